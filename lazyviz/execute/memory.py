"""What a run holds: counted from the real sizes of its tensors as they come and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .. import _torch
from ..graph.ir import Storage
from ..plan.alive import Category
from ..plan.projection import Peak, highest
from ..record.storage import TrackedNode, TrackedStorage
from .report import Timeline
from .stretch import Stretch

Timelines = Mapping[int, Sequence[tuple[int, int]]]
"""By id of a graph: positions of its nodes as they ran, each with the most bytes held while it did."""


class ResidentMemory:
    """Bytes of the storages that the run holds, on all devices; what else kernels take is not seen."""

    def __init__(self, nodes: Sequence[TrackedNode]) -> None:
        self._sizes: dict[Storage, int] = {}  # by origin: of memory met again after a sync point once
        self._names: dict[Storage, set[Storage]] = {}  # the record's storages for each
        for node in nodes:
            for value in node.inputs:
                if value.real is not None:
                    origin = value.storage.origin
                    self._sizes[origin] = value.storage.nbytes
                    self._names.setdefault(origin, set()).add(value.storage)
        self._changes: list[list[tuple[Storage, int]]] = [list(self._sizes.items())]
        self._frees: list[tuple[Storage, int]] = []
        self.now = sum(self._sizes.values())
        self.peak = self.now
        self._steps: list[TrackedNode | None] = []  # of the timeline, and the most held during each
        self._marks: list[int] = []
        self._high = self.now

    def step(self, node: TrackedNode | None = None, *, shown: bool = True) -> None:
        """The next node runs: what was freed before is gone.

        The timeline leaves out one that is not ``shown``; without a ``node`` it counts to the next one.
        """
        self._changes.append(self._frees)
        self._frees = []
        if node is not None:
            if self._steps:
                self._marks.append(self._high)
            self._steps.append(node if shown else None)
            self._high = self.now

    def timeline(self) -> list[tuple[TrackedNode, int]]:
        """The nodes in the order in which they ran, each with the most bytes held while it did."""
        marks = zip(self._steps, [*self._marks, self._high])
        return [(node, nbytes) for node, nbytes in marks if node is not None]

    def timelines(self) -> Timelines:
        """The timeline of each graph that nodes are of."""
        result: dict[int, list[tuple[int, int]]] = {}
        for node, held in self.timeline():
            result.setdefault(id(node.graph), []).append((node.index, held))
        return result

    def levels(self, storages: Sequence[TrackedStorage]) -> Levels:
        """What came and went, for another run of the same stretch, whose storages these are."""
        places: dict[Storage, int] = {}
        for place, storage in enumerate(storages):
            places.setdefault(storage, place)
            places.setdefault(storage.origin, place)
        changes, now, after = [], 0, []
        for step, following in zip(self._changes, [*self._changes[1:], self._frees]):
            changes.append([(places[storage], nbytes) for storage, nbytes in step])
            for _, nbytes in step:
                now += nbytes
            left = now
            for _, nbytes in following:  # what is freed after a node is noted with the next one
                if nbytes < 0:
                    left += nbytes
            after.append(left)
        return Levels(changes, [*self._marks, self._high], after, self.peak)

    def _grown(self) -> None:
        if self.now > self._high:
            self._high = self.now
            if self.now > self.peak:
                self.peak = self.now

    def beside(self, storage: Storage, size: int) -> None:
        """``size`` bytes more, or less, beside ``storage`` itself: of a piece, or made once more."""
        if size > 0:
            self._changes[-1].append((storage, size))
        else:
            self._frees.append((storage, size))
        self.now += size
        self._grown()

    def made(self, storage: Storage, real: torch.Tensor) -> None:
        size = _torch.TensorBase.untyped_storage(real).nbytes()
        more = size - self._sizes.get(storage, 0)  # a sum of pieces is there before it is handed over
        self._sizes[storage] = size
        self._names[storage] = {storage}
        self._changes[-1].append((storage, more))
        self.now += more
        self._grown()

    def resized(self, storage: Storage, real: torch.Tensor) -> None:
        """``out=`` may have grown what it was given."""
        origin = storage.origin
        if (before := self._sizes.get(origin)) is None:
            return
        size = self._sizes[origin] = _torch.TensorBase.untyped_storage(real).nbytes()
        if size != before:
            self._changes[-1].append((origin, size - before))
            self.now += size - before
            self._grown()

    def freed(self, storage: Storage) -> None:
        origin = storage.origin
        names = self._names.get(origin, set())
        names.discard(storage)
        if names:
            return
        size = self._sizes.pop(origin, 0)
        self._frees.append((origin, -size))
        self.now -= size

    def peak_on(self, device: torch.device, categories: Mapping[Storage, Category]) -> Peak:
        """The peak of one device, and what it was for."""
        changes = [
            [(storage, nbytes) for storage, nbytes in step if storage.device == device]
            for step in self._changes
        ]
        return highest(device, changes, categories)


@dataclass(frozen=True)
class Levels:
    """What a run of a stretch held, with its storages by number.

    ``changes`` are what came and went before the first node and at each of them, ``marks`` the most that was
    held during each node, ``after`` what was left after it (first: before all of them), ``peak`` the most.
    """

    changes: Sequence[Sequence[tuple[int, int]]]
    marks: Sequence[int]
    after: Sequence[int]
    peak: int


class KnownMemory:
    """What a run holds of which every allocation is known; as :class:`ResidentMemory`, which see."""

    def __init__(self, levels: Levels, stretch: Stretch, held: Peak | None) -> None:
        self._levels, self._stretch, self._held = levels, stretch, held
        self._finished = len(stretch.nodes)
        self.peak = levels.peak
        self.now = levels.after[0]

    def reach(self, count: int) -> None:
        """So many nodes have run."""
        self.now = self._levels.after[count]

    def stop(self, count: int) -> None:
        """No more than so many nodes have run; the next one may have been tried."""
        self._finished = count + 1
        self.reach(count)
        self.peak = max([self._levels.after[0], *self._levels.marks[: count + 1]])

    def timelines(self) -> Timelines:
        nodes, marks = self._stretch.nodes[: self._finished], self._levels.marks
        if len(self._stretch.graphs) == 1:
            return {id(nodes[0].graph): Timeline([node.index for node in nodes], marks)}
        result: dict[int, list[tuple[int, int]]] = {}
        for node, held in zip(nodes, marks):
            result.setdefault(id(node.graph), []).append((node.index, held))
        return result

    def peak_on(self, device: torch.device, categories: Mapping[Storage, Category]) -> Peak:
        if self._held is not None:
            return self._held
        storages = self._stretch.storages
        changes = [
            [(storages[place], nbytes) for place, nbytes in step if storages[place].device == device]
            for step in self._levels.changes
        ]
        return highest(device, changes, categories)


Memory = ResidentMemory | KnownMemory
