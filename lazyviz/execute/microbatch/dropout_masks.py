"""Dropout masks of a split run: drawn for the whole batch and kept for later pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from ...graph.ir import Node, is_dense


class Masks:
    """Parts of masks, with one bit per element: drawing them again for each piece would take longer."""

    def __init__(self) -> None:
        self._kept: dict[Node, dict[tuple[int, int], _Bits]] = {}

    def keep(self, node: Node, parts: Mapping[tuple[int, int], torch.Tensor]) -> None:
        """Store the parts of a mask, by the samples' start and stop."""
        self._kept[node] = {samples: _Bits.of(part) for samples, part in parts.items()}

    def take(self, node: Node, samples: tuple[int, int]) -> torch.Tensor | None:
        """A part; ``None`` if it was not stored, for example because pieces have been halved since."""
        bits = self._kept.get(node, {}).get(samples)
        return bits.mask() if bits is not None else None

    def drop(self, node: Node) -> None:
        self._kept.pop(node, None)

    def nbytes(self, node: Node) -> int:
        return sum(bits.packed.numel() for bits in self._kept.get(node, {}).values())


class _Bits(NamedTuple):
    packed: torch.Tensor
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, mask: torch.Tensor) -> _Bits:
        if not is_dense(mask.shape, mask.stride()):
            mask = mask.contiguous()
        flat = mask.as_strided((mask.numel(),), (1,), mask.storage_offset()).view(torch.uint8)
        rows = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(8, -1)
        packed = rows[0].clone()
        for row in range(1, 8):
            packed.bitwise_or_(rows[row] << row)
        return cls(packed, mask.shape, mask.stride())

    def mask(self) -> torch.Tensor:
        rows = torch.empty(8, self.packed.numel(), dtype=torch.uint8, device=self.packed.device)
        for row in range(8):
            torch.bitwise_and(self.packed >> row, 1, out=rows[row])
        return rows.view(torch.bool).flatten().as_strided(self.shape, self.stride)
