"""Table view: ops, modules or lines, sorted and filtered, a page at a time.

It shows the same facts as the picture, for users who cannot see it or want to sort them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...graph.ir import Node
from ...graph.modules import module_path
from ...plan.node_formatting import line_text
from ...plan.runtime.gpu_timeline import duration
from ...plan.units import format_bytes, format_share
from ..scene.boxes import LANE_TITLES, Box, op_name
from ..scene.scene import Scene, dtype_text, shape_of, shape_text
from ..scene.time_track import ASKED, projected
from .search import Index
from .source_view import Code

ROWS = 100  # rows per page
PHASES = ("forward", "backward", "optimizer", "other")
STATES = ("failed", "pending", "done")  # sort order: states that need attention first


class Column(NamedTuple):
    key: str
    title: str
    number: bool = False  # numbers are sorted in descending order first


_OP = Column("op", "Op")
_MODULE = Column("module", "Module")
_PHASE = Column("phase", "Phase")
_LINE = Column("line", "Line")
_OPS = Column("ops", "Ops", True)
_BYTES, _HELD = Column("bytes", "Allocates", True), Column("held", "At peak", True)
_TIME, _STATE = Column("seconds", "Time", True), Column("state", "State")
OWN = "own_"  # prefix of columns about a module without its submodules
# The most important columns come first, so that they are visible in a narrow table.
COLUMNS: dict[str, tuple[Column, ...]] = {
    "ops": (
        _OP,
        _BYTES,
        _HELD,
        _TIME,
        _MODULE,
        _PHASE,
        _LINE,
        Column("shape", "Shape", True),
        Column("dtype", "Dtype"),
        _STATE,
    ),
    "modules": (
        _MODULE,
        _BYTES,
        Column("own_bytes", "Own", True),
        _HELD,
        Column("own_held", "Own", True),
        _TIME,
        Column("own_seconds", "Own", True),
        _OPS,
        _PHASE,
        _STATE,
    ),
    "lines": (_LINE, Column("text", "Code"), _BYTES, _HELD, _TIME, _OPS, _PHASE, _STATE),
}


class Request(NamedTuple):
    """A request of the page: ``"ops bytes down 3 forward relu"``; each part except the query is one word.

    ``page`` counts from 0; ``"@n12"`` is the page with the row of that box. The phase ``all`` selects all
    phases.
    """

    mode: str
    sort: str
    down: bool
    page: int
    at: str
    phase: str
    query: str

    @classmethod
    def parse(cls, id: str) -> Request | None:
        found = re.fullmatch(
            r"(\w+) (\w*) (up|down) (?:([0-9]{1,7})|@([\w:]+)) (\w+) (.{0,200})", id, re.DOTALL
        )
        if found is None:
            return None
        mode, sort, way, page, at, phase, query = found.groups("")
        if mode not in COLUMNS or (sort and sort not in [column.key for column in COLUMNS[mode]]):
            return None
        if phase != "all" and phase not in PHASES:
            return None
        return cls(mode, sort, way == "down", int(page or 0), at, phase, query.strip())


class Table:
    """The rows of one scene; ``index`` creates the index of its boxes when a query first needs it."""

    def __init__(self, scene: Scene, code: Code, index: Callable[[], Index]) -> None:
        self._scene = scene
        self._code = code
        self._index = index
        drawn = scene.hierarchy.box_of
        self._nodes = [node for node in scene.graph.nodes if drawn[node.index] is not None]
        self._rows: dict[str, list[tuple[Any, list[Node]]]] = {}
        self._own: dict[str, list[Node]] = defaultdict(list)  # ops by module, without its submodules
        self._weights: tuple[Any, tuple[dict[str, int], dict[str, int]]] = (None, ({}, {}))  # by plan
        # By mode and column, for columns that no run changes.
        self._keys: dict[tuple[str, str], list[Any]] = {}

    def rows(self, mode: str) -> list[tuple[Any, list[Node]]]:
        """Every row's key (a box, a path, a line) and its ops, in program order.

        The ops of a module include those of its submodules.
        """
        known = self._rows.get(mode)
        if known is not None:
            return known
        groups: dict[Any, list[Node]] = defaultdict(list)
        if mode == "ops":
            box_of = self._scene.hierarchy.box_of
            groups = {box_of[node.index]: [node] for node in self._nodes}
        elif mode == "modules":
            for node in self._nodes:
                path = module_path(node)
                self._own[path].append(node)
                for end in [at for at, letter in enumerate(path) if letter == "."]:
                    groups[path[:end]].append(node)
                groups[path].append(node)
        else:
            drawn = self._scene.hierarchy.box_of
            for key, nodes in self._code.ops.items():
                mine = [node for node in nodes if drawn[node.index] is not None]
                if mine:
                    groups[key] = mine
        self._rows[mode] = list(groups.items())
        return self._rows[mode]

    def page(self, request: Request) -> dict[str, Any]:
        """One page of rows, as JSON."""
        held = self._held()
        order = self._filtered(request)
        if request.sort:
            keys = self._sorted_by(request.mode, request.sort, held)
            order = sorted(order, key=keys.__getitem__, reverse=request.down)
        elif request.down:
            order.reverse()
        rows = self.rows(request.mode)
        page, at = request.page, -1
        if request.at:
            at = next(
                (n for n, row in enumerate(order) if self._id(request.mode, rows[row]) == request.at), -1
            )
            page = max(at, 0) // ROWS
        page = min(page, max(len(order) - 1, 0) // ROWS)
        shown = order[page * ROWS : (page + 1) * ROWS]
        columns = COLUMNS[request.mode]
        return {
            "mode": request.mode,
            "sort": request.sort,
            "down": request.down,
            "phase": request.phase,
            "query": request.query,
            "page": page,
            "pages": max(-(-len(order) // ROWS), 1),
            "total": len(order),
            "first": page * ROWS,
            "columns": [list(column) for column in columns],
            "rows": [self._row(request.mode, columns, rows[row], held) for row in shown],
        }

    def _filtered(self, request: Request) -> list[int]:
        rows = self.rows(request.mode)
        wanted: set[int] | None = None
        if request.query:
            index = self._index()
            found = (index.boxes[at].node for at in index.find(request.query))
            wanted = {node.index for node in found if node is not None}
        if wanted is None and request.phase == "all":
            return list(range(len(rows)))
        return [
            row
            for row, (_, nodes) in enumerate(rows)
            if any(
                (request.phase == "all" or self._scene.hierarchy.lane_of(node) == request.phase)
                and (wanted is None or node.index in wanted)
                for node in nodes
            )
        ]

    def _held(self) -> dict[int, int]:
        held: dict[int, int] = defaultdict(int)
        for allocation in self._scene.plan.alive_at_peak:
            if allocation.node is not None:
                held[allocation.node.index] += allocation.nbytes
        return held

    def _held_in(self, row: tuple[Any, list[Node]], held: dict[int, int], *, own: bool) -> int:
        """Bytes at the peak that a row's ops allocated, and for a module also those of its weights."""
        key, nodes = row
        size = sum(held.get(node.index, 0) for node in nodes)
        if not isinstance(key, str) or not key:
            return size
        return size + self._weights_held()[0 if own else 1].get(key, 0)

    def _weights_held(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes of weights that are alive at the peak, by module: its own, and including submodules."""
        plan = self._scene.plan
        if self._weights[0] is not plan:
            owner = {
                value.storage.id: box.parent
                for box in self._scene.hierarchy.boxes.values()
                if box.kind == "input"
                for value in box.values
            }
            sizes: dict[str, int] = defaultdict(int)
            inside: dict[str, int] = defaultdict(int)
            for allocation in plan.alive_at_peak:
                storage = getattr(allocation, "storage", None)
                box = owner.get(storage.id) if allocation.node is None and storage is not None else None
                while box is not None and not (box.name and (box.repeats == 1 or box.calls > 1)):
                    box = box.parent
                if box is not None:
                    sizes[box.name] += allocation.nbytes
                    for end in [at for at, letter in enumerate(f"{box.name}.") if letter == "."]:
                        inside[box.name[:end]] += allocation.nbytes
            self._weights = plan, (sizes, inside)
        return self._weights[1]

    def _sorted_by(self, mode: str, column: str, held: dict[int, int]) -> list[Any]:
        """The sort keys of the rows; for text, its rank, so that ``h.2`` comes before ``h.10``."""
        known = self._keys.get((mode, column))
        if known is not None:
            return known
        rows = self.rows(mode)
        if column.startswith(OWN):
            rows, column = [(key, self._own[key]) for key, _ in rows], column.removeprefix(OWN)
            if column == "held":
                return [self._held_in(row, held, own=True) for row in rows]
            if column == "seconds":
                return [self._seconds(nodes) for _, nodes in rows]
            return [self._code.allocated(nodes, self._scene.plan) for _, nodes in rows]
        if column == "ops":
            keys: list[Any] = [len(nodes) for _, nodes in rows]
        elif column == "bytes":
            keys = [self._code.allocated(nodes, self._scene.plan) for _, nodes in rows]
        elif column == "held":
            return [self._held_in(row, held, own=mode != "modules") for row in rows]
        elif column == "seconds":
            return [self._seconds(nodes) for _, nodes in rows]
        elif column == "state":
            return [STATES.index(_state(nodes)) for _, nodes in rows]
        elif column == "line":
            keys = _ranks([key if mode == "lines" else _line_key(nodes[0]) for key, nodes in rows], key=None)
        elif column == "phase":
            keys = [tuple(PHASES.index(each) for each in self._phases(nodes)) for _, nodes in rows]
        elif column == "shape":
            keys = [nodes[0].outputs[0].nbytes if nodes[0].outputs else -1 for _, nodes in rows]
        else:
            words = [self._cell(mode, column, row, held) for row in rows]
            keys = _ranks(words, key=_natural)
        self._keys[mode, column] = keys
        return keys

    def _row(
        self, mode: str, columns: Sequence[Column], row: tuple[Any, list[Node]], held: dict[int, int]
    ) -> dict[str, Any]:
        return {
            "id": self._id(mode, row),
            "cells": [self._cell(mode, column.key, row, held) for column in columns],
        }

    def _id(self, mode: str, row: tuple[Any, list[Node]]) -> str:
        """The text of a box, or of a line of code."""
        key, nodes = row
        if mode == "ops":
            return str(key.id)
        return self._code.id(key) if mode == "lines" else self._module_box(nodes).id

    def _phases(self, nodes: Sequence[Node]) -> list[str]:
        return list(dict.fromkeys(self._scene.hierarchy.lane_of(node) for node in nodes))

    def _module_box(self, nodes: list[Node]) -> Box:
        """The innermost box that contains all ops of a module in one phase; for one op, its box."""
        box_of = self._scene.hierarchy.box_of
        lane_of = self._scene.hierarchy.lane_of
        phase = lane_of(nodes[0])
        boxes = [box for node in nodes if lane_of(node) == phase and (box := box_of[node.index]) is not None]
        common = boxes[0]
        for box in boxes:
            other: Box | None = box
            while other is not None and other.depth > common.depth:
                other = other.parent
            while other is not common and common.parent is not None:
                common = common.parent
                while other is not None and other.depth > common.depth:
                    other = other.parent
        return boxes[0] if common.kind in ("root", "lane") else common

    def _cell(self, mode: str, column: str, row: tuple[Any, list[Node]], held: dict[int, int]) -> str:
        key, nodes = row
        node = nodes[0]
        own = column.startswith(OWN)
        if own:
            nodes, column = self._own[key], column.removeprefix(OWN)
        if column == "op":
            return op_name(node)
        if column == "module":
            return module_path(node) if mode == "ops" else key or "(outside of modules)"
        if column == "phase":
            return ", ".join(LANE_TITLES[phase].lower() for phase in self._phases(nodes))
        if column == "line":
            source = self._code.source(key) if mode == "lines" else node.source
            return line_text(source) if source is not None else ""
        if column == "text":
            return self._code.source(key).text.strip()
        if column == "shape":
            shapes = [shape_text(shape_of(value, self._scene.graph)) for value in node.outputs[:3]]
            return ", ".join(shapes) + (" …" if len(node.outputs) > 3 else "")
        if column == "dtype":
            return ", ".join(dict.fromkeys(dtype_text(value) for value in node.outputs))
        if column == "ops":
            return f"{len(nodes):,}"
        if column == "bytes":
            return format_bytes(self._code.allocated(nodes, self._scene.plan))
        if column == "held":
            size = self._held_in((key, nodes), held, own=own or mode != "modules")
            share = size / max(self._scene.plan.peak_bytes, 1)
            return format_share(share) if share else ""
        if column == "state":
            return _state(nodes)
        seconds = self._seconds(nodes)
        if seconds < 0:
            return ""
        return duration(seconds) if _measured(nodes) is not None else f"≈ {duration(seconds)}"

    def _seconds(self, nodes: Sequence[Node]) -> float:
        """The measured time of the nodes that have run, otherwise the projected one, if it is shown.

        Nodes without either are sorted after those that took no time.
        """
        measured = _measured(nodes)
        if measured is not None:
            return measured
        time = projected(self._scene) if ASKED in self._scene.numbers.asked else None
        return (time.of(nodes) or -1.0) if time is not None else -1.0


def _state(nodes: Sequence[Node]) -> str:
    states = {node.state for node in nodes}
    return next(state for state in STATES if state in states)


def _measured(nodes: Sequence[Node]) -> float | None:
    """The total measured time of the nodes that have run; ``None`` if none has."""
    times = [node.measured_seconds for node in nodes if node.measured_seconds is not None]
    return sum(times) if times else None


def _line_key(node: Node) -> tuple[str, int]:
    return (node.source.file, node.source.line) if node.source is not None else ("", 0)


def _natural(word: str) -> list[tuple[bool, int, str]]:
    """A sort key that sorts ``h.10`` after ``h.2``."""
    return [
        (not part.isdecimal(), int(part) if part.isdecimal() else 0, part.casefold())
        for part in re.split(r"(\d+)", word)
    ]


def _ranks(words: list[Any], key: Callable[[Any], Any] | None) -> list[int]:
    """The rank of each word among the distinct words."""
    places = {word: place for place, word in enumerate(sorted(set(words), key=key))}
    return [places[word] for word in words]
