"""Outside tensors: real tensors that a block uses but did not create; their values, ``.data``, and swaps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..torch_internals import dispatcher_bypasses, private_api
from . import constant_folding
from .interception.observers_of_deferred_writes import UNKNOWN, MemoryHolders, Unexamined
from .lazy_tensor import being_swapped, is_lazy, is_pending, make_pending, make_real
from .provenance.module_calls_and_phases import Scopes
from .recording_state import RecordingState
from .shapes.shape_inference_cache import ShapeCache
from .sync_points import PendingRuns
from .tensor_table import TensorTable, release
from .tracked_storages import (
    TensorRef,
    TrackedNode,
    TrackedStorage,
    TrackedValue,
    drop_reference,
    same_bytes,
    snapshot_of,
)


class NotDeferrable(Exception):
    """An argument cannot be an input of a node; the message says why, ``sparse`` if it has no strides."""

    def __init__(self, reason: str, *, sparse: bool) -> None:
        super().__init__(reason)
        self.sparse = sparse


class Placeholder(Exception):
    """An argument is an uninitialized parameter of a lazy module, so there is no value to wait for."""


class ZeroTensor(Exception):
    """An argument is one of autograd's zero tensors without memory; only views of these reach the kernels."""


def no_storage(device: torch.device) -> str:
    """Why an op with a tensor on ``device`` is run immediately."""
    return f"a tensor on {device.type!r}, where tensors have no storage, cannot be deferred"


class ExternalTensors:
    """How recording handles real tensors that it did not create, and rebinds them to pending ones."""

    def __init__(
        self,
        recording: RecordingState,
        runs: PendingRuns,
        tensors: TensorTable,
        memory_holders: MemoryHolders,
        *,
        scopes: Scopes,
        shapes: ShapeCache,
    ) -> None:
        self._recording, self._runs, self._tensors = recording, runs, tensors
        self._memory_holders, self._scopes, self._shapes = memory_holders, scopes, shapes

    def from_outside(self, tensor: torch.Tensor) -> TrackedValue:
        """The value of a real tensor that recording encounters."""
        value = self._tensors.outside.get(id(tensor))
        if (
            value is not None
            and value.real is not None
            and value.tensor is not None
            and value.tensor() is tensor
            and value.storage.address
            == private_api.storage_address(tensor)  # something has exchanged its memory
        ) and (not value.storage.foreign or (same_bytes(value.real, tensor) and self.is_shared(tensor))):
            return value
        if private_api.is_zero_tensor(tensor):
            raise ZeroTensor
        if not private_api.has_storage(tensor) and tensor.layout == torch.strided:
            raise NotDeferrable(no_storage(tensor.device), sparse=False)
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            sparse = str(tensor.layout).startswith("torch.sparse")
            kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else tensor.layout
            raise NotDeferrable(f"a {kind} tensor cannot be deferred", sparse=sparse)
        graph = self._recording.graph
        assert graph is not None
        address = private_api.storage_address(tensor)
        storage = self._tensors.storages.get(address)
        memory = private_api.TensorBase.untyped_storage(tensor)
        if storage is None:
            storage = TrackedStorage(memory.nbytes(), tensor.device, graph, external=True)
            storage.address = address
            if tensor.is_cuda:
                storage.place = dispatcher_bypasses.storage_data_ptr(memory)  # nothing is pending on it
            storage.role, storage.name = self._scopes.role_of(tensor)
            holder = self._memory_holders.holder(tensor)
            if holder is UNKNOWN and (storage.role is not None or tensor.requires_grad):
                graph.storages.pop()
                raise Unexamined
            storage.foreign = holder is not None  # if it is not known and only read, a copy is enough
            self._tensors.found_outside(tensor, storage, graph)
            if storage.foreign:
                self._find_foreign(tensor)
            # The node reads the snapshot instead, and the original address may pass to other memory.
            if not storage.foreign:
                self._tensors.storages[address] = storage
                earlier = self._tensors.computed.get(address)
                if earlier is not None and earlier.live:
                    storage.continues = earlier
        elif storage.nbytes < memory.nbytes():
            storage.nbytes = memory.nbytes()  # `resize_` has been called
        value = TrackedValue(self._shapes.meta_of(tensor), storage, None)
        value.name = storage.name
        value.real = private_api.alias(tensor)
        if storage.foreign:
            value.real = snapshot_of(value.real)
            value.meta = self._shapes.meta_of(value.real)
            storage.nbytes = value.meta.storage_nbytes
        TensorRef(tensor, value)
        graph.inputs.append(value)
        self._tensors.outside[id(tensor)] = value
        value.given = constant_folding.is_given(tensor)
        if self._recording.batch is not None and (dim := self._recording.batch(tensor)) is not None:
            graph.batch[value] = dim
        return value

    def _find_foreign(self, tensor: torch.Tensor) -> None:
        """Run what is pending on other storages that share memory with ``tensor``."""
        if pending := self.pending_on_overlapping(tensor):
            self._runs.sync("use of memory that also belongs to another storage", pending)
        self._memory_holders.note_part(private_api.TensorBase.untyped_storage(tensor))

    def is_shared(self, tensor: torch.Tensor) -> bool:
        """Whether an object other than a PyTorch tensor may share the tensor's memory."""
        return tensor.layout == torch.strided and self._memory_holders.holder(tensor) is not None

    def is_foreign(self, tensor: torch.Tensor) -> bool:
        """Whether a view of a real tensor must be created immediately, because only a copy of the tensor is
        recorded.
        """
        value = self._tensors.outside.get(id(tensor))
        if value is not None and value.tensor is not None and value.tensor() is tensor:
            return value.storage.foreign
        if tensor.layout != torch.strided or not private_api.has_storage(tensor):
            return False
        if private_api.storage_address(tensor) in self._tensors.storages:
            return False
        holder = self._memory_holders.holder(tensor)
        if holder is UNKNOWN and (tensor.requires_grad or self._scopes.role_of(tensor)[0] is not None):
            raise Unexamined
        return holder is not None

    def pending_on_overlapping(self, tensor: torch.Tensor) -> list[TrackedNode]:
        """Pending nodes on memory that overlaps ``tensor``'s, although it belongs to other storages."""
        nodes: list[TrackedNode] = []
        for address in self._memory_holders.overlapped(tensor):
            if (storage := self._tensors.storages.get(address)) is not None:
                nodes += [*storage.readers, *([storage.writer] if storage.writer is not None else [])]
        return [node for node in nodes if node.state != "done"]

    def rebind(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        """``tensor.data = data`` where either is pending: recorded, keeping ``tensor``'s identity."""
        if not isinstance(data, torch.Tensor):
            private_api.TensorBase.data.__set__(tensor, data)  # this call raises the error
            return
        old = self._tensors.value_of(tensor)
        self._tensors.forget_address(tensor)
        if not is_lazy(data):
            if old is not None and is_lazy(tensor):
                make_real(tensor, data)
                release(old, tensor)
            else:
                private_api.TensorBase.data.__set__(tensor, data)  # type: ignore[attr-defined]
            return
        value: TrackedValue = data._lazyviz
        if value is old:
            return
        make_pending(tensor, value, data)  # it raises an error before anything is recorded
        if old is not None:
            release(old, tensor)
        role, name = self._scopes.role_of(tensor)
        if value.storage.role is None:
            value.storage.role, value.storage.name = role, name

    def swap(self, exchange: Callable[[Any, Any], None], one: torch.Tensor, other: torch.Tensor) -> None:
        """``torch.utils.swap_tensors(one, other)``, which our weak references would prevent."""
        self._recording.view_is_made()
        values = [self._tensors.value_of(one), self._tensors.value_of(other)]
        for tensor, value in zip((one, other), values):
            self._tensors.forget_address(tensor)
            self._tensors.arrivals.forget(tensor)
            drop_reference(tensor)
            if value is not None:
                value.storage.live -= 1
        being_swapped.update((id(one), id(other)))
        try:
            exchange(one, other)
            values.reverse()
        finally:
            being_swapped.difference_update((id(one), id(other)))
            for tensor, value in zip((one, other), values):
                if value is not None:
                    TensorRef(tensor, value)
                    if not is_pending(tensor):
                        (self._tensors.outside if value.node is None else self._tensors.results)[
                            id(tensor)
                        ] = value
