"""Evaluation: runs pending nodes by the chosen strategy, and reports what the run did.

A part of :mod:`lazyviz.session.lazy_graph`: it holds the state of the process (graphs with pending ops,
metrics, the guard between cells), and all runs of nodes pass through it.
"""

from __future__ import annotations

import contextvars
import functools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch

from ..execute import eager_backend, stop_runs_at_exit
from ..execute.kernels_on_background_thread import AsyncRun
from ..execute.measured_memory import Memory, Timelines
from ..execute.remaining_time import learn
from ..execute.replay import native_codegen, native_short_runs, node_passes
from ..execute.replay.program_cache import Projection
from ..execute.run_report import Report, difference
from ..graph.ir import Failure, Graph, failure_of
from ..process.deferred_signals import Deferred, abandoned, deferred, deferring, forget_signals
from ..process.global_state_transaction import complete
from ..record.dependency_closure import closure
from ..record.intercept_ops_outside_blocks import nodes_before_access
from ..record.interception import warning_routing
from ..record.interception.install_modes_and_patches import Instrumentation
from ..record.sync_points import RunLock
from ..record.tape import tape
from ..record.tracked_storages import FORGOTTEN_BY_FORK, TrackedNode
from ..torch_internals import fake_cuda_devices
from . import device_options, progress_bar
from .metrics import Metrics
from .recorded_graph_interface import RecordedGraph
from .run_history import RunHistory
from .run_options import RunOptions
from .run_strategies.base import Strategy
from .run_strategies.strategy_selection import choose

if TYPE_CHECKING:
    from ..execute.microbatch.run_pieces_and_add_gradients import SplitRun

Looked = TypeVar("Looked", bound=RecordedGraph)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

watch = Instrumentation(tape)
with_users_lines = partial(warning_routing.in_python, sources=tape.scopes.sources)
# Graphs with pending nodes, by id of the ir.Graph; weak, because an unreachable graph need not run.
graphs: weakref.WeakValueDictionary[int, RecordedGraph] = weakref.WeakValueDictionary()
latest: weakref.ref[RecordedGraph] | None = None  # of the last block
forbidden = contextvars.ContextVar("lazyviz_forbid_sync", default=False)
forbidden_blocks = 0  # number of blocks that have forbidden sync points
metrics = Metrics()
projection_errors: deque[float] = deque(maxlen=1000)
compile_reasons: deque[str] = deque(maxlen=100)  # miss reasons of compilations
last_run: tuple[str, int, float] | None = None  # the cause, ops, and seconds of the last evaluation
_INTERVAL = 0.005  # seconds between two checks for signals, while nodes on another thread are waited for


def needed(tensors: Sequence[torch.Tensor]) -> list[TrackedNode]:
    """The nodes that must run before ``tensors`` can be read."""
    return [node for tensor in tensors for node in nodes_before_access(tape, tensor, write=False)]


class ActiveRun:
    """Context of a run: code that is called during the run cannot start another one.

    Signals wait until its end, or for a point between two nodes, so that exceptions of their handlers cannot
    occur between a kernel and its bookkeeping, or leave a state set.
    """

    __slots__ = ("_signals", "running")

    def __init__(self, nodes: Sequence[TrackedNode]) -> None:
        if nodes:
            tape.runs.refuse_nested()
        self._signals = Deferred()
        self.running: Sequence[RecordedGraph] = ()  # graphs that have not been notified of its end

    def __enter__(self) -> Deferred:
        arrived = self._signals.__enter__()
        tape.runs.active_thread = threading.get_ident()
        tape.recording.changed()
        tape.runs.await_recorder()
        return arrived

    def __exit__(self, *error: object) -> None:
        """Can be called a second time by the code that entered it, if the first call failed."""
        if self._signals.leave is not None:
            self._signals.leave()
            watch.release()  # it treated nodes as pending that have run since
        tape.runs.active_thread = 0
        if self.running:
            for lazy in self.running:
                notify([lazy], None, {}, "interrupted" if lazy.has_pending else None)
            watch.release()
            self.running = ()
        self._signals.__exit__()


def reads_recording(
    method: Callable[Concatenate[Looked, Parameters], Result],
) -> Callable[Concatenate[Looked, Parameters], Result]:
    """``method`` of a graph, which reads all of it: another thread that records in it waits meanwhile, and
    so do the handlers of signals on the thread that records.
    """

    @functools.wraps(method)
    def look(graph: Looked, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        recording, here = tape.recording, threading.get_ident()
        if recording.graph is not graph.ir or here == tape.runs.active_thread:
            return method(graph, *args, **kwargs)
        if here == recording.owner:
            with deferred():
                return method(graph, *args, **kwargs)
        with tape.runs.lock:
            context = ActiveRun([])
            try:
                with context:
                    return method(graph, *args, **kwargs)
            finally:
                context.__exit__()

    return look


@with_users_lines
def run(
    nodes: Sequence[TrackedNode],
    cause: str,
    graph: RecordedGraph | None = None,
    owner: RecordedGraph | None = None,
    **options: Any,
) -> Report:
    """Run ``nodes`` (closed under dependencies, in program order), and notify their graphs.

    The ``options`` are those of :class:`.run_options.RunOptions`.  With ``graph``, which is set for runs
    requested by the user, the peak is projected first (for a run in this process).  ``split`` refers to the
    batch of that graph, or of ``owner`` without it; an interrupted split run is completed first.
    ``recompute`` is the budget in bytes for recomputing activations.
    """
    stop_runs_at_exit.uses()
    wanted = RunOptions(**options)
    background = tape.runs.background
    if tape.runs.finish_background(nodes):
        nodes = node_passes.unfinished(nodes)
        if not nodes and isinstance(background, AsyncEvaluation) and background.report is not None:
            return background.report
    if begun := interrupted_split(nodes):
        nodes = closure({*nodes, *(node for node in begun.nodes if node.state != "done")})
    context = ActiveRun(nodes)
    try:
        with context as arrived:
            strategy = _chosen(nodes, wanted, graph, begun, owner)
            report = _execute(strategy, cause, context, arrived)
            _note(nodes)
    finally:
        context.__exit__()
    if graph is not None:
        graph.runs.report = report
    return report


def _note(nodes: Sequence[TrackedNode]) -> None:
    """Note that ``nodes`` run before their block has ended, if one is being recorded on this thread."""
    graph = tape.recording.graph
    if graph is not None and tape.recording.owner == threading.get_ident():
        tape.runs.note_run(nodes, graph)


def _chosen(
    nodes: Sequence[TrackedNode],
    wanted: RunOptions,
    graph: RecordedGraph | None,
    begun: SplitRun | None,
    owner: RecordedGraph | None = None,
) -> Strategy:
    """Choose how to run ``nodes``, and project the peak; raises an error if they cannot run."""
    nodes = node_passes.unfinished(nodes)  # a signal's handler may have run them
    errors, irs = node_passes.begin(nodes)
    for error in errors:
        if failure_of(error) is not Failure.RAISED:
            raise RuntimeError(error)
    device_options.refuse(nodes, graph.device if graph is not None else None)
    touched = [graphs[id(ir)] for ir in irs if id(ir) in graphs]
    strategy = choose(nodes, wanted, graph, touched, begun, owner)
    strategy.project()
    return strategy


@with_users_lines
def start(
    nodes: Sequence[TrackedNode], cause: str, graph: RecordedGraph | None = None, **options: Any
) -> AsyncEvaluation:
    """Like :func:`run`, on another thread if possible; otherwise it has run when this returns.

    There is one run at a time: an earlier one is finished first, and its errors are raised here.
    """
    stop_runs_at_exit.uses()
    tape.runs.finish_background()
    wanted, context = RunOptions(**options), ActiveRun(nodes)
    begun = interrupted_split(nodes)
    try:
        with context as arrived:
            strategy = None if begun else _chosen(nodes, wanted, graph, None)
            if strategy is not None:
                evaluation = AsyncEvaluation(strategy, cause)
                if evaluation.begin():
                    _note(nodes)
                    return evaluation
                reason, report = evaluation.reason, _execute(strategy, cause, context, arrived)
                return AsyncEvaluation(strategy, cause, reason, report)
    finally:
        context.__exit__()
    reason = "an interrupted split run continues"
    return AsyncEvaluation(None, cause, reason, run(nodes, cause, graph, **options))


class AsyncEvaluation:
    """A run started by :func:`start`; if it has a ``report``, it ran synchronously, for the ``reason``."""

    def __init__(
        self,
        strategy: Strategy | None,
        cause: str,
        reason: str | None = None,
        report: Report | None = None,
    ) -> None:
        self._strategy = strategy if report is None else None
        self.cause, self.reason, self.report = cause, reason, report
        self.error: BaseException | None = None
        self._positions: dict[TrackedNode, int] | None = None
        self.nodes = frozenset(strategy.nodes if strategy is not None and report is None else ())

    def begin(self) -> bool:
        """Start its kernels; return False and set ``reason`` if they cannot run on another thread."""
        strategy = self._strategy
        assert strategy is not None
        try:
            tape.runs.background = self  # before they start, so that they are always waited for
            self.reason = strategy.start() if strategy.nodes else "nothing was pending"
        finally:
            if self.started is None:
                tape.runs.background = None
        if self.reason is not None:
            return False
        for lazy in strategy.touched:
            lazy.runs.error, lazy.runs.live = None, strategy.live
            lazy.runs.changed("running")
        return True

    @property
    def started(self) -> AsyncRun | None:
        """The running kernels; ``None`` when it is finished."""
        started = self._strategy.started if self._strategy is not None else None
        return started if started is not None and started.has_begun else None

    def cancel(self) -> None:
        """Stop it between two nodes; finishing it then raises ``Interrupted``."""
        if (started := self.started) is not None:
            started.stop(eager_backend.Interrupted("canceled"))

    def finish_first(self, needed: Iterable[TrackedNode]) -> None:
        """Wait until all of ``needed`` have run, and do the bookkeeping of the nodes up to the last of them.

        The rest continues, and its errors are raised where it is needed.  If everything has run, or nothing
        can be used before, this is :meth:`finish`.  An interrupt ends the run, as there.
        """
        strategy = self._strategy
        if strategy is None:
            return
        if self._positions is None:
            self._positions = {node: at for at, node in enumerate(strategy.nodes)}
        count = 1 + max(self._positions.get(node, -1) for node in needed)
        with tape.runs.lock:
            if not strategy.can_finish_first() or self._wait_for_first(count) not in range(
                count, len(strategy.nodes)
            ):
                self.finish()
                return
            if self._strategy is None:  # a signal's handler has finished it
                return
            context = ActiveRun(strategy.nodes)
            try:
                with context:
                    strategy.finish_first(count)
            finally:
                context.__exit__()

    def _wait_for_first(self, count: int) -> int:
        """Wait until ``count`` nodes have run or no more will, and return how many have; 0 while signals are
        deferred.
        """
        outer = Deferred.current.get(threading.get_ident())
        try:
            while (started := self.started) is not None:
                ran = started.wait_for_first(count, _INTERVAL)
                if ran >= count or started.is_over:
                    return ran
                if outer:
                    return 0
        except BaseException as error:
            self._end_by(error)
            raise
        return 0

    def _end_by(self, error: BaseException) -> None:
        """Stop the run between two nodes and finish it, because ``error`` was raised while waiting for it."""
        if (started := self.started) is not None:
            started.stop(error)
            try:
                self.finish()
            except BaseException as another:
                if another is not error:
                    raise

    def finish(self) -> None:
        """Wait for its end, and do its bookkeeping; a second call does nothing.

        The first call raises the error that stopped it, like :func:`run`.
        """
        strategy = self._strategy
        if strategy is None:
            return
        with tape.runs.lock:
            context = ActiveRun(strategy.nodes)
            try:
                with context as arrived:
                    self.report = _execute(strategy, self.cause, context, arrived)
                strategy.release()
            except BaseException as error:
                self.error = error
                raise
            finally:
                if (started := self.started) is None or started.is_joined:  # otherwise, it is tried again
                    self._strategy = None
                    if tape.runs.background is self:
                        tape.runs.background = None
                context.__exit__()
                if strategy.graph is not None and self.report is not None:
                    strategy.graph.runs.report = self.report


def _shows_bar(strategy: Strategy) -> bool:
    """Whether a long run shows a progress bar: not if it is followed, or part of a fast loop."""
    if strategy.is_followed or (
        strategy.is_known
        and last_run is not None
        and last_run[1] == len(strategy.nodes)
        and last_run[2] < progress_bar.AFTER / 2
    ):
        return False
    return progress_bar.is_wanted()


def _execute(strategy: Strategy, cause: str, context: ActiveRun, arrived: Deferred) -> Report:
    """Run the nodes with the chosen ``strategy``; the graphs are notified in any case."""
    reports: list[Report] = []
    outcome: str | None = None
    start = time.perf_counter()
    try:
        context.running = strategy.touched
        for lazy in strategy.touched:
            lazy.runs.error, lazy.runs.live = None, strategy.live
            lazy.runs.changed("running")
        with progress_bar.Bar(strategy.live, wanted=_shows_bar(strategy)):
            strategy.execute()
    except BaseException as error:
        outcome = outcome_of(error, arrived)
        if outcome == "failed":
            for lazy in strategy.touched:
                lazy.runs.error = error
        raise
    finally:
        seconds = strategy.seconds or time.perf_counter() - start
        complete(partial(_end, strategy, cause, context, outcome, seconds, reports))
    return reports[0]


def _end(
    strategy: Strategy,
    cause: str,
    context: ActiveRun,
    outcome: str | None,
    seconds: float,
    reports: list[Report],
) -> None:
    """End the run; can be called again if it was interrupted."""
    try:
        if not reports:
            reports[:] = map(partial.__call__, (partial(_report, strategy, cause, outcome, seconds),))
            _count(strategy, reports[0])
    finally:
        tape.runs.active_thread = 0  # listeners may read results and start another evaluation
        timelines = {} if strategy.is_hidden else strategy.memory.timelines()
        notify(strategy.touched, reports[0] if reports else None, timelines, outcome)
        context.running = ()
        watch.release()
    if strategy.is_followed:
        learn(strategy.nodes)


def outcome_of(error: BaseException, arrived: Deferred) -> str:
    """The outcome of a run that ended with ``error``."""
    kinds = (KeyboardInterrupt, eager_backend.Interrupted, SystemExit)
    stopped = isinstance(error, kinds) or error is arrived.raised
    return "interrupted" if stopped else "failed"


def _report(strategy: Strategy, cause: str, outcome: str | None, seconds: float) -> Report:
    """The report of the run."""
    nodes, projection, seen = strategy.nodes, strategy.projection, strategy.seen
    compiled = strategy.compiled
    done = len(nodes) if outcome is None else sum(node.state == "done" for node in nodes)
    peak: int | None = None
    projected: int | None = None
    above: dict[str, int] = {}
    if outcome is None and not strategy.is_hidden:
        peak, projected, above = _measured(strategy.memory, strategy.cuda, projection)
        strategy.learn()
    graph = strategy.graph
    own = graph.ir if graph is not None else nodes[-1].graph if nodes else None
    timelines = {} if strategy.is_hidden else strategy.memory.timelines()
    if seen is not None:
        for lazy in strategy.touched:
            lazy.runs.note_nonfinite(lazy.ir, seen.first)
    return Report(
        done,
        seconds,
        peak,
        strategy.wanted.backend,
        cause,
        pieces=len(strategy.split_run.pieces) if strategy.split_run is not None else 1,
        recomputed=strategy.recomputed,
        share=strategy.share / len(nodes) if nodes and outcome is None else 1.0,
        projected_bytes=projected,
        projected_total_bytes=None if projected is None or projection is None else projection[0].total,
        difference=above,
        timeline=timelines.get(id(own), []),
        first_nan=seen.first.get("nan") if seen is not None else None,
        first_inf=seen.first.get("inf") if seen is not None else None,
        cache_hit=strategy.cache_hit,
        cache_miss_reason=strategy.cache_miss_reason,
        fallbacks=tuple(compiled.fallbacks) if compiled is not None else (),
        _record=weakref.ref(own) if own is not None and outcome is None else None,
    )


def _count(strategy: Strategy, report: Report) -> None:
    """Update the metrics, at most once; an interrupt here leaves them incomplete."""
    global last_run
    compiled, done = strategy.compiled, report.ops_run
    last_run = report.cause, done, report.seconds
    metrics.add("evaluate", report.seconds)
    metrics.count("ops run", done)
    if compiled is not None:
        metrics.count("compiles", compiled.misses)
        metrics.count("compiled segments reused", compiled.hits)
        metrics.count("ops that a backend left to eager", done - compiled.share)
        compile_reasons.extend(compiled.missed)
        if compiled.misses:
            metrics.add("compile", compiled.seconds)
    if report.error is not None:
        projection_errors.append(report.error)


def notify(
    touched: Sequence[RecordedGraph], report: Report | None, timelines: Timelines, outcome: str | None
) -> None:
    """Notify the graphs of a run of their nodes, after all state has been updated."""
    for lazy in touched:
        split = lazy.runs.split_run
        if split is not None and (split.complete or _must_start_over(split)):
            lazy.runs.split_run = None
        lazy.runs.live, lazy.runs.state = None, outcome
        if report is None:
            continue
        lazy.runs.report = report
        lazy.runs.note_timeline(timelines.get(id(lazy.ir), ()))
        may_have_pending = len(touched) > 1 or len(lazy.nodes) > report.ops_run
        if lazy.ir is not tape.recording.graph and not (may_have_pending and lazy.has_pending):
            graphs.pop(id(lazy.ir), None)
    for lazy in touched:
        if lazy.runs.has_listeners:
            lazy.runs.notify()


def _must_start_over(split: SplitRun) -> bool:
    """Whether a failed op stops this run although the other ops can run without it and without a split."""
    return split.has_begun_no_pass and any(node.state == "failed" for node in split.nodes)


def interrupted_split(nodes: Sequence[TrackedNode]) -> SplitRun | None:
    """The interrupted split run of some of ``nodes``, if any."""
    for runs in list(RunHistory.with_split_runs):
        split = runs.split_run
        if split is not None and not set(nodes).isdisjoint(split.nodes):
            return split
    return None


def _measured(
    memory: Memory, cuda: Sequence[int], projection: Projection | None
) -> tuple[int, int | None, dict[str, int]]:
    """The measured peak, the projected peak, and their difference."""
    counters = {index: fake_cuda_devices.max_memory_allocated(index) for index in cuda}
    if projection is None:
        return max(counters.values(), default=memory.peak), None, {}
    projected, categories = projection
    held = memory.peak_on(projected.device, categories)
    peak = held.nbytes
    if projected.device.type == "cuda":
        peak = counters.get(projected.device.index or 0, peak)
    return peak, projected.nbytes, difference(projected, held, peak)


def cause_at_line(what: str) -> str:
    """``what``, with the user's line that requested it."""
    line, _ = tape.scopes.sources.find(sys._getframe(2))
    return f"{what} at {line}" if line is not None else what


def live_graphs() -> list[Graph]:
    """The graphs that can be evaluated, without those that are marked as being deleted."""
    return [graph.ir for graph in graphs.values() if not graph.ir.lost]


def run_writes_of_known_values() -> None:
    """Run pending writes of known values, each of which would keep its whole graph alive."""
    with tape.runs.lock:
        nodes, tape.pending_ops.overdue = tape.pending_ops.overdue, []
        run(closure(nodes), "writes of known values")


_MODULES = (__name__, f"{__package__}.evaluate_at_sync_point")
_RUNS = ("run", "run_for_values")


def is_running_here() -> bool:
    """Whether this code is called by a run: from a kernel, listener, finalizer, or signal handler."""
    if native_short_runs.module is not None and native_short_runs.module.is_running():
        return True
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in _RUNS and frame.f_globals.get("__name__") in _MODULES:
            return True
        frame = frame.f_back
    return False


@deferring
def stop_background() -> None:
    """At process exit: stop the kernels on another thread between two ops, and wait for it."""
    background = tape.runs.background
    if isinstance(background, AsyncEvaluation) and (started := background.started) is not None:
        started.stop(eager_backend.Interrupted("the process is exiting"))
        if not started.wait(stop_runs_at_exit.SECONDS):
            return
    native_codegen.end_worker()


def end_abandoned() -> None:
    """End a run of this thread that was not exited, although its frames no longer exist."""
    if not is_running_here():
        if tape.runs.active_thread == threading.get_ident():
            tape.runs.active_thread = 0
        if (left := Deferred.current.get(threading.get_ident())) is not None:
            left.__exit__()
        for context in abandoned().values():
            context.__exit__()


def forget_in_child() -> None:
    """A forked child (such as a DataLoader worker) does not record or evaluate ops of its parent."""
    forget_signals()
    tape.runs.background = None  # its thread exists only in the parent
    tape.runs.running = tape.runs.active_thread = 0  # the run continues in the parent
    tape.recording.graph = None
    tape.runs.lock = RunLock()
    tape.pending_ops.forget_all(FORGOTTEN_BY_FORK)
    graphs.clear()
    RunHistory.with_split_runs.clear()
