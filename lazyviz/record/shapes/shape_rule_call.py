"""Shape rule calls: operator calls in the form that shape rules receive, and the results that they return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...graph.ir import TensorMeta
from ...torch_internals.private_api import OpOverload

Shape = tuple[int, ...]


class New(NamedTuple):
    """A dense result on its own memory: of its size, or of more bytes if the kernel allocates more."""

    shape: Shape
    stride: Shape
    dtype: torch.dtype
    nbytes: int = 0


Made = list[New | None] | None
"""The results of a call that creates tensors, or ``None``: ask PyTorch."""


class Call(NamedTuple):
    """A call of an operator; tensors are values, which have a ``meta``."""

    op: OpOverload
    name: str
    arguments: dict[str, Any]
    inputs: Sequence[Any]

    def meta(self, name: str) -> TensorMeta:
        """The metadata of the tensor argument ``name``."""
        found: TensorMeta = self.arguments[name].meta
        return found

    def optional(self, *names: str) -> list[TensorMeta]:
        """The metadata of the given ones among these arguments."""
        given = [self.arguments.get(name) for name in names]
        return [value.meta for value in given if value is not None]

    def wanted(self) -> Sequence[bool]:
        mask: Sequence[bool] = self.arguments["output_mask"]
        return mask


Rule = Callable[[Call], Made]

FLOATS = (torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32)
COMMON = (*FLOATS, *INTEGERS, torch.bool, torch.uint8, torch.bfloat16, torch.float16)  # any memory has them


def one_dtype(metas: Sequence[TensorMeta], allowed: Sequence[torch.dtype] = FLOATS) -> torch.dtype | None:
    """The common dtype of all of them, if it is in the set."""
    dtype = metas[0].dtype
    if dtype not in allowed or any(meta.dtype != dtype for meta in metas):
        return None
    return dtype


def contiguous(shape: Sequence[int]) -> Shape:
    """The strides of a new tensor."""
    stride, step = [0] * len(shape), 1
    for at in range(len(shape) - 1, -1, -1):
        stride[at] = step
        step *= shape[at] or 1
    return tuple(stride)


def new(shape: Sequence[int], dtype: torch.dtype) -> New:
    return New(tuple(shape), contiguous(shape), dtype)


def is_plain(*metas: TensorMeta) -> bool:
    """Whether the strides are the default ones, also in dimensions of size 1: no other format matches."""
    return all(meta.stride == contiguous(meta.shape) for meta in metas)


def are_sizes(sizes: Any, least: int = 1) -> bool:
    return type(sizes) in (list, tuple) and all(type(size) is int and size >= least for size in sizes)


def broadcast(shapes: Sequence[Shape]) -> Shape | None:
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return first
    rank = max(map(len, shapes))
    result = [1] * rank
    for shape in shapes:
        for at, size in enumerate(shape, rank - len(shape)):
            if size != 1 and result[at] != size:
                if result[at] != 1:
                    return None
                result[at] = size
    return tuple(result)
