"""Base class of run strategies: projects the peak, executes, and provides the data for the report.

A strategy is created by :mod:`lazyviz.session.run_strategies.strategy_selection`.  Strategies do not depend
on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch

from ...execute import eager_backend
from ...execute.compute_value_stats import Summaries
from ...execute.measured_memory import Memory, ResidentMemory
from ...execute.progress import Run
from ...execute.replay.program_cache import Projection
from ...plan.peak_of_one_run import project
from ...process import gc_pause
from ...record.tape import tape
from ...record.tracked_storages import TrackedNode
from ...torch_internals import fake_cuda_devices
from ..recorded_graph_interface import RecordedGraph
from ..run_options import RunOptions

if TYPE_CHECKING:  # imported by the first run that needs them, so that lazyviz is imported faster
    from ...execute.compiler.partitioned_run import Outcome
    from ...execute.kernels_on_background_thread import AsyncRun
    from ...execute.microbatch.run_pieces_and_add_gradients import SplitRun

Cancelled: TypeAlias = Callable[[], bool] | None
Marks: TypeAlias = list[tuple[TrackedNode, Any, Any]]
"""Nodes, each with the CUDA events before and after it."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to run, and how.

    ``graph`` is set for runs that the user requested; ``touched`` are the graphs of ``nodes``, ``cuda`` the
    indices of the devices.
    """

    nodes: Sequence[TrackedNode]
    wanted: RunOptions
    graph: RecordedGraph | None
    touched: Sequence[RecordedGraph]
    cuda: list[int]
    seen: Summaries | None = None


class Strategy:
    """A prepared way to run nodes, and its results."""

    split_run: SplitRun | None = None
    projection: Projection | None = None
    compiled: Outcome | None = None  # the activity of a compiling backend
    cache_hit: bool = False
    cache_miss_reason: str | None = None
    is_known: bool = False  # code for the nodes exists from an earlier run of the same program
    is_hidden: bool = False  # the memory is visible only to the device's own counter
    share: int = 0  # number of nodes that the backend itself ran
    not_async: ClassVar[str] = ""  # the reason why its kernels cannot run on another thread

    def __init__(self, request: Request) -> None:
        self.nodes, self.wanted, self.graph = request.nodes, request.wanted, request.graph
        self.touched, self.cuda, self.seen = request.touched, request.cuda, request.seen
        self.marks: Marks = []
        self.resident: ResidentMemory
        self.live: Run

    @property
    def memory(self) -> Memory:
        return self.resident

    @property
    def is_followed(self) -> bool:
        """Whether the progress of the run is followed."""
        return self.wanted.progress is not None or any(lazy.runs.has_listeners for lazy in self.touched)

    @property
    def started(self) -> AsyncRun | None:
        """The running kernels, if they run on another thread."""
        return None

    @property
    def seconds(self) -> float | None:
        """The time of the kernels that ran on another thread."""
        return None

    @property
    def recomputed(self) -> int:
        """Number of ops that ran a second time."""
        return 0

    # --- projecting -----------------------------------------------------------------------

    def project(self) -> None:
        """Project the peak of a run that the user requested in this process, and start counting memory."""
        if self.graph is not None and self.nodes:
            self.projection = self._projected()
        for index in self.cuda:
            torch.cuda.reset_peak_memory_stats(index)
        self.resident = ResidentMemory(() if self.is_known else self.nodes)
        self._prepare()
        self.live = Run(self.nodes, self.memory, self.split_run)

    def _projected(self) -> Projection | None:
        running = list({id(node.graph): node.graph for node in self.nodes}.values())
        with gc_pause.paused():
            return project(running, self.nodes, tape.pending)

    def _prepare(self) -> None:
        """Prepare the counting of memory."""

    # --- executing ------------------------------------------------------------------------

    def start(self) -> str | None:
        """Start the kernels on another thread; return the reason as text if that is not possible."""
        if self.is_followed or self.wanted.cancel is not None:
            return "its progress is being followed"
        return self._start()

    def _start(self) -> str | None:
        return self.not_async

    def can_finish_first(self) -> bool:
        """Whether its first nodes can be finished while the others run on another thread."""
        return False

    def finish_first(self, count: int) -> None:
        """Do the bookkeeping of the first ``count`` nodes, which have run on another thread."""

    def execute(self) -> None:
        """Run the nodes.  Raises the errors of :meth:`lazyviz.session.lazy_graph.LazyGraph.evaluate`."""
        wanted = self.wanted
        on_node = self._on_node if wanted.progress is not None else self.live.step
        self._run(
            on_node if self.is_followed else None, wanted.cancel.is_set if wanted.cancel is not None else None
        )
        for index in self.cuda:
            fake_cuda_devices.synchronize(index)
        for node, begin, end in self.marks:
            node.measured_seconds = begin.elapsed_time(end) / 1000

    def _run(self, on_progress: eager_backend.Progress | None, cancelled: Cancelled) -> None:
        raise NotImplementedError

    @property
    def _timed(self) -> bool:
        timings = self.wanted.timings
        return not self.cuda if timings is None else (timings and not self.cuda)

    def _on_node(self, done: int, total: int, node: TrackedNode) -> None:
        self.live.step(done, total, node)
        assert self.wanted.progress is not None
        self.wanted.progress(self.live.now())

    def _op_by_op(
        self,
        nodes: Sequence[TrackedNode],
        on_progress: eager_backend.Progress | None,
        cancelled: Cancelled,
        around: eager_backend.AroundNodes | None = None,
    ) -> None:
        """Run ``nodes`` by their recorded kernels, with CUDA events around them if times are requested."""
        eager_backend.run(
            tape,
            nodes,
            self.resident,
            progress=on_progress,
            cancelled=cancelled,
            timed=self._timed,
            around=around,
            seen=self.seen,
            marks=self.marks if self.cuda and self.wanted.timings else None,
        )

    # --- afterwards -----------------------------------------------------------------------

    def learn(self) -> None:
        """After a successful run: cache what later runs of the same program can reuse."""

    def release(self) -> None:
        """After a run on another thread: release what the next step does not need."""


def cuda_devices(nodes: Sequence[TrackedNode]) -> list[int]:
    """The indices of the CUDA devices that ``nodes`` run on."""
    if not torch.cuda.is_available():
        return []
    devices = {value.device for node in nodes for value in node.outputs}
    return sorted({device.index or 0 for device in devices if device.type == "cuda"})
