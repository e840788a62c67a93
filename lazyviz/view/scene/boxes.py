"""Boxes: the drawn items, as a tree over the graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...graph.collective_info import NAMESPACES, collective_of
from ...graph.ir import RAN_AT_ONCE, Graph, Node, RejectedOp, SyncPoint, Value
from ...graph.modules import ModuleFacts, facts_of, known_path, root_parts

# The titles of lanes by phase; dataflow.lanes_of() describes their content.
LANE_TITLES = {
    "forward": "Forward",
    "backward": "Backward",
    "optimizer": "Optimizer",
    "other": "Initialization",
}

Kind = Literal["root", "lane", "step", "module", "op", "input", "output", "sync", "error"]


class Box:
    """One box of the picture: an op, a group of boxes, a tensor from outside, or a sync point.

    ``ops`` and ``syncs`` count the ops (including hidden views) and sync points inside; ``nbytes`` is the
    number of bytes that they allocate.  ``repeats`` is the number of equal members that a fold represents,
    otherwise 1.  ``edges`` of a group connect its children; the pairs in ``order`` only constrain the
    layout.  A module's box has its full ``name`` (``"net.h.0"``), its ``root`` module, and the number of
    ``calls`` that it represents.
    """

    __slots__ = (
        "calls", "children", "container", "depth", "edges", "enters", "entry", "exit", "first", "gives", "id",
        "key", "kind", "label", "leaves", "name", "nbytes", "node", "ops", "order", "parent", "phase",
        "position", "repeats", "root", "saves", "shape_hash", "sync", "syncs", "takes",
        "takes_data", "values",
    )  # fmt: skip

    def __init__(self, kind: Kind, label: str, phase: str, parent: Box | None, key: object = None) -> None:
        self.id = ""
        self.kind: Kind = kind
        self.label = label
        self.phase = phase
        self.parent = parent
        self.key = key
        self.name = ""
        self.root = ""
        self.calls = 1
        self.container = False  # a module that is never called itself, such as a ModuleList
        self.children: list[Box] = []
        self.position = 0  # among the parent's children
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.node: Node | None = None  # of an op
        self.values: Sequence[Value] = ()  # of an input or output
        self.sync: SyncPoint | None = None
        self.first = -1  # program position of the first op inside
        self.ops = 0
        self.syncs = 0
        self.nbytes = 0
        self.repeats = 1
        self.shape_hash = 0
        self.edges: dict[tuple[Box, Box], list[Value]] = {}
        self.order: list[tuple[Box, Box]] = []
        self.enters: dict[
            Box, list[int]
        ] = {}  # for a group: ids of outside tensors, by the child that reads them
        self.leaves: dict[Box, list[int]] = {}  # the same for results read outside the group
        self.entry = False  # reads a result from elsewhere in its lane
        self.exit = False  # creates a result that is read elsewhere in its lane
        self.saves: dict[int, Value] = {}  # for a forward lane: by storage, values read in backward
        self.takes: Value | None = None  # the first incoming tensor, other than weights
        self.takes_data: Value | None = None  # the first input that is not indices or a mask, if ``takes`` is
        self.gives: Value | None = None  # the last result, or largest gradient, read elsewhere in its lane

    @property
    def is_group(self) -> bool:
        return bool(self.children)

    def __repr__(self) -> str:
        return f"<Box {self.id} {self.kind} {self.label!r} {self.ops} ops>"


@dataclass(slots=True)
class Hierarchy:
    """The tree of boxes, and the data flow from which it was built.

    ``box_of[i]`` is the box of node ``i`` (``None`` for a hidden view). ``reads[i]`` has the values that it
    reads, with the position of the node that created each (``None`` for an outside tensor), seen through
    hidden views. ``behind[i]`` has the views hidden behind it.
    """

    graph: Graph
    root: Box
    boxes: dict[str, Box]
    box_of: list[Box | None]
    box_of_value: dict[int, Box]
    reads: list[list[tuple[int | None, Value]]]
    behind: dict[int, list[Node]]
    drawn_of: tuple[object, ...] = ()  # key of the graph's state that boxes depend on
    opened: set[str] = field(default_factory=set)  # groups drawn open from the start, besides lanes
    gradients: dict[Node, list[Node]] | None = None  # for each forward op; computed on first use
    _readers: list[list[int]] | None = None
    _value_readers: dict[int, list[int]] | None = None
    _places: dict[str, int] | None = None

    def lane_of(self, node: Node) -> str:
        """The phase of the lane in which the node is drawn."""
        box = self.box_of[node.index]
        return box.phase if box is not None else node.phase

    def title_of(self, node: Node) -> str:
        """The node's module or lane, and its op: ``"net.0: addmm"``."""
        return f"{self.place_of(node)}: {op_name(node)}"

    def place_of(self, node: Node) -> str:
        """The module of the node, or outside of modules its lane."""
        return known_path(node) or LANE_TITLES[self.lane_of(node)].lower()

    def readers(self, index: int) -> list[int]:
        """Positions of the drawn nodes that read a result of node ``index``."""
        if self._readers is None:
            self._readers = [[] for _ in self.reads]
            for reader, reads in enumerate(self.reads):
                if self.box_of[reader] is not None:
                    for producer in dict.fromkeys(producer for producer, _ in reads):
                        if producer is not None:
                            self._readers[producer].append(reader)
        return self._readers[index]

    def readers_of(self, value: int) -> list[int]:
        """Positions of the nodes that read the value with that id, hidden views included."""
        if self._value_readers is None:
            self._value_readers = {}
            for reader, reads in enumerate(self.reads):
                for _, read in reads:
                    self._value_readers.setdefault(read.id, []).append(reader)
        return self._value_readers.get(value, [])

    def place_in_program(self, id: str) -> int:
        """The place of the box with that id among all boxes, which are in the order of the program."""
        if self._places is None or len(self._places) != len(self.boxes):
            self._places = {id: place for place, id in enumerate(self.boxes)}
        return self._places[id]

    def nodes_in(self, box: Box) -> Iterator[Node]:
        """The drawn ops inside ``box``, itself included."""
        stack = [box]
        while stack:
            current = stack.pop()
            if current.node is not None:
                yield current.node
            stack.extend(reversed(current.children))

    def lanes(self) -> Iterator[Box]:
        """Every lane, in drawing order."""
        stack = [self.root]
        while stack:
            box = stack.pop()
            if box.kind == "lane":
                yield box
            elif box.kind in ("root", "step"):
                stack.extend(reversed(box.children))


def chain(box: Box) -> list[str]:
    """Ids from the outermost group down to ``box``: the first one that is drawn stands for it."""
    ids: list[str] = []
    current: Box | None = box
    while current is not None:
        ids.append(current.id)
        current = current.parent
    return ids[::-1]


def rejected_of(box: Box) -> RejectedOp | None:
    """The op that ended the recording, for an error's box."""
    return box.key if isinstance(box.key, RejectedOp) else None


def op_name(node: Node) -> str:
    """``"addmm"``, ``"_foreach_add_"``, or ``"mylib::op"`` for operators of other libraries."""
    name: str = node.op._schema.name
    if name == RAN_AT_ONCE:
        return node.at_once
    if node.op.namespace in NAMESPACES and (collective := collective_of(node)) is not None:
        return collective.label
    return name.removeprefix("aten::").removeprefix("lazyviz::")


def name_of(box: Box) -> str:
    """Its label with the number of calls or repeats: ``"h.0–5 × 6"``, ``"D · 2 calls"``."""
    if box.calls > 1:
        return f"{box.label} · {box.calls} calls"
    return f"{box.label} × {box.repeats}" if box.repeats > 1 else box.label


def around(boxes: Iterable[Box], limit: int) -> list[str]:
    """Ids of these boxes and of the groups around them, which represent them while closed."""
    ids: dict[str, None] = {}
    for each in boxes:
        box: Box | None = each
        while box is not None and box.kind not in ("root", "lane") and box.id not in ids:
            if len(ids) >= limit:
                return list(ids)
            ids[box.id] = None
            box = box.parent
    return list(ids)


def is_of_numbers(value: Value) -> bool:
    """Whether the tensor has real or complex numbers, rather than indices or a mask."""
    return value.dtype.is_floating_point or value.dtype.is_complex


def module_facts(box: Box) -> ModuleFacts | None:
    """Facts about the module that ``box`` represents; for several similar modules, about the first."""
    while box.children and box.repeats > 1 and not box.calls > 1:
        first = box.children[0]
        # One of several rounds with a single module, such as a residual block and the sum after it.
        named = [child for child in first.children if child.name] if first.kind == "step" else []
        first = named[0] if len(named) == 1 else first
        if not first.name:
            break
        box = first
    if not box.name:
        return None
    base = root_parts(box.root)[:1]
    path = box.name[len(base[0]) + 1 :] if base else ""
    return facts_of(box.root, path) or (ModuleFacts(str(box.root)) if not path else None)


def named(box: Box) -> dict[str, Any]:
    """The data for a link to ``box``, as JSON: its text, and the ids that lead to it."""
    label = box.label
    if box.node is not None:
        label = f"{known_path(box.node) or LANE_TITLES[box.phase].lower()}: {op_name(box.node)}"
    elif box.repeats > 1 and box.calls == 1:
        label = f"{label} × {box.repeats}"
    return {"label": label, "chain": chain(box)}
