"""Wrapped rows: wide lanes are wrapped into several rows, like staves in sheet music.

Each lane is cut between its boxes.  A cut edge leaves at the right and continues at the left of the next row,
at the same height in the lane; a cut frame is drawn, with its title, in each row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ..scene.boxes import Box
from .coordinates import LANE_GAP, Arrangement, Frame, Line
from .edge_labels import CHAR_WIDTH, SIZE

SHORT = 1600.0  # pixels, about the width of a slide
MOST_ROWS = 12
PAD = 16.0  # between the end of a row and the boxes beside the cut
ROW_GAP = 26.0
_NEAR = 48.0  # minimum distance of a cut from the sides of an open frame
_MOST = 1.3  # maximum width of a row, relative to equal rows, for which all lanes are cut at the same x

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Area:
    """The rectangle around the lanes of one step."""

    x: float
    y: float
    right: float
    bottom: float


@dataclass(frozen=True, slots=True)
class _Lane:
    """A lane with its content, the ranges in which it cannot be cut (``taken``), and the end of its content;
    coordinates are relative to the lane.
    """

    frame: Frame
    inside: Sequence[Frame]
    lines: Sequence[Line]
    taken: Sequence[Point]
    end: float


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a lane, from ``start`` to ``end``, that is drawn at ``x`` and ``y``."""

    start: float
    end: float
    x: float
    y: float


def folded(picture: Arrangement, ratio: float, more: float) -> Arrangement:
    """The picture with the lanes of its widest step wrapped into rows, if data flows to the right.

    It has as few rows as possible for a width of at most ``ratio * (height + more)``.
    """
    lanes = [frame for frame in picture.frames if frame.open and frame.box.kind == "lane"]
    if not picture.across or not lanes or picture.width <= SHORT:
        return picture
    step = max(lanes, key=lambda frame: frame.width).box.parent
    lanes = [frame for frame in lanes if frame.box.parent is step]
    area = _Area(
        min(lane.x for lane in lanes),
        min(lane.y for lane in lanes),
        max(lane.x + lane.width for lane in lanes),
        max(lane.y + lane.height for lane in lanes),
    )
    parts = [_lane(picture, frame, area) for frame in lanes]
    result = picture
    for rows in range(2, MOST_ROWS + 1):
        if result.width <= ratio * (result.height + more):
            break
        result = _replaced(picture, parts, area, _in_rows(parts, rows))
    return result


def _lane(picture: Arrangement, lane: Frame, area: _Area) -> _Lane:
    inside = [_moved(each, lane) for each in picture.frames if _is_in(each.box, lane.box)]
    bottom = lane.y + lane.height
    lines = [
        _shifted(line, lane)
        for line in picture.lines
        if lane.y <= line.points[0][1] <= bottom and all(area.x <= x <= area.right for x, _ in line.points)
    ]
    taken: list[Point] = []
    for frame in inside:
        left, right = frame.x, frame.x + frame.width
        if frame.open:
            taken += [(left - PAD, left + _NEAR), (right - _NEAR, right + PAD)]
        else:
            taken.append((left - PAD / 2, right + PAD / 2))
    for line in lines:
        if line.at is not None:
            half = len(line.at[2]) * SIZE * CHAR_WIDTH / 2
            taken.append((line.at[0] - half, line.at[0] + half))
    end = max((frame.x + frame.width for frame in inside), default=0.0) + PAD
    return _Lane(lane, inside, lines, sorted(taken), end)


def _is_in(box: Box, group: Box) -> bool:
    around = box.parent
    while around is not None and around is not group:
        around = around.parent
    return around is group


def _moved(frame: Frame, lane: Frame) -> Frame:
    return Frame(frame.box, frame.x - lane.x, frame.y - lane.y, frame.width, frame.height, frame.open)


def _shifted(line: Line, lane: Frame) -> Line:
    points = [(x - lane.x, y - lane.y) for x, y in line.points]
    at = (line.at[0] - lane.x, line.at[1] - lane.y, line.at[2]) if line.at is not None else None
    return Line(points, line.label, at, line.width, line.tip)


def _in_rows(lanes: Sequence[_Lane], rows: int) -> Arrangement:
    ends = _cuts(lanes, rows)
    wide = max(end - start + 2 * PAD for each in ends for start, end in itertools.pairwise([0.0, *each]))
    pieces: list[list[_Piece]] = [[] for _ in lanes]
    top = 0.0
    for row in range(max(map(len, ends))):
        for lane, each, placed in zip(lanes, ends, pieces, strict=True):
            if row < len(each):
                # The first piece includes the lane's own padding; the others get PAD instead.
                placed.append(_Piece(placed[-1].end if row else 0.0, each[row], PAD if row else 0.0, top))
                top += lane.frame.height + LANE_GAP
        top += ROW_GAP
    frames: list[Frame] = []
    lines: list[Line] = []
    for lane, placed in zip(lanes, pieces, strict=True):
        frames += [Frame(lane.frame.box, 0.0, each.y, wide, lane.frame.height, True) for each in placed]
        for frame in lane.inside:
            frames += _frames(frame, placed, wide)
        for line in lane.lines:
            lines += _lines(line, placed, wide)
    return Arrangement(frames, lines, wide, top - ROW_GAP - LANE_GAP, across=True)


def _cuts(lanes: Sequence[_Lane], rows: int) -> list[list[float]]:
    """The x coordinates where the pieces of each lane end.

    If the lanes have common gaps, they are cut at the same x, so that a layer stays above its backward pass.
    """
    end = max(lane.end for lane in lanes)
    room = end / rows
    together = _spread(sorted(itertools.chain.from_iterable(lane.taken for lane in lanes)), end, rows)
    if max(right - left for left, right in itertools.pairwise([0.0, *together])) <= _MOST * room:
        return [[*(cut for cut in together if cut < lane.end - PAD), lane.end] for lane in lanes]
    return [_spread(lane.taken, lane.end, max(round(lane.end / room), 1)) for lane in lanes]


def _spread(taken: Sequence[Point], end: float, rows: int) -> list[float]:
    """The ends of up to ``rows`` pieces, as equal in width as the gaps between ``taken`` ranges allow."""
    gaps = []
    free = 0.0
    for left, right in taken:
        if left > free:
            gaps.append((free, left))
        free = max(free, right)
    cuts: list[float] = []
    start = 0.0
    for more in range(rows, 1, -1):
        aim = start + (end - start) / more
        ends = [min(max(aim, left), right) for left, right in gaps if right > (start + aim) / 2]
        if not ends:
            break
        start = min(ends, key=lambda each: abs(each - aim))
        cuts.append(start)
    return [*cuts, end]


def _frames(frame: Frame, pieces: Sequence[_Piece], wide: float) -> list[Frame]:
    """The frame in its row; an open frame is drawn in every row that it reaches."""
    found = []
    right = frame.x + frame.width
    for piece in pieces:
        if frame.open:
            reaches = frame.x < piece.end and right > piece.start
        else:
            reaches = piece.start <= frame.x + frame.width / 2 < piece.end
        if reaches:
            x = frame.x - piece.start + piece.x if frame.x >= piece.start else PAD / 2
            last = right - piece.start + piece.x if right <= piece.end else wide - PAD / 2
            found.append(Frame(frame.box, x, frame.y + piece.y, last - x, frame.height, frame.open))
    return found


def _lines(line: Line, pieces: Sequence[_Piece], wide: float) -> list[Line]:
    """The parts of an edge in each row that it passes."""

    def moved(point: Point, piece: _Piece) -> Point:
        return point[0] - piece.start + piece.x, point[1] + piece.y

    def piece_of(x: float) -> _Piece:
        return next((each for each in pieces if x < each.end), pieces[-1])

    result: list[Line] = []
    piece = piece_of(line.points[0][0])
    points = [moved(line.points[0], piece)]
    for (x, y), (next_x, next_y) in itertools.pairwise(line.points):
        while not piece.start <= next_x <= piece.end:
            ahead = next_x > piece.end
            at = pieces.index(piece) + (1 if ahead else -1)
            if not 0 <= at < len(pieces):
                break
            share = ((piece.end if ahead else piece.start) - x) / (next_x - x)
            height = y + (next_y - y) * share * share * (3 - 2 * share)  # the height of the curve at the cut
            edge = wide if ahead else 0.0
            result.append(Line([*points, (edge, height + piece.y)], line.label, None, line.width, tip=False))
            piece = pieces[at]
            points = [(wide - edge, height + piece.y)]
        points.append(moved((next_x, next_y), piece))
    result.append(Line(points, line.label, None, line.width, line.tip))
    if line.at is not None:
        result[-1].at = (*moved(line.at[:2], piece_of(line.at[0])), line.at[2])
    return result


def _replaced(picture: Arrangement, lanes: Sequence[_Lane], area: _Area, rows: Arrangement) -> Arrangement:
    """The picture with its lanes replaced by ``rows``; everything beside and below them is moved."""
    narrower, higher = area.right - area.x - rows.width, rows.height - (area.bottom - area.y)

    def moved(x: float, y: float) -> Point:
        return x - narrower if x >= area.right else x, y + higher if y >= area.bottom else y

    of_lanes = [lane.frame.box for lane in lanes]
    frames: list[Frame] = []
    for frame in picture.frames:
        if any(frame.box is lane or _is_in(frame.box, lane) for lane in of_lanes):
            continue
        around = frame.open and _is_in(of_lanes[0], frame.box)
        size = (frame.width - narrower, frame.height + higher) if around else (frame.width, frame.height)
        frames.append(Frame(frame.box, *moved(frame.x, frame.y), *size, frame.open))
    lines = []
    for line in picture.lines:
        if all(area.x <= x <= area.right and area.y <= y <= area.bottom for x, y in line.points):
            continue
        at = (*moved(*line.at[:2]), line.at[2]) if line.at is not None else None
        lines.append(Line([moved(*each) for each in line.points], line.label, at, line.width, line.tip))
    back = Frame(of_lanes[0], -area.x, -area.y, 0.0, 0.0, open=True)
    frames += [_moved(each, back) for each in rows.frames]
    lines += [_shifted(each, back) for each in rows.lines]
    return Arrangement(frames, lines, picture.width - narrower, picture.height + higher, across=True)
