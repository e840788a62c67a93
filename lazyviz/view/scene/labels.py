"""Labels of modules: as much of the path as tells them apart, the same in every lane."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .boxes import Box

_NUMBERS = re.compile(r"\d+(–\d+)?")  # of an item in a list, or of several


def tell_apart(root: Box, opened: Sequence[Box]) -> None:
    """Lengthen the labels of modules in the first picture until none ends the path of another module.

    Of ``net.encoder.norm`` and ``net.decoder.norm`` none is called ``norm``, in whichever lane it is.
    Items of lists that differ by their numbers alone are told apart by them.
    """
    groups = [root]
    for group in groups:  # grows while it is read
        groups += [child for child in group.children if child.kind in ("step", "lane") or child in opened]
    named = [
        (box, group)
        for group in groups
        if group.phase != "optimizer"
        for box in group.children
        if box.kind == "module" and box.name
    ]
    names = {box.name for box, _ in named}
    patterns = {name: _NUMBERS.sub("*", name) for name in names}
    for box, group in named:
        around = f"{group.name}." if group in opened else ""
        parts = box.name.removeprefix(around).split(".")
        count = box.label.count(".") + 1
        if box.label != ".".join(parts[-count:]):
            continue  # called in words, or as its group is
        while count < len(parts) and _is_ambiguous(".".join(parts[-count:]), box.name, patterns):
            count += 1
        label = ".".join(parts[-count:])
        box.label = f"{_last_part(group.name)}.{label}" if around and label[:1].isdigit() else label


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _is_ambiguous(label: str, name: str, patterns: Mapping[str, str]) -> bool:
    """Whether the path of another module than that of ``name`` ends so, its numbers aside."""
    if label[:1].isdigit():
        return True  # says nothing without what it counts
    ending, pattern = f".{label}", "." + _NUMBERS.sub("*", label)
    return any(
        other != name and (other.endswith(ending) or (of != patterns[name] and of.endswith(pattern)))
        for other, of in patterns.items()
    )
