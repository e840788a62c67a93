"""Optional numbers in boxes: FLOPs, projected time, and the user's annotations.

Each has a key: ``"flops"``, ``"time"``, or ``"note:NAME"`` for an annotation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ...graph.ir import Annotation, Node
from ...plan.units import format_flops
from .boxes import Box, Hierarchy
from .plan_protocol import PlanLike
from .planned_sizes import node_flops

Span = tuple[float, float]  # minimum and maximum
NOTE = "note:"
COUNTED = ("flops", "time")


def number_text(number: float) -> str:
    """``0.12345`` -> ``"0.1235"``, with at most four significant digits."""
    return f"{number:.4g}"


def span_text(span: Span) -> str:
    """``"0.12"``, or ``"0.12 to 3.4"`` for a group of boxes with several numbers."""
    least, most = map(number_text, span)
    return least if least == most else f"{least} to {most}"


class Numbers:
    """The numbers of one graph's boxes, computed on first use."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy
        self._notes: dict[str, tuple[Annotation, dict[Box, Span]]] = {}
        self._sums: dict[str, tuple[object, dict[Box, float]]] = {}
        self.asked: set[str] = set()  # requested keys of COUNTED
        self._hidden: dict[int, int] | None = None

    @property
    def annotations(self) -> Mapping[str, Annotation]:
        """The annotations by name, the newest last."""
        return self._hierarchy.graph.annotations

    @property
    def newest(self) -> str | None:
        """The name of the annotation that is shown unless another number is chosen."""
        return next(reversed(list(self.annotations)), None)

    def of(self, box: Box, plan: PlanLike) -> dict[str, list[Any]]:
        """The minimum, maximum, and text of each number of ``box`` by key, as JSON."""
        result: dict[str, list[Any]] = {}
        for key in COUNTED:
            number = self.sums(key, plan).get(box) if key in self.asked else None
            if number is not None:
                result[key] = [number, number, format_flops(round(number)) if key == "flops" else ""]
        for name, span in self.notes_of(box).items():
            result[NOTE + name] = [*span, span_text(span)]
        return result

    def notes_of(self, box: Box) -> dict[str, Span]:
        """The annotations of ``box``, by name."""
        found = ((name, self.spans(name).get(box)) for name in self.annotations)
        return {name: span for name, span in found if span is not None}

    def notes_json(self) -> list[list[Any]]:
        """The annotations: name, minimum, maximum, and these as text."""
        return [
            [each.name, each.least, each.most, number_text(each.least), number_text(each.most)]
            for each in self.annotations.values()
        ]

    def spans(self, name: str) -> Mapping[Box, Span]:
        """The boxes with an annotation ``name``: its own number, or the minimum and maximum inside it."""
        given = self.annotations[name]
        known = self._notes.get(name)
        if known is None or known[0] is not given:
            known = self._notes[name] = given, self._spread(given)
        return known[1]

    def sums(self, key: str, plan: PlanLike) -> Mapping[Box, float]:
        """FLOPs of boxes, or the seconds that a plan projects for them; unknown ones are omitted."""
        basis: object = plan.time if key == "time" else plan.batch_size
        known = self._sums.get(key)
        if known is None or (known[0] is not basis and known[0] != basis):
            amounts: Iterable[tuple[Node, float]] = (
                ((node, node_flops(node, plan)) for node in self._hierarchy.graph.nodes)
                if key == "flops"
                else ((each.node, each.seconds) for each in plan.time.ops)
                if plan.time is not None
                else ()
            )
            known = self._sums[key] = basis, self._added(amounts)
        return known[1]

    def _added(self, amounts: Iterable[tuple[Node, float]]) -> dict[Box, float]:
        result: dict[Box, float] = {}
        for node, amount in amounts:
            box = self._box_at(node.index)
            while box is not None:
                result[box] = result.get(box, 0) + amount
                box = box.parent
        return result

    def _box_at(self, index: int) -> Box | None:
        """The box of a node; for a hidden view, the box that hides it."""
        box = self._hierarchy.box_of[index]
        if box is not None:
            return box
        if self._hidden is None:
            behind = self._hierarchy.behind.items()
            self._hidden = {node.index: at for at, views in behind for node in views}
        return self._hierarchy.box_of[self._hidden.get(index, index)]

    def _spread(self, given: Annotation) -> dict[Box, Span]:
        own = self._own(given)
        inside: dict[Box, Span] = {}  # minimum and maximum over a box and its content
        result: dict[Box, Span] = {}
        for box in reversed(self._hierarchy.boxes.values()):  # children come after their parents
            number = own.get(box) or inside.get(box)
            if number is None:
                continue
            result[box] = number
            if box.parent is not None:
                inside[box.parent] = _both(number, inside.get(box), inside.get(box.parent))
        return result

    def _own(self, given: Annotation) -> dict[Box, Span]:
        """The boxes of the nodes and modules that have a number."""
        own: dict[Box, Span] = {}
        for index, number in given.nodes.items():
            box = self._box_at(index)
            if box is not None:
                own[box] = _both((number, number), own.get(box))
        boxes = _boxes_by_module(self._hierarchy.boxes.values(), given.modules)
        for name, number in given.modules.items():
            for box in boxes.get(name, ()):
                own.setdefault(box, (number, number))
        return own


def _both(span: Span, *others: Span | None) -> Span:
    known = [span, *(each for each in others if each is not None)]
    return min(low for low, _ in known), max(high for _, high in known)


def _is_module(box: Box) -> bool:
    """Whether it is one module, not a fold of several."""
    return box.kind == "module" and bool(box.name) and (box.repeats == 1 or box.calls > 1)


def _boxes_by_module(boxes: Iterable[Box], names: Collection[str]) -> dict[str, list[Box]]:
    """The boxes of modules, by name; in a lane without a box for a module, that of its only submodule."""
    own: dict[tuple[str, Box | None], list[Box]] = {}
    parts: dict[tuple[str, Box | None], list[Box]] = {}
    for box in boxes:
        if not _is_module(box):
            continue
        around = _above(box, _is_module)
        outer, lane = around.name if around is not None else "", _above(box, lambda at: at.kind == "lane")
        name, found = box.name, own
        while len(name) > len(outer):
            if name in names:
                found.setdefault((name, lane), []).append(box)
            name, found = name.rpartition(".")[0], parts
    result: dict[str, list[Box]] = {}
    for key in dict.fromkeys([*own, *parts]):
        alone = parts[key] if key not in own and len(parts[key]) == 1 else []
        result.setdefault(key[0], []).extend(own.get(key, alone))
    return result


def _above(box: Box, stop: Callable[[Box], bool]) -> Box | None:
    parent = box.parent
    while parent is not None and not stop(parent):
        parent = parent.parent
    return parent
