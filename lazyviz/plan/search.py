"""Searching for the largest size that fits, where asking for one size takes a plan."""

from __future__ import annotations

from collections.abc import Callable


def largest_fitting(start: int, most: int, ask: Callable[[int], tuple[bool, int]], room: int) -> int:
    """The largest size up to ``most`` that fits; 0 if none does.

    ``ask`` says of a size whether it fits and what it needs, of which ``room`` is there.  Needs are
    nearly straight lines in the size, bent upwards at most (:func:`lazyviz.plan.split.scaled`): the next
    size asked for is where the line through what is known meets the room.  The allocator's steps make
    that miss, so every third one is in the middle.
    """
    low, need_low = 0, 0
    high, turn = min(start, most), 0
    while True:
        fits, need_high = ask(high)
        if not fits:
            break
        if high >= most:
            return high
        grows = (need_high - need_low) / (high - low)
        low, need_low = high, need_high
        further = (room - need_low) / grows if grows > 0 else low
        # A line through the origin is too flat where something is there without any sample.
        high = min(low + max(int(min(further, 64.0 * low)), low // 8) + 1, most)
    while high - low > 1:
        turn += 1
        middle = (low + high) // 2
        if turn % 3 and need_low < room < need_high:
            middle = low + int((room - need_low) * (high - low) / (need_high - need_low))
            middle = min(max(middle, low + 1), high - 1)
        fits, need = ask(middle)
        if fits:
            low, need_low = middle, need
        else:
            high, need_high = middle, need
    return low
