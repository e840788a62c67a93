"""Storage of a planned tensor: its size can be read and changed, but not its contents.

FSDP2 frees and allocates the memory of all-gathered parameters by resizing their storage, while all views of
it and all tensors saved by autograd keep referring to it.
"""

from __future__ import annotations

from typing import Any

import torch

from ...graph.ir import Resize
from ...torch_internals import fake_cuda_devices
from ..sync_points import TRACE_ELSEWHERE, AbsentDeviceError
from ..tape import Tape
from ..tracked_storages import TrackedStorage

SHARD_BY_PARAMETER = (
    "If FullyShardedDataParallel asks for it, plan with torch.distributed.fsdp.fully_shard instead, which "
    "shards each parameter by itself."
)


class PlannedStorage:
    """Replaces ``torch.UntypedStorage`` for memory that will never have content."""

    def __init__(self, tape: Tape, storage: TrackedStorage, device: torch.device) -> None:
        self._tape, self._storage, self.device = tape, storage, device

    def nbytes(self) -> int:
        resized = self._storage.resized
        return resized[-1].nbytes if resized else self._storage.nbytes

    size = __len__ = nbytes

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def resizable(self) -> bool:
        return True

    def element_size(self) -> int:
        return 1

    @property
    def _cdata(self) -> int:
        return -self._storage.id - 1  # not the address of any storage

    def resize_(self, size: int) -> PlannedStorage:
        """From the next op on, it has ``size`` bytes; to an allocator, it is other memory."""
        storage, graph = self._storage, self._tape.recording.graph
        if size == self.nbytes():
            return self
        if graph is None:
            raise AbsentDeviceError("the storage of a planned tensor can be resized only in a lazy block")
        before = storage.resized or (Resize(0, storage.created, storage.nbytes),)
        storage.resized = (*before, Resize(id(graph), len(graph.nodes), size))
        storage.nbytes = max(storage.nbytes, size)
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlannedStorage) and other._storage is self._storage

    def __hash__(self) -> int:
        return hash(self._storage)

    def __repr__(self) -> str:
        return f"<storage of {self.nbytes()} bytes on {self.device}, pending>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not (
            hasattr(torch.UntypedStorage, name) or hasattr(torch.TypedStorage, name)
        ):
            raise AttributeError(name)
        text = f"{name} of a storage that is only planned: only its size can be read and changed."
        if name in ("_size", "_resize_"):
            text += f" {SHARD_BY_PARAMETER}"
        if name == "_fix_weakref":  # accessed when fake tensors are created
            text += f" {TRACE_ELSEWHERE}"
        raise AbsentDeviceError(text)


def planned_storage(tape: Tape, tensor: torch.Tensor) -> PlannedStorage | None:
    """The replacement for the storage of a tensor that nothing here can compute; ``None`` for any other
    tensor.
    """
    value = tensor.__dict__.get("_lazyviz")
    if value is None:
        return None
    if tape.recording.world is None and value.meta.device not in fake_cuda_devices.STAND_INS:
        return None
    return PlannedStorage(tape, value.storage, value.meta.device)
