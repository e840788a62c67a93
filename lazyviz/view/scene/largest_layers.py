"""The layers that hold the most memory at the peak: name, class, shapes, and line; equal ones are summed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ...graph.ir import SourceLine
from ...plan.units import format_bytes
from .box_contents import through_text
from .boxes import Box, chain, module_facts
from .scene import Scene, shape_of, shape_text

MOST = 6
LONGEST = 26  # letters of a name and its count that fit on a line of the list
MOST_LETTERS = 2 * LONGEST  # a path may take two lines
_LEADING = re.compile(r"\b\w+×")  # a shape's first dimension, which differs between experts of a mixture
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")  # index of a list item


def largest_layers(scene: Scene) -> list[dict[str, Any]]:
    """The modules with the most bytes at the peak, without those of their submodules, as JSON.

    Items of a list with the same class and, except for the first dimension, the same shapes are one row.
    """
    forward: dict[str, Box] = {}
    for box in scene.hierarchy.boxes.values():
        if box.phase == "forward" and _is_layer(box):
            forward.setdefault(box.name, box)
    rows: dict[tuple[str, str, str], list[tuple[Box, int]]] = {}
    own = {box: _own(scene, box) for box in scene.held() if _is_layer(box)}
    for box, sizes in own.items():
        if size := sum(sizes.values()):
            shapes = _LEADING.sub("", _through(scene, forward.get(box.name, box)))
            rows.setdefault((_NUMBER.sub("*", box.name), _class(box), shapes), []).append((box, size))
    ranked = sorted(rows.values(), key=lambda row: -sum(size for _, size in row))[:MOST]
    labels = [_together([box.name for box, _ in row]) for row in ranked]
    shared = _shared(labels)
    if len({label.removeprefix(shared) for label in labels}) < len(set(labels)):
        shared = ""  # a submodule has the same name as its model
    return [
        _row(scene, label.removeprefix(shared), row, forward, own)
        for label, row in zip(labels, ranked, strict=True)
    ]


def _together(names: list[str]) -> str:
    """One name for several layers: ``net.h.*.mlp.0`` for layers that differ only in the first index."""
    columns = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(same[0] if len(set(same)) == 1 else "*" for same in columns)


def _shared(names: list[str]) -> str:
    """The common prefix of the names, which the list omits; empty for a single name.

    The name of the model itself, listed for its ops outside of layers, is ignored.
    """
    models = [name for name in names if "." not in name]
    names = [name for name in names if "." in name]
    if len(names) == 1 and names[0].split(".")[0] in models:
        return f"{names[0].split('.')[0]}."
    parts: list[str] = []
    for same in zip(*(name.split(".")[:-1] for name in names)):
        if len(set(same)) > 1:
            break
        parts.append(f"{same[0]}.")
    while parts and any(_starts_with_number(name[len("".join(parts)) :]) for name in names):
        parts = parts[:-1]  # an index alone does not name its list
    return "".join(parts) if len(names) > 1 else ""


def _starts_with_number(rest: str) -> bool:
    """Whether ``rest`` is empty or begins with an index or ``*``."""
    return not rest or rest[0] in "*0123456789"


def _through(scene: Scene, box: Box) -> str:
    return through_text(box, lambda value: shape_text(shape_of(value, scene.graph)))


def _class(box: Box) -> str:
    facts = module_facts(box)
    return facts.kind if facts is not None else ""


def _is_layer(box: Box) -> bool:
    """Whether ``box`` is one module, drawn as one box."""
    if box.kind != "module" or not box.name or box.phase == "optimizer":
        return False
    return box.repeats == 1 or box.calls > 1


def _own(scene: Scene, box: Box) -> Mapping[str, int]:
    """Bytes that the module's own ops hold at the peak, by category."""
    held = scene.held()
    sizes = Counter(held[box])
    for part in _modules_in(box):
        sizes.subtract(held.get(part, {}))
    return +sizes


def _modules_in(box: Box) -> list[Box]:
    """The outermost modules in ``box``."""
    found: list[Box] = []
    inside = list(box.children)
    while inside:
        part = inside.pop()
        if part.kind == "module" and part.name:
            found.append(part)
        else:
            inside += part.children
    return found


def _row(
    scene: Scene,
    label: str,
    row: list[tuple[Box, int]],
    forward: Mapping[str, Box],
    own: Mapping[Box, Mapping[str, int]],
) -> dict[str, Any]:
    names = sorted({box.name for box, _ in row}, key=_natural)
    total = sum(size for _, size in row)
    largest = max(row, key=lambda each: each[1])[0]
    shown = forward.get(largest.name, largest)
    categories: Counter[str] = Counter()
    for box, _ in row:
        categories.update(own[box])
    source = _line(scene, shown)
    count = f" × {len(names)}" if len(names) > 1 else ""
    together = ", ".join(name[len(names[0]) - len(label) :] for name in names) if count else ""
    told = together and len(set(together.split(", "))) == len(names)  # each suffix is unique
    if told and len(together) <= LONGEST and all(len(name) == len(names[0]) for name in names):
        label, count = together, ""
    return {
        "label": _ending(label, MOST_LETTERS - len(count)) + count,
        "name": label + count,
        "cls": f"{_class(shown)} (own ops)" if _modules_in(shown) else _class(shown),
        "through": _through(scene, shown),
        "line": scene.line_text(source) if source is not None else "",
        "bytes": format_bytes(total),
        "category": categories.most_common(1)[0][0],
        "share": round(total / max(scene.plan.peak_bytes, 1), 4),
        "chain": chain(shown),
    }


def _natural(path: str) -> list[tuple[int, str]]:
    """A key that sorts ``layers.10`` after ``layers.9``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in path.split(".")]


def _ending(path: str, room: int) -> str:
    """The longest suffix of the path that fits, because the last components distinguish layers."""
    rest = path
    while len(rest) > room and "." in rest:
        rest = rest.partition(".")[2].removeprefix("*.")
    return rest if rest == path else f"…{rest}"


def _line(scene: Scene, box: Box) -> SourceLine | None:
    """The user's line that calls the module."""
    found: Iterable[SourceLine | None] = (node.source for node in scene.hierarchy.nodes_in(box))
    return next((source for source in found if source is not None), None)
