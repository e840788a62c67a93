"""Scratch memory of Fourier transforms on the CPU, by MKL.

It follows ``aten/src/ATen/native/mkl/SpectralOps.cpp``: dimensions that are not transformed are collapsed
into one, which copies an operand if its strides require it; a multidimensional transform to real numbers
first transforms to complex numbers.  Builds without MKL use PocketFFT, which uses the operands' strides, and
whose memory does not come from PyTorch's allocator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ...graph.ir import Node, TensorMeta
from .workspace_rule import Rule, on
from .workspace_size import NOTHING, Events, Need

TABLE: dict[str, Rule] = {}


class _Strided:
    """Sizes, strides and element size of a tensor that a transform reads; a result has the same layout."""

    def __init__(self, shape: Sequence[int], stride: Sequence[int], item: int) -> None:
        self.shape, self.stride, self.item = list(shape), list(stride), item

    @classmethod
    def of(cls, meta: TensorMeta) -> _Strided:
        return cls(meta.shape, meta.stride, meta.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.item

    def batch(self, dims: Sequence[int]) -> list[int]:
        """The dimensions that are not transformed, outermost first."""
        rest = [dim for dim in range(len(self.shape)) if dim not in dims]
        return sorted(rest, key=lambda dim: -self.stride[dim])

    def copied(self, dims: Sequence[int]) -> int:
        """Bytes of the copy in which the other dimensions are collapsed into one, or nothing is expanded."""
        if any(step == 0 and size > 1 for size, step in zip(self.shape, self.stride)):
            return self.nbytes
        inner: int | None = None  # the stride that the next outer dimension needs
        for dim in reversed(self.batch(dims)):
            if self.shape[dim] == 1:
                continue
            if inner is not None and self.stride[dim] != inner:
                return self.nbytes
            inner = self.stride[dim] * self.shape[dim]
        return 0

    def transformed(self, dims: Sequence[int]) -> _Strided:
        """The result: contiguous, with the transformed dimensions innermost."""
        stride, step = [0] * len(self.shape), 1
        for dim in (*reversed(dims), *reversed(self.batch(dims))):
            stride[dim] = step
            step *= self.shape[dim]
        return _Strided(self.shape, stride, self.item)

    def by_stride(self, dims: Sequence[int]) -> list[int]:
        return sorted(dims, key=lambda dim: -self.stride[dim])


def _dims(node: Node) -> list[int]:
    rank = len(node.args[0].meta.shape)
    return [dim % rank for dim in node.args[1]] if rank else []


@on(TABLE, "_fft_c2c", "_fft_r2c")
def _to_complex(node: Node, threads: int) -> Need:
    """The operand with its other dimensions collapsed."""
    dims = _dims(node)
    if not torch.backends.mkl.is_available() or not dims:
        return NOTHING
    nbytes = _Strided.of(node.args[0].meta).copied(dims)
    return Need(nbytes, nbytes, nbytes)


@on(TABLE, "_fft_c2r")
def _to_real(node: Node, threads: int) -> Need:
    """Transform all dimensions but the last to complex numbers, then the last one."""
    dims = _dims(node)
    if not torch.backends.mkl.is_available() or not dims:
        return NOTHING
    operand, result = _Strided.of(node.args[0].meta), node.outputs[0].nbytes
    run = Events()
    if len(dims) > 1:
        first = operand.by_stride(dims[:-1])
        copy = operand.copied(first)
        run.take(operand.nbytes, copy)
        run.free(copy)
        operand = operand.transformed(first)
    run.take(result, operand.copied(dims[-1:]))
    return run.need(result)
