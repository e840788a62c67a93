"""Source view: the user's code beside the graph, with bytes and time per line.

A cell is shown as a whole; for other files, the lines that ops come from are shown with their surroundings.
An op counts towards the line that ran it, and the user's lines that called that line.  Allocations of the
backward pass count towards ``loss.backward()``, and are also shown at their forward line.
"""

from __future__ import annotations

import linecache
import os
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...graph.ir import Graph, Node, SourceLine
from ...graph.sync_point_groups import sites
from ...plan.runtime.gpu_timeline import Projection, duration
from ...plan.units import format_bytes
from ..printable_text import as_written
from ..scene.boxes import Box, named
from ..scene.plan_protocol import PlanLike
from ..scene.planned_sizes import growing_storages, planned
from ..scene.scene import Scene, plural

AROUND = 2  # context lines shown before and after a line with ops
LONGEST = 400  # maximum characters of a line
WHOLE_CELL = 200  # maximum lines of another cell that is shown from its first to its last line with ops
WHOLE = 3000  # maximum lines of a cell that are shown without ops
LISTED = 60  # maximum ops of a line listed in the details
MOST_LINES = 2000  # maximum lines of all files

Key = tuple[str, int]  # file and line


@dataclass(slots=True)
class Section:
    """A file, or the cell: its displayed name, and the visible lines."""

    file: str
    label: str
    lines: list[tuple[int, str]]


class Code:
    """The code of one graph; ``cell`` is the code of the cell, if there is one.

    A line's id is ``"1:12"``: line 12 of the second section.
    """

    def __init__(self, graph: Graph, cell: str = "") -> None:
        self._graph = graph
        self.ops: dict[Key, list[Node]] = defaultdict(list)
        # Nodes of the backward pass, by forward line.
        self.gradients: dict[Key, list[Node]] = defaultdict(list)
        self._syncs: dict[Key, list[str]] = defaultdict(list)
        sources: dict[Key, SourceLine] = {}
        for node in graph.nodes:
            own = lines_of(node)
            for source in own:
                key = source.file, source.line
                sources.setdefault(key, source)
                self.ops[key].append(node)
            if node.forward is not None:
                for source in lines_of(node.forward):
                    if source not in own:
                        key = source.file, source.line
                        sources.setdefault(key, source)
                        self.gradients[key].append(node)
        self._drop_outside(sources)
        for site in sites(graph.sync_points):
            if site.source is not None:
                key = site.source.file, site.source.line
                sources.setdefault(key, site.source)
                self._syncs[key].append(f"{replace(site, source=None)}: ran {plural(site.ops, 'op')}")
        self._raised: dict[Key, str] = {}
        if graph.raised is not None and graph.raised.source is not None:
            here = graph.place.file if graph.place is not None else ""
            for stop in (graph.raised.source, *graph.raised.callers):
                if stop is graph.raised.source or stop.file == here or (stop.file, stop.line) in sources:
                    sources.setdefault((stop.file, stop.line), stop)
                    self._raised[stop.file, stop.line] = graph.raised.message.strip().split("\n")[0]
        self._sources = sources = {
            key: source
            for key, source in sources.items()
            if key in self.ops or key in self.gradients or key in self._syncs or key in self._raised
        }
        self.sections = _sections(sources, cell)
        self._place = {section.file: at for at, section in enumerate(self.sections)}
        self._made = [0] * len(graph.nodes)  # bytes
        self._growing: tuple[PlanLike, list[int]] | None = None  # values that differ in a plan
        for storage in graph.storages:
            if not storage.external and 0 <= storage.created < len(self._made):
                self._made[storage.created] += storage.nbytes

    def _drop_outside(self, sources: Mapping[Key, SourceLine]) -> None:
        """Drop lines outside the block, which called all ops but ran none themselves."""
        own = {(node.source.file, node.source.line) for node in self._graph.nodes if node.source is not None}
        some = sum(node.source is not None for node in self._graph.nodes)
        for key, nodes in list(self.ops.items()):
            if key not in own and len(nodes) == some and not sources[key].in_cell:
                del self.ops[key]
                self.gradients.pop(key, None)

    def source(self, key: Key) -> SourceLine:
        return self._sources[key]

    @property
    def size(self) -> int:
        """Characters shown."""
        return sum(len(text) + 8 for section in self.sections for _, text in section.lines)

    def text_json(self) -> list[dict[str, Any]]:
        return [
            {
                "label": section.label,
                "lines": [
                    (line, _indented(text))
                    for line, text in _dedented([(line, as_written(text)) for line, text in section.lines])
                ],
            }
            for section in self.sections
        ]

    def facts_json(self, plan: PlanLike, time: Projection | None = None) -> dict[str, Any]:
        """Numbers of each line, by its id: ops, bytes, seconds; 0 and "" are omitted.

        ``time``: the projected time of the plan, if it is shown.
        """
        held: dict[int, int] = defaultdict(int)
        for allocation in plan.alive_at_peak:
            if allocation.node is not None:
                held[allocation.node.index] += allocation.nbytes
        facts: dict[str, dict[str, Any]] = {}
        for key in {**self.ops, **self.gradients, **self._syncs, **self._raised}:
            nodes, backward = self.ops.get(key, ()), self.gradients.get(key, ())
            times = [node.measured_seconds for node in nodes if node.measured_seconds is not None]
            failed = next((node.error or "failed" for node in nodes if node.state == "failed"), "")
            failed = failed or self._raised.get(key, "")
            fact = {
                "ops": len(nodes),
                "called": sum(_key(node) != key for node in nodes),
                "bytes": self.allocated(nodes, plan),
                "held": sum(held[node.index] for node in nodes),
                "gradients": len(backward),
                "gradientBytes": self.allocated(backward, plan),
                "gradientHeld": sum(held[node.index] for node in backward),
                "seconds": sum(times) if times else None,
                "projected": time.of(nodes) if time is not None else None,
                "sync": "; ".join(dict.fromkeys(self._syncs.get(key, ()))),
                "failed": failed,
            }
            facts[self.id(key)] = {name: value for name, value in fact.items() if value}
        made = sum(held[node.index] for node in self._graph.nodes if node.source is not None)
        return {"lines": facts, "peak": plan.peak_bytes, "elsewhere": plan.peak_bytes - made}

    def id(self, key: Key) -> str:
        return f"{self._place[key[0]]}:{key[1]}"

    def key(self, id: str) -> Key | None:
        """The line with this id; ``None`` if it has no ops."""
        section, _, line = id.partition(":")
        if not (section.isascii() and section.isdigit() and line.isascii() and line.isdigit()):
            return None
        at = int(section)
        key = (self.sections[at].file, int(line)) if at < len(self.sections) else None
        known = self.ops, self.gradients, self._syncs, self._raised
        return key if any(key in each for each in known) else None

    def ids_of(self, nodes: Iterable[Node]) -> list[str]:
        """The lines of these ops, for backward ops also those of the forward pass."""
        sources: dict[SourceLine, None] = {}
        for node in nodes:
            sources.update(dict.fromkeys(lines_of(node)))
            if node.forward is not None:
                sources.update(dict.fromkeys(lines_of(node.forward)))
        keys = [(source.file, source.line) for source in sources]
        return [self.id(key) for key in keys if key in self._sources][:MOST_LINES]

    def allocated(self, nodes: Sequence[Node], plan: PlanLike) -> int:
        """Bytes that these ops allocate for the batch size of the plan."""
        if self._growing is None or self._growing[0] is not plan:
            sizes = [0] * len(self._made)
            growing = growing_storages(self._graph, plan)
            for storage in self._graph.storages if growing else ():
                if storage.id in growing and not storage.external and 0 <= storage.created < len(sizes):
                    sizes[storage.created] += storage.nbytes
            self._growing = plan, sizes
        made, more = (sum(sizes[node.index] for node in nodes) for sizes in (self._made, self._growing[1]))
        return made - more + planned(more, plan)

    def describe(self, scene: Scene, key: Key) -> tuple[dict[str, Any], list[Box]]:
        """A line for the details panel, as JSON, with its ops as links, and the boxes of all its ops."""
        nodes, backward = self.ops.get(key, []), self.gradients.get(key, [])
        section = self.sections[self._place[key[0]]]
        text = next((text for line, text in section.lines if line == key[1]), "")
        facts = [["ops", f"{len(nodes):,}"], ["allocates", format_bytes(self.allocated(nodes, scene.plan))]]
        if backward:
            of = f"{plural(len(backward), 'op')}, {format_bytes(self.allocated(backward, scene.plan))}"
            facts.append(["its gradients", of])
        times = [node.measured_seconds for node in nodes if node.measured_seconds is not None]
        if times:
            facts.append(["time", duration(sum(times))])
        if syncs := self._syncs.get(key):
            facts.append(["sync point", "; ".join(dict.fromkeys(syncs))])
        links: list[dict[str, Any]] = []
        boxes: dict[str, Box] = {}
        for node in [*nodes, *backward]:
            box = scene.hierarchy.box_of[node.index]
            if box is None or box.id in boxes:
                continue  # a view is drawn with its reader
            boxes[box.id] = box
            if len(links) < LISTED:
                links.append({**named(box), "bytes": format_bytes(self.allocated([node], scene.plan))})
        return {
            "id": "",
            "title": f"line {key[1]}",
            "subtitle": "",
            "facts": facts,
            "source": {"file": section.label, "line": key[1], "text": text.strip()},
            "inputs": [],
            "outputs": [],
            "forward": None,
            "flows": [],
            "lifetime": [],
            "links": links,
            "more": len(boxes) - len(links),
        }, list(boxes.values())


def _dedented(lines: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """The lines without the common indentation of consecutive lines."""
    result: list[tuple[int, str]] = []
    run: list[tuple[int, str]] = []
    for at, line in enumerate(lines):
        run.append(line)
        if at + 1 == len(lines) or lines[at + 1][0] > line[0] + 1:
            texts = textwrap.dedent("\n".join(text for _, text in run)).split("\n")
            result += [(number, text) for (number, _), text in zip(run, texts, strict=True)]
            run = []
    return result


def _indented(text: str) -> str:
    """The line with non-breaking spaces as indentation, which wrapping does not separate from the code."""
    code = text.lstrip(" ")
    return "\u00a0" * (len(text) - len(code)) + code


def lines_of(node: Node) -> tuple[SourceLine, ...]:
    """The user's lines that ``node`` counts towards, innermost first."""
    own = () if node.source is None else (node.source,)
    return own + tuple(line for line in node.callers if line != node.source)


def _key(node: Node) -> Key | None:
    return (node.source.file, node.source.line) if node.source is not None else None


def _sections(sources: dict[Key, SourceLine], cell: str) -> list[Section]:
    lines: dict[str, dict[int, str]] = defaultdict(dict)
    for (file, line), source in sources.items():
        lines[file][line] = source.text
    sections: list[Section] = []
    own = ""
    if cell.strip():
        own, section = _cell(cell, lines)
        sections.append(section)
    others = 0
    budget = MOST_LINES
    for file, known in lines.items():
        if file == own:
            continue
        in_cell = next(iter(sources[file, line] for line in known)).in_cell
        label = os.path.basename(file)
        number = next((sources[file, line].cell for line in known), None)
        if number is not None:
            label = f"cell [{number}]"
        elif in_cell:
            label = "another cell" if cell.strip() else "the cell"
            others += 1
            label += f" ({others})" if others > 1 else ""
        around = _around(file, known, whole=in_cell)[:budget]
        budget -= len(around)
        if around:
            sections.append(Section(file, label, around))
    return sections


def _cell(cell: str, lines: dict[str, dict[int, str]]) -> tuple[str, Section]:
    """A section with the whole code of the cell: the file that ends with this code, possibly after other
    lines.
    """
    body = cell.strip("\n").rstrip().split("\n")
    first = 2 + len(cell) - len(cell.lstrip("\n"))  # below the line of the magic
    file = ""
    for name in lines:
        text = [line.rstrip("\n") for line in linecache.getlines(name)]
        while text and not text[-1].strip():
            text.pop()
        start = len(text) - len(body)
        if start >= 0 and text[start:] == body:
            file, first = name, start + 1
    if not file:  # it has no ops, or its text was transformed: use the recorded text of its lines
        for name, known in lines.items():
            if all(
                first <= line < first + len(body) and text in body[line - first]
                for line, text in known.items()
            ):
                file = name
    shown = [(first + at, _cut(text)) for at, text in enumerate(body)]
    if len(shown) > WHOLE:
        near = {line + by for line in lines.get(file, ()) for by in range(-AROUND, AROUND + 1)}
        shown = [each for each in shown if each[0] in near]
    return file, Section(file, "this cell", shown)


def _around(file: str, known: dict[int, str], *, whole: bool) -> list[tuple[int, str]]:
    if not any(known.values()):  # unknown, or redacted
        return [(line, "") for line in sorted(known)]
    text = linecache.getlines(file)
    near = {line + by for line in known for by in range(-AROUND, AROUND + 1)}
    whole = whole and len(text) <= WHOLE_CELL
    if whole:
        near |= set(range(min(known), max(known)))
    shown: list[tuple[int, str]] = []
    for line in sorted(near):
        here = text[line - 1].rstrip("\n") if 0 < line <= len(text) else ""
        if line in known and known[line].strip() not in here:
            here = known[line]  # the file has been changed since
        if line in known or here.strip() or (whole and 0 < line <= len(text)):
            shown.append((line, here))
    texts = textwrap.dedent("\n".join(here for _, here in shown)).split("\n")
    return [(line, _cut(here)) for (line, _), here in zip(shown, texts, strict=True)]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
