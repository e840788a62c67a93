"""Layered graph layout (Sugiyama): layers, order within layers, coordinates.

Python computes layers and orders of each group once (:func:`layers_of`).  Coordinates (:func:`place`) depend
on which boxes are open, so the browser computes them, too (``js/src/model/coordinates-from-layers.ts``); both
are tested with the same golden files.

A group's boxes are numbered from 0.  An edge over several layers passes through *bends*, whose numbers follow
those of the boxes.  Edges that skip layers that other edges connect (a residual, the skips of a U-Net) run
beside all boxes on a *rail*, and move none of them; edges of one box share its rail.  Coordinates are pixels,
y points down; the position of a box is its top left corner.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

LAYER_GAP = 26.0  # between layers
BOX_GAP = 18.0  # between boxes of a layer
BEND_WIDTH = 8.0
BEND_WEIGHT = 4.0  # bends have a lower weight than boxes, so that long edges stay straight
RAIL_GAP = 8.0  # between a rail and its left neighbor
MOST_RAILS = 12  # maximum rails in one group
PLACE_SWEEPS = 6
ORDER_SWEEPS = 4


@dataclass(slots=True)
class Layers:
    """Layers of one group, first to last, each from left to right.

    ``paths[i]`` has the nodes that edge ``i`` passes through: its boxes and the bends between them.
    ``rails`` has the bends of each rail, from the innermost to the outermost; they are last in their layers.
    """

    boxes: int
    layers: list[list[int]]
    paths: list[list[int]]
    rails: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class Placed:
    """Positions of boxes (and bends), and the group's size."""

    x: list[float]
    y: list[float]
    width: float
    height: float
    tops: list[float] = field(default_factory=list)  # top and bottom of each layer
    bottoms: list[float] = field(default_factory=list)


def layers_of(
    count: int,
    edges: Sequence[tuple[int, int]],
    order: Sequence[tuple[int, int]] = (),
    *,
    widest: int = 5,
    close: Sequence[int] = (),
) -> Layers:
    """Layers and orders for ``count`` boxes.

    ``edges`` and ``order`` are pairs (before, after) with ``before < after``; those of ``order`` are not
    drawn. A layer has at most ``widest`` boxes. The boxes in ``close`` (outside tensors, and ops without
    inputs) move down to just above their readers.
    """
    layer = _assign(count, edges, order, widest, set(close))
    layers: list[list[int]] = [[] for _ in range(max(layer, default=-1) + 1)]
    for box in range(count):
        layers[layer[box]].append(box)
    skips = _skips(edges, layer)
    paths, usual = [], []
    bends = count
    for edge in edges:
        start, end = edge
        between = range(layer[start] + 1, layer[end])
        if edge in skips:
            paths.append([start, end])  # the bends of its rail are added below
            continue
        own = range(bends, bends + len(between))
        for at, bend in zip(between, own, strict=True):
            layers[at].append(bend)
        bends += len(own)
        paths.append([start, *own, end])
        usual.append(paths[-1])
    layers = _ordered(layers, usual, bends)
    last: dict[int, int] = {}  # end layer of each rail, by the box where it begins
    for start, end in skips:
        last[start] = max(last.get(start, 0), layer[end])
    rails: dict[int, list[int]] = {}
    for start in sorted(last, key=lambda start: (last[start] - layer[start], start)):
        rails[start] = list(range(bends, bends + last[start] - layer[start] - 1))
        bends += len(rails[start])
        for at, bend in enumerate(rails[start], layer[start] + 1):
            layers[at].append(bend)
    for path, (start, end) in zip(paths, edges, strict=True):
        if (start, end) in skips:
            path[1:1] = rails[start][: layer[end] - layer[start] - 1]
    return Layers(count, layers, paths, list(rails.values()))


def _skips(edges: Sequence[tuple[int, int]], layer: Sequence[int]) -> set[tuple[int, int]]:
    """Skip edges: both the start has a nearer reader and the end has a nearer producer."""
    nearest: dict[int, int] = {}  # number of layers to the first reader, and from the last producer
    closest: dict[int, int] = {}
    for start, end in edges:
        span = layer[end] - layer[start]
        nearest[start] = min(nearest.get(start, span), span)
        closest[end] = min(closest.get(end, span), span)
    found = {
        (start, end)
        for start, end in edges
        if 1 < (span := layer[end] - layer[start]) > nearest[start] and span > closest[end]
    }
    return found if len({start for start, _ in found}) <= MOST_RAILS else set()


def _assign(
    count: int,
    edges: Sequence[tuple[int, int]],
    order: Sequence[tuple[int, int]],
    widest: int,
    close: set[int],
) -> list[int]:
    before: list[list[int]] = [[] for _ in range(count)]
    after: list[list[int]] = [[] for _ in range(count)]
    for start, end in (*edges, *order):
        if not 0 <= start < end < count:
            raise ValueError(f"an edge must go forward between the {count} boxes, not {start} -> {end}")
        before[end].append(start)
        after[start].append(end)
    layer = [0] * count
    room: dict[int, int] = {}
    moved = {box for box in close if not before[box] and after[box]}
    results = {
        box for box in range(count) if before[box] and not after[box] and moved.issuperset(before[box])
    }
    for box in range(count):
        if box in moved or box in results:
            continue  # placed after its readers, or after its producer
        at = max((layer[b] + 1 for b in before[box] if b not in close or before[b]), default=0)
        if any(b in close and not before[b] for b in before[box]):
            at = max(at, 1)
        while room.get(at, 0) >= widest:
            at += 1
        layer[box] = at
        room[at] = room.get(at, 0) + 1
    for box in moved:
        layer[box] = max(min((layer[a] for a in after[box] if a not in results), default=0) - 1, 0)
    for box in results:
        layer[box] = max(layer[b] for b in before[box]) + 1
    return _spread(layer, moved, widest)


def _spread(layer: list[int], moved: set[int], widest: int) -> list[int]:
    """Divide layers that are still too wide into several; boxes that were moved into them go last."""
    by_layer: dict[int, list[int]] = {}
    for box in sorted(range(len(layer)), key=lambda box: box in moved):
        by_layer.setdefault(layer[box], []).append(box)
    result = [0] * len(layer)
    at = 0
    for key in sorted(by_layer):
        members = by_layer[key]
        rows = -(-len(members) // widest)
        size = -(-len(members) // rows)
        for number, box in enumerate(members):
            result[box] = at + number // size
        at += rows
    return result


def _ordered(layers: list[list[int]], paths: list[list[int]], count: int) -> list[list[int]]:
    """Layers ordered by barycenter passes; returns the order with the fewest crossings."""
    up: list[list[int]] = [[] for _ in range(count)]
    down: list[list[int]] = [[] for _ in range(count)]
    for path in paths:
        for start, end in itertools.pairwise(path):
            down[start].append(end)
            up[end].append(start)
    best = [list(layer) for layer in layers]
    fewest = _crossings(best, down)
    current = [list(layer) for layer in layers]
    for sweep in range(ORDER_SWEEPS):
        if fewest == 0:
            break
        downwards = sweep % 2 == 0
        sequence = range(1, len(current)) if downwards else range(len(current) - 2, -1, -1)
        for at in sequence:
            neighbors = up if downwards else down
            place = {box: i for i, box in enumerate(current[at - 1 if downwards else at + 1])}
            scores = {}
            for i, box in enumerate(current[at]):
                known = [place[other] for other in neighbors[box] if other in place]
                scores[box] = (sum(known) / len(known) if known else float(i), i)
            current[at].sort(key=scores.__getitem__)
        crossings = _crossings(current, down)
        if crossings < fewest:
            fewest, best = crossings, [list(layer) for layer in current]
    return best


def _crossings(layers: list[list[int]], down: list[list[int]]) -> int:
    total = 0
    for upper, lower in itertools.pairwise(layers):
        place = {box: i for i, box in enumerate(lower)}
        ends = [place[end] for box in upper for end in sorted(down[box], key=lambda end: place.get(end, 0))]
        for i, end in enumerate(ends):
            total += sum(1 for other in ends[:i] if other > end)
    return total


def place(
    layers: Layers, sizes: Sequence[tuple[float, float]], *, flip: bool = False, gap: float = LAYER_GAP
) -> Placed:
    """Coordinates for boxes of these ``sizes`` (width, height); ``flip`` puts the first layer last.

    ``gap``: between layers.

    The same arithmetic as ``js/src/model/coordinates-from-layers.ts``, operation by operation.
    """
    count = sum(len(layer) for layer in layers.layers)
    width = [sizes[i][0] if i < layers.boxes else BEND_WIDTH for i in range(count)]
    height = [sizes[i][1] if i < layers.boxes else 0.0 for i in range(count)]
    neighbors: tuple[list[list[int]], list[list[int]]] = (
        [[] for _ in range(count)],
        [[] for _ in range(count)],
    )
    on_rails = {bend for rail in layers.rails for bend in rail}
    inner = [[i for i in layer if i not in on_rails] for layer in layers.layers]
    for path in layers.paths:
        for start, end in itertools.pairwise(path):
            if start not in on_rails and end not in on_rails:
                neighbors[0][end].append(start)
                neighbors[1][start].append(end)
    center = [0.0] * count
    for layer in inner:
        at = -sum(width[i] for i in layer) / 2 - BOX_GAP * (len(layer) - 1) / 2
        for i in layer:
            center[i] = at + width[i] / 2
            at += width[i] + BOX_GAP
    for sweep in range(PLACE_SWEEPS):
        downwards = sweep % 2 == 0
        for layer in inner if downwards else reversed(inner):
            _settle(layer, neighbors[0 if downwards else 1], center, width, layers.boxes)
    ends = [max((center[i] + width[i] / 2 for i in layer), default=0.0) for layer in inner]
    level = {i: number for number, layer in enumerate(layers.layers) for i in layer}
    for rail in layers.rails:
        at = max(ends[level[bend]] for bend in rail) + RAIL_GAP + BEND_WIDTH / 2
        for bend in rail:
            center[bend] = at
            ends[level[bend]] = at + BEND_WIDTH / 2
    left = min((center[i] - width[i] / 2 for i in range(count)), default=0.0)
    right = max((center[i] + width[i] / 2 for i in range(count)), default=0.0)
    y = [0.0] * count
    share = _shares(layers, count, flip=flip)
    tops, bottoms = [], []
    top = 0.0
    for layer in reversed(layers.layers) if flip else layers.layers:
        tall = max((height[i] for i in layer), default=0.0)
        for i in layer:
            y[i] = top + (tall - height[i]) * share[i]
        tops.append(top)
        bottoms.append(top + tall)
        top += tall + gap
    x = [center[i] - width[i] / 2 - left for i in range(count)]
    return Placed(x, y, right - left, max(top - gap, 0.0), tops, bottoms)


def _shares(layers: Layers, count: int, *, flip: bool) -> list[float]:
    """The vertical position of each box in its layer: results near their producer, tensors near their
    reader.
    """
    makers = {path[0] for path in layers.paths}
    readers = {path[-1] for path in layers.paths}
    share = [0.5] * count
    for box in makers ^ readers:
        share[box] = float((box in makers) != flip)
    return share


def _settle(
    layer: list[int], neighbors: list[list[int]], center: list[float], width: list[float], boxes: int
) -> None:
    """Move a layer's boxes as close to the middle of their neighbors as order and gaps allow.

    This is the least-squares solution, found by pooling boxes that push against one another.
    """
    offset = 0.0
    pools: list[list[float]] = []  # sum of weight * desired position, sum of weights, number of boxes
    offsets = []
    for position, i in enumerate(layer):
        if position:
            offset += (width[layer[position - 1]] + width[i]) / 2 + BOX_GAP
        offsets.append(offset)
        around = neighbors[i]
        wish = sum(center[n] for n in around) / len(around) if around else center[i]
        weight = BEND_WEIGHT if i >= boxes else 1.0
        pools.append([weight * (wish - offset), weight, 1.0])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            last = pools.pop()
            pools[-1][0] += last[0]
            pools[-1][1] += last[1]
            pools[-1][2] += last[2]
    position = 0
    for total, weight, members in pools:
        for _ in range(int(members)):
            center[layer[position]] = total / weight + offsets[position]
            position += 1
