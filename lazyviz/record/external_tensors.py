"""The user's real tensors: the value each has in the record, and what rebinds them to pending ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..torch_internals import private_api, tensor_memory
from ..torch_internals.private_api import OpOverload
from . import constant_folding
from .interception.memory_holders import UNKNOWN, Unexamined
from .lazy_tensor import LazyTensor, is_pending, make_pending, make_real
from .pending_ops import PendingOps, release
from .storage import TensorRef, TrackedStorage, TrackedValue, let_go, same_bytes, snapshot_of


class NotDeferrable(Exception):
    """An argument that no node can take; the message says why, ``sparse`` whether it has no strides."""

    def __init__(self, reason: str, *, sparse: bool) -> None:
        super().__init__(reason)
        self.sparse = sparse


class Placeholder(Exception):
    """An argument is a lazy module's parameter that has no shape yet: there is nothing to wait for."""


class ZeroTensor(Exception):
    """An argument is one of autograd's zeros without memory; only views of such reach the kernels' level."""


class ExternalTensors(PendingOps):
    """What recording knows of tensors that it did not make."""

    def record_view(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a view that is taken outside of a block."""
        raise NotImplementedError

    def from_outside(self, tensor: torch.Tensor) -> TrackedValue:
        """The value of a real tensor that recording meets."""
        value = self.outside.get(id(tensor))
        if (
            value is not None
            and value.real is not None
            and value.tensor is not None
            and value.tensor() is tensor
            and value.storage.address
            == private_api.storage_address(tensor)  # whatever has exchanged its memory
        ) and (not value.storage.foreign or (same_bytes(value.real, tensor) and self.is_shared(tensor))):
            return value
        if private_api.is_zero_tensor(tensor):
            raise ZeroTensor
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            sparse = str(tensor.layout).startswith("torch.sparse")
            raise NotDeferrable(f"a {tensor.layout} tensor cannot be deferred", sparse=sparse)
        graph = self.graph
        assert graph is not None
        address = private_api.storage_address(tensor)
        storage = self.storages.get(address)
        memory = private_api.TensorBase.untyped_storage(tensor)
        if storage is None:
            storage = TrackedStorage(memory.nbytes(), tensor.device, graph, external=True)
            storage.address = address
            if tensor.is_cuda:
                storage.place = tensor_memory.storage_data_ptr(memory)  # which waits for nothing
            storage.role, storage.name = self.scopes.role_of(tensor)
            holder = self.memory_holders.holder(tensor)
            if holder is UNKNOWN and (storage.role is not None or tensor.requires_grad):
                graph.storages.pop()
                raise Unexamined
            storage.foreign = holder is not None  # of what is only read a copy does, if that is not known
            if storage.foreign and (owed := self.owed_to_overlapping(tensor)):
                self.sync("use of memory that is another storage's, too", owed)
            if not storage.foreign:  # of that a snapshot is read, and its address may pass to other memory
                self.storages[address] = storage
                earlier = self.met.get(address)
                if earlier is not None and earlier.live:
                    storage.continues = earlier
        elif storage.nbytes < memory.nbytes():
            storage.nbytes = memory.nbytes()  # `resize_` has been there
        value = TrackedValue(self.shapes.meta_of(tensor), storage, None)
        value.name = storage.name
        value.real = private_api.alias(tensor)
        if storage.foreign:
            value.real = snapshot_of(value.real)
            value.meta = self.shapes.meta_of(value.real)
            storage.nbytes = value.meta.storage_nbytes
        TensorRef(tensor, value)
        graph.inputs.append(value)
        self.outside[id(tensor)] = value
        value.given = constant_folding.is_given(tensor)
        if self.batch is not None and (dim := self.batch(tensor)) is not None:
            graph.batch[value] = dim
        return value

    def is_shared(self, tensor: torch.Tensor) -> bool:
        """Whether somebody besides PyTorch may show the tensor's memory."""
        return tensor.layout == torch.strided and self.memory_holders.holder(tensor) is not None

    def is_foreign(self, tensor: torch.Tensor) -> bool:
        """Whether a view of a real tensor is to be made at once, since only a copy of it is recorded."""
        value = self.outside.get(id(tensor))
        if value is not None and value.tensor is not None and value.tensor() is tensor:
            return value.storage.foreign
        if tensor.layout != torch.strided or private_api.storage_address(tensor) in self.storages:
            return False
        holder = self.memory_holders.holder(tensor)
        if holder is UNKNOWN and (tensor.requires_grad or self.scopes.role_of(tensor)[0] is not None):
            raise Unexamined
        return holder is not None

    def forget_outside(self, tensor: torch.Tensor) -> TrackedValue | None:
        """Before ``tensor``'s metadata may change: what was recorded shows its old form."""
        value = self.forget_place(tensor)
        if value is not None:
            release(value)
        return value

    def forget_place(self, tensor: torch.Tensor) -> TrackedValue | None:
        """``tensor`` shows other memory from now on; the value that it was, if it was recorded as outside."""
        made = self.made.pop(id(tensor), None)
        return self.outside.pop(id(tensor), made)

    def value_of(self, tensor: torch.Tensor) -> TrackedValue | None:
        """The value recorded for a tensor, pending or from outside."""
        value = tensor.__dict__.get("_lazyviz")
        if value is None:
            for values in (self.outside, self.made):
                value = values.get(id(tensor))
                if value is not None and value.tensor is not None and value.tensor() is tensor:
                    return value
            return None  # or the id of one that has died since
        return value

    def rebind(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        """``tensor.data = data`` where either is pending: recorded, keeping ``tensor``'s identity."""
        if not isinstance(data, torch.Tensor):
            private_api.TensorBase.data.__set__(tensor, data)  # which refuses it
            return
        old = self.value_of(tensor)
        self.forget_place(tensor)
        if type(data) is not LazyTensor:
            if old is not None and type(tensor) is LazyTensor:
                make_real(tensor, data)
                release(old)
            else:
                private_api.TensorBase.data.__set__(tensor, data)  # type: ignore[attr-defined]
            return
        source: TrackedValue = data._lazyviz
        value = TrackedValue(source.meta, source.storage, source.node, source.index)
        make_pending(tensor, value, data)  # refuses first, before anything is noted
        if old is not None:
            release(old)
        role, name = self.scopes.role_of(tensor)
        if source.storage.role is None:
            source.storage.role, source.storage.name = role, name
        if source.node is not None:
            source.node.outputs.append(value)
            shadow = source.storage.shadow
            if shadow is not None and source in shadow.tensors:
                shadow.tensors[value] = shadow.tensors[source]

    def swap(self, exchange: Callable[[Any, Any], None], one: torch.Tensor, other: torch.Tensor) -> None:
        """``torch.utils.swap_tensors(one, other)``, which our weak references would forbid."""
        self.view_is_made()
        values = [self.value_of(one), self.value_of(other)]
        for tensor, value in zip((one, other), values):
            self.forget_place(tensor)
            let_go(tensor)
            if value is not None:
                value.tensor = None
                value.storage.live -= 1
        try:
            exchange(one, other)
            values.reverse()
        finally:
            for tensor, value in zip((one, other), values):
                if value is not None:
                    TensorRef(tensor, value)
                    if not is_pending(tensor):
                        (self.outside if value.node is None else self.made)[id(tensor)] = value
