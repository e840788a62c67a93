"""Display names of boxes: the shortest unambiguous suffix of a module's path, and the user's variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...graph.ir import Graph, Node, Value
from .boxes import Box
from .dataflow import Reads
from .small_ops import is_line, is_small_ops

_NUMBERS = re.compile(r"\d+(–\d+)?")  # of an item in a list, or of several


def tell_apart(root: Box, opened: Sequence[Box]) -> None:
    """Lengthen the labels of modules in the first picture until none is a suffix of another module's path.

    For example, neither ``net.encoder.norm`` nor ``net.decoder.norm`` is labeled ``norm``, in any lane.
    Paths that differ only in list indices do not count as different: the index is in the label.
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
    fewest: dict[str, int] = {}  # least number of path components in a label, by path without list indices
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
            continue  # its label is not a suffix of its path, and no shorter one is known
        count = least
        # A module with a single submodule is one box with it, labeled with both names; the outer name is
        # dropped if other submodules of the outer module are in the picture.
        while count > 1 and _has_other_parts(".".join(box.name.split(".")[: 1 - count]), box.name, patterns):
            count -= 1
        while count < len(parts) and _is_ambiguous(".".join(parts[-count:]), box.name, patterns):
            count += 1
        label = ".".join(parts[-count:])
        box.label = f"{_last_part(group.name)}.{label}" if around and label[:1].isdigit() else label


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _has_other_parts(outer: str, name: str, patterns: Mapping[str, str]) -> bool:
    """Whether ``outer`` contains modules other than ``name``, apart from list indices."""
    return any(of != patterns[name] and other.startswith(f"{outer}.") for other, of in patterns.items())


def _is_ambiguous(label: str, name: str, patterns: Mapping[str, str]) -> bool:
    """Whether ``label`` is also a suffix of another module's path, apart from list indices."""
    if label[:1].isdigit():
        return True  # an index alone does not name its list
    ending, pattern = f".{label}", "." + _NUMBERS.sub("*", label)
    return any(
        other != name and (other.endswith(ending) or (of != patterns[name] and of.endswith(pattern)))
        for other, of in patterns.items()
    )


def names_by_round(graph: Graph, reads: Reads, box_of: Sequence[Box | None]) -> dict[int, str]:
    """Names of outside tensors whose variables have been reassigned since, such as the batches of a loop.

    If the forward pass of a step has the same ops and source lines as that of the last step, its inputs get
    the names of the last step's inputs. Returns names by value id.
    """
    rounds: dict[Box, list[int]] = {}
    for index, box in enumerate(box_of):
        if box is None or box.phase != "forward":
            continue  # an optimizer's first step differs, because it creates the optimizer state
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
    """A named value with a box of its own: the box that creates it, and its own box in the same lane."""

    maker: Box
    box: Box

    def is_read_by(self, reader: Box) -> bool:
        """Whether the edge to ``reader`` starts at the result's box.

        It does if ``reader`` is in the same lane, but not in the group that creates the value.
        """
        lane = self.box.parent
        at = _in_lane(reader, lane)
        return at is not None and at is not _in_lane(self.maker, lane)


def add_results(graph: Graph, reads: Reads, box_of: list[Box | None]) -> dict[int, Result]:
    """Add a box for each named result after the op that creates it; returns results by value id.

    If the op is a direct child of its lane and its results are read there, or if it is folded with other
    small ops, its label gets the names instead: ``x = randn``.  There is no box, either, if the op is in a
    box of its line of code, which says the name.
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
        if not named:
            continue
        lane = lane_of(maker)
        place = _in_lane(maker, lane)
        assert place is not None  # it is in the lane
        here = all((value.id, lane) in read for value in named)
        if is_small_ops(place) or (maker is place and here):
            maker.label = f"{', '.join(value.name for value in named)} = {maker.label}"
            continue
        if here and is_line(place):
            continue  # the line says its name
        for value in named:
            box = Box("output", value.name, lane.phase, lane)
            box.values = (value,)
            box.key = node.index
            results[value.id] = Result(maker, box)
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
    """The child of ``lane`` that is or contains ``box``; ``None`` if ``box`` is not in the lane."""
    at: Box | None = box
    while at is not None and at.parent is not lane:
        at = at.parent
    return at
