"""Batch placement in a tensor: DTensor's terms, for pieces of one batch on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from ...graph.ir import TensorMeta


@dataclass(frozen=True, slots=True)
class Part:
    """Part ``index`` of ``count`` of a batch, as ``torch.chunk`` cuts them: only the last is smaller."""

    index: int
    count: int

    def samples(self, total: int) -> int:
        """The samples in this part of a batch of ``total``; 0 if fewer parts contain all of them."""
        most = -(-total // self.count)
        return max(0, min(most, total - self.index * most))

    @property
    def symbol(self) -> str:
        """Its samples as a term of ``"B"``."""
        most = f"ceil(B/{self.count})"
        before = f"{self.index}*{most}" if self.index > 1 else most
        return most if self.index < self.count - 1 or not self.index else f"(B-{before})"


@dataclass(frozen=True, slots=True)
class Shard:
    """The batch is in dimension ``dim``, which has ``outer * (samples / group) * unit`` entries.

    Merged dimensions keep their factors: ``(B, T)`` flattened is ``Shard(0, unit=T)``, ``(T, B)``
    is ``Shard(0, outer=T)``, the first of the two dimensions of a batch seen as ``(B / 4, 4)`` is
    ``Shard(0, group=4)``: pieces then have a multiple of 4 samples.  ``part``: only these samples are there.
    """

    dim: int
    outer: int = 1
    unit: int = 1
    group: int = 1
    part: Part | None = None

    def at(self, dim: int) -> Shard:
        return self if dim == self.dim else replace(self, dim=dim)

    def like(self, other: Shard) -> bool:
        """Whether both split their dimension at the same positions."""
        return self.at(0) == other.at(0)

    def samples(self, total: int) -> int:
        """The number of samples present, of a batch of ``total``."""
        return total if self.part is None else self.part.samples(total)

    def size(self, samples: int) -> int:
        """Entries of the dimension for that many samples."""
        return self.outer * (self.samples(samples) // self.group) * self.unit

    def shape(self, full: Sequence[int], samples: int) -> list[int]:
        """The shape of the part that holds ``samples`` of a tensor of shape ``full``."""
        result = list(full)
        result[self.dim] = self.size(samples)
        return result

    def symbolic(self, full: Sequence[int]) -> tuple[int | str, ...]:
        """The shape ``full`` with the size of the batch as ``"B"``: ``("128*B", 512)``, ``("B/4", 4)``."""
        factor = self.outer * self.unit
        batch = "B" if self.part is None else self.part.symbol
        name = (batch if factor == 1 else f"{factor}*{batch}") + (f"/{self.group}" if self.group > 1 else "")
        return (*full[: self.dim], name, *full[self.dim + 1 :])

    def stride(self, meta: TensorMeta, samples: int) -> list[int]:
        """The strides of a part with the layout of the whole tensor: its order of dimensions, dense."""
        own = meta.stride[self.dim]
        full, part = meta.shape[self.dim], self.size(samples)
        return [
            step * part // full if step > own or (step == own and index < self.dim) else step
            for index, step in enumerate(meta.stride)
        ]

    def nbytes(self, meta: TensorMeta, samples: int) -> int:
        """Bytes of the part's elements."""
        return prod(self.shape(meta.shape, samples)) * meta.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Partial:
    """Each piece has a summand of the value, or what is combined with ``how`` (``"any"``, ``"all"``).

    With ``mean_of``, the total is divided by the total of that output of the same node.
    """

    mean_of: int | None = None
    how: str = "sum"


@dataclass(frozen=True, slots=True)
class Local:
    """Internal state of a kernel that only nodes of the same piece can read."""


Placement = Shard | Partial | Local
"""How a value is spread over the pieces; ``None`` means ``Replicate``: each piece sees all of it."""

PARTIAL = Partial()
LOCAL = Local()


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples ``start`` to ``stop`` of a batch of ``total``."""

    index: int
    start: int
    stop: int
    total: int

    @property
    def samples(self) -> int:
        return self.stop - self.start
