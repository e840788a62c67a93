"""Matching rows: aligns the backward counterpart of a module vertically with the module.

The same as ``#align`` in ``js/src/model/open-groups-and-layout.ts``.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..scene.boxes import Box
from .layered_layout import Placed

MOST_GAP = 400.0  # maximum pixels that a row is moved down
SAME_ROW = 20.0  # minimum vertical distance of the middles of boxes in different rows
MOST_PAIRS = 100  # maximum modules aligned with their backward counterparts
_RANGE = re.compile(r"(\d+)–(\d+)")

Row = tuple[str, int]  # a group's id, and the row's number from the top


@dataclass(slots=True)
class Group:
    """An open group: its rows of boxes from the top, and their coordinates."""

    box: Box
    rows: Sequence[Sequence[int]]
    children: Sequence[Box]
    placed: Placed
    above: float  # padding above its content


@dataclass(frozen=True, slots=True)
class InRow:
    """A named box with its vertical center and the rows that contain it, outermost first."""

    name: str
    middle: float
    rows: tuple[Row, ...]


@dataclass(slots=True)
class Gaps:
    """Pixels added above rows, by group and row; open groups grow by the pixels added inside them."""

    groups: dict[str, Group]
    added: dict[Row, float] = field(default_factory=dict)

    def before(self, id: str, row: int) -> float:
        """How far a row moves down within its group."""
        return sum(
            self.added.get((id, n), 0.0) + (self.grown(id, n) if n < row else 0.0) for n in range(row + 1)
        )

    def grown(self, id: str, row: int) -> float:
        """How much taller the row becomes because of open groups in it."""
        group = self.groups[id]
        inside = (group.children[i].id for i in group.rows[row])
        return max((self.total(each) for each in inside if each in self.groups), default=0.0)

    def total(self, id: str) -> float:
        """How much taller the group becomes."""
        rows = range(len(self.groups[id].rows))
        return sum(self.added.get((id, n), 0.0) + self.grown(id, n) for n in rows)

    def moved(self, id: str) -> Placed:
        """The group's content with its rows moved down."""
        group = self.groups[id]
        placed = group.placed
        y, tops, bottoms = list(placed.y), list(placed.tops), list(placed.bottoms)
        for n, row in enumerate(group.rows):
            down = self.before(id, n)
            for i in row:
                y[i] += down
            tops[n] += down
            bottoms[n] += down + self.grown(id, n)
        return Placed(placed.x, y, placed.width, placed.height + self.total(id), tops, bottoms)


def match_rows(groups: dict[str, Group], forward: Box, backward: Box, size: Callable[[Box], float]) -> Gaps:
    """The gaps that align the modules of both lanes; ``size`` returns the height of a box."""
    gaps = Gaps(groups)
    ahead, back = (
        {each.name: each for each in _single(_walk(groups, lane, size))} for lane in (forward, backward)
    )
    done: set[Row] = set()
    for one, other in _ascending([(box, back[name]) for name, box in ahead.items() if name in back]):
        last = one.rows[-1], other.rows[-1]
        if not done.isdisjoint(last):
            continue
        done.update(last)
        lower = _middle(gaps, one) - _middle(gaps, other)
        if abs(lower) <= MOST_GAP:
            rows = (other if lower > 0 else one).rows
            # The frame around a first row moves as a whole, so that it has no hole.
            row = next((each for each in reversed(rows) if each[1]), rows[0])
            gaps.added[row] = gaps.added.get(row, 0.0) + abs(lower)
    return gaps


def _walk(groups: dict[str, Group], lane: Box, size: Callable[[Box], float]) -> Iterator[InRow]:
    stack: list[tuple[Group, float, tuple[Row, ...]]] = [(groups[lane.id], groups[lane.id].above, ())]
    while stack:
        group, top, around = stack.pop()
        for number, row in enumerate(group.rows):
            rows = (*around, (group.box.id, number))
            for i in row:
                child = group.children[i]
                y = top + group.placed.y[i]
                inner = groups.get(child.id)
                if inner is not None:
                    stack.append((inner, y + inner.above, rows))
                elif child.name:
                    yield InRow(_key(child), y + size(child) / 2, rows)


def _key(box: Box) -> str:
    """The key that a module shares with its backward counterpart, in which folds count down."""
    if box.repeats > 1 and box.calls == 1:
        return _RANGE.sub(lambda found: "–".join(sorted(found.groups(), key=int)), box.label)
    return box.name


def _single(boxes: Iterator[InRow]) -> list[InRow]:
    """The boxes with a unique name."""
    found: dict[str, list[InRow]] = {}
    for box in boxes:
        found.setdefault(box.name, []).append(box)
    return [alike[0] for alike in found.values() if len(alike) == 1]


def _ascending(pairs: list[tuple[InRow, InRow]]) -> list[tuple[InRow, InRow]]:
    """The longest subsequence of these pairs, sorted by first element, that is also sorted by second.

    Boxes of one row, whose middles can differ by some pixels, are in the order of their counterparts.
    """

    def order(one: tuple[InRow, InRow], other: tuple[InRow, InRow]) -> int:
        (a, c), (b, d) = one, other
        return int((a.middle - b.middle) / SAME_ROW) or (c.middle > d.middle) - (c.middle < d.middle)

    pairs = sorted(pairs, key=functools.cmp_to_key(order))[:MOST_PAIRS]
    ends: list[float] = []  # for each length, the least final second element
    runs: list[list[tuple[InRow, InRow]]] = []
    for pair in pairs:
        at = bisect.bisect_left(ends, pair[1].middle)
        run = [*(runs[at - 1] if at else []), pair]
        ends[at : at + 1] = [pair[1].middle]
        runs[at : at + 1] = [run]
    return runs[-1] if runs else []


def _middle(gaps: Gaps, box: InRow) -> float:
    return box.middle + sum(gaps.before(id, row) for id, row in box.rows)
