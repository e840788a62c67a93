"""Eager strategy: runs the recorded kernels op by op, and adds the subgraph to the program cache."""

from __future__ import annotations

from ...execute import eager_backend
from ...execute.replay import program_cache
from ...execute.replay.program_key import Subgraph
from ...process import gc_pause
from .base import Cancelled, Request, Strategy


class EagerRun(Strategy):
    """``subgraph``: the structure of the nodes if it can be cached; otherwise ``reason`` says why not."""

    def __init__(self, request: Request, subgraph: Subgraph | None, reason: str | None) -> None:
        super().__init__(request)
        self.subgraph, self.cache_miss_reason = subgraph, reason

    def _start(self) -> str | None:
        if self.seen is not None:
            return "its results are summarized while it runs"
        return self.cache_miss_reason or "these ops run for the first time"

    def _run(self, on_progress: eager_backend.Progress | None, cancelled: Cancelled) -> None:
        self._op_by_op(self.nodes, on_progress, cancelled)
        self.share = len(self.nodes)

    def learn(self) -> None:
        if self.subgraph is not None:
            with gc_pause.paused():
                self.cache_miss_reason = program_cache.replays.learn(
                    self.subgraph, self.resident, self.projection
                )
