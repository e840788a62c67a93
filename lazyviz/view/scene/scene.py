"""Scene: the boxes, edges, and labels of each group, and the memory chart.

The static picture, the text form, and the widget draw the same scene.  A group has a separate description
(:meth:`Scene.group`), so that the widget can request it when it is opened.  Everything is JSON: strings are
data from the user's program and are escaped by the code that draws them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Any

from ...graph.ir import Graph, Node, SourceLine, Storage, Value, places
from ...plan.units import format_bytes
from ..layout.layered_layout import Layers, layers_of
from ..layout.text_width import width as text_width
from . import box_contents
from .box_coloring import Facts
from .box_numbers import Numbers
from .boxes import LANE_TITLES, Box, Hierarchy, module_facts, op_name
from .dataflow import hidden_views
from .hierarchy import build_hierarchy
from .plan_protocol import PlanLike
from .planned_sizes import box_bytes, growing_storages, planned
from .rejected_op_box import error_json, unreached_words
from .run_states import States

LANE_WIDEST = 2  # boxes side by side in a lane
MOST_VALUES = 8  # tensors of an edge whose ends in open groups are known to the page
STACKED = 6  # maximum number of the optimizer's boxes that are stacked to keep its lane narrow
BARRED = ("module", "step", "op")  # kinds of boxes with a bar


def shape_text(shape: Sequence[object]) -> str:
    """``(8, 128)`` -> ``"8×128"``; ``()`` -> ``"scalar"``."""
    return "×".join(map(str, shape)) if len(shape) else "scalar"


def shape_of(value: Value, graph: Graph) -> tuple[int | str, ...]:
    """The shape that a picture of ``graph`` shows: symbolic, as in ``("B", 128)``, only if the batch of this
    graph is named.
    """
    node, nodes = value.node, graph.nodes
    own = node is not None and node.index < len(nodes) and nodes[node.index] is node
    return value.symbolic_shape if own or graph.batch else value.meta.shape


def value_text(value: Value, graph: Graph) -> str:
    """Shape and size of one tensor: ``"8×128 · 4.00 KiB"``."""
    return f"{shape_text(shape_of(value, graph))} · {format_bytes(value.nbytes)}"


def values_text(
    values: Sequence[Value], graph: Graph, size: Callable[[int, Value], int] = lambda nbytes, _: nbytes
) -> str:
    """Shape and size of the data along an edge; ``size`` converts the recorded bytes of a value."""
    if not values:
        return ""
    if len(values) == 1:
        value = values[0]
        return f"{shape_text(shape_of(value, graph))} · {format_bytes(size(value.nbytes, value))}"
    sizes = {value.storage.id: size(value.storage.nbytes, value) for value in values}
    return f"{len(values)} tensors · {format_bytes(sum(sizes.values()))}"


def edge_width(values: Sequence[Value]) -> float:
    """The width of a line, in pixels, for the bytes that flow along it."""
    sizes = {value.storage.id: value.nbytes for value in values}
    return round(min(1 + 0.5 * math.log2(1 + sum(sizes.values()) / 2**20), 5.0), 1)


def dtype_text(value: Value) -> str:
    """``"float32"``"""
    return str(value.dtype).removeprefix("torch.")


def plural(count: int, noun: str) -> str:
    """``plural(2, "op")`` -> ``"2 ops"``, thousands separated."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _widest(box: Box, opened: bool) -> int:
    """The maximum number of boxes side by side; ``opened``: the group is open initially, like a model."""
    if box.kind != "lane":
        return LANE_WIDEST if opened else 5
    return 1 if box.phase == "optimizer" and len(box.children) <= STACKED else LANE_WIDEST


class Scene:
    """The picture of one graph under one plan; ``by`` is the number that boxes show at first."""

    def __init__(
        self,
        graph: Graph,
        plan: PlanLike,
        *,
        views: bool = False,
        drawn: Hierarchy | None = None,
        by: str = "",
    ) -> None:
        self.graph = graph
        self.plan = plan
        self.by = by
        # Boxes are the same under every plan: the earlier ones in `drawn` are reused as long as they are
        # valid.
        self.hierarchy: Hierarchy = build_hierarchy(graph, views=views, drawn=drawn)
        self._views = 0
        self._layers: dict[str, Layers] = {}
        self._facts: Facts | None = None
        self._places: tuple[PlanLike, dict[int, list[int]]] | None = None
        self._held: tuple[PlanLike, dict[Box, dict[str, int]]] | None = None
        self._planned: tuple[PlanLike, tuple[set[int], dict[Box, int]]] | None = None
        self._number_of: dict[int, int] = {}
        self._cards: dict[Box, dict[str, Any]] = {}
        self._asides: Mapping[str, str] = {}
        self.states = States(self.hierarchy)
        self.numbers = Numbers(self.hierarchy)

    def places(self) -> Mapping[int, Sequence[int]]:
        """The positions of every node in the plan's timeline; in a split run, there can be several."""
        if self._places is None or self._places[0] is not self.plan:
            places: dict[int, list[int]] = {}
            for position, (index, _) in enumerate(self.plan.timeline):
                places.setdefault(index, []).append(position)
            self._places = self.plan, places
        return self._places[1]

    # --- groups -------------------------------------------------------------------

    def layers(self, box: Box) -> Layers:
        """The layers of the children of ``box``; the first edges are ``box.edges``, in their order."""
        known = self._layers.get(box.id)
        if known is None:
            at = {child: position for position, child in enumerate(box.children)}
            made = {end for _, end in box.edges}.union(
                box.enters
            )  # of other boxes, in the group and out of it
            known = self._layers[box.id] = layers_of(
                len(box.children),
                [(at[start], at[end]) for start, end in box.edges],
                [(at[start], at[end]) for start, end in box.order],
                widest=_widest(box, box.id in self.hierarchy.opened),
                close=[at[child] for child in box.children if child.kind == "input" or child not in made],
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
            [
                path,
                self.edge_text(values),
                edge_width(values),
                self._numbers(value.id for value in values[:MOST_VALUES]),
            ]
            for path, values in zip(layers.paths, box.edges.values(), strict=True)
        ]
        for name, ends in (("reads", box.enters), ("gives", box.leaves)):
            if ends:
                result[name] = [[child.position, self._numbers(ids)] for child, ids in ends.items()]
        if layers.rails:
            result["rails"] = layers.rails
        return {**result, "layers": layers.layers, "edges": edges, "flip": box.phase == "backward"}

    def _numbers(self, ids: Iterable[int]) -> list[int]:
        """Small numbers that replace these value ids, the same in every group of this scene."""
        return [self._number_of.setdefault(id, len(self._number_of)) for id in ids]

    def edge_text(self, values: Sequence[Value]) -> str:
        return values_text(values, self.graph, self.planned)

    def box(self, box: Box) -> dict[str, Any]:
        """One box as JSON; false flags are omitted."""
        result: dict[str, Any] = {
            "id": box.id,
            "kind": box.kind,
            "label": LANE_TITLES.get(box.label, box.label) if box.kind == "lane" else box.label,
            "sub": self.subtitle(box),
            "phase": box.phase,
        }
        if box.node is not None:
            result["op"] = str(box.node.op)
        if box.kind == "input":
            result["role"] = box.key
        if box.is_group:
            result["group"] = len(box.children)
        if box.is_group and box.syncs:
            result["syncs"] = box.syncs
        if box.calls > 1:
            result["calls"] = box.calls
        elif box.repeats > 1:
            result["repeats"] = box.repeats
        if box.name:
            facts = module_facts(box)
            result["name"] = box.name
            result["cls"] = facts.kind if facts is not None else ""
        if box.entry:
            result["entry"] = True
        if box.exit:
            result["exit"] = True
        if box.kind == "error":
            error = error_json(box, self.subtitle(box))
            error["given"] = [[*self._numbers([id]), parts] for id, parts in error["given"]]
            return result | error
        if box.kind == "sync":
            return result | self.card(box)
        return result | self.card(box) | self.coloring(box) | self.progress(box)

    def coloring(self, box: Box) -> dict[str, Any]:
        """The values that ``box`` can be colored by, such as ``bytes`` (allocated by its ops) and ``held``
        (alive at the peak).
        """
        if self._facts is None:
            self._facts = Facts(self.hierarchy)
        held_by = self.held()
        result: dict[str, Any] = {"bytes": self.made(box)}
        if held := held_by.get(box):
            result["held"] = sum(held.values())
            if box.kind in BARRED:
                result["by"] = [[name, size] for name, size in held.items() if size]
        if dtype := self._facts.dtype(box):
            result["dtype"] = dtype
        if module := self._facts.module(box):
            result["module"] = module
        if numbers := self.numbers.of(box, self.plan):
            result["numbers"] = numbers
        return result

    def held(self) -> dict[Box, dict[str, int]]:
        """For each box the bytes that are alive at the peak, by category."""
        if self._facts is None:
            self._facts = Facts(self.hierarchy)
        if self._held is None or self._held[0] is not self.plan:
            self._held = self.plan, self._facts.held(self.plan.alive_at_peak)
        return self._held[1]

    def made(self, box: Box) -> int:
        """Bytes that the ops of ``box`` allocate in the plan's batch; for an outside tensor, its size."""
        growing, sizes = self._sizes()
        if not growing:
            return box.nbytes or sum(value.nbytes for value in box.values)
        return sizes.get(box, 0)

    def planned(self, nbytes: int, value: Value) -> int:
        """``nbytes`` of ``value``, or of its storage, converted to the plan's batch."""
        return planned(nbytes, self.plan) if value.storage.id in self._sizes()[0] else nbytes

    def _sizes(self) -> tuple[set[int], dict[Box, int]]:
        """Ids of storages whose planned size differs from the recorded one, and planned bytes of boxes."""
        if self._planned is None or self._planned[0] is not self.plan:
            growing = growing_storages(self.graph, self.plan)
            sizes = box_bytes(self.hierarchy, self.plan, growing) if growing else {}
            self._planned = self.plan, (growing, sizes)
        return self._planned[1]

    def alive_at(self, position: int) -> dict[Box, dict[str, int]]:
        """Like :meth:`held`, at ``position`` of the plan's timeline."""
        if self._facts is None:
            self._facts = Facts(self.hierarchy)
        return self._facts.held(self.plan.at(position).alive)

    def card(self, box: Box) -> dict[str, Any]:
        """The content of a closed box besides its name, see :mod:`.box_contents`; the same under
        every plan.
        """
        known = self._cards.get(box)
        if known is None:
            known = self._cards[box] = self._card(box)
        return known

    def _card(self, box: Box) -> dict[str, Any]:
        if box.kind in ("lane", "root"):
            return {}
        if box.kind == "sync":
            words = max(text_width(box.label) * 8.6, text_width(self.subtitle(box)) * 6.4)
            return {"size": [round(min(max(words + 28, 236), box_contents.ROW[1])), 44]}
        if box.kind == "error":
            return {"size": [296, 64]}
        if box.kind in ("module", "step"):
            held = sum(self.held().get(box, {}).values())
            through = box_contents.through_text(box, lambda value: shape_text(shape_of(value, self.graph)))
            return box_contents.card(box, held, self.plan.peak_bytes, through, self.subtitle(box))
        return box_contents.row(box, self._asides.get(box.id, self.subtitle(box)))

    def with_asides(self, asides: Mapping[str, str]) -> Scene:
        """A copy of this scene whose op rows have room for these texts, by box id, at their ends."""
        made = copy(self)
        made._cards, made._asides = {}, asides
        return made

    def size(self, box: Box) -> tuple[float, float]:
        """Width and height of a closed box, in pixels."""
        width, height = self.card(box).get("size", (216.0, 44.0))
        return width, height

    def progress(self, box: Box) -> dict[str, Any]:
        """The progress of a run in ``box``: ``state`` unless it is pending; ``share``, ``seconds``,
        ``alarm``.
        """
        summary = self.states.of(box)
        if summary is None:
            return {}
        state, seconds, alarm = summary
        result: dict[str, Any] = {"state": state} if state != "pending" else {}
        if state == "partly":
            result["share"] = round(self.states.share(box), 3)
        if seconds is not None:
            result["seconds"] = seconds
        if alarm is not None:
            result["alarm"] = alarm
        return result

    def subtitle(self, box: Box) -> str:
        """A box's second line: shape and size of a tensor, number of ops and bytes of a group."""
        if box.kind == "error":
            return (self.graph.raised.message if self.graph.raised is not None else "").strip().split("\n")[0]
        if box.node is not None:
            outputs = box.node.outputs
            if outputs:
                return self.edge_text(outputs)
            return "writes in place" if box.node.writes else "no output"
        if box.values:
            return self.edge_text(box.values)
        if box.sync is not None:
            source, reader = box.sync.source, box.sync.reader
            line = [self.line_text(source)] if source is not None else []
            return " · ".join([*line, *places(None, reader), f"ran {plural(box.sync.ops, 'op')}"])
        if box.kind == "lane":
            return self._lane_subtitle(box)
        drawn = [child for child in box.children if child.kind != "input"]
        if len(drawn) == 1 and drawn[0].node is not None:
            return f"{op_name(drawn[0].node)} · {format_bytes(self.made(box))}"
        parts = [plural(box.ops, "op"), format_bytes(self.made(box))] if box.ops else []
        return " · ".join(parts + ([plural(box.syncs, "sync point")] if box.syncs else []))

    def line_text(self, source: SourceLine) -> str:
        """``"line 3"`` of the graph's own cell or of a file, else ``"cell [7], line 3"``: room is scarce."""
        own = self.graph.place.cell if self.graph.place is not None else None
        return f"line {source.line}" if source.cell == own or not source.in_cell else str(source)

    def _lane_subtitle(self, lane: Box) -> str:
        if unreached := unreached_words(lane):
            return f"not reached: {unreached}"
        text = plural(lane.ops, "op")
        if lane.saves:
            saved = sum(self.planned(value.storage.nbytes, value) for value in lane.saves.values())
            text += f" · saves {format_bytes(saved)} for backward"
        return text

    def owns(self, node: Node) -> bool:
        """Whether ``node`` is a node of this graph."""
        nodes = self.graph.nodes
        return node.index < len(nodes) and nodes[node.index] is node

    def near(self, node: Node) -> Box | None:
        """The box of ``node``; for a hidden view, the box that hides it."""
        box = self.hierarchy.box_of[node.index]
        if box is None:
            behind = (at for at, views in self.hierarchy.behind.items() if node in views)
            box = next((self.hierarchy.box_of[at] for at in behind), None)
        return box

    def opened(self) -> list[Box]:
        """Groups that are open at first, outermost first: lanes and the groups that contain them."""
        result = [self.hierarchy.root]
        for box in result:  # grows while it is read
            result += [c for c in box.children if c.kind == "lane" or c.id in self.hierarchy.opened]
        return result

    # --- tensors ------------------------------------------------------------------

    def box_of_storage(self, storage: Storage | None) -> Box | None:
        """The box of a tensor from outside."""
        if storage is None:
            return None
        if not hasattr(self, "_by_storage"):
            self._by_storage: dict[int, Box] = {}
            for box in self.hierarchy.boxes.values():
                for value in box.values:
                    self._by_storage.setdefault(value.storage.id, box)
        return self._by_storage.get(storage.id)

    def summary(self) -> str:
        """``"3,803 ops recorded (920 of them views), 3,803 pending, no sync point"``"""
        graph = self.graph
        pending = sum(node.state != "done" for node in graph.nodes)
        syncs = plural(len(graph.sync_points), "sync point") if graph.sync_points else "no sync point"
        views = self._views = self._views or sum(hidden_views(graph))  # lanes do not count them
        among = f" ({views:,} of them {'a view' if views == 1 else 'views'})" if views else ""
        return f"{plural(len(graph.nodes), 'op')} recorded{among}, {pending:,} pending, {syncs}"
