"""Interned metadata: one object for equal shape, strides, offset, dtype, and device."""

from __future__ import annotations

from typing import Any

import torch

from ...graph.ir import TensorMeta


class MetadataTable:
    """Interns :class:`~lazyviz.graph.ir.TensorMeta`, so that keys of the shape cache compare by identity."""

    def __init__(self) -> None:
        self.entries: dict[Any, TensorMeta] = {}

    def meta_of(self, tensor: torch.Tensor, device: torch.device | None = None) -> TensorMeta:
        flags = int(tensor.is_conj()) | int(tensor.is_neg()) << 1
        place = device or tensor.device
        return self.meta(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, place, flags)

    def meta(
        self, shape: Any, stride: Any, offset: Any, dtype: torch.dtype, device: torch.device, flags: int = 0
    ) -> TensorMeta:
        """The one object for this metadata."""
        key = (shape, stride, offset, dtype, device, flags)
        meta = self.entries.get(key)
        if meta is None:
            meta = self.entries[key] = TensorMeta(
                tuple(shape), tuple(stride), int(offset), dtype, device, flags
            )
        return meta
