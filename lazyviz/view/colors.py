"""Colors of boxes by the bytes that their ops allocate: js/src/graph/colors.ts's scale, on a light page."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .scene.boxes import Box

# Fill and text of each class; a class reaches to four times as much as the one before.  Readable by those
# who see no red or no green, as the scale goes from light to dark.
HEATS = (
    ("#fdfde6", "#000000"),
    ("#edf8b1", "#000000"),
    ("#c7e9b4", "#000000"),
    ("#7fcdbb", "#000000"),
    ("#41b6c4", "#000000"),
    ("#1d91c0", "#000000"),
    ("#225ea8", "#ffffff"),
)


def heat(amount: float, most: float) -> int:
    """The class of ``amount`` on a scale that ends at ``most``: 0 to 6."""
    if amount <= 0 or most <= 0:
        return 0
    return min(max(len(HEATS) - 1 + math.ceil(math.log2(amount / most) / 2 - 1e-9), 0), len(HEATS) - 1)


def largest(groups: Iterable[Box]) -> int:
    """Bytes of the largest box in these groups, where the scale ends."""
    return max((box.nbytes for group in groups for box in group.children if box.kind != "lane"), default=0)
