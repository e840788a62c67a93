"""Evaluation at sync points: runs what a read needs.

A program may read a value after every op, so this must be fast.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from ..execute import eager_backend
from ..execute.backend_registry import find_backend
from ..execute.measured_memory import KnownMemory, Levels, Memory, ResidentMemory, timeline_of
from ..execute.microbatch.ray_and_ipyparallel import is_cluster
from ..execute.progress import Run
from ..execute.replay import native_short_runs, node_passes, program_cache
from ..execute.replay.program_cache import Known
from ..execute.replay.program_key import Subgraph
from ..execute.run_report import Report
from ..process import gc_pause
from ..process.deferred_signals import Deferred
from ..process.global_state_transaction import complete
from ..record.dependency_closure import Search, closure
from ..record.interception.warning_routing import at_users_line
from ..record.sync_points import Evaluator, OtherRanks, SyncError, needs_absent
from ..record.tape import tape
from ..record.tracked_storages import TrackedNode
from ..torch_internals import fake_cuda_devices
from . import evaluation, progress_bar
from .evaluation import ActiveRun, notify, outcome_of, run, with_users_lines
from .recompute_options import RecomputeError, name_block
from .recorded_graph_interface import RecordedGraph
from .run_history import OfRead, RunHistory
from .split_options import SplitError


def _touched_alone(nodes: Sequence[TrackedNode]) -> list[RecordedGraph] | None:
    """The graphs of ``nodes``, if these need nothing but to be run."""
    errors, irs = node_passes.begin(nodes)
    if not nodes or errors or fake_cuda_devices.may_have_cuda() or needs_absent(nodes):
        return None
    if RunHistory.with_split_runs:
        return None
    touched = []
    for ir in irs:
        lazy = evaluation.graphs.get(id(ir))
        if lazy is not None:
            if lazy.choices.summaries or lazy.runs.has_listeners:
                return None
            touched.append(lazy)
    return touched


def _note_failure(subgraph: Subgraph, known: Known, error: BaseException, seconds: float, cause: str) -> None:
    """Note that a run in a single call has failed or was interrupted."""
    nodes, outcome = subgraph.nodes, outcome_of(error, Deferred())
    touched = [lazy for ir in subgraph.graphs if (lazy := evaluation.graphs.get(id(ir))) is not None]
    if outcome == "failed":
        for lazy in touched:
            lazy.runs.error = error
    memory = KnownMemory(known.levels, subgraph, None)
    _note_values(nodes, touched, memory, outcome, seconds, cause, True, None)


def _note_elsewhere(
    lazy: RecordedGraph | None, nodes: Sequence[TrackedNode], seconds: float, levels: Levels, cause: str
) -> None:
    """Note a read of values of a graph that is not being recorded; ``None`` if the graph no longer exists."""
    if lazy is not None:
        timeline = timeline_of(nodes, levels.marks)
        report = Report.for_sync_point(len(nodes), seconds, levels.peak, cause, timeline)
        lazy.runs.error = None
        notify([lazy], report, {id(lazy.ir): timeline}, None)
    evaluation.watch.release()


def _never(nodes: Sequence[TrackedNode], cause: str) -> bool:
    return False


@with_users_lines
def run_for_values(nodes: Sequence[TrackedNode], cause: str) -> bool:
    """:func:`run` for a sync point that only needs to run ``nodes``; returns False otherwise.

    A program may read a value after every op, so every check here costs time.
    """
    touched = _touched_alone(nodes)
    if touched is None:
        return False
    context = ActiveRun(nodes)
    try:
        arrived = context.__enter__()
        nodes = node_passes.unfinished(nodes)  # a signal handler may have run them in the meantime
        if not nodes:
            return True
        subgraph = program_cache.replays.structure_of(tape, nodes, False)
        found = program_cache.replays.find(subgraph) if subgraph is not None else None
        new = program_cache.replays.not_cacheable_reason if subgraph is None else None
        _run_for_values(nodes, cause, touched, subgraph, found, new, context, arrived)
    finally:
        try:
            context.__exit__()
        finally:
            context.__exit__()
    return True


def _run_for_values(
    nodes: Sequence[TrackedNode],
    cause: str,
    touched: Sequence[RecordedGraph],
    subgraph: Subgraph | None,
    found: program_cache.Replay | None,
    new: str | None,
    context: ActiveRun,
    arrived: Deferred,
) -> None:
    resident: ResidentMemory | None = None
    memory: Memory
    if found is not None:
        memory = found.memory
    else:
        memory = resident = ResidentMemory(nodes)
    live = Run(nodes, memory)
    context.running = touched
    for lazy in touched:
        lazy.runs.error, lazy.runs.live = None, live
        lazy.runs.changed("running")
    outcome: str | None = None
    start = time.perf_counter()
    try:
        if found is not None:
            found.run(tape, timed=True)
        elif resident is not None:
            with progress_bar.Bar(live, wanted=progress_bar.is_wanted()):
                eager_backend.run(tape, nodes, resident, timed=True)
    except BaseException as error:
        outcome = outcome_of(error, arrived)
        if outcome == "failed":
            for lazy in touched:
                lazy.runs.error = error
        raise
    finally:
        seconds = time.perf_counter() - start

        def end() -> None:
            nonlocal new
            if outcome is None and subgraph is not None and resident is not None:
                with gc_pause.paused():
                    new = program_cache.replays.learn(subgraph, resident, None)
            tape.runs.active_thread = 0
            _note_values(nodes, touched, memory, outcome, seconds, cause, found is not None, new)
            context.running = ()

        complete(end)


def _note_values(
    nodes: Sequence[TrackedNode],
    touched: Sequence[RecordedGraph],
    memory: Memory,
    outcome: str | None,
    seconds: float,
    cause: str,
    hit: bool,
    new: str | None,
) -> None:
    """Note a read of values: write the report, update metrics, and notify listeners."""
    done = len(nodes) if outcome is None else sum(node.state == "done" for node in nodes)
    timelines = memory.timelines()
    report = Report.brief(
        ops_run=done,
        seconds=seconds,
        peak_bytes=memory.peak if outcome is None else None,
        backend="eager",
        cause=cause,
        timeline=timelines.get(id(nodes[-1].graph), []),
        cache_hit=hit,
        cache_miss_reason=new,
    )
    evaluation.last_run = cause, done, seconds
    evaluation.metrics.add("evaluate", seconds)
    evaluation.metrics.count("ops run", done)
    notify(touched, report, timelines, outcome)
    evaluation.watch.release()


@functools.lru_cache(1024)
def _counter_of(cause: str) -> str:
    """The name of the counter for sync points with this cause, regardless of their lines."""
    return f"syncs by {cause.partition(' at ')[0]}"


def _refuse(nodes: Sequence[TrackedNode], cause: str) -> NoReturn:
    raise SyncError(f"{cause} needs {len(nodes)} pending ops to run, inside forbid_sync()")


def run_for_sync(nodes: Sequence[TrackedNode], cause: str) -> None:
    """Run ``nodes``, which a read depends on, with the options of their graph."""
    if evaluation.forbidden.get():
        _refuse(nodes, cause)
    if tape.runs.background is not None and tape.runs.finish_first(nodes):
        nodes = node_passes.unfinished(nodes)
    counters = evaluation.metrics.counters
    counters["syncs"] += 1
    counters[_counter_of(cause)] += 1
    # Nothing is left if all of them have run on another thread.
    if nodes and not run_in_one_go(nodes, cause):
        _run_counted(nodes, cause)


def _run_counted(nodes: Sequence[TrackedNode], cause: str) -> None:
    """Run ``nodes``, which are not a short cached subgraph; the sync point has been counted."""
    if (left := run_with_options(nodes, cause)) and not run_for_values(left, cause):
        run(left, cause)


def run_with_options(
    nodes: Sequence[TrackedNode],
    cause: str,
    *,
    apart: RecordedGraph | None = None,
    reports: list[Report] | None = None,
) -> Sequence[TrackedNode]:
    """Run the graphs of ``nodes`` that split the batch or recompute activations, as their blocks say.

    All pending ops of such a graph run: a part of a step would keep the activations of the whole batch for
    the rest.  An op that has failed stops only the ops that need it, so a graph with such an op is left out
    unless ``nodes`` need it.  Returns those of ``nodes`` that are still pending.

    Args:
        apart: a graph that is not run here.
        reports: the reports of the runs are appended.

    Raises:
        lazyviz.SplitError, lazyviz.RecomputeError: a block's options cannot be met.
    """
    recorded = tape.recording.graph
    irs = node_passes.begin(nodes)[1]
    if recorded is not None and recorded not in irs:
        irs.append(recorded)
    for ir in irs:
        lazy = evaluation.graphs.get(id(ir))
        if lazy is None or lazy is apart or not lazy.choices.saves_memory:
            continue
        own = [node for node in lazy.nodes if node.state != "done"]
        needed = {*nodes, *own} if ir is recorded else own
        pending = closure(needed)
        if any(node.state == "failed" for node in set(pending).difference(closure(nodes))):
            continue
        choices = lazy.choices
        backend = choices.backend if is_cluster(find_backend(choices.backend)) else "eager"
        try:
            report = run(
                pending, cause, split=choices.split, recompute=choices.recompute, backend=backend, owner=lazy
            )
        except (SplitError, RecomputeError) as error:
            name_block(error, lazy)
            raise
        if reports is not None:
            reports.append(report)
        nodes = node_passes.unfinished(nodes)
    return nodes


def _connect_compiled() -> tuple[Callable[[Sequence[TrackedNode], str], bool], Evaluator]:
    """Connect the compiled module for short cached subgraphs; returns its function that runs nodes if they
    form such a subgraph, and its form of :func:`run_for_sync`.
    """
    module = native_short_runs.module
    if module is None:
        return _never, run_for_sync
    module.connect(
        tape=tape,
        replays=program_cache.replays,
        node_passes=node_passes,
        evaluation=evaluation,
        RunHistory=RunHistory,
        is_on_gpu=fake_cuda_devices.cuda_is_present if fake_cuda_devices.BUILT_WITH_CUDA else None,
        stand_ins=fake_cuda_devices.STAND_INS,
        OtherRanks=OtherRanks,
        needs_absent=needs_absent,
        at_users_line=at_users_line,
        complete=complete,
        can_run_in_one_go=native_short_runs.can_run_in_one_go,
        graph_of=Search.graph_of,
        note_elsewhere=_note_elsewhere,
        note_failure=_note_failure,
        raise_stopped=native_short_runs.raise_stopped,
        finish_stopped=native_short_runs.finish_stopped,
        main_thread=threading.main_thread().ident,
        longest=native_short_runs.LONGEST,
        refuse=_refuse,
        run_counted=_run_counted,
        counter_of=_counter_of,
        of_read=functools.partial(tuple.__new__, OfRead),  # its own constructor is in Python
        numbers=TrackedNode._sequence,
    )
    return module.run_in_one_go, module.run_for_sync


run_in_one_go, evaluator = _connect_compiled()
