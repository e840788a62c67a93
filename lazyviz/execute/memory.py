"""What a run holds: counted from the real sizes of its tensors as they come and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .. import _torch
from ..graph.ir import Storage
from ..plan.alive import Category
from ..plan.projection import Peak, highest
from ..record.storage import TrackedNode


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
