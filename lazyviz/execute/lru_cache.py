"""Least-recently-used cache: a dictionary that evicts the entry that was unused for longest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, ValuesView
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """Values by key, at most ``limit`` of them, or with a total ``size`` of at most ``limit``.

    Args:
        on_drop: called with the key and the value that are dropped because the cache is full; True keeps
            them for another round.

    Every step is a single dictionary operation, so that an asynchronous exception cannot leave it
    inconsistent.
    """

    def __init__(
        self,
        limit: int,
        *,
        size: Callable[[V], int] | None = None,
        on_drop: Callable[[K, V], bool | None] | None = None,
    ) -> None:
        self.limit = limit
        self.total = 0
        self._size, self._on_drop = size, on_drop
        self._values: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def peek(self, key: K) -> V | None:
        """The value, without marking it as used."""
        return self._values.get(key)

    def get(self, key: K) -> V | None:
        """The value, which becomes the most recently used."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def use(self, key: K) -> None:
        """Mark the value under ``key``, if there is one, as the most recently used."""
        if key in self._values:
            self._values.move_to_end(key)

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key)
        self._values[key] = value
        self.total += self._size(value) if self._size is not None else 1
        while self.total > self.limit:
            oldest, dropped = self._values.popitem(last=False)
            if self._on_drop is not None and self._on_drop(oldest, dropped):
                self._values[oldest] = dropped
            else:
                self.total -= self._size(dropped) if self._size is not None else 1

    def pop(self, key: K) -> V | None:
        """Remove a value and return it, if there is one."""
        value = self._values.pop(key, None)
        if value is not None:
            self.total -= self._size(value) if self._size is not None else 1
        return value

    def clear(self) -> None:
        self._values.clear()
        self.total = 0

    def values(self) -> ValuesView[V]:
        """The values, the least recently used first."""
        return self._values.values()
