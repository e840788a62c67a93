"""Replay strategy: runs the generated code of a subgraph that has run before, also on another thread."""

from __future__ import annotations

from ...execute import eager_backend, kernels_on_background_thread
from ...execute.kernels_on_background_thread import AsyncRun
from ...execute.measured_memory import Memory
from ...execute.replay.program_cache import Projection, Replay
from ...record.tape import tape
from .base import Cancelled, Request, Strategy


class ReplayRun(Strategy):
    """``found``: the code of the nodes."""

    cache_hit = True
    is_known = True

    def __init__(self, request: Request, found: Replay) -> None:
        super().__init__(request)
        self.found = found

    @property
    def memory(self) -> Memory:
        return self.found.memory

    @property
    def started(self) -> AsyncRun | None:
        return self.found.started

    @property
    def seconds(self) -> float | None:
        started = self.found.started
        return started.times[-1] - started.times[0] if started is not None and started.has_begun else None

    def _projected(self) -> Projection | None:
        return self.found.projection if self.found.projection is not None else super()._projected()

    def _start(self) -> str | None:
        return self.found.start()

    def can_finish_first(self) -> bool:
        return self.found.can_take_first()

    def finish_first(self, count: int) -> None:
        self.found.take_first(tape, count, self._timed)

    def _run(self, on_progress: eager_backend.Progress | None, cancelled: Cancelled) -> None:
        self.found.run(tape, progress=on_progress, cancelled=cancelled, timed=self._timed)
        self.share = len(self.nodes)

    def learn(self) -> None:
        if self.found.projection is None:
            self.found.learn(self.projection)

    def release(self) -> None:
        kernels_on_background_thread.part(self.found.subgraph)
