"""Run strategies (eager, replay, compiled, micro-batched, rematerialized): selection and execution.

A part of :mod:`lazyviz.session.evaluation`, which notifies the graphs and creates the report.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from ..execute import eager
from ..execute.backend import Backend, Compiled
from ..execute.memory_tracker import Memory, ResidentMemory
from ..execute.microbatch.clusters import Cluster, is_cluster
from ..execute.progress import Run
from ..execute.registry import find_backend
from ..execute.rematerialization import RecomputeRun
from ..execute.replay import program_cache
from ..execute.replay.program_key import Subgraph
from ..execute.value_stats import Summaries
from ..plan.liveness.live_set import categorize
from ..plan.projection import Peak, project
from ..process import gc_pause
from ..record.storage import TrackedNode
from ..record.tape import tape
from ..torch_internals import cuda as torch_cuda
from . import recompute_options, split_options
from .recorded_graph import RecordedGraph

if TYPE_CHECKING:  # imported by the first run that needs them, so that lazyviz is imported faster
    from ..execute.compiler.partitioned_run import Outcome
    from ..execute.microbatch.run import SplitRun
    from ..plan.remat.selection import Choice

Projection = program_cache.Projection


@dataclass(frozen=True)
class RunOptions:
    """How to run nodes, as requested; see :meth:`lazyviz.session.lazy_graph.LazyGraph.evaluate`."""

    backend: str = "eager"
    progress: Callable[[Any], None] | None = None
    cancel: threading.Event | None = None
    graph: RecordedGraph | None = None
    owner: RecordedGraph | None = None  # the graph whose batch is split, if ``graph`` is not given
    split: int | str = "off"
    recompute: int | str = "off"
    summaries: bool | None = None
    timings: bool | None = None
    verify: bool = False


@dataclass
class Strategy:
    """The chosen and prepared way to run ``nodes``, and its results."""

    nodes: Sequence[TrackedNode]
    wanted: RunOptions
    touched: Sequence[RecordedGraph]
    cuda: list[int]  # the indices of the devices
    cluster: Cluster | None = None
    compiler: Backend | None = None
    split_run: SplitRun | None = None
    is_begun: bool = False  # the split run was started earlier
    choice: Choice | None = None  # of recomputed activations
    subgraph: Subgraph | None = None
    found: program_cache.Replay | None = None
    code: Compiled | None = None  # a backend's code for all nodes
    new: str | None = None  # why the subgraph was not in the cache
    projection: Projection | None = None
    recomputing: RecomputeRun | None = None
    seen: Summaries | None = None
    compiled: Outcome | None = None
    share: int = 0  # number of nodes that the backend itself ran
    marks: list[tuple[TrackedNode, Any, Any]] | None = None
    resident: ResidentMemory = field(init=False)
    live: Run = field(init=False)

    @property
    def is_hidden(self) -> bool:
        """Whether the memory of compiled code is visible only to the device's own counter."""
        return self.compiler is not None and self.split_run is None and not self.cuda

    @property
    def is_followed(self) -> bool:
        """Whether the progress of the run is followed."""
        return self.wanted.progress is not None or any(lazy.runs.has_listeners for lazy in self.touched)

    @property
    def seconds(self) -> float | None:
        """The time of its kernels on another thread."""
        started = self.found.started if self.found is not None else None
        return started.times[-1] - started.times[0] if started is not None and started.has_begun else None

    @property
    def is_known(self) -> bool:
        """Whether code for the nodes exists from an earlier run of the same program."""
        return self.found is not None or self.code is not None

    @property
    def memory(self) -> Memory:
        return self.found.memory if self.found is not None else self.resident

    # --- choosing -------------------------------------------------------------------------

    @classmethod
    def choose(
        cls,
        nodes: Sequence[TrackedNode],
        wanted: RunOptions,
        touched: Sequence[RecordedGraph],
        begun: SplitRun | None,
    ) -> Strategy:
        """Choose how to run ``nodes`` of the graphs ``touched``; ``begun`` is an interrupted run of some."""
        runner = find_backend(wanted.backend)
        strategy = cls(
            nodes, wanted, touched, cuda_devices(nodes), split_run=begun, is_begun=begun is not None
        )
        if is_cluster(runner):
            strategy.cluster = runner
        else:
            strategy.compiler = cast(Backend | None, runner)
        owner = wanted.graph or wanted.owner or (touched[-1] if touched else None)
        if owner is not None:
            strategy._choose_lever(owner)
        summaries = wanted.summaries
        if summaries is None:
            summaries = any(lazy.choices.summaries for lazy in touched)
        strategy.seen = Summaries() if summaries else None
        strategy._recognize()
        return strategy

    def _choose_lever(self, owner: RecordedGraph) -> None:
        """Choose between splitting the batch and recomputing activations, if requested."""
        wanted = self.wanted
        split, recompute = wanted.split, wanted.recompute
        if self.cluster is not None and split == "off":
            split = "auto"  # this backend runs pieces
        if self.split_run is None and split != "off":
            if recompute == "off" or not recompute_options.instead_of_split(owner):
                self.split_run = split_options.split_run(tape, owner, self.nodes, split, self.cluster)
            if self.split_run is not None:
                owner.runs.split_run = self.split_run
        if recompute != "off" and self.split_run is None and wanted.backend == "eager":
            self.choice = recompute_options.choose_run(owner, self.nodes, recompute, tape.pending)

    def _recognize(self) -> None:
        """Look up code for nodes that have run before."""
        nodes = self.nodes
        if self.split_run is not None or self.seen is not None or self.cluster is not None:
            return
        if self.compiler is not None:
            if nodes:
                from ..execute.compiler.segment_cache import cached_segments

                self.subgraph = cached_segments.subgraph_of(tape, nodes, self.compiler)
                self.code = (
                    cached_segments.find(self.subgraph, self.compiler) if self.subgraph is not None else None
                )
        elif self.choice is None and not (self.cuda and self.wanted.timings):
            self.subgraph = program_cache.replays.structure_of(tape, nodes, self.wanted.graph is not None)
            self.found = program_cache.replays.find(self.subgraph) if self.subgraph is not None else None
            self.new = program_cache.replays.not_cacheable_reason if self.subgraph is None else None

    # --- projecting -----------------------------------------------------------------------

    def project(self) -> None:
        """Project the peak of a run that the user requested in this process, and start counting memory."""
        graph, nodes = self.wanted.graph, self.nodes
        if self.cluster is not None or graph is None or not nodes or self.is_hidden or self.code is not None:
            pass
        elif self.found is not None and self.found.projection is not None:
            self.projection = self.found.projection
        elif self.choice is not None:
            self.projection = self.choice.projected()
        elif self.split_run is None:
            running = list({id(node.graph): node.graph for node in nodes}.values())
            with gc_pause.paused():
                self.projection = project(running, nodes, tape.pending)
        elif not self.is_begun:
            self.projection = _projection_of(graph, len(self.split_run.pieces), nodes)
        for index in self.cuda:
            torch.cuda.reset_peak_memory_stats(index)
        self.resident = ResidentMemory(nodes if self.found is None and self.code is None else ())
        if self.choice is not None and self.choice.schedule is not None:
            self.recomputing = RecomputeRun(tape, self.choice.trace, self.choice.schedule, self.resident)
        self.live = Run(nodes, self.memory, self.split_run)

    # --- executing ------------------------------------------------------------------------

    def start(self) -> str | None:
        """Start the kernels on another thread; return the reason as text if that is not possible."""
        if self.is_followed or self.wanted.cancel is not None:
            return "its progress is being followed"
        if self.compiler is not None or self.cluster is not None:
            return f"the backend {self.wanted.backend!r} runs it"
        if self.split_run is not None:
            return "it runs in pieces of the batch"
        if self.choice is not None:
            return "it recomputes activations"
        if self.seen is not None:
            return "its results are summarized while it runs"
        if self.found is None:
            return self.new or "these ops run for the first time"
        return self.found.start()

    def execute(self) -> None:
        """Run the nodes.  Raises the errors of :meth:`lazyviz.session.lazy_graph.LazyGraph.evaluate`."""
        wanted = self.wanted
        on_node = self._on_node if wanted.progress is not None else self.live.step
        on_progress = on_node if self.is_followed else None
        cancelled = wanted.cancel.is_set if wanted.cancel is not None else None
        if self.split_run is not None:
            self._split(on_progress, cancelled)
        elif self.compiler is not None:
            self._compiled(self.compiler, on_progress, cancelled)
        elif self.found is not None:
            self.found.run(tape, progress=on_progress, cancelled=cancelled, timed=self._timed)
            self.share = len(self.nodes)
        else:
            self._op_by_op(on_progress, cancelled)
        for index in self.cuda:
            torch_cuda.synchronize(index)
        for node, begin, end in self.marks or ():
            node.measured_seconds = begin.elapsed_time(end) / 1000

    @property
    def _timed(self) -> bool:
        timings = self.wanted.timings
        return not self.cuda if timings is None else (timings and not self.cuda)

    def _on_node(self, done: int, total: int, node: TrackedNode) -> None:
        self.live.step(done, total, node)
        assert self.wanted.progress is not None
        self.wanted.progress(self.live.now())

    def _compiles(self, what: str | None) -> None:
        self.live.compiles(what)
        if self.wanted.progress is not None and what is not None:
            self.wanted.progress(self.live.now())

    def _op_by_op(self, on_progress: eager.Progress | None, cancelled: Callable[[], bool] | None) -> None:
        self.marks = [] if self.cuda and self.wanted.timings else None
        eager.run(
            tape,
            self.nodes,
            self.resident,
            progress=on_progress,
            cancelled=cancelled,
            timed=self._timed,
            around=self.recomputing,
            seen=self.seen,
            marks=self.marks,
        )
        self.share = len(self.nodes) if self.cluster is None else 0

    def _split(self, on_progress: eager.Progress | None, cancelled: Callable[[], bool] | None) -> None:
        assert self.split_run is not None
        self.split_run.run(
            self.resident,
            progress=on_progress,
            cancelled=cancelled,
            cluster=self.cluster,
            seen=self.seen,
            timed=self._timed,
        )
        left = [node for node in self.nodes if node.state != "done"]
        eager.run(
            tape,
            left,
            self.resident,
            progress=on_progress,
            cancelled=cancelled,
            timed=self._timed,
            seen=self.seen,
        )
        self.share = len(self.nodes) if self.cluster is None else len(self.split_run.spread)

    def _compiled(
        self, compiler: Backend, on_progress: eager.Progress | None, cancelled: Callable[[], bool] | None
    ) -> None:
        from ..execute.compiler.partitioned_run import Outcome, run_with_backend
        from ..execute.compiler.segment_cache import run_compiled

        nodes, subgraph, code = self.nodes, self.subgraph, self.code
        if (
            code is not None
            and subgraph is not None
            and run_compiled(tape, subgraph, code, progress=on_progress, cancelled=cancelled)
        ):
            self.compiled = Outcome(hits=1)
            self.compiled.ran(len(nodes), code)
        else:
            self.compiled = run_with_backend(
                tape,
                nodes,
                compiler,
                self.resident,
                progress=on_progress,
                cancelled=cancelled,
                verify=self.wanted.verify,
                seen=self.seen,
                compiles=self._compiles,
                subgraph=subgraph,
            )
        self.share = self.compiled.share

    def learn(self) -> None:
        """After the run: add its nodes to the program cache."""
        if self.subgraph is not None and self.found is None and self.compiler is None:
            with gc_pause.paused():
                self.new = program_cache.replays.learn(self.subgraph, self.resident, self.projection)
        elif self.found is not None and self.found.projection is None:
            self.found.learn(self.projection)


def cuda_devices(nodes: Sequence[TrackedNode]) -> list[int]:
    """The indices of the CUDA devices that ``nodes`` run on."""
    if not torch.cuda.is_available():
        return []
    devices = {value.device for node in nodes for value in node.outputs}
    return sorted({device.index or 0 for device in devices if device.type == "cuda"})


def _projection_of(graph: RecordedGraph, pieces: int, nodes: Sequence[TrackedNode]) -> Projection | None:
    """The projected peak of a split run of the whole graph; ``None`` for a part of it, or if later graphs
    need its results.
    """
    own = set(nodes)
    needed = (value for node in list(tape.pending) if node not in own for value in node.inputs)
    if len(nodes) != len(graph.nodes) or any(value.node in own for value in needed):
        return None
    plan = graph.plan(device=graph.device, split=pieces)
    categories = {span.storage.origin: categorize(span) for span in plan._lifetimes.values()}
    nbytes = plan.tensor_peak_bytes if plan.recorded_device.type == "cpu" else plan.peak_bytes
    scratch = plan.peak_bytes - plan.tensor_peak_bytes if plan.recorded_device.type != "cpu" else 0
    sizes = {name: size for name, size in plan.by_category.items() if size}
    return Peak(plan.recorded_device, nbytes, sizes, scratch, plan.peak_bytes), categories
