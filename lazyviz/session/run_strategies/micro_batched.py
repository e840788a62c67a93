"""Micro-batched strategy: runs the pieces of a split batch one after another, in this process."""

from __future__ import annotations

from ...execute import eager_backend
from ...execute.microbatch.run_pieces_and_add_gradients import SplitRun
from ...execute.replay.program_cache import Projection
from ...plan.liveness.live_set_and_categories import categorize
from ...plan.peak_of_one_run import Peak
from ...record.tape import tape
from .base import Cancelled, Request, Strategy


class MicroBatchedRun(Strategy):
    """``is_begun``: the split run was started earlier, and continues."""

    not_async = "it runs in pieces of the batch"

    def __init__(self, request: Request, split_run: SplitRun, is_begun: bool) -> None:
        super().__init__(request)
        self.split_run: SplitRun = split_run
        self._is_begun = is_begun

    def _projected(self) -> Projection | None:
        """The projected peak of a split run of the whole graph; ``None`` for a part of it, or if later graphs
        need its results.
        """
        graph, own = self.graph, set(self.nodes)
        if self._is_begun or graph is None or len(self.nodes) != len(graph.nodes):
            return None
        needed = (value for node in list(tape.pending) if node not in own for value in node.inputs)
        if any(value.node in own for value in needed):
            return None
        plan = graph.plan(device=graph.device, split=len(self.split_run.pieces))
        categories = {span.storage.origin: categorize(span) for span in plan._lifetimes.values()}
        is_cpu = plan.recorded_device.type == "cpu"
        nbytes = plan.tensor_peak_bytes if is_cpu else plan.peak_bytes
        scratch = 0 if is_cpu else plan.peak_bytes - plan.tensor_peak_bytes
        sizes = {name: size for name, size in plan.by_category.items() if size}
        return Peak(plan.recorded_device, nbytes, sizes, scratch, plan.peak_bytes), categories

    def _run(self, on_progress: eager_backend.Progress | None, cancelled: Cancelled) -> None:
        self.split_run.run(
            self.resident, progress=on_progress, cancelled=cancelled, seen=self.seen, timed=self._timed
        )
        left = [node for node in self.nodes if node.state != "done"]
        self._op_by_op(left, on_progress, cancelled)
        self.share = len(self.nodes)
