"""The layers with the most memory at the peak: name, class, shapes, and line; equal ones are summed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ...graph.ir import SourceLine
from ...plan.units import format_bytes
from .box_contents import through_text
from .boxes import Box, chain, module_facts
from .scene import Scene, shape_of, shape_text

MOST = 6
LONGEST = 26  # letters of a name with its count, which the list has room for
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")  # of an item in a list


def largest_layers(scene: Scene) -> list[dict[str, Any]]:
    """The innermost modules by what they hold at the peak, as JSON; those of one list are one row."""
    rows: dict[tuple[str, str], list[tuple[Box, int]]] = {}
    for box, sizes in scene.held().items():
        if _is_layer(box) and (size := sum(sizes.values())):
            rows.setdefault((_NUMBER.sub("*", box.name), _class(box)), []).append((box, size))
    ranked = sorted(rows.items(), key=lambda row: -sum(size for _, size in row[1]))[:MOST]
    shared = _shared([name for (name, _), _ in ranked])
    return [_row(scene, name[len(shared) :], row) for (name, _), row in ranked]


def _shared(names: list[str]) -> str:
    """The path that all names begin with, which is omitted; empty for a single name."""
    parts: list[str] = []
    for same in zip(*(name.split(".")[:-1] for name in names)):
        if len(set(same)) > 1:
            break
        parts.append(f"{same[0]}.")
    if any(name[len("".join(parts)) :].startswith("*") for name in names):
        parts = parts[:-1]  # a number alone says nothing
    return "".join(parts) if len(names) > 1 else ""


def _class(box: Box) -> str:
    facts = module_facts(box)
    return facts.kind if facts is not None else ""


def _is_layer(box: Box) -> bool:
    """Whether ``box`` is a module, drawn as one box, that contains no user-defined module."""
    if box.kind != "module" or not box.name or box.phase == "optimizer":
        return False
    if box.repeats > 1 and box.calls == 1:
        return False
    inside = [
        each for child in box.children for each in (child.children if child.kind == "step" else [child])
    ]
    return not any(each.kind == "module" and each.name for each in inside)


def _row(scene: Scene, label: str, row: list[tuple[Box, int]]) -> dict[str, Any]:
    names = sorted({box.name for box, _ in row}, key=_natural)
    total = sum(size for _, size in row)
    largest = max(row, key=lambda each: each[1])[0]
    same = (box for box in scene.hierarchy.boxes.values() if box.name == largest.name and _is_layer(box))
    forward = next((box for box in same if box.phase == "forward"), largest)
    categories: Counter[str] = Counter()
    for box, _ in row:
        categories.update(scene.held()[box])
    source = _line(scene, forward)
    if len(names) == 1:
        label = names[0][-len(label) :] if "*" not in label else names[0]
    count = f" × {len(names)}" if len(names) > 1 else ""
    together = ", ".join(names)
    if count and len(together) <= LONGEST:
        label, count = together, ""
    return {
        "label": _ending(label, LONGEST - len(count)) + count,
        "name": label + count,
        "cls": _class(forward),
        "through": through_text(forward, lambda value: shape_text(shape_of(value, scene.graph))),
        "line": f"line {source.line}" if source is not None else "",
        "bytes": format_bytes(total),
        "category": categories.most_common(1)[0][0],
        "share": round(total / max(scene.plan.peak_bytes, 1), 4),
        "chain": chain(forward),
    }


def _natural(path: str) -> list[tuple[int, str]]:
    """A key that sorts ``layers.10`` after ``layers.9``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in path.split(".")]


def _ending(path: str, room: int) -> str:
    """The path without as many of its first parts as necessary to fit, because the last parts distinguish
    layers.
    """
    rest = path
    while len(rest) > room and "." in rest:
        rest = rest.partition(".")[2].removeprefix("*.")
    return rest if rest == path else f"…{rest}"


def _line(scene: Scene, box: Box) -> SourceLine | None:
    """The user's line that calls the module."""
    found: Iterable[SourceLine | None] = (node.source for node in scene.hierarchy.nodes_in(box))
    return next((source for source in found if source is not None), None)
