"""Largest fitting size: the search for it, with one plan per trial."""

from __future__ import annotations

from collections.abc import Callable


class TimeIsUp(Exception):
    """The time for the search for the largest batch is over; ``samples`` are known to fit."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.samples = samples


def largest_fitting(
    start: int,
    most: int,
    ask: Callable[[int], tuple[bool, int]],
    room: int,
    *,
    too_big: int | None = None,
    alike: Callable[[int, int], bool] = int.__eq__,
) -> int:
    """The largest size up to ``most`` that fits; 0 if none does.

    ``ask`` returns whether a size fits, and the bytes that it needs; ``room`` bytes are available. The bytes
    are nearly a linear, or else a convex, function of the size
    (:func:`lazyviz.plan.batch.split_plan.scaled`), so the next size is found by linear interpolation between
    known sizes. Because the allocator rounds sizes up, every third step bisects the interval instead.
    ``too_big``: the bytes for size ``most + 1``, if it is known not to fit; otherwise ``start`` is tried
    first. ``alike`` returns whether two sizes are equally good.
    """
    low, need_low = 0, 0
    high, turn = min(start, most), 0
    need_high = 0
    if too_big is not None:
        high, need_high = most + 1, too_big
    while too_big is None:
        fits, need_high = ask(high)
        if not fits:
            break
        if high >= most:
            return high
        grows = (need_high - need_low) / (high - low)
        low, need_low = high, need_high
        further = (room - need_low) / grows if grows > 0 else low
        # A line through the origin is too flat if some memory is needed without any sample.
        high = min(low + max(int(min(further, 64.0 * low)), low // 8) + 1, most)
    while not alike(low, high - 1):
        turn += 1
        middle = (low + high) // 2
        if not low:
            middle = 1  # memory that does not depend on samples
        elif turn % 3 and need_low < room < need_high:
            middle = low + int((room - need_low) * (high - low) / (need_high - need_low))
            middle = min(max(middle, low + 1), high - 1)
        fits, need = ask(middle)
        if fits:
            low, need_low = middle, need
        else:
            high, need_high = middle, need
    return low


def fewest_pieces(blocks: int, ask: Callable[[int, int], tuple[bool, int]], room: int, too_big: int) -> int:
    """The fewest pieces of ``blocks`` that fit, from 2; as many as blocks if none do.

    ``ask`` is the callback of :func:`largest_fitting`, called with the sizes of the first two pieces;
    ``too_big`` is the memory that the whole batch needs.
    """

    def pieces(first: int) -> int:
        return -(-blocks // max(first, 1))

    first = largest_fitting(
        1,
        blocks - 1,
        lambda first: ask(first, min(first, blocks - first)),
        room,
        too_big=too_big,
        alike=lambda one, other: pieces(one) == pieces(other),
    )
    found = pieces(first)
    while found > 2:  # fewer may fit whose second piece is smaller than the first
        least, more = divmod(blocks, found - 1)
        if not ask(least + (more > 0), least + (more > 1))[0]:
            break
        found -= 1
    return found
