"""Search over boxes: op, module, class, line, shape, dtype, and tensor names.

A query is literal text, and case does not matter.  Three forms have a special meaning: ``line 12`` matches
that line and not line 120, a shape can be written in any usual form (``8x128``, ``(8, 128)``), and
``addmm_12`` is the name of a node. The index has every distinct word once, because there are far fewer words
than ops.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ...graph.ir import Node, SourceLine, Value
from ...graph.modules import full_name, module_path
from ..scene.boxes import Box, around, module_facts, named, op_name
from ..scene.scene import Scene, dtype_text, shape_of, shape_text

PAGE = 50  # hits per message
MOST_LIT = 4000  # maximum number of highlighted boxes

_LINE = re.compile(r"(?:(?P<file>\S+):|line\s+)(?P<line>\d{1,9})")
_SIZE = r"(?:(?:\d{1,12}\*)?b(?:/\d{1,9})?|\d{1,12})"  # B is the batch size: 128*B/4
_SHAPE = re.compile(
    rf"{_SIZE}(?:\s*[x×*,]\s*{_SIZE})+,?|[\[(]\s*(?:{_SIZE}(?:\s*[x×*,]\s*{_SIZE})*,?)?\s*[\])]"
)
_NODE = re.compile(r"_\d+$")


class Index:
    """Search index of ``scene``'s boxes.

    Hits are ranked: boxes whose own name matches come before those inside a matching module, and in both,
    modules before ops. Ops of the optimizer rank with the latter. Equal ranks are in program order. Boxes
    that match only by the text of their source line come last, because one line may contain a whole
    training step.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.boxes = sorted(
            (box for box in scene.hierarchy.boxes.values() if box.kind not in ("root", "lane")),
            key=lambda box: (_rank(box), _position(box), box.depth),
        )
        self.classes = [_class(box) for box in self.boxes]
        self._optimizer = sum(_rank(box) < 2 for box in self.boxes)  # position of the optimizer's first box
        self._words: dict[str, list[int]] = defaultdict(list)
        self._code: dict[str, list[int]] = defaultdict(list)  # words of source lines
        self._lines: dict[int, list[tuple[str, int]]] = defaultdict(list)
        self._shapes: dict[str, list[int]] = defaultdict(list)
        self._names: list[str] | None = None
        self._last: tuple[str, list[int]] = "", []
        self._fill()

    def _fill(self) -> None:
        texts: dict[object, str] = {}
        for at, box in enumerate(self.boxes):
            node = box.node
            words: set[str] = set()
            if node is None:
                words |= {box.label, self._path(box), self.classes[at]}
                source = box.sync.source if box.sync is not None else None
            else:
                words |= {_op_words(node, texts), module_path(node)}
                source = node.source
            if source is not None:
                self._code[_line_words(source, texts)].append(at)
                self._lines[source.line].append((os.path.basename(source.file).casefold(), at))
            self._note(node.outputs if node is not None else box.values, words, at, texts)
            for word in sorted(words):  # saved pages of one graph are the same
                if word:
                    self._words[word].append(at)
        self._words, self._code = _folded(self._words), _folded(self._code)

    def _note(self, values: Sequence[Value], words: set[str], at: int, texts: dict[object, str]) -> None:
        """Shapes, dtypes, and names of tensors."""
        shapes: set[str] = set()
        for value in values:
            sizes = shape_of(value, self._scene.graph)
            shapes.add(texts.get(sizes) or texts.setdefault(sizes, shape_text(sizes)))
            if sizes is not value.meta.shape:
                shapes.add(shape_text(value.meta.shape))
            dtype = value.meta.dtype
            words.add(texts.get(dtype) or texts.setdefault(dtype, f"torch.{dtype_text(value)}"))
            words |= {full_name(value.name), full_name(value.storage.name), *value.storage.variables}
        words |= shapes
        for shape in sorted(shapes):
            self._shapes[shape.casefold()].append(at)

    def _path(self, box: Box) -> str:
        """The path of a module's group; its label may be a suffix of it."""
        if box.kind != "module" or box.first < 0:
            return ""
        return box.name

    def find(self, query: str) -> list[int]:
        """Positions of the matches in ``boxes``, in order."""
        wanted = query.strip().casefold()
        if not wanted:
            return []
        if self._last[0] == wanted:
            return self._last[1]
        found: set[int] = set()
        in_code: set[int] = set()
        line = _LINE.fullmatch(wanted)
        if line is not None:
            file = line["file"] or ""
            found.update(at for name, at in self._lines.get(int(line["line"]), ()) if file in name)
        shape = _SHAPE.fullmatch(wanted)
        if shape is not None:
            sizes = re.findall(_SIZE, wanted)
            found.update(self._shapes.get("×".join(sizes) if sizes else "scalar", ()))
        if shape is None or not found:
            for word, places in self._words.items():
                if wanted in word:
                    found.update(places)
            for text, places in self._code.items():
                if wanted in text:
                    in_code.update(places)
        if _NODE.search(wanted):
            names = self._node_names()
            found.update(at for at, name in enumerate(names) if wanted in name)
        called = [at for at in found if at < self._optimizer and self._is_called(at, wanted)]
        self._last = (
            wanted,
            [
                *sorted(called),
                *sorted(found.difference(called)),
                *sorted(in_code - found),
            ],
        )
        return self._last[1]

    def _is_called(self, at: int, wanted: str) -> bool:
        return wanted in self.boxes[at].label.casefold() or wanted in self.classes[at].casefold()

    def _node_names(self) -> list[str]:
        if self._names is None:
            self._names = [box.node.name.casefold() if box.node is not None else "" for box in self.boxes]
        return self._names

    def page(self, query: str, start: int = 0) -> dict[str, Any]:
        """One page of hits from number ``start`` on, as JSON; the first includes the highlighted boxes."""
        found = self.find(query)
        hits = [self.hit(at) for at in found[start : start + PAGE]]
        result: dict[str, Any] = {"query": query, "total": len(found), "start": start, "hits": hits}
        if start == 0:
            result["lit"] = around((self.boxes[at] for at in found), MOST_LIT)
        return result

    def hit(self, at: int) -> dict[str, Any]:
        """One box as a search result."""
        box = self.boxes[at]
        sub = self._scene.subtitle(box)
        if box.node is None and (path := _groups_above(box)):
            sub = f"{path} · {sub}"
        if self.classes[at]:
            sub = f"{self.classes[at]} · {sub}"
        return {**named(box), "sub": sub}

    def as_json(self) -> dict[str, Any]:
        """The index for a page without Python; positions are stored as differences."""
        return {
            "words": _steps(self._words),
            "code": _steps(self._code),
            "lines": self._lines,
            "shapes": self._shapes,
            "names": self._node_names(),
            "optimizer": self._optimizer,
        }


def _folded(words: dict[str, list[int]]) -> dict[str, list[int]]:
    folded: dict[str, list[int]] = defaultdict(list)
    for word, places in words.items():
        folded[word.casefold()] += places
    return folded


def _steps(words: dict[str, list[int]]) -> dict[str, list[int]]:
    return {
        word: [b - a for a, b in zip([0, *places], places, strict=False)]
        for word, places in ((word, sorted(places)) for word, places in words.items())
    }


def _rank(box: Box) -> int:
    """0 for modules and the user's tensors, 1 for ops and groups of ops, 2 for ops of the optimizer."""
    if box.phase == "optimizer":
        return 2
    return 0 if box.name or box.kind in ("input", "output", "sync", "step") else 1


def _class(box: Box) -> str:
    """The class name of a module, as on its card; "" for other boxes."""
    facts = module_facts(box) if box.kind == "module" and box.phase != "optimizer" else None
    return facts.kind if facts is not None else ""


def _position(box: Box) -> int:
    """The position of a box in the program; for an external tensor, that of its first reader."""
    if box.sync is not None:
        return box.sync.index
    if box.first >= 0 or box.parent is None:
        return box.first
    siblings = box.parent.children
    after = siblings[box.position :] if box.kind == "input" else siblings[box.position :: -1]
    return next((each.first for each in after if each.first >= 0), 0)


def _op_words(node: Node, texts: dict[object, str]) -> str:
    key = id(node.op), node.at_once
    return texts.get(key) or texts.setdefault(key, f"{op_name(node)}\n{node.op}")


def _line_words(source: SourceLine, texts: dict[object, str]) -> str:
    key = id(source)
    if key not in texts:
        where = f"cell [{source.cell}]" if source.cell is not None else ""
        texts[key] = f"{source.text}\n{where if source.in_cell else os.path.basename(source.file)}".strip()
    return texts[key]


def _groups_above(box: Box) -> str:
    parts: list[str] = []
    current = box.parent
    while current is not None and current.kind != "root":
        parts.append(current.label)
        current = current.parent
    return " › ".join(reversed(parts))
