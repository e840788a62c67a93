"""Running what is pending: at the user's word, or at a sync point; and what came of it.

A part of :mod:`.session`: the state of the process (graphs with pending ops, metrics, the
guard between cells) and the one way in which nodes of any graphs are run.
"""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from . import _torch_cuda, absence, batching, recomputing
from .execute import eager, replay, sweeps
from .execute.backend import Backend, find_backend
from .execute.clusters import is_cluster
from .execute.forecast import learn
from .execute.memory import Memory, ResidentMemory, Timelines
from .execute.progress import Run
from .execute.recompute import RecomputeRun
from .execute.repeats import repeats, run_again
from .execute.report import Report, difference
from .execute.segments import Outcome, run_with_backend
from .execute.split import SplitRun
from .execute.summaries import Summaries
from .graph.ir import Graph
from .metrics import Metrics
from .plan import collector
from .plan.alive import categorize
from .plan.projection import Peak, project
from .record import warned
from .record.guard import nodes_before_access
from .record.order import closure
from .record.pending import RunLock, SyncError
from .record.recorder import tape
from .record.storage import FORGOTTEN, HALF_DONE, Lost, TrackedNode
from .record.watch import Watch

if TYPE_CHECKING:
    from .session import LazyGraph

watch = Watch(tape)
watch.rehearse()
# Graphs with pending nodes, by id of the ir.Graph; weak, since a graph nobody can reach need not run.
graphs: weakref.WeakValueDictionary[int, LazyGraph] = weakref.WeakValueDictionary()
latest: weakref.ref[LazyGraph] | None = None  # of the last block
forbidden = contextvars.ContextVar("lazyviz_forbid_sync", default=False)
metrics = Metrics()
projection_errors: deque[float] = deque(maxlen=1000)
compile_reasons: deque[str] = deque(maxlen=100)  # what was new about what had to be compiled
last_cause = "nothing has been evaluated yet"

Projection = replay.Projection


def needed(tensors: Sequence[torch.Tensor]) -> list[TrackedNode]:
    """The nodes that must run before ``tensors`` can be read."""
    return [node for tensor in tensors for node in nodes_before_access(tape, tensor, write=False)]


@warned.in_python
def run(
    nodes: Sequence[TrackedNode],
    cause: str,
    *,
    backend: str = "eager",
    progress: Callable[[Any], None] | None = None,
    cancel: threading.Event | None = None,
    graph: LazyGraph | None = None,
    split: int | str = "off",
    recompute: int | str = "off",
    summaries: bool | None = None,
    timings: bool | None = None,
    verify: bool = False,
) -> Report:
    """Run ``nodes`` (closed under dependencies, in program order) and tell the graphs they belong to.

    With ``graph``, at the user's word, the peak is projected before (of a run in this process).  ``split``
    is of the batch of that graph; what an interrupted split run was to do is done first.  ``recompute`` is
    the budget in bytes that activations are dropped and computed again for.
    """
    global last_cause
    runner = find_backend(backend)
    cluster = runner if is_cluster(runner) else None
    if cluster is not None and split == "off":
        split = "auto"  # pieces are what such a backend is for
    if begun := begun_split(nodes):
        nodes = closure({*nodes, *(node for node in begun.nodes if node.state != "done")})
    errors, irs = sweeps.begin(nodes)
    for error in errors:
        if error.startswith((FORGOTTEN, HALF_DONE)):
            raise RuntimeError(error)
    absence.refuse(nodes, graph.device if graph is not None else None)
    touched = [graphs[id(ir)] for ir in irs if id(ir) in graphs]
    projection: Projection | None = None
    split_run = begun
    if split_run is None and split != "off":
        owner = graph if graph is not None else touched[-1] if touched else None
        if owner is not None and not (recompute != "off" and recomputing.instead_of_split(owner)):
            split_run = batching.split_run(tape, owner, nodes, split, cluster)
        if split_run is not None and owner is not None:
            owner.split_run = split_run
    choice = None
    if recompute != "off" and split_run is None and backend == "eager":
        owner = graph if graph is not None else touched[-1] if touched else None
        choice = recomputing.choose_run(owner, nodes, recompute, tape.pending) if owner is not None else None
    if summaries is None:
        summaries = any(lazy.summaries for lazy in touched)
    cuda = _cuda_devices(nodes)
    stretch = found = code = None
    new: str | None = None  # why the stretch was not recognised
    compiler = cast(Backend | None, runner) if cluster is None else None
    # What compiled code holds while it runs only a device's own counter knows.
    hidden = compiler is not None and split_run is None and not cuda
    if compiler is not None and split_run is None and not summaries and nodes:
        stretch = repeats.look_at(tape, nodes, compiler)
        code = repeats.find(stretch, compiler) if stretch is not None else None
    elif runner is None and split_run is None and choice is None and not summaries and not (cuda and timings):
        stretch = replay.replays.look_at(tape, nodes, graph is not None)
        found = replay.replays.find(stretch) if stretch is not None else None
        new = replay.replays.not_looked_at if stretch is None else None
    if cluster is not None or graph is None or not nodes or hidden or code is not None:
        pass
    elif found is not None and found.projection is not None:
        projection = found.projection
    elif choice is not None:
        projection = choice.projected()
    elif split_run is not None and begun is None:
        projection = _projection_of(graph, len(split_run.pieces), nodes)
    elif split_run is None:
        running = list({id(node.graph): node.graph for node in nodes}.values())
        with collector.paused():
            projection = project(running, nodes, tape.pending)
    start = time.perf_counter()
    for index in cuda:
        torch.cuda.reset_peak_memory_stats(index)
    resident = ResidentMemory(nodes if found is None and code is None else ())
    memory: Memory = found.memory if found is not None else resident
    again = None
    if choice is not None and choice.again is not None:
        again = RecomputeRun(tape, choice.trace, choice.again, resident)

    live = Run(nodes, memory, split_run)
    seen = Summaries() if summaries else None
    marks: list[tuple[TrackedNode, Any, Any]] | None = [] if cuda and timings else None
    timed = not cuda if timings is None else (timings and not cuda)

    def on_node(done: int, total: int, node: TrackedNode) -> None:
        live.step(done, total, node)
        if progress is not None:
            progress(live.now())

    def compiles(what: str | None) -> None:
        live.compiles(what)
        if progress is not None and what is not None:
            progress(live.now())

    for lazy in touched:
        lazy.error = None
        lazy.live = live
        lazy._changed("running")
    outcome: str | None = None
    share = 0
    compiled: Outcome | None = None
    try:
        watched = any(lazy.watched for lazy in touched)
        on_progress = on_node if progress is not None else live.step if watched else None
        cancelled = cancel.is_set if cancel is not None else None
        if split_run is not None:
            split_run.run(
                resident,
                progress=on_progress,
                cancelled=cancelled,
                cluster=cluster,
                seen=seen,
                timed=timed,
            )
            left = [node for node in nodes if node.state != "done"]
            eager.run(tape, left, resident, progress=on_progress, cancelled=cancelled, timed=timed, seen=seen)
            share = len(nodes) if cluster is None else len(split_run.spread)
        elif compiler is None:
            if found is not None:
                found.run(tape, progress=on_progress, cancelled=cancelled, timed=timed)
            else:
                eager.run(
                    tape,
                    nodes,
                    resident,
                    progress=on_progress,
                    cancelled=cancelled,
                    timed=timed,
                    again=again,
                    seen=seen,
                    marks=marks,
                )
            share = len(nodes) if cluster is None else 0
        elif (
            code is not None
            and stretch is not None
            and run_again(tape, stretch, code, progress=on_progress, cancelled=cancelled)
        ):
            compiled = Outcome(hits=1)
            compiled.ran(len(nodes), code)
            share = compiled.share
        else:
            compiled = run_with_backend(
                tape,
                nodes,
                compiler,
                resident,
                progress=on_progress,
                cancelled=cancelled,
                verify=verify,
                seen=seen,
                compiles=compiles if on_progress is not None else None,
                stretch=stretch,
            )
            share = compiled.share
        for index in cuda:
            _torch_cuda.synchronize(index)
        for node, begin, end in marks or ():
            node.seconds = begin.elapsed_time(end) / 1000
    except (KeyboardInterrupt, eager.Interrupted):
        outcome = "interrupted"
        raise
    except BaseException as error:
        outcome = "failed"
        for lazy in touched:
            lazy.error = error
        raise
    finally:
        seconds = time.perf_counter() - start
        done = len(nodes) if outcome is None else sum(node.state == "done" for node in nodes)
        peak: int | None = None
        projected: int | None = None
        above: dict[str, int] = {}
        if outcome is None and not hidden:
            peak, projected, above = _measured(memory, cuda, projection)
            if stretch is not None and found is None and compiler is None:
                with collector.paused():
                    new = replay.replays.learn(stretch, resident, projection)
            elif found is not None and found.projection is None:
                found.learn(projection)
        own = graph.ir if graph is not None else nodes[-1].graph if nodes else None
        timelines = {} if hidden else memory.timelines()
        report = Report(
            done,
            seconds,
            peak,
            backend,
            cause,
            pieces=len(split_run.pieces) if split_run is not None else 1,
            recomputed=again.count if again is not None else 0,
            share=share / len(nodes) if nodes and outcome is None else 1.0,
            projected_bytes=projected,
            projected_total_bytes=None if projected is None or projection is None else projection[0].total,
            difference=above,
            timeline=timelines.get(id(own), []),
            first_nan=seen.first.get("nan") if seen is not None else None,
            first_inf=seen.first.get("inf") if seen is not None else None,
            cache_hit=found is not None
            or (compiled is not None and compiled.hits > 0 and not compiled.misses),
            cache_miss_reason="; ".join(compiled.missed) if compiled is not None and compiled.missed else new,
            fallbacks=tuple(compiled.fallbacks) if compiled is not None else (),
        )
        last_cause = f"{cause}: {done} ops in {seconds:.3f} s"
        metrics.add("evaluate", seconds)
        metrics.count("ops run", done)
        if compiled is not None:
            metrics.count("compiles", compiled.misses)
            metrics.count("compiled segments met again", compiled.hits)
            metrics.count("ops that a backend left to eager", done - compiled.share)
            compile_reasons.extend(compiled.missed)
            if compiled.misses:
                metrics.add("compile", compiled.seconds)
        if report.error is not None:
            projection_errors.append(report.error)
        if seen is not None:
            for lazy in touched:
                lazy.note_nonfinite(seen.first)
        _tell(touched, report, timelines, outcome)
        watch.release()
        if on_progress is not None:
            learn(nodes)
    if graph is not None:
        graph.report = report
    return report


def _tell(touched: Sequence[LazyGraph], report: Report, timelines: Timelines, outcome: str | None) -> None:
    """Tell the graphs what came of a run of some of their nodes."""
    for lazy in touched:
        if lazy.split_run is not None and lazy.split_run.complete:
            lazy.split_run = None
        lazy.report = report
        lazy.live = None
        lazy.note_timeline(timelines.get(id(lazy.ir), ()))
        if lazy.ir is not tape.graph and not (len(lazy.nodes) > report.ops_run and lazy.has_pending):
            graphs.pop(id(lazy.ir), None)
        lazy._changed(outcome)


@warned.in_python
def run_for_values(nodes: Sequence[TrackedNode], cause: str) -> bool:
    """:func:`run` for a sync point where there is nothing to it but to run ``nodes``; False: there is more.

    A program may read a value after every op, and pays each time for what is asked here.
    """
    global last_cause
    errors, irs = sweeps.begin(nodes)
    if not nodes or errors or _torch_cuda.STAND_INS or _torch_cuda.may_have_cuda():
        return False
    known = list(graphs.values())
    touched = [lazy for lazy in known if lazy.ir in irs]
    if [lazy for lazy in known if lazy.split_run is not None] or [
        lazy for lazy in touched if lazy.summaries or lazy.watched
    ]:
        return False
    stretch = replay.replays.look_at(tape, nodes, False)
    found = replay.replays.find(stretch) if stretch is not None else None
    new = replay.replays.not_looked_at if stretch is None else None
    resident = ResidentMemory(nodes if found is None else ())
    memory: Memory = found.memory if found is not None else resident
    live = Run(nodes, memory)
    for lazy in touched:
        lazy.error, lazy.live = None, live
        lazy._changed("running")
    outcome: str | None = None
    start = time.perf_counter()
    try:
        if found is not None:
            found.run(tape, timed=True)
        else:
            eager.run(tape, nodes, resident, timed=True)
    except KeyboardInterrupt:
        outcome = "interrupted"
        raise
    except BaseException as error:
        outcome = "failed"
        for lazy in touched:
            lazy.error = error
        raise
    finally:
        seconds = time.perf_counter() - start
        done = len(nodes) if outcome is None else sum(node.state == "done" for node in nodes)
        peak = None
        if outcome is None:
            peak = memory.peak
            if stretch is not None and found is None:
                with collector.paused():
                    new = replay.replays.learn(stretch, resident, None)
        timelines = memory.timelines()
        report = Report(
            done,
            seconds,
            peak,
            "eager",
            cause,
            timeline=timelines.get(id(nodes[-1].graph), []),
            cache_hit=found is not None,
            cache_miss_reason=new,
        )
        last_cause = f"{cause}: {done} ops in {seconds:.3f} s"
        metrics.add("evaluate", seconds)
        metrics.count("ops run", done)
        _tell(touched, report, timelines, outcome)
        watch.release()
    return True


def begun_split(nodes: Sequence[TrackedNode]) -> SplitRun | None:
    """The split run that was interrupted in the midst of some of ``nodes``."""
    for lazy in list(graphs.values()):
        if lazy.split_run is not None and not set(nodes).isdisjoint(lazy.split_run.nodes):
            return lazy.split_run
    return None


def _projection_of(graph: LazyGraph, pieces: int, nodes: Sequence[TrackedNode]) -> Projection | None:
    """What a run of the whole graph in pieces would peak at; ``None`` for one of a part."""
    if len(nodes) != len(graph.nodes):
        return None
    plan = graph.plan(device=graph.device, split=pieces)
    categories = {span.storage.origin: categorize(span) for span in plan._lifetimes.values()}
    nbytes = plan.tensor_peak_bytes if plan.recorded_device.type == "cpu" else plan.peak_bytes
    scratch = plan.peak_bytes - plan.tensor_peak_bytes if plan.recorded_device.type != "cpu" else 0
    sizes = {name: size for name, size in plan.by_category.items() if size}
    return Peak(plan.recorded_device, nbytes, sizes, scratch, plan.peak_bytes), categories


def _cuda_devices(nodes: Sequence[TrackedNode]) -> list[int]:
    if not torch.cuda.is_available():
        return []
    devices = {value.device for node in nodes for value in node.outputs}
    return sorted({device.index or 0 for device in devices if device.type == "cuda"})


def _measured(
    memory: Memory, cuda: Sequence[int], projection: Projection | None
) -> tuple[int, int | None, dict[str, int]]:
    """The measured peak, what was projected of it, and how they differ."""
    counters = {index: _torch_cuda.max_memory_allocated(index) for index in cuda}
    if projection is None:
        return max(counters.values(), default=memory.peak), None, {}
    projected, categories = projection
    held = memory.peak_on(projected.device, categories)
    peak = held.nbytes
    if projected.device.type == "cuda":
        peak = counters.get(projected.device.index or 0, peak)
    return peak, projected.nbytes, difference(projected, held, peak)


def called(what: str) -> str:
    """``what``, with the user's line that called for it."""
    line, _ = tape.scopes.sources.find(sys._getframe(2))
    return f"{what} at {line}" if line is not None else what


def _run_for_sync(nodes: Sequence[TrackedNode], cause: str) -> None:
    if forbidden.get():
        raise SyncError(f"{cause} needs {len(nodes)} pending ops to run, inside forbid_sync()")
    metrics.count("syncs")
    metrics.count(f"syncs by {cause.partition(' at ')[0]}")
    current = graphs.get(id(tape.graph)) if tape.graph is not None else None
    if current is None:
        owners = {id(node.graph): graphs.get(id(node.graph)) for node in nodes}
        current = next(
            (lazy for lazy in owners.values() if lazy is not None and lazy.recompute != "off"), None
        )
    if current is not None and (current.split not in ("off", 1) or current.recompute != "off"):
        # A part of a step would have to keep the whole batch's activations for the rest of it.
        pending = closure({*nodes, *(node for node in current.nodes if node.state != "done")})
        backend = current.backend if is_cluster(find_backend(current.backend)) else "eager"
        run(pending, cause, split=current.split, recompute=current.recompute, backend=backend)
    elif not run_for_values(nodes, cause):
        run(nodes, cause)


tape.evaluator = _run_for_sync


def _reachable() -> list[Graph]:
    return [graph.ir for graph in graphs.values()]


tape.reachable = _reachable
Lost.look = tape.forget_lost


def catch_up() -> None:
    """Make owed writes whose values are known anyway: each would keep its whole graph."""
    with tape.lock:
        nodes, tape.overdue = tape.overdue, []
        run(closure(nodes), "writes of known values")


def _forget_in_child() -> None:
    """A forked child (a loader's worker) neither records nor evaluates what its parent recorded."""
    tape.graph = None
    tape.lock = RunLock()
    tape.forget_all()
    graphs.clear()


os.register_at_fork(after_in_child=_forget_in_child)
