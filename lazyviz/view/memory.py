"""The memory chart as the page and the static picture draw it: what is needed, when, and for what.

Positions are those of the plan's timeline: in a run of pieces those of its own order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..plan.split import SHOWN, SplitPlan
from ..plan.units import format_bytes, format_range
from .boxes import chain, op_name
from .scene import AllocationLike, PlanLike, Scene

CHART_POINTS = 240
LISTED = 40  # allocations listed for one moment


def verdict(plan: PlanLike) -> tuple[str, str]:
    """The verdict's hook (``fits``, ``too-big``, ``unknown``) and its words.

    What is needed is more than the tensors' peak where a CUDA allocator and context are counted
    (:func:`needed_for`).
    """
    need = format_bytes(plan.needed_bytes)
    cut = f" in {plan.split.pieces:,} pieces" if plan.split.pieces > 1 else ""
    if plan.capacity_bytes is None or plan.fits is None:
        return "unknown", f"Needs {need}{cut} · memory of {plan.device} unknown"
    probably = plan.straddles(plan.capacity_bytes)
    if probably:
        need += f" ({format_range(*plan.needed_range)})"
    words = f"needs {need} of {format_bytes(plan.capacity_bytes)} on {plan.device}"
    if plan.fits:
        return "fits", f"{'Probably fits' if probably else 'Fits'}{cut}: {words}"
    over = plan.needed_bytes - plan.capacity_bytes
    if probably:
        return "too-big", f"Probably too big{cut}: {words}"
    if over <= 0:  # enough memory, but not in one piece
        return "too-big", f"Too big{cut}, in fragments: {words}" if cut else f"Too big in fragments: {words}"
    return "too-big", f"Too big by {format_bytes(over)}{cut}: {words}"


def needed_for(plan: PlanLike) -> str:
    """What the needed bytes are beside the tensors' peak; nothing where they are that peak."""
    if plan.reserved_bytes is None:
        return ""
    parts = f"{format_bytes(plan.reserved_bytes)} held by PyTorch's allocator"
    context = plan.needed_bytes - plan.reserved_bytes
    if context:
        parts += f", {format_bytes(context)} for the CUDA context (an estimate)"
    return parts


def _pieces(split: SplitPlan) -> list[list[Any]]:
    """Where pieces begin in the chart, and what they are called; "" where whole nodes go on."""

    def name(piece: int) -> str:
        alike = split.pieces - SHOWN
        if piece < SHOWN or alike <= 0:
            return f"piece {piece}" if piece else ""
        return f"piece {piece}, and {alike:,} more like it"

    return [[start, name(piece)] for start, piece in split.stretches]


def memory_json(scene: Scene) -> dict[str, Any]:
    """The memory chart: for each category its bytes at up to 240 positions, each its range's peak."""
    plan = scene.plan
    timeline = plan.timeline
    count = len(timeline)
    picks = []
    buckets = min(count, CHART_POINTS)
    for bucket in range(buckets):
        span = range(bucket * count // buckets, (bucket + 1) * count // buckets)
        picks.append(max(span, key=lambda i: timeline[i][1]))
    categories = [
        {
            "name": str(name),
            "bytes": [series[i] for i in picks],
            "peak": (size := plan.by_category.get(name, 0)),
            "peakText": format_bytes(size),
        }
        for name, series in plan.category_timeline.items()
        if any(series[i] for i in picks)
    ]
    hook, words = verdict(plan)
    alive = alive_json(scene, plan.alive_at_peak)
    peak = plan.peak_node
    phases: list[list[Any]] = []  # [phase, first position]
    for position, (index, _) in enumerate(timeline):
        phase = scene.graph.nodes[index].phase
        if not phases or phases[-1][0] != phase:
            phases.append([phase, position])
    return {
        "count": count,
        "at": picks,
        "categories": categories,
        "peak": plan.peak_bytes,
        "peakText": format_bytes(plan.peak_bytes),
        "peakAt": plan.peak_position if peak is not None else None,
        "peakName": (f"{peak.module or peak.phase}: {op_name(peak)}" if peak is not None else ""),
        "eager": plan.eager_peak_bytes,
        "eagerText": format_bytes(plan.eager_peak_bytes),
        "capacity": plan.capacity_bytes,
        "capacityText": format_bytes(plan.capacity_bytes) if plan.capacity_bytes is not None else "",
        "device": plan.device,
        "verdict": hook,
        "verdictText": words,
        "verdictTitle": "\n".join(filter(None, (words, needed_for(plan)))),
        "alive": alive,
        "aliveCount": len(plan.alive_at_peak),
        "phases": phases if len(phases) <= 64 else [],
        "pieces": _pieces(plan.split),
    }


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


def _label(allocation: AllocationLike) -> str:
    name: str = getattr(allocation, "name", "")
    if name:
        return name
    parts = [allocation.module] if allocation.module else []
    if allocation.node is not None:
        parts.append(op_name(allocation.node))
    elif allocation.source is not None:
        parts.append(f"line {allocation.source.line}")
    return " · ".join(parts) or str(allocation.category)
