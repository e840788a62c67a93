"""Results: values with a name of the user's, as boxes of their own or in the label of the op that makes them."""

from __future__ import annotations

from dataclasses import dataclass

from ...graph.ir import Graph, Node, Value
from .boxes import Box
from .dataflow import Reads


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
    """A box for each named result, after what makes it; by the id of the value.

    An op that stands in its lane and whose results are read there has their names in its label, instead:
    ``x = randn``.
    """
    read: set[tuple[int, Box]] = set()
    for index, found in enumerate(reads):
        if (reader := box_of[index]) is not None:
            lane = _lane_of(reader)
            read.update((value.id, lane) for _, value in found)
    results: dict[int, Result] = {}
    after: dict[Box, list[Box]] = {}
    for node in graph.nodes:
        maker = box_of[node.index]
        if maker is None or node.phase not in ("forward", "other"):
            continue
        named = [value for value in node.outputs if _is_result(value, node)]
        lane = _lane_of(maker)
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
    for lane in {result.box.parent for result in results.values()}:
        assert lane is not None
        lane.children = [box for child in lane.children for box in (child, *after.get(child, ()))]
    return results


def _is_result(value: Value, node: Node) -> bool:
    storage = value.storage
    return bool(value.name) and value.node is node and storage.dropped is None and not storage.external


def _lane_of(box: Box) -> Box:
    lane: Box | None = box
    while lane is not None and lane.kind != "lane":
        lane = lane.parent
    assert lane is not None  # every op is in one
    return lane


def _in_lane(box: Box, lane: Box | None) -> Box | None:
    """The child of ``lane`` that is ``box`` or holds it; ``None`` if it is elsewhere."""
    at: Box | None = box
    while at is not None and at.parent is not lane:
        at = at.parent
    return at
