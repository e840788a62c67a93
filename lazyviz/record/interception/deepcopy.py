"""``copy.deepcopy`` and ``copy.copy`` of tensors that are pending or have a pending write: recorded.

PyTorch's own methods copy storages, which have no contents yet.  Here, the copies are recorded as ops:
tensors of one storage share a copy of it, found by the memo; a parameter is a clone, without gradient and
attributes.  Other classes are left to PyTorch's methods, at a sync point.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ...torch_internals import dispatch_level, private_api
from ..intercept_ops_outside_blocks import nodes_before_access
from ..lazy_tensor import class_of, is_pending
from ..tracked_storages import TrackedStorage
from .attribute_dictionary import OURS
from .torch_function import sees_calls

if TYPE_CHECKING:
    from ..tape import Tape


def deep_copy(
    tape: Tape, original: Callable[..., Any], tensor: torch.Tensor, memo: dict[Any, Any]
) -> torch.Tensor | None:
    """The result of ``copy.deepcopy`` for ``tensor``; ``None`` if PyTorch's own method has to compute it."""
    cls = class_of(tensor)
    if cls is torch.Tensor and not tensor.is_leaf:
        refused: torch.Tensor = original(tensor, memo)
        return refused
    if _records(tape) and tensor.layout == torch.sparse_coo:  # clones it, which is recorded
        cloned: torch.Tensor = original(tensor, memo)
        return cloned
    if not _records(tape) or _is_special(tensor):
        return None
    if id(tensor) in memo:
        known: torch.Tensor = memo[id(tensor)]
        return known
    if issubclass(cls, torch.nn.Parameter) and cls.__deepcopy__ is torch.nn.Parameter.__deepcopy__:
        if not nodes_before_access(tape, tensor, write=False):
            return None
        made = cls(tensor.data.clone(memory_format=torch.preserve_format), tensor.requires_grad)
        memo[id(tensor)] = made
        return made
    if cls is not torch.Tensor:
        return None
    with dispatch_level.no_grad():
        copied = _copy_in_common(tape, tensor, memo)
        if copied is None:
            return None
        torch.autograd.graph.increment_version(copied)  # like `set_`
    if tensor.requires_grad:
        copied.requires_grad_()
    if tensor.grad is not None:
        copied.grad = tensor.grad.__deepcopy__(memo)
    attributes = {name: item for name, item in tensor.__dict__.items() if name not in OURS}
    copied.__dict__.update(copy.deepcopy(attributes, memo))
    memo[id(tensor)] = copied
    return copied


def _records(tape: Tape) -> bool:
    recording = tape.recording
    return (
        recording.graph is not None
        and not recording.pauses
        and recording.owner == threading.get_ident()
        and recording.absent is None
        and not torch.is_inference_mode_enabled()
    )


def _is_special(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.is_inference()
        or tensor.is_meta
        or private_api.is_zero_tensor(tensor)
    )


def _copy_in_common(tape: Tape, tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor | None:
    """A tensor in the copy of its storage that all tensors of one ``deepcopy`` share.

    ``None`` if it need not be deferred, or PyTorch has made the copy.
    """
    storage = _storage_of(tape, tensor)
    if storage is None or not _has_to_wait(storage):
        return None
    copies = memo.setdefault("torch", {})
    whole = copies.get(storage)
    shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    if whole is None:
        if storage.address in copies:
            return None
        size, rest = divmod(storage.nbytes, tensor.element_size())
        if rest:
            return None
        with private_api.below_autograd():  # not a view of another tensor, to autograd
            covers = tensor.numel() == size and tensor.is_contiguous()
            flat = tensor if covers else tensor.as_strided((size,), (1,), 0)
            whole = copies[storage] = flat.clone()
        if covers:
            return whole
    with private_api.below_autograd():
        if whole.element_size() == tensor.element_size():
            whole = whole.view(tensor.dtype)
        else:
            count = storage.nbytes // tensor.element_size() * tensor.element_size()
            whole = whole.view(torch.uint8)[:count].view(tensor.dtype)
        return whole.as_strided(shape, stride, offset)


def _has_to_wait(storage: TrackedStorage) -> bool:
    """Whether a storage has no content yet, or not its final content."""
    if storage.external or storage.has_pending_write:
        return storage.has_pending_write
    return storage.graph.nodes[storage.created].state != "done"


def _storage_of(tape: Tape, tensor: torch.Tensor) -> TrackedStorage | None:
    if is_pending(tensor):
        value: Any = tensor._lazyviz  # type: ignore[attr-defined]
        found: TrackedStorage = value.storage
        return found
    return tape.tensors.storages.get(private_api.storage_address(tensor))


def shallow_copy(tape: Tape, tensor: torch.Tensor) -> torch.Tensor | None:
    """The result of ``copy.copy`` for ``tensor``: another tensor on the same storage, with the same
    attributes.
    """
    if not _records(tape) or _is_special(tensor) or tensor._backward_hooks:
        return None
    cls = class_of(tensor)
    if cls is not torch.Tensor and cls is not torch.nn.Parameter:
        return None
    if not nodes_before_access(tape, tensor, write=False):
        return None
    made: Any = private_api.alias(tensor)
    if cls is torch.nn.Parameter:
        made = torch.nn.Parameter(made, tensor.requires_grad)
    else:
        torch.autograd.graph.increment_version(made)  # like `set_`
        made.requires_grad_(tensor.requires_grad)
    made.__dict__.update({name: item for name, item in tensor.__dict__.items() if name not in OURS})
    return made


def copier(tape: Tape) -> Callable[[torch.Tensor], Any]:
    """``Tensor.__copy__``, which ``copy.copy`` calls if it exists."""

    def __copy__(tensor: torch.Tensor) -> Any:
        made = shallow_copy(tape, tensor) if tape.pending and not sees_calls(tensor) else None
        if made is not None:
            return made
        reduced = tensor.__reduce_ex__(4)  # as it does otherwise
        if isinstance(reduced, str):
            return tensor
        return copy._reconstruct(tensor, None, *reduced)  # type: ignore[attr-defined]

    return __copy__
