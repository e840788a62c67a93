"""Distributed strategy: workers of a cluster run the pieces of a split batch."""

from __future__ import annotations

from ...execute import eager_backend
from ...execute.microbatch.ray_and_ipyparallel import Cluster
from ...execute.microbatch.run_pieces_and_add_gradients import SplitRun
from ...execute.replay.program_cache import Projection
from .base import Cancelled, Request, Strategy


class DistributedRun(Strategy):
    """Nodes run in this process if nothing is split (``split_run`` is ``None``)."""

    def __init__(self, request: Request, cluster: Cluster, split_run: SplitRun | None) -> None:
        super().__init__(request)
        self.cluster, self.split_run = cluster, split_run

    def _projected(self) -> Projection | None:
        return None  # the memory is that of other processes

    def _start(self) -> str | None:
        return f"the backend {self.wanted.backend!r} runs it"

    def _run(self, on_progress: eager_backend.Progress | None, cancelled: Cancelled) -> None:
        if self.split_run is not None:
            self.split_run.run(
                self.resident,
                progress=on_progress,
                cancelled=cancelled,
                cluster=self.cluster,
                seen=self.seen,
                timed=self._timed,
            )
            self.share = len(self.split_run.spread)
        left = [node for node in self.nodes if node.state != "done"]
        self._op_by_op(left, on_progress, cancelled)
