"""Names in the picture: as much of a module's path as tells it apart, and the user's variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...graph.ir import Graph, Node, Value
from .boxes import Box
from .dataflow import Reads

_NUMBERS = re.compile(r"\d+(–\d+)?")  # of an item in a list, or of several


def tell_apart(root: Box, opened: Sequence[Box]) -> None:
    """Lengthen the labels of modules in the first picture until none ends the path of another module.

    For example, neither ``net.encoder.norm`` nor ``net.decoder.norm`` is labeled ``norm``, in any lane. Items
    of lists that differ only in their numbers are distinguished by them.
    """
    groups, frames = [root], set(opened)
    for group in groups:  # grows while it is read
        groups += [child for child in group.children if child.kind in ("step", "lane") or child in frames]
    named = [
        (box, group)
        for group in groups
        if group.phase != "optimizer"
        for box in group.children
        if box.kind == "module" and box.name
    ]
    names = {box.name for box, _ in named}
    patterns = {name: _NUMBERS.sub("*", name) for name in names}
    fewest: dict[str, int] = {}  # parts of the labels of modules that differ only in their numbers
    for box, _ in named:
        pattern, count = patterns[box.name], box.label.count(".") + 1
        if box.label == ".".join(box.name.split(".")[-count:]):
            fewest[pattern] = min(fewest.get(pattern, count), count)
    for box, group in named:
        around = f"{group.name}." if group in frames else ""
        parts = box.name.removeprefix(around).split(".")
        count = box.label.count(".") + 1
        least = min(count, fewest.get(patterns[box.name], count))
        if box.label != ".".join(parts[-count:]) and least == count:
            continue  # called in words, or as its group is
        count = least
        # A module with one part is one box with it, by both names, but not if it has other parts here.
        while count > 1 and _has_other_parts(".".join(box.name.split(".")[: 1 - count]), box.name, patterns):
            count -= 1
        while count < len(parts) and _is_ambiguous(".".join(parts[-count:]), box.name, patterns):
            count += 1
        label = ".".join(parts[-count:])
        box.label = f"{_last_part(group.name)}.{label}" if around and label[:1].isdigit() else label


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _has_other_parts(outer: str, name: str, patterns: Mapping[str, str]) -> bool:
    """Whether ``outer`` contains other modules than that of ``name``, its numbers aside."""
    return any(of != patterns[name] and other.startswith(f"{outer}.") for other, of in patterns.items())


def _is_ambiguous(label: str, name: str, patterns: Mapping[str, str]) -> bool:
    """Whether the path of another module than that of ``name`` ends so, its numbers aside."""
    if label[:1].isdigit():
        return True  # a bare index does not say what it counts
    ending, pattern = f".{label}", "." + _NUMBERS.sub("*", label)
    return any(
        other != name and (other.endswith(ending) or (of != patterns[name] and of.endswith(pattern)))
        for other, of in patterns.items()
    )


def names_by_round(graph: Graph, reads: Reads, box_of: Sequence[Box | None]) -> dict[int, str]:
    """Names of outside tensors whose variables have other values by now, such as the batches of a loop.

    What the ops of a step's forward pass read is named as what the same ops of the last step read, if all ops
    and lines of the two passes are the same. Results are by id of the value.
    """
    rounds: dict[Box, list[int]] = {}
    for index, box in enumerate(box_of):
        if box is None or box.phase != "forward":
            continue  # the first step of an optimizer makes its states
        if (step := lane_of(box).parent) is not None and step.kind == "step":
            rounds.setdefault(step, []).append(index)
    if len(rounds) < 2:
        return {}
    names: dict[int, str] = {}
    last = list(rounds.values())[-1]
    lines = [(graph.nodes[index].op, graph.nodes[index].source) for index in last]
    for indices in list(rounds.values())[:-1]:
        if [(graph.nodes[index].op, graph.nodes[index].source) for index in indices] != lines:
            continue
        for index, model in zip(indices, last, strict=True):
            for (producer, value), (other, known) in zip(reads[index], reads[model]):
                outside = producer is None and other is None and value is not known
                if outside and known.name and not value.name and value.storage.role in (None, "input"):
                    names[value.id] = known.name
    return names


@dataclass(frozen=True, slots=True)
class Result:
    """A named value that has a box: its maker, and that box, which stands in the maker's lane."""

    maker: Box
    box: Box

    def is_read_by(self, reader: Box) -> bool:
        """Whether the line to ``reader`` starts at the box: in its lane, and not inside of what makes it."""
        lane = self.box.parent
        at = _in_lane(reader, lane)
        return at is not None and at is not _in_lane(self.maker, lane)


def add_results(graph: Graph, reads: Reads, box_of: list[Box | None]) -> dict[int, Result]:
    """Add a box for each named result after the op that makes it; returns them by the id of the value.

    If the op is in the lane itself and its results are read there, the names are put into its label instead:
    ``x = randn``.
    """
    read: set[tuple[int, Box]] = set()
    for index, found in enumerate(reads):
        if (reader := box_of[index]) is not None:
            lane = lane_of(reader)
            read.update((value.id, lane) for _, value in found)
    results: dict[int, Result] = {}
    after: dict[Box, list[Box]] = {}
    for node in graph.nodes:
        maker = box_of[node.index]
        if maker is None or node.phase not in ("forward", "other"):
            continue
        named = [value for value in node.outputs if _is_result(value, node)]
        lane = lane_of(maker)
        if named and maker.parent is lane and all((value.id, lane) in read for value in named):
            maker.label = f"{', '.join(value.name for value in named)} = {maker.label}"
            continue
        for value in named:
            box = Box("output", value.name, lane.phase, lane)
            box.values = (value,)
            box.key = node.index
            results[value.id] = Result(maker, box)
            place = _in_lane(maker, lane)
            assert place is not None  # it is in the lane
            after.setdefault(place, []).append(box)
    for within in {result.box.parent for result in results.values()}:
        assert within is not None  # a lane
        within.children = [box for child in within.children for box in (child, *after.get(child, ()))]
    return results


def _is_result(value: Value, node: Node) -> bool:
    storage = value.storage
    return bool(value.name) and value.node is node and storage.dropped is None and not storage.external


def lane_of(box: Box) -> Box:
    while box.kind != "lane":
        assert box.parent is not None  # every op is in one
        box = box.parent
    return box


def _in_lane(box: Box, lane: Box | None) -> Box | None:
    """The child of ``lane`` that is ``box`` or holds it; ``None`` if it is elsewhere."""
    at: Box | None = box
    while at is not None and at.parent is not lane:
        at = at.parent
    return at
