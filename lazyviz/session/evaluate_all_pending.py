"""Evaluating everything pending: a failing op stops only the ops that depend on it.

A part of :mod:`lazyviz.session.lazy_graph`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ..execute.microbatch.ray_and_ipyparallel import NoWorkersError
from ..execute.run_report import Report
from ..plan.node_formatting import line_with_text
from ..record.dependency_closure import can_run_without, closure
from ..record.partially_written_memory import is_partial_write
from ..record.sync_points import AbsentDeviceError
from ..record.tape import tape
from ..record.tracked_storages import TrackedNode
from . import device_options, evaluation
from .recompute_options import RecomputeError, name_block
from .recorded_graph_interface import RecordedGraph
from .run_history import RunHistory
from .split_options import SplitError

REFUSED = (AbsentDeviceError, SplitError, RecomputeError, NoWorkersError)
"""Errors that an evaluation may raise before any op runs."""


def failed_nodes(nodes: Iterable[TrackedNode] | None = None) -> list[TrackedNode]:
    """The failed nodes among ``nodes``, or among all pending nodes, that may run again."""
    found = list(tape.pending) if nodes is None else nodes  # another thread may be recording
    return [node for node in found if node.state == "failed" and not is_partial_write(node)]


def failures(nodes: Iterable[TrackedNode] | None = None) -> list[str]:
    """:func:`failure_text` for all failed nodes among ``nodes``, or among all pending nodes."""
    found = list(tape.pending) if nodes is None else nodes
    return [failure_text(node) for node in found if node.state == "failed"]


def failure_text(node: TrackedNode) -> str:
    """``"index_3 at cell [8], line 4: b = a[i]: index 6 is out of bounds"``."""
    if is_partial_write(node) and node.error is not None:
        return node.error  # names the op and its line
    where = f" at {line_with_text(node.source)}" if node.source is not None else ""
    return f"{node.name}{where}: {(node.error or 'failed').partition(chr(10))[0]}"


def runnable_nodes() -> list[TrackedNode]:
    """The pending nodes that can still run here; the others have failed or depend on failed nodes."""
    return _runnable({node for node in list(tape.pending) if node.state == "failed"})


def run_all(cause: str, apart: Iterable[TrackedNode] = ()) -> Report:
    """Run all pending nodes that can run here, except the nodes in ``apart``.

    Nodes that failed before are tried again last; if they fail with the same error, the report lists them in
    ``left``.

    Raises:
        Exception: the first new error, after everything else has run.
    """
    reports: list[Report] = []
    apart = set(apart)
    before = {node: node.error for node in failed_nodes() if node not in apart}
    skipped = {*before, *apart}
    error = _run(lambda: _runnable(skipped), cause, reports, skipped)
    for node in before:
        if node not in tape.pending:
            continue
        skipped.discard(node)
        again = _run(lambda: _without(closure([node]), skipped), cause, reports, skipped)  # noqa: B023
        if node not in tape.pending:
            again = _run(lambda: _runnable(skipped), cause, reports, skipped) or again
        elif node.error == before[node]:
            again = None
        error = error or again
    failed = failed_nodes()
    for lazy in {id(node.graph): evaluation.graphs.get(id(node.graph)) for node in failed}.values():
        if lazy is not None:
            lazy.runs.changed("failed")
    if error is not None:
        raise error
    return merged(reports, tuple(failure_text(node) for node in failed))


def pending_graphs() -> list[RecordedGraph]:
    """The graphs with pending ops that can still be evaluated, in the order of recording."""
    irs = {id(node.graph): None for node in list(tape.pending)}
    return [evaluation.graphs[key] for key in irs if key in evaluation.graphs]


def evaluate_graphs(cause: str) -> tuple[list[tuple[RecordedGraph | None, Report]], list[Exception]]:
    """Evaluate each pending graph with the options of its block, and then all other pending nodes.

    Returns the reports, and the errors of graphs that could not be evaluated.

    Raises:
        Exception: the first new error of an op, after everything else has run.
    """
    reports: list[tuple[RecordedGraph | None, Report]] = []
    refused: list[Exception] = []
    error: Exception | None = None
    apart: set[TrackedNode] = set()
    with tape.runs.lock:
        if tape.pending:
            tape.runs.refuse_nested()
        tape.pending_ops.forget_unreachable(tape.pending_ops.reachable())
        for graph in pending_graphs():
            pending = closure(graph.unfinished())  # also ops of earlier graphs
            before = {node: node.error for node in pending if node.state == "failed"}
            if not graph.pending or (before and not graph.choices.saves_memory):
                continue  # nodes that do not depend on failed ones run below
            try:
                reports.append((graph, graph.evaluate()))
            except REFUSED as reason:
                if isinstance(reason, SplitError | RecomputeError):
                    name_block(reason, graph)
                refused.append(reason)
                apart.update(node for node in graph.nodes if node.state != "done")
            except Exception as failure:
                new = [node for node in pending if node.state == "failed" and before.get(node) != node.error]
                if not new and not any(str(text) in str(failure) for text in before.values()):
                    raise  # not the error of an op
                error = error or (failure if new else None)
                if graph.choices.saves_memory:  # the remaining nodes of these graphs must not run as a whole
                    apart.update(node for node in graph.nodes if node.state != "done")
        if any(node not in apart for node in _runnable(set())):
            try:
                reports.append((None, run_all(cause, apart)))
            except Exception as failure:
                error = error or failure
    if error is not None:
        raise error
    return reports, refused


def evaluate_everything(cause: str) -> Report:
    """:func:`evaluate_graphs`, with one report.

    Raises:
        Exception: the first new error of an op, otherwise the first of a block's options that cannot be met;
            everything else has run.
    """
    if all(graph.choices.is_plain for graph in pending_graphs()):
        if tape.pending:
            tape.runs.refuse_nested()
        tape.pending_ops.forget_unreachable(tape.pending_ops.reachable())
        return run_all(cause)
    found, refused = evaluate_graphs(cause)
    for reason in refused:
        if not isinstance(reason, AbsentDeviceError):
            raise reason
    reports = [report for _, report in found]
    left = tuple(failure_text(node) for node in failed_nodes())
    return merged(reports, left) if reports else replace(run_all(cause), left=left)


def _run(
    nodes: Callable[[], Sequence[TrackedNode]], cause: str, reports: list[Report], failed: set[TrackedNode]
) -> Exception | None:
    """Run ``nodes``; after a failure, run those that do not depend on the failed one. Returns the first
    error.
    """
    first: Exception | None = None
    while True:
        chosen = nodes()
        if not chosen and reports:
            return first
        try:
            reports.append(evaluation.run(chosen, cause))
            return first
        except Exception as error:
            new = [node for node in chosen if node.state == "failed" and node not in failed]
            if not new:  # not the error of an op
                raise
            failed.update(new)
            first = first or error


def _runnable(failed: set[TrackedNode]) -> list[TrackedNode]:
    """The pending nodes that can run without ``failed`` ones, in program order.

    A split run that a failing op has stopped cannot continue, and none of its ops can run separately.
    """
    splits = [runs.split_run for runs in list(RunHistory.with_split_runs)]
    stuck = (split.nodes for split in splits if split is not None and any(map(is_partial_write, split.nodes)))
    return _without(device_options.runnable(), failed.union(*stuck))


def _without(nodes: Iterable[TrackedNode], failed: set[TrackedNode]) -> list[TrackedNode]:
    """The ``nodes`` that do not depend on a failed one, in program order."""
    stuck = set(failed)
    kept = []
    for node in nodes:
        needed = (*(value.node for value in node.inputs), *node.after)
        if node in stuck or any(
            other in stuck and not can_run_without(other, node) for other in needed if other is not None
        ):
            stuck.add(node)
        else:
            kept.append(node)
    return kept


def merged(reports: Sequence[Report], left: tuple[str, ...] = ()) -> Report:
    """One report of several consecutive runs: sums, the highest peak, and otherwise the values of the last
    run.
    """
    last = reports[-1]
    if len(reports) == 1:
        return replace(last, left=left) if left else last
    peaks = [report.peak_bytes for report in reports if report.peak_bytes is not None]
    ops = sum(report.ops_run for report in reports)
    return replace(
        last,
        ops_run=ops,
        pieces=max(report.pieces for report in reports),
        recomputed=sum(report.recomputed for report in reports),
        share=sum(report.share * report.ops_run for report in reports) / ops if ops else 1.0,
        seconds=sum(report.seconds for report in reports),
        peak_bytes=max(peaks, default=None),
        left=left,
    )
