"""Diagnostics: ``%lazy status``, ``why()`` and ``metrics()``.

A part of :mod:`lazyviz.session.lazy_graph`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..execute.backend_registry import backend_counters, compiled_programs
from ..execute.replay.program_cache import replays
from ..graph.ir import Failure, failure_of
from ..graph.sync_point_groups import listed
from ..plan.batch.batch_analysis_result import Blocker
from ..plan.batch.split_plan import describe
from ..plan.result_tables import DisplayedText
from ..record import native_recorder
from ..record.tape import tape
from ..torch_internals import native_module_loader
from . import evaluation
from .evaluate_all_pending import failures
from .recorded_graph_interface import RecordedGraph


def status_of(graph: RecordedGraph, where: str = "") -> str:
    """The number of recorded, pending and dropped ops of a graph, its failed ops, and its sync points."""
    dropped = {node for node in graph.nodes if failure_of(node.error) is Failure.FORGOTTEN}
    lines = [f"{where}{len(graph.nodes):,} ops recorded, {graph.pending:,} pending"]
    if dropped:
        lines[0] += f", {len(dropped):,} dropped"
    elif graph.state not in ("pending", "done"):
        lines[0] += f", {graph.state}"
    lines += [f"  {line}" for line in listed(graph.sync_points)]
    lines += [f"  failed: {what}" for what in failures(node for node in graph.nodes if node not in dropped)]
    if graph.runs.report is not None:
        lines.append(f"{'  ' if where else ''}last run: {graph.runs.report}")
    return "\n".join(lines)


def status_of_all(latest: RecordedGraph | None) -> str:
    """The pending ops of all graphs, with their cells; the latest graph is always listed."""
    pending = Counter([node.graph for node in list(tape.pending)])
    total = f"{len(tape.pending):,} op{'' if len(tape.pending) == 1 else 's'} pending"
    lines = [f"{total} in {len(pending)} graph{'' if len(pending) == 1 else 's'}"]
    for ir, count in pending.items():
        graph = evaluation.graphs.get(id(ir))
        if graph is not None:
            lines.append(status_of(graph, f"{ir.where}: "))
        else:  # the graph was deleted, but tensors that it creates or writes still exist
            lines.append(f"{ir.where}: {count:,} pending of {len(ir):,} ops recorded")
            own = [node for node in list(tape.pending) if node.graph is ir]
            lines += [f"  failed: {what}" for what in failures(own)]
    if latest is not None and latest.ir not in pending:
        lines.append(status_of(latest, f"{latest.ir.where}: "))
    return "\n".join(lines)


def unmet_options(graph: RecordedGraph, names: str | None = None) -> list[str]:
    """Options of a block that cannot be satisfied (budget, split, batch), one sentence each.

    ``names``: the option that names the batch.
    """
    if graph.choices.batch is not None and graph.choices.batch.missing:
        return [f"--batch {names}: the cell assigned no tensor to {', '.join(graph.choices.batch.missing)}."]
    choices = graph.choices
    if not graph.nodes or not choices.saves_memory:
        return []
    plan = graph.plan()
    if plan.split.blocked_by and choices.split not in ("off", 1):
        rest = len(plan.split.blocked_by) - 1
        more = f" {rest:,} more op{'s prevent' if rest > 1 else ' prevents'} it, too." if rest else ""
        text = describe(Blocker(plan.split.blocked_by[0], plan.split.reasons[0])).rstrip(".")
        return [f"The batch cannot be split: {text}.{more}"]
    if plan.recompute.reason:
        how = "will use the lowest peak found" if choices.recompute == "auto" else "will be refused"
        return [f"The budget cannot be met: {plan.recompute.reason}. An evaluation {how}."]
    if plan.fits is False and "auto" in (choices.split, choices.recompute):
        from ..plan.explain_memory import verdict  # imports the planner, already imported by `plan()`

        how = f"Even in {plan.split.pieces:,} pieces of the batch" if plan.split.pieces > 1 else "Even so"
        return [f"The budget cannot be met: {how.lower()}, {verdict(plan)[0].lower()}{verdict(plan)[1:]}"]
    return []


def why() -> str:
    """The cause of the last evaluation, the sync points of the last block, and the last cache misses, as
    text.

    The caches are the shape cache, the program cache, and the cache of compiled programs.
    """
    miss = tape.shapes.last_miss
    inferred = f"{miss} (recorded more slowly: PyTorch's shape rules ran)" if miss else "none yet"
    compiled = evaluation.compile_reasons[-1] if evaluation.compile_reasons else "none yet"
    new = replays.last_miss or "none yet"
    graph = evaluation.latest() if evaluation.latest is not None else None
    lines = [
        f"last evaluation: {_last_evaluation()}",
        *[f"  {line}" for line in listed(graph.sync_points if graph is not None else ())],
        f"last op with new input shapes: {inferred}",
        f"last program that was new to the cache: {new}",
        f"last compilation: {compiled}",
    ]
    return DisplayedText("\n".join(lines))


def _last_evaluation() -> str:
    if evaluation.last_run is None:
        return "nothing has been evaluated yet"
    cause, ops, seconds = evaluation.last_run
    return f"{cause}: {ops} ops in {seconds:.3f} s"


def metrics() -> dict[str, Any]:
    """Timings (count, total, percentiles in seconds) and counters of this process.

    ``"projected peak errors"``: projected over measured peak minus 1, for the last evaluated graphs.
    ``"compiled modules"``: the native modules in use (none: lazyviz runs only Python code).
    ``"replays"``: evaluations by generated code; ``"replays not known"``: misses of the program cache.
    ``"compiles"`` and ``"compiled segments reused"``: misses and hits of compiling backends;
    ``"compile reasons"``: the last 100 miss reasons; ``"compiled programs"``: cached programs per backend.
    ``"backend counters"``: counters of the backends, such as captures and replays of ``"cudagraphs"``.
    """
    result = evaluation.metrics.summary()
    result["projected peak errors"] = list(evaluation.projection_errors)
    result["compiled recorder"] = native_recorder.active
    result["compiled modules"] = sorted(native_module_loader.loaded)
    result["shape cache hits"] = tape.shapes.hits + native_recorder.shape_cache_hits()
    result["shape cache misses"] = tape.shapes.misses
    result["ops pending"] = len(tape.pending)
    result["replays"], result["replays not known"] = replays.hits, replays.misses
    result["replays generated"], result["replays dropped"] = replays.generated, replays.dropped
    result["replayed subgraphs known"] = len(replays)
    result["compile reasons"] = list(evaluation.compile_reasons)
    result["compiled programs"] = compiled_programs()
    result["backend counters"] = backend_counters()
    counters = ("ops recorded", "ops run", "graphs", "compiles", "compiled segments reused")
    for counter in (*counters, "syncs", "bytes read at syncs"):
        result.setdefault(counter, 0)
    return result
