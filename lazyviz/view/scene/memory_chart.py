"""Memory chart: the memory of the run over time, by category.

Positions are those of the plan's timeline; for a split run, in the order of that run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ...graph.ir import Node
from ...graph.modules import full_name, known_path
from ...plan.batch.split_plan import SHOWN, SplitPlan
from ...plan.node_formatting import category_text, line_text
from ...plan.units import format_bytes, format_range, format_share, looks_exact
from .boxes import LANE_TITLES, chain, op_name
from .plan_protocol import AllocationLike, PlanLike
from .scene import Scene

CHART_POINTS = 240
MOST_PHASES = CHART_POINTS  # sections of one phase that are distinguished on the axis
LISTED = 40  # allocations listed for one moment


def verdict(plan: PlanLike) -> tuple[str, str]:
    """The verdict: its kind (``fits``, ``too-big``, ``unknown``) and its text.

    The needed bytes exceed the tensors' peak if a CUDA allocator and context are counted
    (:func:`needed_for`).
    """
    need = format_bytes(plan.needed_bytes)
    cut = f" in {plan.split.pieces:,} pieces" if plan.split.pieces > 1 else ""
    if plan.capacity_bytes is None or plan.fits is None:
        return "unknown", f"Needs {need}{cut} · memory of {plan.device} unknown"
    probably = plan.straddles(plan.capacity_bytes)
    if probably and not looks_exact(*plan.needed_range):
        need += f" ({format_range(*plan.needed_range)})"
    words = f"needs {need} of {format_bytes(plan.capacity_bytes)} on {plan.device}"
    if plan.fits:
        return "fits", f"{'Probably fits' if probably else 'Fits'}{cut}: {words}"
    over = plan.needed_bytes - plan.capacity_bytes
    if probably:
        return "too-big", f"Probably too big{cut}: {words}"
    if over <= 0:  # enough memory, but fragmented
        return "too-big", f"Too big{cut}, in fragments: {words}" if cut else f"Too big in fragments: {words}"
    return "too-big", f"Too big by {format_bytes(over)}{cut}: {words}"


def other_run(plan: PlanLike) -> str:
    """The peak of the kind of run that the plan does not describe."""
    if plan.verdict_of == "eager":
        return f"evaluated by lazyviz: {format_bytes(plan.lazyviz_peak_bytes)}"
    return f"plain eager PyTorch: {format_bytes(plan.eager_peak_bytes)}"


TIGHT = 0.85  # share of the capacity above which a fit is tight


def short_verdict(plan: PlanLike) -> str:
    """The verdict in a few words: ``"Fits · 340 MiB of 12.4 GiB"``."""
    need, capacity = format_bytes(plan.needed_bytes), plan.capacity_bytes
    if capacity is None or plan.fits is None:
        return f"Needs {need}"
    word = "Tight" if plan.needed_bytes > TIGHT * capacity else "Fits"
    if plan.straddles(capacity):
        word = "Probably fits" if plan.fits else "Probably too big"
    elif not plan.fits:
        word = "Too big"
    cut = f" in {plan.split.pieces:,} pieces" if plan.split.pieces > 1 else ""
    elsewhere = f" on {plan.device}" if str(plan.device) != str(plan.recorded_device) else ""
    return f"{word}{cut} · {need} of {format_bytes(capacity)}{elsewhere}"


def needed_for(plan: PlanLike) -> str:
    """Text about needed bytes beyond the peak of the tensors; "" if there are none."""
    if plan.reserved_bytes is None:
        return ""
    parts = f"{format_bytes(plan.reserved_bytes)} held by PyTorch's allocator"
    context = plan.needed_bytes - plan.reserved_bytes
    if context:
        parts += f", {format_bytes(context)} for the CUDA context (an estimate)"
    return parts


def _borrowed(plan: PlanLike) -> str:
    """What is unknown in a plan for a device other than that of the tensors."""
    if not plan.borrowed:
        return ""
    return f"Recorded on {plan.recorded_device}; {plan.device} may choose kernels that save other tensors."


def _pieces(split: SplitPlan) -> list[list[Any]]:
    """The positions at which pieces begin in the chart, with their names; "" where whole nodes continue."""

    def name(piece: int) -> str:
        alike = split.pieces - SHOWN
        if piece < SHOWN or alike <= 0:
            return f"piece {piece}" if piece else ""
        return f"piece {piece}, and {alike:,} more like it"

    return [[start, name(piece)] for start, piece in split.ranges]


def memory_json(scene: Scene, measured: Sequence[tuple[int, int]] = ()) -> dict[str, Any]:
    """The memory chart: the points of the whole run, the peak, the storages that are alive there, and the
    verdict.

    ``measured`` has the bytes that runs held, as ``(node_index, bytes)`` in the order in which the nodes ran.
    """
    plan = scene.plan
    count = len(plan.timeline)
    categories = [
        {
            "name": str(name),
            "label": category_text(name),
            "peak": (size := plan.by_category.get(name, 0)),
            "peakText": format_bytes(size),
            "most": (most := max(series)),
            "mostText": format_bytes(most),
        }
        for name, series in plan.category_timeline.items()
        if any(series)
    ]
    hook, words = verdict(plan)
    alive = alive_json(scene, plan.alive_at_peak)
    peak = plan.peak_node
    phases = stretches(scene)
    phases = phases if len(phases) <= MOST_PHASES else []
    needed = plan.needed_bytes if plan.needed_bytes > plan.peak_bytes else None
    held = align(plan, measured)
    return {
        "count": count,
        "points": points(scene, 0, count, held),
        "categories": categories,
        "peak": plan.peak_bytes,
        "peakText": format_bytes(plan.peak_bytes),
        "peakAt": plan.peak_position if peak is not None else None,
        "peakName": scene.hierarchy.title_of(peak) if peak is not None else "",
        "peakChain": _way_to(scene, peak).split() if peak is not None else [],
        "eager": plan.eager_peak_bytes,
        "eagerText": format_bytes(plan.eager_peak_bytes),
        "otherRun": other_run(plan),
        "needed": needed,
        "neededText": format_bytes(needed) if needed is not None else "",
        "capacity": plan.capacity_bytes,
        "capacityText": format_bytes(plan.capacity_bytes) if plan.capacity_bytes is not None else "",
        "device": plan.device,
        "recordedOn": str(plan.recorded_device),
        "verdict": hook,
        "verdictText": words,
        "verdictShort": short_verdict(plan),
        "verdictTitle": "\n".join(filter(None, (words, needed_for(plan), _borrowed(plan)))),
        "alive": alive,
        "aliveCount": len(plan.alive_at_peak),
        "phases": phases,
        "titles": {phase: LANE_TITLES[phase] for phase, _ in phases},
        "pieces": _pieces(plan.split),
        "measured": comparison(plan, measured, held, in_parts=bool(scene.graph.sync_points)),
    }


def stretches(scene: Scene) -> list[tuple[str, int]]:
    """The phases of the run, as the lanes show them, each with the position of its first op."""
    nodes, box_of = scene.graph.nodes, scene.hierarchy.box_of
    result: list[tuple[str, int]] = []
    for position, (index, _) in enumerate(scene.plan.timeline):
        box = box_of[index]
        if box is None and result:
            continue  # a hidden view is in the same phase as the ops around it
        phase = box.phase if box is not None else nodes[index].phase
        if not result or result[-1][0] != phase:
            result.append((phase, position))
    return result


def points(scene: Scene, start: int, stop: int, held: Sequence[int | None] | None = None) -> dict[str, Any]:
    """Up to 240 points of the chart from position ``start`` to before ``stop``, each with its range's peak.

    ``bytes`` has a list for each category that :func:`memory_json` names, ``ops`` has what runs at each
    point.
    """
    plan = scene.plan
    timeline = plan.timeline
    parts = spans(start, stop)
    picks = [max(span, key=lambda i: timeline[i][1]) for span in parts]
    nodes = [scene.graph.nodes[timeline[i][0]] for i in picks]
    title_of = scene.hierarchy.title_of
    result: dict[str, Any] = {
        "range": [start, stop],
        "at": picks,
        "bytes": [[series[i] for i in picks] for series in plan.category_timeline.values() if any(series)],
        "ops": [
            f"{title_of(node)} · {line_text(node.source)}" if node.source is not None else title_of(node)
            for node in nodes
        ],
        "boxes": [_way_to(scene, node) for node in nodes],
    }
    if held is not None:
        result["held"] = [
            max((size for i in span if (size := held[i]) is not None), default=None) for span in parts
        ]
    return result


def spans(start: int, stop: int) -> list[range]:
    """The positions that each point represents."""
    count = stop - start
    buckets = min(count, CHART_POINTS)
    return [
        range(start + bucket * count // buckets, start + (bucket + 1) * count // buckets)
        for bucket in range(buckets)
    ]


def _way_to(scene: Scene, node: Node) -> str:
    """Ids from the outermost group to the box of ``node``; for a hidden view, to that of the next
    drawn op.
    """
    following = scene.hierarchy.box_of[node.index : node.index + 16]
    box = next((box for box in following if box is not None), None)
    return " ".join(chain(box)) if box is not None else ""


def range_json(
    scene: Scene, start: int, stop: int, measured: Sequence[tuple[int, int]] = ()
) -> dict[str, Any]:
    """The points of a part of the run, and its allocations: the largest ones, with their shares."""
    plan = scene.plan
    made = plan.made(start, stop)
    total = sum(each.nbytes for each in made)
    rows = alive_json(scene, made)
    for row, allocation in zip(rows, made):
        row["share"] = allocation.nbytes / max(total, 1)
    top = max(range(start, stop), key=lambda i: plan.timeline[i][1])
    return {
        "points": points(scene, start, stop, align(plan, measured)),
        "made": rows,
        "madeCount": len(made),
        "madeText": format_bytes(total),
        "peakText": format_bytes(plan.timeline[top][1]),
        "peakName": scene.hierarchy.title_of(scene.graph.nodes[plan.timeline[top][0]]),
    }


def align(plan: PlanLike, measured: Sequence[tuple[int, int]]) -> list[int | None] | None:
    """The bytes measured at each position of the plan's timeline; ``None`` if they belong to another run.

    A node that runs in several pieces has several positions; of repeated runs, the last one counts.
    """
    if not measured or plan.batch_size != plan.recorded_batch_size:
        return None
    places: dict[int, list[int]] = {}
    for position, (index, _) in enumerate(plan.timeline):
        places.setdefault(index, []).append(position)
    times = Counter(index for index, _ in measured)
    otherwise = sum(len(places.get(index, ())) != count for index, count in times.items())
    if otherwise > len(times) // 10:  # another split; a few nodes may have run again after an interrupt
        return None
    seen: dict[int, int] = {}
    result: list[int | None] = [None] * len(plan.timeline)
    for index, size in measured:
        own = places.get(index)
        if own is not None:
            turn = seen[index] = seen.get(index, -1) + 1
            result[own[min(turn, len(own) - 1)]] = size
    return result


def comparison(
    plan: PlanLike,
    measured: Sequence[tuple[int, int]],
    held: Sequence[int | None] | None,
    *,
    in_parts: bool = False,
) -> str:
    """Text that compares the measured with the projected peak; "" if nothing was measured.

    ``in_parts``: it ran in several parts, because of sync points.
    """
    if not measured:
        return ""
    if held is None and plan.batch_size == plan.recorded_batch_size:
        return "measured in other pieces: choose those that ran to see it here"
    if held is None:
        return f"measured with {plan.recorded_batch_size:,} samples: choose that batch to see it here"
    known = [size for size in held if size is not None]
    if not known:
        return ""
    peak = max(known)
    if len(known) < len(held):
        return f"measured up to {format_bytes(peak)} so far, in {len(known):,} of {len(held):,} ops"
    # On the CPU, the scratch memory of kernels cannot be measured.
    alone = str(plan.recorded_device) == "cpu" and plan.tensor_peak_bytes < plan.peak_bytes
    projected = plan.tensor_peak_bytes if alone else plan.peak_bytes
    more = peak - projected
    words = "as projected"
    if abs(more) > projected / 2000:  # a few bytes do not count as a difference
        side = "above" if more > 0 else "below"
        share = abs(more) / max(projected, 1)
        words = f"{format_bytes(abs(more))} ({format_share(share)}) {side} the projection"
    if alone:
        words += f" of {format_bytes(projected)} for tensors; kernels' own memory is not measured on the CPU"
    if in_parts and more < 0:
        words += " (it ran in parts, each of which counts what it works on)"
    return f"measured peak {format_bytes(peak)}, {words}"


def alive_json(scene: Scene, allocations: Sequence[AllocationLike]) -> list[dict[str, Any]]:
    """The first of ``allocations``, with the boxes that made them."""
    rows = []
    for allocation in allocations[:LISTED]:
        node = allocation.node
        box = scene.hierarchy.box_of[node.index] if node is not None else None
        if node is None:
            storage = getattr(allocation, "storage", None)
            box = scene.box_of_storage(storage)
        rows.append(
            {
                "bytes": format_bytes(allocation.nbytes),
                "category": str(allocation.category),
                "label": _label(allocation),
                "chain": chain(box) if box is not None else [],
            }
        )
    return rows


def alive_name(allocation: AllocationLike) -> str:
    """The name of a weight, or the full path of the module that created the tensor; "" outside of modules."""
    if name := getattr(allocation, "name", ""):
        return full_name(name)
    node = allocation.node
    return known_path(node) if node is not None else full_name(allocation.module)


def _label(allocation: AllocationLike) -> str:
    if getattr(allocation, "name", ""):
        return alive_name(allocation)
    place = alive_name(allocation)
    parts = [place] if place else []
    if allocation.node is not None:
        parts.append(op_name(allocation.node))
    elif allocation.source is not None:
        parts.append(line_text(allocation.source))
    return " · ".join(parts) or category_text(allocation.category)
