"""Rematerialized strategy: runs op by op; activations are dropped, and recomputed in the backward pass."""

from __future__ import annotations

from ...execute import eager_backend
from ...execute.rematerialization import RecomputeRun
from ...execute.replay.program_cache import Projection
from ...plan.remat.recompute_selection import Choice
from ...record.tape import tape
from .base import Cancelled, Request, Strategy


class RematerializedRun(Strategy):
    """``choice``: the activations to recompute; without a schedule, none have to be."""

    not_async = "it recomputes activations"

    def __init__(self, request: Request, choice: Choice) -> None:
        super().__init__(request)
        self.choice = choice
        self._recomputing: RecomputeRun | None = None

    @property
    def recomputed(self) -> int:
        return self._recomputing.count if self._recomputing is not None else 0

    def _projected(self) -> Projection | None:
        return self.choice.projected()

    def _prepare(self) -> None:
        if self.choice.schedule is not None:
            self._recomputing = RecomputeRun(tape, self.choice.trace, self.choice.schedule, self.resident)

    def _run(self, on_progress: eager_backend.Progress | None, cancelled: Cancelled) -> None:
        self._op_by_op(self.nodes, on_progress, cancelled, around=self._recomputing)
        self.share = len(self.nodes)
