"""Edge labels: placed next to their edge, clear of edges, boxes, and other labels.

``js/src/model/edge-labels.ts`` does the same; both are tested with the same golden files.
"""

from __future__ import annotations

from collections.abc import Sequence

Point = tuple[float, float]
Rect = tuple[float, float, float, float]  # left, top, right, bottom

SIZE = 11.0  # font size
CHAR_WIDTH = 0.66  # character width in a shape, relative to the font size: digits, "×" and units are wide
ROOM = 5.0  # minimum space between text and lines
SAMPLES = 8  # sampled points per curve


def place_labels(
    lines: Sequence[Sequence[Point]],
    texts: Sequence[str],
    groups: Sequence[bool],
    paths: Sequence[Sequence[int]],
    boxes: Sequence[Rect],
    behind: Sequence[float],
    bounds: tuple[float, float],
    *,
    flip: bool,
) -> list[tuple[float, float, str] | None]:
    """The middle of each label's baseline and its text, or None if there is no room or no text.

    An op's own second line describes its results, so only results of groups are labeled: once, if all its
    edges have the same label, otherwise at a reader with a single edge. If there is no room for shape and
    bytes, only the shape is written.

    Args:
        lines: the edges as points, which curves join.
        groups: for each box whether it is a group.
        paths: nodes that each edge passes through, with its two boxes at the ends.
        behind: how far the cards of a fold extend below its box.
        bounds: the left and right edge of the surrounding group.
    """
    leaving: dict[int, set[str]] = {}
    arriving: dict[int, int] = {}
    for path, text in zip(paths, texts, strict=True):
        leaving.setdefault(path[0], set()).add(text)
        arriving[path[-1]] = arriving.get(path[-1], 0) + 1
    strokes = [stroke for line in lines for stroke in _strokes(line)]
    taken: list[Rect] = list(boxes)
    done: set[int] = set()
    result: list[tuple[float, float, str] | None] = []
    for line, path, text in zip(lines, paths, texts, strict=True):
        start, end = path[0], path[-1]
        label = None
        if groups[start] and text and start not in done:
            same = len(leaving[start]) == 1
            heights = []
            if same:
                heights.append((line[0], -6.0 if flip else 13.0 + behind[start]))
            if arriving[end] == 1 and (same or groups[end]):
                heights.append((line[-1], 19.0 if flip else -12.0))
            for words in (text, text.partition(" · ")[0]):
                wide = len(words) * SIZE * CHAR_WIDTH
                at = _free(heights, wide, strokes, taken, bounds)
                if at is not None:
                    label = (*at, words)
                    taken.append((at[0] - wide / 2, at[1] - 9.0, at[0] + wide / 2, at[1] + 3.0))
                    if same:
                        done.add(start)
                    break
        result.append(label)
    return result


def _free(
    heights: Sequence[tuple[Point, float]],
    wide: float,
    strokes: Sequence[Rect],
    taken: Sequence[Rect],
    bounds: tuple[float, float],
) -> Point | None:
    for (x, y), down in heights:
        for middle in (x + ROOM + 2.0 + wide / 2, x - ROOM - 2.0 - wide / 2):
            left, right, top, bottom = middle - wide / 2, middle + wide / 2, y + down - 9.0, y + down + 3.0
            if left < bounds[0] or right > bounds[1]:
                continue
            if any(
                left - ROOM < r and right + ROOM > l and top - 2.0 < b and bottom + 2.0 > t
                for l, t, r, b in strokes  # noqa: E741 (left)
            ):
                continue
            if any(left < r + 2.0 and right > l - 2.0 and top < b and bottom > t for l, t, r, b in taken):  # noqa: E741
                continue
            return middle, y + down
    return None


def _strokes(points: Sequence[Point]) -> list[Rect]:
    """The line divided into short pieces, each as the rectangle around it."""
    result: list[Rect] = []
    x, y = points[0]
    for nx, ny in points[1:]:
        px, py = x, y
        for sample in range(1, SAMPLES + 1):
            t = sample / SAMPLES
            bend = t * t * (3.0 - 2.0 * t)
            along = 1.5 * t * (1.0 - t) + t * t * t
            qx, qy = x + (nx - x) * bend, y + (ny - y) * along
            result.append((min(px, qx), min(py, qy), max(px, qx), max(py, qy)))
            px, py = qx, qy
        x, y = nx, ny
    return result
