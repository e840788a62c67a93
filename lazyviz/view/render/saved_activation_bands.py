"""Bands for saved activations in static pictures, as in ``js/src/graph/saved-activations.ts``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..layout.coordinates import Arrangement, Frame
from ..layout.edge_labels import CHAR_WIDTH, SIZE
from ..scene.saved_activations import kept_json
from ..scene.scene import Scene

MOST = 3
SMALL = 0.01  # minimum fraction of the peak for a band
PER_PIXEL = 2**24  # bytes
STEEPEST = 80.0  # maximum vertical distance in pixels between boxes that are not side by side
WIDTHS = (2.0, 28.0)
BEHIND = 6.0  # further cards of a fold
PILL = 20.0  # its height


@dataclass(frozen=True, slots=True)
class Band:
    """A band between two boxes: both ends, the width in proportion to bytes, and a label if there is room."""

    start: tuple[float, float]
    end: tuple[float, float]
    width: float
    text: str
    pill: tuple[float, float, float] | None  # left, top, width


def saved_activation_bands(scene: Scene, picture: Arrangement) -> list[Band]:
    """The largest bands between boxes that are side by side; none if the forward pass goes to the right."""
    if picture.across:
        return []
    frames = {frame.box.id: frame for frame in picture.frames}
    closed = [frame for frame in picture.frames if not frame.open]
    result: list[Band] = []
    for kept in kept_json(scene):
        start, end = (_visible(kept[key], frames) for key in ("from", "to"))
        if kept["bytes"] < SMALL * scene.plan.peak_bytes or start is None or end is None:
            continue
        if end.x < start.x + start.width:
            continue
        y, last = _levels(start, end)
        if abs(y - last) > STEEPEST or any(_is_between(each, start, end, y, last) for each in closed):
            continue  # behind a box, it would seem to start there
        folded = start.box.repeats > 1 and start.box.calls == 1
        left, right = start.x + start.width + (BEHIND if folded else 0.0), end.x
        width = min(max(kept["bytes"] / PER_PIXEL, WIDTHS[0]), WIDTHS[1])
        pill = _pill(left, right, (y + last) / 2, kept["text"], closed)
        result.append(Band((left, y), (right, last), width, kept["text"], pill))
    return result[:MOST]


def _visible(ids: Sequence[str], frames: dict[str, Frame]) -> Frame | None:
    """The innermost visible box of a chain, which starts with the outermost."""
    shown = None
    for id in ids[1:]:
        shown = frames.get(id)
        if shown is None or not shown.open:
            break
    return shown


def _is_between(other: Frame, start: Frame, end: Frame, y: float, last: float) -> bool:
    """Whether a band from ``start`` to ``end`` at these heights runs behind the box."""
    if other is start or other is end:
        return False
    beside = other.x < end.x and other.x + other.width > start.x + start.width
    return beside and other.y < max(y, last) and other.y + other.height > min(y, last)


def _levels(start: Frame, end: Frame) -> tuple[float, float]:
    """The heights at which a band starts and ends; equal if its boxes are side by side."""
    top, bottom = max(start.y, end.y), min(start.y + start.height, end.y + end.height)
    if bottom > top:
        return (top + bottom) / 2, (top + bottom) / 2
    return start.y + start.height / 2, end.y + end.height / 2


def _pill(
    left: float, right: float, y: float, text: str, closed: Sequence[Frame]
) -> tuple[float, float, float] | None:
    """The position of the label, if no box is there."""
    wide = len(text) * SIZE * CHAR_WIDTH + 14.0
    x, top = (left + right) / 2 - wide / 2, y - PILL / 2
    if not (left < x - 4 and x + wide + 4 < right):
        return None
    taken = any(
        each.x < x + wide + 4
        and each.x + each.width > x - 4
        and each.y < top + 24
        and each.y + each.height > top - 4
        for each in closed
    )
    return None if taken else (x, top, wide)
