"""Coordinates of all boxes of a picture, with nested open groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ..scene.boxes import Box
from ..scene.scene import MOST_VALUES, Scene, edge_width
from .edge_labels import CHAR_WIDTH, SIZE, place_labels
from .layered_layout import LAYER_GAP, Placed, place
from .matching_rows import Group, match_rows

# Padding inside an open group: left and right, above (for its title), below.
GROUP_PADDING = (12.0, 40.0, 12.0)
LANE_PADDING = (12.0, 64.0, 14.0)
LANE_GAP = 8.0
LANE_MIN_WIDTH = 224.0
LEAST_WIDTH = 216.0  # minimum content width of an open group
BESIDE = 12.0  # space at both ends of text along an edge
MOST_ENDS = 3  # maximum ends of one edge in an open group
MATCHING = ("forward", "backward")  # phases of lanes whose rows match
Point = tuple[float, float]
Area = tuple[float, float, float, float]  # left, top, right, bottom
STACKED_HEIGHT = 1600.0  # taller lanes stay side by side, because stacked ones would be out of sight


@dataclass(slots=True)
class Frame:
    """A box with its absolute position; ``open`` if its children are drawn."""

    box: Box
    x: float
    y: float
    width: float
    height: float
    open: bool


@dataclass(slots=True)
class Line:
    """An edge as a list of points, in the direction the data flows."""

    points: list[tuple[float, float]]
    label: str
    at: tuple[float, float, str] | None  # middle of the label's base line and its text, if it is drawn
    width: float = 1.0
    tip: bool = True  # whether it has an arrowhead at its end


@dataclass(slots=True)
class Arrangement:
    frames: list[Frame]  # outer before inner
    lines: list[Line]
    width: float
    height: float
    across: bool = False  # data flows to the right, and back in the backward pass


def padding(box: Box) -> tuple[float, float, float]:
    if box.kind == "lane":
        return LANE_PADDING
    return (0.0, 0.0, 0.0) if box.kind == "root" else GROUP_PADDING


def is_row(box: Box) -> bool:
    """Whether the children are arranged side by side, like lanes."""
    return bool(box.children) and box.children[0].kind == "lane"


def lane_rows(sizes: Sequence[tuple[float, float]], room: float) -> tuple[Placed, list[tuple[float, float]]]:
    """Place lanes side by side, in several rows if ``room`` (pixels) is too narrow for one.

    Lanes of a row get the height of the highest, and all rows the width of the widest.  Returns positions
    and the new sizes.
    """
    rows: list[list[int]] = []
    used = 0.0
    if any(height > STACKED_HEIGHT for _, height in sizes):
        room = math.inf
    for lane, (width, _) in enumerate(sizes):
        if rows and used + LANE_GAP + width <= room:
            rows[-1].append(lane)
            used += LANE_GAP + width
        else:
            rows.append([lane])
            used = width
    total = max(sum(sizes[lane][0] for lane in row) + LANE_GAP * (len(row) - 1) for row in rows)
    x, y, stretched = [0.0] * len(sizes), [0.0] * len(sizes), list(sizes)
    top = 0.0
    for row in rows:
        tall = max(sizes[lane][1] for lane in row)
        own = sum(sizes[lane][0] for lane in row) + LANE_GAP * (len(row) - 1)
        left = 0.0
        for lane in row:
            wide = sizes[lane][0] + (total - own) / len(row)
            x[lane], y[lane], stretched[lane] = left, top, (wide, tall)
            left += wide + LANE_GAP
        top += tall + LANE_GAP
    return Placed(x, y, total, top - LANE_GAP), stretched


def arrange(
    scene: Scene,
    opened: set[str],
    *,
    room: float = math.inf,
    lanes: Collection[str] | None = None,
    across: bool = False,
    matching: bool = False,
) -> Arrangement:
    """Coordinates of the picture in which the groups with ids in ``opened`` are open.

    ``room`` is the width in pixels that the lanes of a step should fit into.  ``lanes``: draw only these
    phases, if a step has any of them.  ``across``: data flows to the right instead of down; lanes are then
    stacked without a limit on their width, and edge labels have only shapes.  ``matching``: align the
    backward counterpart of a module with the module.
    """

    def drawn_in(box: Box) -> list[Box]:
        shown = [child for child in box.children if lanes is None or child.phase in lanes]
        return paired.get(box.id) or (shown if is_row(box) and shown else box.children)

    paired: dict[str, list[Box]] = {}
    order = [scene.hierarchy.root]
    for box in order:  # grows while it is read
        order += [child for child in drawn_in(box) if child.id in opened]
    size: dict[str, tuple[float, float]] = {}
    placed: dict[str, Placed] = {}
    for box in reversed(order):
        left, right, above, below = _pads(box, across)
        if matching and is_row(box) and not across:
            wide = sum(size[lane.id][0] + LANE_GAP for lane in drawn_in(box)) - LANE_GAP
            if wide > room:  # in several rows, the lanes to be aligned must be in the first
                paired[box.id] = sorted(drawn_in(box), key=lambda lane: lane.phase not in MATCHING)
        sizes = [size.get(child.id) or _closed_size(scene, child, across) for child in drawn_in(box)]
        if is_row(box):
            result, stretched = lane_rows(sizes, math.inf if across else room)
            size.update((child.id, each) for child, each in zip(drawn_in(box), stretched, strict=True))
        else:
            result = place(scene.layers(box), sizes, flip=_up(box), gap=_gap(scene, box, across))
        placed[box.id] = result
        least = LANE_MIN_WIDTH if box.kind == "lane" else LEAST_WIDTH + 2 * GROUP_PADDING[0]
        wide, tall = result.width + left + right, result.height + above + below
        if box.kind != "root":
            wide, tall = (wide, max(tall, least)) if across else (max(wide, least), tall)
        size[box.id] = wide, tall
    if matching:
        _match(scene, order, drawn_in, placed, size, across=across)
    made = _located(scene, opened, order, drawn_in, placed, size, across=across)
    return _transposed(made) if across else made


def _located(
    scene: Scene,
    opened: set[str],
    order: Sequence[Box],
    drawn_in: Callable[[Box], list[Box]],
    placed: Mapping[str, Placed],
    size: Mapping[str, tuple[float, float]],
    *,
    across: bool,
) -> Arrangement:
    """Absolute coordinates, from those relative to each group."""
    root = scene.hierarchy.root
    frames: list[Frame] = []
    drawn: list[tuple[Box, list[Line]]] = []
    origin: dict[str, tuple[float, float]] = {root.id: (0.0, 0.0)}
    for box in order:
        left, top = origin[box.id]
        before, after, above, _ = _pads(box, across)
        result = placed[box.id]
        left += before + (size[box.id][0] - before - after - result.width) / 2
        top += above
        rects: list[tuple[float, float, float, float]] = []
        for position, child in enumerate(drawn_in(box)):
            w, h = size.get(child.id) or _closed_size(scene, child, across)
            x, y = left + result.x[position], top + result.y[position]
            rects.append((x, y, w, h))
            origin[child.id] = (x, y)
            frames.append(Frame(child, x, y, w, h, child.id in opened))
        if not is_row(box):
            drawn.append((box, _lines(scene, box, result, rects, left, top, words=not across)))
    width, height = size[root.id]
    at = {frame.box: frame for frame in frames}
    areas = _areas(frames)
    reaching = [line for box, lines in drawn for line in _reaching(box, lines, at, areas)]
    return Arrangement(frames, reaching, width, height)


def _closed_size(scene: Scene, box: Box, across: bool) -> tuple[float, float]:
    width, height = scene.size(box)
    return (height, width) if across else (width, height)


def _match(
    scene: Scene,
    order: Sequence[Box],
    drawn_in: Callable[[Box], list[Box]],
    placed: dict[str, Placed],
    size: dict[str, tuple[float, float]],
    *,
    across: bool,
) -> None:
    """Align modules with their backward counterparts: move rows down in ``placed``, enlarge ``size``."""
    root = order[0]
    if not is_row(root):
        return
    lanes = drawn_in(root)
    of_phase = {lane.phase: at for at, lane in enumerate(lanes) if lane.id in placed}
    ahead, back = of_phase.get("forward"), of_phase.get("backward")
    y = placed[root.id].y
    if ahead is None or back is None or y[ahead] != y[back]:
        return
    groups = {}
    for box in order[1:]:
        if not is_row(box):
            layers = scene.layers(box)
            rows = [[i for i in layer if i < layers.boxes] for layer in layers.layers]
            rows = rows[::-1] if _up(box) else rows
            groups[box.id] = Group(box, rows, drawn_in(box), placed[box.id], _pads(box, across)[2])

    gaps = match_rows(groups, lanes[ahead], lanes[back], lambda box: _closed_size(scene, box, across)[1])
    for box in order[1:]:
        if box.id in groups:
            placed[box.id] = gaps.moved(box.id)
            if box.kind != "lane":
                size[box.id] = size[box.id][0], size[box.id][1] + gaps.total(box.id)
    needed = {}
    for lane in lanes:
        _, _, above, below = _pads(lane, across)
        own = placed[lane.id].height + above + below if lane.id in placed else 0.0
        needed[lane.id] = max(own, size[lane.id][1])
    row, down = placed[root.id], 0.0
    for at in sorted(set(row.y)):  # lanes in one row have the same height
        beside = [lane for lane, y in zip(lanes, row.y, strict=True) if y == at]
        most = max(needed[lane.id] for lane in beside)
        row.y = [y + down if y == at else y for y in row.y]
        down += most - size[beside[0].id][1]
        size.update((lane.id, (size[lane.id][0], most)) for lane in beside)
    row.height += down
    size[root.id] = size[root.id][0], row.height


def _pads(box: Box, across: bool) -> tuple[float, float, float, float]:
    """Padding at the left, at the right, above, and below; before the transposition for ``across``, the
    title is at the left.
    """
    side, above, below = padding(box)
    return (above, below, side, side) if across else (side, side, above, below)


def _transposed(made: Arrangement) -> Arrangement:
    """The transposed picture: for data that flows to the right, everything is first laid out with widths and
    heights swapped.
    """
    frames = [Frame(each.box, each.y, each.x, each.height, each.width, each.open) for each in made.frames]
    lines = [
        Line(
            [(y, x) for x, y in each.points],
            each.label,
            (each.at[1], each.at[0], each.at[2]) if each.at is not None else None,
            each.width,
            each.tip,
        )
        for each in made.lines
    ]
    return Arrangement(frames, lines, made.height, made.width, across=True)


def _lines(
    scene: Scene,
    box: Box,
    placed: Placed,
    rects: list[tuple[float, float, float, float]],
    left: float,
    top: float,
    *,
    words: bool,
) -> list[Line]:
    """Edges of one group: they leave boxes in flow direction, and pass through layers in straight lines."""
    layers = scene.layers(box)
    flip = _up(box)
    level = {i: number for number, layer in enumerate(layers.layers) for i in layer}
    last = len(layers.layers) - 1
    texts = [scene.edge_text(values) for values in box.edges.values()]
    drawn: list[list[tuple[float, float]]] = []
    for path in layers.paths:
        points: list[tuple[float, float]] = []
        for step, i in enumerate(path):
            if i < layers.boxes:
                x, y, w, h = rects[i]
                start = step == 0
                points.append((x + w / 2, y + h if start != flip else y))
            else:
                row = last - level[i] if flip else level[i]
                x = left + placed.x[i] + 4.0
                ends = (top + placed.tops[row], top + placed.bottoms[row])
                points += [(x, end) for end in (reversed(ends) if flip else ends)]
        drawn.append(points)
    side = padding(box)[0]
    widths = [edge_width(values) for values in box.edges.values()]
    if not words:
        shapes = _shapes(box, texts)
        labels = [
            _beside(points, shape, flip=flip) if shape else None
            for points, shape in zip(drawn, shapes, strict=True)
        ]
        return [Line(*line) for line in zip(drawn, texts, labels, widths, strict=True)]
    labels = place_labels(
        drawn,
        texts,
        [child.kind in ("module", "step") for child in box.children],
        layers.paths,
        [(x, y, x + w, y + h) for x, y, w, h in rects],
        [6.0 if child.repeats > 1 else 0.0 for child in box.children],
        (left - side + 3.0, left + placed.width + side - 3.0),
        flip=flip,
    )
    return [Line(*line) for line in zip(drawn, texts, labels, widths, strict=True)]


def _up(box: Box) -> bool:
    """Whether data flows up in the group."""
    return box.phase == "backward"


def _shapes(box: Box, texts: Sequence[str]) -> list[str]:
    """Edge labels for data that flows to the right: the shape, only on the first edge of each group."""
    labeled: set[Box] = set()
    result: list[str] = []
    for (start, _), text in zip(box.edges, texts, strict=True):
        first = start.kind in ("module", "step") and start not in labeled
        result.append(text.partition(" · ")[0] if first else "")
        labeled.add(start)
    return result


def _gap(scene: Scene, box: Box, across: bool) -> float:
    """Space between layers; for ``across``, wide enough for the shapes on the edges."""
    if not across:
        return LAYER_GAP
    shapes = _shapes(box, [scene.edge_text(values) for values in box.edges.values()])
    return max(LAYER_GAP, *(_wide(shape) + 2 * BESIDE for shape in shapes if shape), 0.0)


def _wide(shape: str) -> float:
    return len(shape) * SIZE * CHAR_WIDTH


def _beside(points: Sequence[tuple[float, float]], shape: str, *, flip: bool) -> tuple[float, float, str]:
    """The position of text along the start of an edge, before transposition, on the side that the edge bends
    away from.
    """
    (x, y), (next_x, _) = points[0], points[1]
    along = BESIDE / 2 + _wide(shape) / 2
    return (x + SIZE if next_x < x - 1 else x - 4.0), (y - along if flip else y + along), shape


def _reaching(
    box: Box, lines: list[Line], frames: dict[Box, Frame], areas: Mapping[Box | None, Sequence[Area]]
) -> list[Line]:
    """The edges of a group, extended into open groups, from the producer of a tensor to its reader, around
    the ``areas`` of boxes.
    """
    flip = _up(box)
    result: list[Line] = []
    for line, ((a, b), values) in zip(lines, box.edges.items(), strict=True):
        ids = {value.id for value in values[:MOST_VALUES]}
        makers = [each for each in _ends(a, ids, frames, leaving=True) if each.box is not a]
        readers = [each for each in _ends(b, ids, frames, leaving=False) if each.box is not b]
        first, last = line.points[0], line.points[-1]
        leaving = [_way(first, each, frames, areas, above=flip)[::-1] for each in makers]
        entering = [_way(last, each, frames, areas, above=not flip) for each in readers]
        points = [*itertools.chain(*leaving[:1]), *line.points, *itertools.chain(*entering[:1])]
        result.append(Line(points, line.label, line.at, line.width))
        result += [Line([*way, first], line.label, None, line.width, tip=False) for way in leaving[1:]]
        result += [Line([last, *way], line.label, None, line.width) for way in entering[1:]]
    return result


def _areas(frames: Sequence[Frame]) -> dict[Box | None, list[Area]]:
    """The rectangles of the boxes in each group."""
    areas: dict[Box | None, list[Area]] = {}
    for frame in frames:
        area = frame.x, frame.y, frame.x + frame.width, frame.y + frame.height
        areas.setdefault(frame.box.parent, []).append(area)
    return areas


def _way(
    start: Point,
    end: Frame,
    frames: Mapping[Box, Frame],
    areas: Mapping[Box | None, Sequence[Area]],
    *,
    above: bool,
) -> list[Point]:
    """The points of a line from the border of an open group to a box inside it, around what is in between."""
    x, y = end.x + end.width / 2, end.y if above else end.y + end.height
    low, high = sorted((start[1], y))
    around = frames.get(end.box.parent) if end.box.parent is not None else None
    between = [area for area in areas.get(end.box.parent, ()) if low < area[1] and area[3] < high]
    if not between or around is None:
        return [(x, y)]

    def free(at: float) -> bool:
        inside = around.x < at < around.x + around.width
        return inside and all(at < left - 4 or at > right + 4 for left, _, right, _ in between)

    sides = [side for left, _, right, _ in between for side in (left - 8, right + 8)]
    found = sorted((at for at in (x, *sides) if free(at)), key=lambda at: abs(at - x))
    if not found:
        return [(x, y)]
    bends = [(found[0], min(area[1] for area in between) - 6), (found[0], max(a[3] for a in between) + 6)]
    return [*(bends if start[1] < y else bends[::-1]), (x, y)]


def _ends(box: Box, ids: set[int], frames: dict[Box, Frame], *, leaving: bool) -> list[Frame]:
    """The innermost drawn producers or readers of the tensors in ``box``; at most :data:`MOST_ENDS`."""
    level = [box]
    while any(frames[each].open and not is_row(each) for each in level):
        inner: list[Box] = []
        for each in level:
            ends = each.leaves if leaving else each.enters
            found = [child for child, noted in ends.items() if not ids.isdisjoint(noted)]
            if not frames[each].open or is_row(each):  # lines do not cross lanes
                inner.append(each)
            else:
                inner += found[:MOST_ENDS]
        level = inner
    return [frames[each] for each in level[:MOST_ENDS]]


def curve(points: Sequence[tuple[float, float]], *, across: bool = False) -> str:
    """An SVG path through ``points``: vertical at both ends of each segment.

    ``across``: transposed, with x and y exchanged.
    """

    def point(x: float, y: float) -> str:
        return f"{y:.1f},{x:.1f}" if across else f"{x:.1f},{y:.1f}"

    x, y = points[0]
    parts = [f"M{point(x, y)}"]
    for nx, ny in points[1:]:
        middle = (y + ny) / 2
        if abs(nx - x) < 0.5:
            parts.append(f"L{point(nx, ny)}")
        else:
            parts.append(f"C{point(x, middle)} {point(nx, middle)} {point(nx, ny)}")
        x, y = nx, ny
    return "".join(parts)
