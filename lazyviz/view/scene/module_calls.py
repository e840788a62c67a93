"""Calls of one module: merged into one box if no cycle results."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ...graph.ir import Graph, Node
from ...graph.modules import root_key
from .boxes import Box

MOST_CHILDREN = 2000  # maximum children of a group in which calls are merged
MOST_APART = 8  # after this many calls of a module that cannot be merged, the others are not tried
MOST_CALLED = 64  # maximum modules in one group whose calls are merged


class Calls:
    """Tracks which modules are newly entered while the nodes of a graph are visited in order."""

    def __init__(self, graph: Graph) -> None:
        self._calls = graph.calls
        self._entered: set[tuple[object, str]] = set()
        self.of_modules = {(root_key(root), path) for each in graph.calls.values() for root, path in each}

    def pass_by(self, index: int) -> None:
        """Visit node ``index``; newly entered modules accumulate until :meth:`taken`."""
        for root, path in self._calls.get(index, ()):
            self._entered.add((root_key(root), path))

    def taken(self) -> set[tuple[object, str]]:
        """The modules entered since the last call."""
        entered, self._entered = self._entered, set()
        return entered


def merge_calls(
    group: Box, reads: Sequence[Sequence[tuple[int | None, object]]], box_of: list[Box | None]
) -> None:
    """Merge the calls of one module among the children of ``group`` into one box, with one part for each
    call.

    Calls are not merged if something else has to run between them, like the steps of a recurrent cell.
    """
    children = group.children
    by_key: dict[object, list[int]] = {}
    for position, child in enumerate(children):
        if child.kind == "module" and child.name and child.key is not None and not child.container:
            by_key.setdefault(child.key, []).append(position)
    several = [places for places in by_key.values() if len(places) > 1][:MOST_CALLED]
    if not several or len(children) > MOST_CHILDREN:
        return
    after = _flow(group, reads, box_of)
    for place, child in enumerate(children):
        if child.kind == "sync":  # nothing is moved past a sync point
            for other in range(len(children)):
                if other != place:
                    after[min(place, other)].add(max(place, other))
    stands_for = list(range(len(children)))
    for places in several:
        kept = [places[0]]
        for place in places[1:]:
            if len(kept) > MOST_APART:
                break
            if _joined_without_a_cycle(after, kept[-1], place):
                _contract(after, kept[-1], place)
                stands_for[place] = kept[-1]
            else:
                kept.append(place)
    members: dict[int, list[Box]] = {}
    for place, child in enumerate(children):
        members.setdefault(stands_for[place], []).append(child)
    order = _in_order(after, set(members))
    group.children = [_one_box(group, members[place]) for place in order]


def _flow(
    group: Box, reads: Sequence[Sequence[tuple[int | None, object]]], box_of: list[Box | None]
) -> list[set[int]]:
    """For each child of ``group``, the children that read its results."""
    place = {child: position for position, child in enumerate(group.children)}
    after: list[set[int]] = [set() for _ in group.children]
    for child, position in place.items():
        for node in _nodes(child):
            for producer, _ in reads[node.index]:
                made = box_of[producer] if producer is not None else None
                while made is not None and made.parent is not group:
                    made = made.parent
                if made is not None and made is not child:
                    after[place[made]].add(position)
    return after


def _nodes(box: Box) -> list[Node]:
    found, stack = [], [box]
    while stack:
        current = stack.pop()
        if current.node is not None:
            found.append(current.node)
        stack.extend(current.children)
    return found


def _joined_without_a_cycle(after: list[set[int]], first: int, later: int) -> bool:
    """Whether merging the two creates no cycle: no path between them passes through a third child."""
    for start, goal in ((first, later), (later, first)):
        stack = [each for each in after[start] if each != goal]
        seen = set(stack)
        while stack:
            for following in after[stack.pop()]:
                if following == goal:
                    return False
                if following not in seen:
                    seen.add(following)
                    stack.append(following)
    return True


def _contract(after: list[set[int]], kept: int, gone: int) -> None:
    after[kept] |= after[gone]
    after[gone] = set()
    for each in after:
        if gone in each:
            each.discard(gone)
            each.add(kept)
    after[kept].discard(kept)


def _in_order(after: list[set[int]], places: set[int]) -> list[int]:
    """The positions in topological order, otherwise unchanged."""
    before = dict.fromkeys(places, 0)
    for place in places:
        for following in after[place]:
            before[following] += 1
    ready = sorted(place for place, count in before.items() if not count)
    order = []
    while ready:
        place = heapq.heappop(ready)
        order.append(place)
        for following in after[place]:
            before[following] -= 1
            if not before[following]:
                heapq.heappush(ready, following)
    return order


def _one_box(group: Box, calls: list[Box]) -> Box:
    if len(calls) == 1:
        return calls[0]
    box = Box("module", calls[0].label, calls[0].phase, group, calls[0].key)
    box.name, box.root, box.calls = calls[0].name, calls[0].root, len(calls)
    for number, call in enumerate(calls):
        call.kind, call.label, call.key = "step", f"call {number + 1}", ("call", number)
        call.name, call.parent = "", box
        box.children.append(call)
    return box
