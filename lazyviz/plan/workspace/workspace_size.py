"""Workspace size of a kernel: what it allocates and frees while it runs."""

from __future__ import annotations

from typing import NamedTuple


class Need(NamedTuple):
    """Bytes that a kernel holds at most besides its operands and results: best estimate and range."""

    nbytes: int
    low: int
    high: int

    @property
    def exact(self) -> bool:
        return self.low == self.high


NOTHING = Need(0, 0, 0)


class Workspace(NamedTuple):
    """Size of a scratchpad: best estimate, at least, at most."""

    nbytes: int
    low: int
    high: int


class Events:
    """The allocations and frees inside of a kernel, in order; their highest sum is what it needs."""

    __slots__ = ("now", "peak")

    def __init__(self) -> None:
        self.now = [0, 0, 0]
        self.peak = [0, 0, 0]

    def take(self, *sizes: int | Workspace) -> None:
        for size in sizes:
            add = size if isinstance(size, Workspace) else (size, size, size)
            for i in range(3):
                self.now[i] += add[i]
                self.peak[i] = max(self.peak[i], self.now[i])

    def free(self, *sizes: int | Workspace) -> None:
        for size in sizes:
            less = size if isinstance(size, Workspace) else (size, size, size)
            for i in range(3):
                self.now[i] -= less[i]

    def need(self, results: int) -> Need:
        """The need beyond ``results``, the bytes of the node's outputs, which are counted separately."""
        beyond = [max(peak - results, 0) for peak in self.peak]
        return Need(*beyond)
