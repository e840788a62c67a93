"""Reuse distances: how much memory a program touches between two accesses to the same memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...graph.ir import Node, Storage, Value
from .bytes_and_launches import touched


class Access(NamedTuple):
    """An operand of an op: the bytes that it covers, and its reuse ``distance``, the bytes touched since the
    last access to them, including its own; the distance determines which cache they are in.

    ``written``: whether the op creates it, reusing memory freed by a tensor of the same size if possible.
    """

    nbytes: int
    distance: int
    written: bool = False


def accesses(nodes: Sequence[Node]) -> list[list[Access]]:
    """The operands of each op, in a loop that runs ``nodes`` again and again.

    No distance exceeds the memory in use at the peak: an allocator that reuses memory touches no more.
    """
    return _Reuse(nodes).walk(nodes)


class _Reuse:
    def __init__(self, nodes: Iterable[Node]) -> None:
        self.touched = 0
        self.last: dict[Storage, int] = {}
        """For each storage, the bytes touched until its last access."""
        self.free: dict[int, list[int]] = {}
        """The same for freed memory, by size."""
        storages = {value.storage.origin: None for node in nodes for value in (*node.inputs, *node.outputs)}
        self.dropped = sorted(
            (each for each in storages if each.dropped is not None and not each.external),
            key=lambda each: each.dropped or 0,
            reverse=True,
        )
        self.footprint = _peak(storages)

    def walk(self, nodes: Sequence[Node]) -> list[list[Access]]:
        return [self._access(node) for node in nodes]

    def _access(self, node: Node) -> list[Access]:
        while self.dropped and (self.dropped[-1].dropped or 0) <= node.index:
            storage = self.dropped.pop()
            if (last := self.last.pop(storage, None)) is not None:
                self.free.setdefault(storage.nbytes, []).append(last)
        seen: dict[Storage, tuple[Value, int, bool]] = {}
        for value in (*node.inputs, *node.outputs):
            storage = value.storage.origin
            if storage in seen:
                continue
            created = storage not in self.last and storage.created == node.index
            left = self.free.get(storage.nbytes) if created else None
            seen[storage] = value, left.pop() if left else self.last.get(storage, -1), created
        sizes = {storage: touched(value.meta) for storage, (value, _, _) in seen.items()}
        self.touched += sum(sizes.values())
        self.last.update(dict.fromkeys(seen, self.touched))
        found = [
            Access(sizes[storage], self._distance(last), created)
            for storage, (_, last, created) in seen.items()
        ]
        # In place, the op writes what it has just read.
        again = {value.storage.origin for value in node.outputs} & set(sizes) if node.writes else ()
        return found + [Access(sizes[each], sizes[each]) for each in again]

    def _distance(self, last: int) -> int:
        distance = self.touched - last if last >= 0 else self.footprint
        return min(distance, self.footprint)


def _peak(storages: Iterable[Storage]) -> int:
    """The largest number of bytes that exist at the same time."""
    changes: list[tuple[int, int]] = []
    for storage in storages:
        changes.append((-1 if storage.external else storage.created, storage.nbytes))
        if storage.dropped is not None and not storage.external:
            changes.append((storage.dropped, -storage.nbytes))
    now = peak = 0
    for _, change in sorted(changes):
        now += change
        peak = max(peak, now)
    return peak
