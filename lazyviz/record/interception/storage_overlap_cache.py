"""Storage overlap cache: what is known about the memory of storages, and which of them overlap."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import ItemsView, Iterator, Sequence, ValuesView
from typing import Any

import torch

from ...torch_internals import private_api
from ...torch_internals.storage_ownership import memory_of


class HolderInfo:
    """What is known about a storage: its memory, and what holds it.

    ``ties`` are the tensors that an unknown object refers to: once they are gone, it has no holder any more.
    ``searches`` is how often they have been searched in this block.
    """

    __slots__ = ("end", "holder", "searches", "memory", "start", "ties")

    def __init__(
        self, tensor: torch.Tensor, holder: str | None, ties: Sequence[Any], searches: int = 0
    ) -> None:
        place = memory_of(private_api.storage_address(tensor))
        self.memory = private_api.MemoryRef(tensor)
        self.start = place.data if place is not None else 0
        self.end = self.start + private_api.TensorBase.untyped_storage(tensor).nbytes()
        self.holder = holder
        self.ties = ties
        self.searches = searches


class HolderCache:
    """The :class:`HolderInfo` of storages, by address and sorted by memory range.

    A loop that reads an array in each iteration has as many entries as it keeps arrays, so a search for
    overlapping memory does not visit all of them.
    """

    def __init__(self) -> None:
        self._by_address: dict[int, HolderInfo] = {}
        self._in_memory: list[tuple[int, int]] = []  # the start of the memory, and the address
        self._longest = 0  # bytes

    def __len__(self) -> int:
        return len(self._by_address)

    def addresses(self) -> list[int]:
        return list(self._by_address)

    def items(self) -> ItemsView[int, HolderInfo]:
        return self._by_address.items()

    def values(self) -> ValuesView[HolderInfo]:
        return self._by_address.values()

    def get(self, address: int) -> HolderInfo | None:
        return self._by_address.get(address)

    def put(self, address: int, info: HolderInfo) -> None:
        """Store ``info`` instead of any earlier one of ``address``."""
        self.remove(address)
        # An interrupt here leaves at most a position without an entry, which nothing finds.
        self._longest = max(self._longest, info.end - info.start)
        insort(self._in_memory, (info.start, address))
        self._by_address[address] = info

    def remove(self, address: int) -> None:
        """Forget what is known about ``address``."""
        info = self._by_address.pop(address, None)
        if info is not None:
            position = info.start, address
            index = bisect_left(self._in_memory, position)
            if self._in_memory[index : index + 1] == [position]:
                del self._in_memory[index]

    def clear(self) -> None:
        self._by_address.clear()
        self._in_memory.clear()
        self._longest = 0

    def overlapping(self, start: int, end: int) -> Iterator[int]:
        """The addresses of storages whose memory overlaps that from ``start`` to ``end`` (bytes)."""
        first = bisect_left(self._in_memory, (start - self._longest, 0))
        last = bisect_left(self._in_memory, (end, 0))
        for _, address in self._in_memory[first:last]:
            info = self._by_address.get(address)
            if info is not None and info.start < end and start < info.end:
                yield address
