"""What a picture is made of: the boxes, edges and words of each group, and the memory chart.

The static picture, the text form and the widget draw the same scene.  A group is described
by itself (:meth:`Scene.group`), so that the widget can be sent one when it is opened.
Everything is JSON: strings are data from the user's program and are escaped by whoever
draws them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..graph.ir import Graph, Node, SourceLine, Storage, Value
from ..plan.alive import Moment
from ..plan.split import SHOWN, SplitPlan
from ..plan.units import format_bytes, format_range
from .boxes import Box, Hierarchy, chain, op_name
from .flow import hidden_views
from .hierarchy import build_hierarchy
from .layout import Layers, layers_of

# Width and height of a closed box, in pixels.
SIZES: dict[str, tuple[float, float]] = {
    "op": (184.0, 42.0),
    "module": (200.0, 46.0),
    "step": (200.0, 46.0),
    "input": (164.0, 40.0),
    "output": (164.0, 40.0),
    "sync": (212.0, 42.0),
}
LANE_WIDEST = 2  # boxes side by side in a lane
CHART_POINTS = 240
LISTED = 40  # allocations listed for the peak
PHASE_TITLES = {"forward": "Forward", "backward": "Backward", "optimizer": "Optimizer", "other": "Other"}


class AllocationLike(Protocol):
    """One storage alive at the peak; ``nbytes`` in bytes."""

    @property
    def nbytes(self) -> int: ...
    @property
    def category(self) -> str: ...
    @property
    def node(self) -> Node | None: ...
    @property
    def module(self) -> str: ...
    @property
    def source(self) -> SourceLine | None: ...


class PlanLike(Protocol):
    """What the picture needs of a plan.  Sizes are bytes."""

    @property
    def peak_bytes(self) -> int: ...
    @property
    def peak_node(self) -> Node | None: ...
    @property
    def peak_position(self) -> int: ...
    @property
    def eager_peak_bytes(self) -> int: ...
    @property
    def reserved_bytes(self) -> int | None: ...
    @property
    def needed_bytes(self) -> int: ...
    @property
    def needed_range(self) -> tuple[int, int]: ...
    def straddles(self, limit: int) -> bool: ...
    @property
    def timeline(self) -> Sequence[tuple[int, int]]: ...
    @property
    def category_timeline(self) -> Mapping[Any, Sequence[int]]: ...
    @property
    def alive_at_peak(self) -> Sequence[AllocationLike]: ...
    @property
    def by_category(self) -> Mapping[Any, int]: ...
    @property
    def device(self) -> str: ...
    @property
    def capacity_bytes(self) -> int | None: ...
    @property
    def fits(self) -> bool | None: ...
    @property
    def batch_size(self) -> int | None: ...
    @property
    def split(self) -> SplitPlan: ...
    @property
    def max_batch_size(self) -> int | None: ...
    def at(self, position: int) -> Moment: ...
    def held(self, what: Storage) -> Sequence[range]: ...
    def replan(self, batch_size: int | None = None, split: int | str | None = None) -> PlanLike: ...


def shape_text(shape: Sequence[object]) -> str:
    """``(8, 128)`` -> ``"8×128"``; ``()`` -> ``"scalar"``."""
    return "×".join(map(str, shape)) if len(shape) else "scalar"


def value_text(value: Value) -> str:
    """Shape and size of one tensor: ``"8×128 · 4.00 KiB"``."""
    return f"{shape_text(value.symbolic_shape)} · {format_bytes(value.nbytes)}"


def values_text(values: Sequence[Value]) -> str:
    """Shape and size of what flows along an edge."""
    if not values:
        return ""
    if len(values) == 1:
        return value_text(values[0])
    sizes = {value.storage.id: value.storage.nbytes for value in values}
    return f"{len(values)} tensors · {format_bytes(sum(sizes.values()))}"


def dtype_text(value: Value) -> str:
    """``"float32"``"""
    return str(value.dtype).removeprefix("torch.")


def plural(count: int, noun: str) -> str:
    """``plural(2, "op")`` -> ``"2 ops"``, thousands separated."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


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


class Scene:
    """The picture of one graph under one plan."""

    def __init__(self, graph: Graph, plan: PlanLike, *, views: bool = False) -> None:
        self.graph = graph
        self.plan = plan
        self.hierarchy: Hierarchy = build_hierarchy(graph, views=views)
        self._layers: dict[str, Layers] = {}

    # --- groups -------------------------------------------------------------------

    def layers(self, box: Box) -> Layers:
        """Layers of the children of ``box``, its edges first in the order of ``box.edges``."""
        known = self._layers.get(box.id)
        if known is None:
            at = {child: position for position, child in enumerate(box.children)}
            known = self._layers[box.id] = layers_of(
                len(box.children),
                [(at[start], at[end]) for start, end in box.edges],
                [(at[start], at[end]) for start, end in box.order],
                widest=LANE_WIDEST if box.kind == "lane" else 5,
                close=[at[child] for child in box.children if child.kind == "input"],
            )
        return known

    def group(self, box: Box) -> dict[str, Any]:
        """One group as JSON: its boxes, layers and edges."""
        lanes = bool(box.children) and box.children[0].kind == "lane"
        result: dict[str, Any] = {"id": box.id, "boxes": [self.box(child) for child in box.children]}
        if lanes:
            return {**result, "row": True}
        layers = self.layers(box)
        edges = [
            [path, self.edge_text(values)]
            for path, values in zip(layers.paths, box.edges.values(), strict=True)
        ]
        return {**result, "layers": layers.layers, "edges": edges, "flip": box.phase == "backward"}

    def edge_text(self, values: Sequence[Value]) -> str:
        return values_text(values)

    def box(self, box: Box) -> dict[str, Any]:
        """One box as JSON; flags that are off are left out."""
        result: dict[str, Any] = {
            "id": box.id,
            "kind": box.kind,
            "label": PHASE_TITLES.get(box.label, box.label) if box.kind == "lane" else box.label,
            "sub": self.subtitle(box),
            "phase": box.phase,
        }
        if box.node is not None:
            result["op"] = str(box.node.op)
        if box.kind == "input":
            result["role"] = box.key
        if box.is_group:
            result["group"] = len(box.children)
        if box.repeats > 1:
            result["repeats"] = box.repeats
        if box.entry:
            result["entry"] = True
        if box.exit:
            result["exit"] = True
        return result

    def subtitle(self, box: Box) -> str:
        """A box's second line: shape and size of a tensor, number of ops and bytes of a group."""
        if box.node is not None:
            outputs = box.node.outputs
            if outputs:
                return values_text(outputs)
            return "writes in place" if box.node.writes else "no output"
        if box.values:
            return values_text(box.values)
        if box.sync is not None:
            source = box.sync.source
            where = f"line {source.line} · " if source is not None else ""
            return f"{where}ran {plural(box.sync.ops, 'op')}"
        if box.kind == "lane":
            return self._lane_subtitle(box)
        drawn = [child for child in box.children if child.kind != "input"]
        if len(drawn) == 1 and drawn[0].node is not None:
            return f"{op_name(drawn[0].node)} · {format_bytes(box.nbytes)}"
        return f"{plural(box.ops, 'op')} · {format_bytes(box.nbytes)}"

    def _lane_subtitle(self, lane: Box) -> str:
        text = plural(lane.ops, "op")
        parent = lane.parent
        saved: dict[int, Storage] = {}
        if parent is not None and lane.phase == "forward":
            for (start, end), values in parent.edges.items():
                if start is lane and end.phase == "backward":
                    saved.update({value.storage.id: value.storage for value in values})
        if saved:
            text += f" · saves {format_bytes(sum(storage.nbytes for storage in saved.values()))} for backward"
        return text

    def opened(self) -> list[Box]:
        """Groups that are open from the start, outermost first: lanes and what holds them."""
        result = [self.hierarchy.root]
        for box in result:  # grows while it is read
            result += [c for c in box.children if c.kind == "lane" or c.id in self.hierarchy.opened]
        return result

    # --- memory -------------------------------------------------------------------

    def memory(self) -> dict[str, Any]:
        """The memory chart: for each category its bytes at up to 240 positions, each its range's peak.

        Positions are the timeline's: in a run of pieces those of its own order.
        """
        plan = self.plan
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
        alive = self.alive(plan.alive_at_peak)
        peak = plan.peak_node
        phases: list[list[Any]] = []  # [phase, first position]
        for position, (index, _) in enumerate(timeline):
            phase = self.graph.nodes[index].phase
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

    def alive(self, allocations: Sequence[AllocationLike]) -> list[dict[str, Any]]:
        """The first of ``allocations``, with the boxes that made them."""
        rows = []
        for allocation in allocations[:LISTED]:
            node = allocation.node
            box = self.hierarchy.box_of[node.index] if node is not None else None
            if node is None:
                storage = getattr(allocation, "storage", None)
                box = self._box_of_storage(storage)
            rows.append(
                {
                    "bytes": format_bytes(allocation.nbytes),
                    "category": str(allocation.category),
                    "label": self._allocation_label(allocation),
                    "chain": chain(box) if box is not None else [],
                }
            )
        return rows

    def _box_of_storage(self, storage: Storage | None) -> Box | None:
        if storage is None:
            return None
        if not hasattr(self, "_by_storage"):
            self._by_storage: dict[int, Box] = {}
            for box in self.hierarchy.boxes.values():
                for value in box.values:
                    self._by_storage.setdefault(value.storage.id, box)
        return self._by_storage.get(storage.id)

    def _allocation_label(self, allocation: AllocationLike) -> str:
        name: str = getattr(allocation, "name", "")
        if name:
            return name
        parts = [allocation.module] if allocation.module else []
        if allocation.node is not None:
            parts.append(op_name(allocation.node))
        elif allocation.source is not None:
            parts.append(f"line {allocation.source.line}")
        return " · ".join(parts) or str(allocation.category)

    def summary(self) -> str:
        """``"3,803 ops recorded (920 of them views), 3,803 pending, no sync point"``"""
        graph = self.graph
        pending = sum(node.state != "done" for node in graph.nodes)
        syncs = plural(len(graph.sync_points), "sync point") if graph.sync_points else "no sync point"
        views = sum(hidden_views(graph))  # the lanes' numbers are without them
        among = f" ({views:,} of them {'a view' if views == 1 else 'views'})" if views else ""
        return f"{plural(len(graph.nodes), 'op')} recorded{among}, {pending:,} pending, {syncs}"
