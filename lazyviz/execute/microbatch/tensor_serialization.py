"""Serialization of tensors: bytes with strides; shared memory is sent only once.

``torch.save`` is not used: it writes whole storages, so that a piece of the batch would take the whole batch
along, and its format contains a pickle, which messages between processes avoid (SECURITY.md). Offsets and
lengths are checked here, so that any damaged message raises the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...torch_internals import private_api
from .pickle_free_encoding import MessageError


@dataclass(frozen=True, slots=True)
class View:
    """The position of a tensor in a buffer; ``offset`` and ``stride`` count elements."""

    buffer: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Packed:
    """Tensors by name: ``buffers`` are (bytes, dtype, recorded device)."""

    buffers: list[tuple[bytearray, torch.dtype, torch.device]]
    views: dict[Any, View]

    @property
    def nbytes(self) -> int:
        return sum(len(buffer) for buffer, _, _ in self.buffers)


def pack(tensors: Mapping[Any, torch.Tensor]) -> Packed:
    """Copies of ``tensors``.

    Call it without active modes and autograd. Raises ``ValueError`` for tensors that are not strided.
    """
    groups: dict[Hashable, list[tuple[Any, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            raise ValueError(f"a tensor of layout {tensor.layout} cannot be sent to a worker")
        tensor = tensor.resolve_conj().resolve_neg()
        if _extent(tensor) > 2 * tensor.numel():  # the memory between its elements is not needed
            tensor = tensor.clone()
        groups.setdefault((private_api.storage_address(tensor), tensor.dtype), []).append((name, tensor))
    result = Packed([], {})
    for members in groups.values():
        start = min(tensor.storage_offset() for _, tensor in members)
        stop = max(tensor.storage_offset() + _extent(tensor) for _, tensor in members)
        first = members[0][1]
        buffer = bytearray((stop - start) * first.itemsize)
        if buffer:
            memory = torch.as_strided(first, (stop - start,), (1,), start)
            torch.frombuffer(buffer, dtype=torch.uint8).copy_(memory.view(torch.uint8))
        for name, tensor in members:
            offset = int(tensor.storage_offset() - start)
            result.views[name] = View(
                len(result.buffers), tuple(tensor.shape), tuple(tensor.stride()), offset
            )
        result.buffers.append((buffer, first.dtype, first.device))
    return result


def unpack(packed: Packed, device: Callable[[torch.device], torch.device]) -> dict[Any, torch.Tensor]:
    """The tensors, in new memory; ``device`` maps their recorded devices.

    Raises :class:`MessageError` for views that are not within their buffers.
    """
    memories = []
    for buffer, dtype, recorded in packed.buffers:
        if len(buffer) % dtype.itemsize:
            raise MessageError(f"{len(buffer)} bytes are not a whole number of elements of {dtype}")
        memory = torch.empty(len(buffer) // dtype.itemsize, dtype=dtype, device=device(recorded))
        if buffer:
            memory.view(torch.uint8).copy_(torch.frombuffer(buffer, dtype=torch.uint8))
        memories.append(memory)
    tensors = {}
    for name, view in packed.views.items():
        if not 0 <= view.buffer < len(memories) or not _lies_in(view, len(memories[view.buffer])):
            raise MessageError(f"{view!r:.200} extends beyond the memory that was sent")
        tensors[name] = torch.as_strided(memories[view.buffer], view.shape, view.stride, view.offset)
    return tensors


def _lies_in(view: View, elements: int) -> bool:
    """Whether a buffer with that many elements contains all elements of ``view``."""
    if len(view.shape) != len(view.stride) or min((view.offset, *view.shape, *view.stride)) < 0:
        return False
    if not all(view.shape):
        return view.offset <= elements
    return view.offset + sum((size - 1) * step for size, step in zip(view.shape, view.stride)) < elements


def _extent(tensor: torch.Tensor) -> int:
    """The number of elements from the tensor's first to its last."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
