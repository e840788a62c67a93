"""Explanation of a plan as text: the peak, what is alive there and why, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.ir import Node
from ..graph.modules import full_name, known_path
from ..graph.sync_point_groups import listed
from .communication_bytes import communication_lines
from .liveness.live_set_and_categories import CATEGORIES, Allocation, Moment
from .node_formatting import category_text, folded_modules, line_text, line_with_text, where
from .plan import Plan
from .remedies.remedy import Remedy, cheapest
from .runtime.bottlenecks_and_speedups import limits, not_given
from .runtime.gpu_timeline import Projection
from .runtime.last_training_step import last_step
from .units import format_bytes, format_range, format_share, looks_exact

LARGEST = 5  # allocations listed
REMEDIES = 3  # remedies listed
LINES = 5  # source lines listed
MODULES = 8
PYTORCHS = frozenset({
    "aten", "prim", "prims", "rngprims", "debugprims", "c10d", "_c10d_functional",
    "_c10d_functional_autograd", "_dtensor", "fsdp", "symm_mem", "quantized", "quantized_decomposed",
    "_quantized", "mkldnn", "mkl", "onednn", "inductor", "profiler", "sparse", "streams", "higher_order",
    "lazyviz",
})  # fmt: skip
"""Namespaces of operators that come with PyTorch, or are lazyviz's own."""


def time_of_a_step(plan: Plan) -> tuple[Projection, list[str]] | None:
    """The projected time of the last training step, and its bottlenecks as text; ``None`` if unknown."""
    nodes = last_step(plan._nodes)
    time = plan.time_of(nodes)
    if time is None or not time.ops:
        return None
    return time, _limits(plan, time, nodes)


def _limits(plan: Plan, time: Projection, nodes: Sequence[Node]) -> list[str]:
    """The bottlenecks of ``nodes``; possible changes only for the recorded batch size."""
    size, target = plan.recorded_batch_size, plan._answers.target
    if plan.batch_size != size:
        return limits(time, None, target)
    return limits(time, nodes, target, plan._answers.sized(nodes, 2 * size) if size is not None else None)


def explain(plan: Plan) -> str:
    """The complete plan as text."""
    lines = [*_peak(plan), *_recomputed(plan), other_run(plan), verdict(plan)]
    if plan.peak_bytes and plan.peak_node is not None:
        lines += of_moment(plan.at(plan.peak_position), "at the peak")
    lines += _remedies(plan)
    lines += batch_text(plan)
    if (time := plan.time) is not None and time.ops:
        lines += _limits(plan, time, plan._nodes)
    elif time is None:
        lines += not_given(plan._nodes, plan._answers.target)
    lines += communication_lines(plan._graph, plan.communication)
    if plan._reservation is not None and plan.verdict_of == "lazyviz":
        lines.append(_reserved(plan))
    for name, other in list(plan.devices.items())[1:]:
        if not other.peak_bytes:
            continue
        line = f"On {name}: {format_bytes(other.peak_bytes)} at most"
        if other.reserved_bytes is not None:
            line += f", {format_bytes(other.reserved_bytes)} held by the allocator"
        if other.fits is not None:
            line += ", which fits" if other.fits else ", which does not fit"
        lines.append(line + ".")
    lines += uncertainties(plan)
    lines += release_lines(plan)
    lines += assumptions(plan)
    lines += other_kernels(plan)
    lines += [f"{line[0].upper()}{line[1:]}" for line in listed(plan._graph.sync_points)]
    return "\n".join(lines)


def uncertainties(plan: Plan) -> list[str]:
    """Memory that is unknown, or would be another: of kernels, and of what is planned in another form."""
    lines: list[str] = []
    if inside := _not_known(plan):
        lines.append(
            f"Ran immediately, at a sync point: {inside}. Their results are counted. The memory that they "
            "used while running is unknown, and the ranges above do not include it."
        )
    if operators := _of_others(plan):
        lines.append(
            f"Operators of other libraries: {operators}. Their results are counted. The memory that their "
            "kernels use while running is unknown, and the ranges above do not include it."
        )
    if layers := sorted(plan._graph.in_parts):
        lines.append(
            f"{', '.join(layers)}: recorded cell by cell with CPU operators, because cuDNN does not "
            "support it. "
            f"{plan.device} would run each cell as one kernel, which the ranges above do not include."
        )
    if functions := sorted(plan._graph.as_eager):
        lines.append(
            f"{', '.join(functions)}: planned as run by eager PyTorch. Compiled by torch.compile it "
            "would take "
            "another amount of memory, usually less, which the ranges above do not include."
        )
    return lines


def assumptions(plan: Plan) -> list[str]:
    """What is assumed about values that only the planned device could compute."""
    return [f"Assumed: {said}." for said in sorted(plan._graph.assumed)]


def other_kernels(plan: Plan) -> list[str]:
    """What is not certain if the ops of another device are planned."""
    if not plan.borrowed:
        return []
    recorded = f"The ops were recorded on {plan.recorded_device}"
    return [f"{recorded}; {plan.device} may use other kernels that save other tensors."]


def release_lines(plan: Plan) -> list[str]:
    """Known differences of the planned PyTorch release, if it is not the installed one."""
    if plan._graph.torch_release is None:
        return []
    differences = "; ".join(plan._graph.release_differences) or "no known difference in memory"
    return [f"Differences in PyTorch {plan.torch_version}: {differences}."]


def batch_text(plan: Plan) -> list[str]:
    """The batch: its size, its pieces or what prevents a split, and the largest batch that fits."""
    if plan.batch_size is None:
        return []
    text = f"Batch of {plan.batch_size:,} samples, {plan.split.explain()}"
    if plan.split.blocked_by:
        text = f"Batch of {plan.batch_size:,} samples; it cannot be split:\n{plan.split.explain()}"
    lines = text.splitlines()
    if (largest := plan.max_batch_size) is not None:
        lines.append(f"The largest batch that fits{' so' if plan.split.pieces > 1 else ''}: {largest:,}")
    elif (why := plan._answers.why_no_largest) is not None:
        lines.append(f"The largest batch that fits is unknown: {why}.")
    return lines


def summary(plan: Plan) -> list[str]:
    """A short version of the plan: the peak and its place, the verdict, and the remedies."""
    return [*_peak(plan), *_recomputed(plan), other_run(plan), verdict(plan), *_remedies(plan)]


def other_run(plan: Plan) -> str:
    """The peak of the kind of run that the plan does not describe: an evaluation, or eager PyTorch."""
    if plan.verdict_of == "eager":
        return f"Evaluated by lazyviz: {format_bytes(plan.lazyviz_peak_bytes)}"
    return f"Plain eager PyTorch {plan.torch_version}: {format_bytes(plan.eager_peak_bytes)}"


def essence(plan: Plan) -> list[str]:
    """The peak, its place, the largest that is alive there, and the remedies: why a budget is exceeded."""
    lines = _peak(plan)
    if plan._reservation is not None and plan.verdict_of == "lazyviz":
        lines.append(_reserved(plan))
    if plan.alive_at_peak:
        lines += ["Alive at the peak, largest first:", *_largest(plan.alive_at_peak)]
    return lines + _remedies(plan)


def _peak(plan: Plan) -> list[str]:
    lines = [f"Projected peak on {plan.device}: {format_bytes(plan.peak_bytes)}"]
    if plan.verdict_of == "eager":
        lines[0] += f" allocated by plain eager PyTorch {plan.torch_version}"
    if between := _between(plan.peak_range):
        if plan._reservation is not None:
            lines.append(
                f"  {between} in {format_share(plan.range_level)} of runs, according to published "
                f"measurements{_unsure(plan)}"
            )
        else:
            lines.append(f"  {between}{_unsure(plan)}")
    if plan._reservation is not None and plan.verdict_of == "eager":
        lines.append(f"  {_reserved(plan)}")
    if borrowed := sum(each.nbytes for each in plan.alive_at_peak if each.is_borrowed):
        lines.append(
            f"  of which {format_bytes(borrowed)} belong to NumPy arrays, mapped files, or shared memory, "
            "which PyTorch's allocator does not count"
        )
    if plan.peak_node is not None:
        lines.append(f"  during {where(plan.peak_node)}")
        if plan.peak_node.source is not None and plan.peak_node.source.text:
            lines.append(f"    {plan.peak_node.source.text.strip()}")
    return lines


def _unsure(plan: Plan) -> str:
    """Text that says which sizes of the graph are estimates."""
    if plan.estimated:
        return (
            ": the scratch memory of some kernels, and what cuDNN saves for the backward pass, are estimates"
        )
    if all(need.exact for need in plan.scratch.values()):
        return ""
    if plan._graph.cudnn_benchmark and plan._reservation is not None:
        return ": cudnn.benchmark tries algorithms whose workspace may be many times as large as the operands"
    return ": the scratch memory of some kernels is an estimate"


def _not_known(plan: Plan) -> str:
    """Ops whose scratch memory is not counted: kernels at sync points, and compiled functions."""
    places: dict[str, None] = {}
    for node in plan._nodes:
        is_measured = node.scratch_bytes is not None and plan._reservation is None  # on the CPU
        if node.at_once and not is_measured and node.index not in plan.scratch:
            name = node.name.rpartition("_")[0]
            places[f"{name} at {line_text(node.source)}" if node.source is not None else name] = None
    rest = len(places) - LINES
    return ", ".join(list(places)[:LINES]) + (f" and {rest} more" if rest > 0 else "")


def _of_others(plan: Plan) -> str:
    """Operators of other libraries, whose kernels are unknown."""
    names = {
        f"{namespace}.{name}": None
        for node in plan._nodes
        if not node.at_once
        for namespace, _, name in (node.op._schema.name.partition("::"),)
        if namespace not in PYTORCHS
    }
    rest = len(names) - LINES
    return ", ".join(list(names)[:LINES]) + (f" and {rest} more" if rest > 0 else "")


def _recomputed(plan: Plan) -> list[str]:
    again = plan.recompute
    return [f"Recomputing: {again.explain()}"] if again.nodes or again.reason else []


def _remedies(plan: Plan) -> list[str]:
    remedies = cheapest(plan.cheapest_remedies(REMEDIES), REMEDIES)
    if not remedies:
        return []
    return [
        "Cheapest remedies:",
        *(f"  {number}. {remedy}{_then(plan, remedy)}" for number, remedy in enumerate(remedies, 1)),
    ]


def _then(plan: Plan, remedy: Remedy) -> str:
    """Text that says whether a plan that does not fit would fit with the remedy."""
    if plan.fits is not False or remedy.fits is None:
        return ""
    if not remedy.fits:
        return "; does not fit even then" if not remedy.estimate else "; probably does not fit even then"
    return "; probably fits then" if remedy.estimate or remedy.at_best else "; fits then"


def of_moment(moment: Moment, when: str) -> list[str]:
    """The live set at one moment: by category, module, and line, and the largest allocations."""
    total = moment.nbytes
    lines = [f"Alive {when}, by category:"]
    lines += table(
        {category_text(key): size for key, size in moment.by_category.items()}, total, len(CATEGORIES)
    )
    lines.append("by module:")
    lines += table(sizes_by_module(moment), total, MODULES)
    if by_line := moment.by_line:
        lines.append("by line that allocated it:")
        lines += table({line_with_text(line): size for line, size in by_line.items()}, total, LINES)
    return [*lines, "largest:", *_largest(moment.alive)]


def sizes_by_module(moment: Moment) -> dict[str, int]:
    """Bytes of each module, or of all that differ only in numbers."""
    by_module: dict[str, int] = {}
    for allocation in moment.alive:
        place = full_name(allocation.module) or "(outside of modules)"
        by_module[place] = by_module.get(place, 0) + allocation.nbytes
    return folded_modules(by_module)


def _largest(alive: Sequence[Allocation]) -> list[str]:
    lines = []
    for allocation in alive[:LARGEST]:
        lines.append(f"  {format_bytes(allocation.nbytes):>10}  {allocation_text(allocation)}")
        if reason := keeper(allocation):
            lines.append(f"              {reason}")
    return lines


def keeper(allocation: Allocation) -> str:
    """What keeps an allocation alive: a backward node, a variable of the user, or "" if unknown."""
    if allocation.variables:
        return f"kept by {', '.join(allocation.variables)}"
    last = allocation.saved_for
    if last is None:
        return ""
    text = f"saved for {last.name}"
    forward = last.forward
    if forward is None:
        return text
    text += f", the backward of {forward.name}"
    if forward.module and known_path(forward) != full_name(allocation.module):
        text += f" in {known_path(forward)}"
    if forward.source is not None and forward.source != allocation.source:
        text += f" at {line_text(forward.source)}"
    return text


def verdict(plan: Plan) -> str:
    """Whether it fits, in one sentence."""
    if plan.capacity_bytes is None:
        why = f" ({plan.device_state})" if plan.device_state not in ("", "ready") else ""
        return f"Whether it fits is unknown: {plan.device} does not report its memory{why}."
    room = format_bytes(plan.capacity_bytes)
    if plan._profile is None:
        room += " free (including tensors of this process)"
    counted = _counted(plan)
    need, reservation = plan.needed_bytes, plan._reservation
    probably = needs = ""
    if plan.straddles(plan.capacity_bytes):
        probably, needs = "probably ", f", where {needed_text(plan)} would be needed"
    if plan.fits:
        if reservation is not None and reservation.retries:
            needs += (
                "; only because the caching allocator frees cached memory when it runs out, which "
                "waits for the "
                f"GPU ({reservation.retries:,} times)"
            )
        return f"It {probably}fits: {plan.device} has {room}{needs}. {_both(plan)}{counted}"
    text = f"It {probably}does not fit: {plan.device} has {room}{needs}"
    if need > plan.capacity_bytes:
        text += f", {format_bytes(need - plan.capacity_bytes)} too little"
    failure = reservation.failure if reservation is not None else None
    if failure is not None:
        text += f"; an allocation of {format_bytes(failure.nbytes)} would fail"
    return f"{text}. {_both(plan)}{counted}"


def needed_text(plan: Plan) -> str:
    """The memory that must fit, as estimate and range: ``"11.0 GiB (7.70 to 23.2 GiB)"``."""
    low, high = plan.needed_range
    text = format_bytes(plan.needed_bytes)
    return text if looks_exact(low, high) else f"{text} ({format_range(low, high)})"


def _both(plan: Plan) -> str:
    """The memory that both kinds of run need, starting with the one that the verdict is about."""
    ours, eager = format_bytes(plan.lazyviz_needed_bytes), format_bytes(plan.eager_needed_bytes)
    if plan.verdict_of == "eager":
        return f"Plain PyTorch {plan.torch_version} needs {eager}; evaluated by lazyviz, it needs {ours}."
    where = f"Evaluated by lazyviz on {plan.device}, it" if plan.borrowed else "Evaluating it"
    text = f"{where} needs {ours}; plain PyTorch {plan.torch_version} {eager}"
    if plan.fits and plan.eager_fits is False:
        text += ", which would not fit"
    return f"{text}."


def _counted(plan: Plan) -> str:
    """A note if the verdict counts only tensors, because the profile has no CUDA context."""
    if plan._profile is None or plan._profile.context_bytes or plan._profile.name == "cpu":
        return ""
    return (
        " Only tensors were counted. To include PyTorch's allocator and the CUDA context, set "
        "context_bytes in "
        "the profile."
    )


def _reserved(plan: Plan) -> str:
    reservation = plan._reservation
    assert reservation is not None
    text = f"PyTorch's caching allocator would reserve {format_bytes(reservation.reserved_bytes)}"
    if reservation.workspace_bytes:
        text += f", {format_bytes(reservation.workspace_bytes)} of it for cuBLAS's workspace"
    if reservation.foreign_bytes:
        text += f", {format_bytes(reservation.foreign_bytes)} of it for tensors that this graph does not use"
    if reservation.context_bytes:
        text += f"; the CUDA context takes about {format_bytes(reservation.context_bytes)} more"
    if plan.reserved_range is not None and (between := _between(plan.reserved_range)):
        text += f"; {between} in {format_share(plan.range_level)} of runs"
    return text + "."


def _between(ends: tuple[int, int]) -> str:
    low, high = ends
    return "" if looks_exact(low, high) else f"between {format_bytes(low)} and {format_bytes(high)}"


def allocation_text(allocation: Allocation) -> str:
    """``"activations, from gelu_14 in net.h.0.mlp (forward) at line 3"``."""
    parts = [category_text(allocation.category)]
    if allocation.name:
        parts.append(full_name(allocation.name))
    if allocation.node is not None:
        parts.append(f"from {where(allocation.node)}")
    elif allocation.module:
        parts.append(f"used in {full_name(allocation.module)}")
    return ", ".join(parts)


def table(sizes: dict[str, int], total: int, limit: int) -> list[str]:
    """Rows of size, share of ``total`` and name, largest first; beyond ``limit`` as one row."""
    rows = sorted(((size, key) for key, size in sizes.items() if size), key=lambda row: (-row[0], row[1]))
    lines = [
        f"  {format_bytes(size):>10} {format_share(size / total):>6}  {key}" for size, key in rows[:limit]
    ]
    rest = rows[limit:]
    if rest:
        size = sum(row[0] for row in rest)
        lines.append(f"  {format_bytes(size):>10} {format_share(size / total):>6}  {len(rest)} more")
    return lines
