"""The op that PyTorch rejected while a block was recorded, and the sizes that do not match."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .ir import RejectedOp

Shapes = Sequence[tuple[int, ...]]
Marks = list[set[int]]  # dimensions of each shape

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "addbmm")
_WITH_ADDEND = ("addmm", "addmv", "baddbmm")
# Ops without the tag of elementwise ops whose operands are broadcast.
_BROADCAST = (
    "copy_",
    "masked_fill",
    "masked_fill_",
    "native_layer_norm",
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
)


def clashes(rejected: RejectedOp) -> Marks:
    """For each input, the dimensions whose sizes do not match those of another input; empty if unknown."""
    shapes = [tuple(value.meta.shape) for value in rejected.inputs]
    marks: Marks = [set() for _ in shapes]
    if rejected.name in _PRODUCTS:
        _products(shapes, marks, addend=rejected.name in _WITH_ADDEND)
    elif rejected.name == "convolution":
        _convolution(rejected, shapes, marks)
    elif rejected.name == "cat":
        _equal(shapes, marks, but=rejected.argument("dim"))
    elif rejected.name == "stack":
        _equal(shapes, marks)
    elif rejected.name == "index":
        _broadcast(shapes[1:], marks[1:])  # of the indices
    elif torch.Tag.pointwise in rejected.op.tags or rejected.name in _BROADCAST:
        _broadcast(shapes, marks)
    return marks


def _products(shapes: Shapes, marks: Marks, *, addend: bool) -> None:
    """The last two operands are multiplied; any operand before them is added, broadcast to the product."""
    if len(shapes) < 2 or not shapes[-2] or not shapes[-1]:
        return
    one, other = shapes[-2:]
    left, right = len(one) - 1, max(len(other) - 2, 0)
    if one[left] != other[right]:
        marks[-2].add(left)
        marks[-1].add(right)
    elif len(one) == len(other) == 3 and one[0] != other[0]:
        marks[-2].add(0)
        marks[-1].add(0)
    elif addend:
        product = one[:-1] + other[right + 1 :]
        for back in range(1, min(len(product), len(shapes[0])) + 1):
            if shapes[0][-back] not in (1, product[-back]):
                marks[0].add(len(shapes[0]) - back)


def _convolution(rejected: RejectedOp, shapes: Shapes, marks: Marks) -> None:
    """The channels of input, weight, and bias, or a kernel that is larger than its padded input."""
    if len(shapes) < 2 or len(shapes[0]) != len(shapes[1]) or len(shapes[0]) < 3:
        return
    given, weight = shapes[:2]
    groups, transposed = rejected.argument("groups"), rejected.argument("transposed")
    if given[1] != (weight[0] if transposed else weight[1] * groups):
        marks[0].add(1)
        marks[1].add(0 if transposed else 1)
    elif len(shapes) > 2 and shapes[2] != ((weight[1] * groups if transposed else weight[0]),):
        marks[2].update(range(len(shapes[2])))
        marks[1].add(1 if transposed else 0)
    elif not transposed:
        padding, dilation = (_each(rejected.argument(name)) for name in ("padding", "dilation"))
        for at, (size, kernel) in enumerate(zip(given[2:], weight[2:])):
            if size + 2 * padding[at % len(padding)] < dilation[at % len(dilation)] * (kernel - 1) + 1:
                marks[0].add(at + 2)
                marks[1].add(at + 2)


def _each(sizes: Any) -> list[int]:
    return list(sizes) if isinstance(sizes, list | tuple) else [sizes]


def _equal(shapes: Shapes, marks: Marks, but: int | None = None) -> None:
    """All shapes must be equal except in one dimension."""
    shapes_of = [
        (at, shape) for at, shape in enumerate(shapes) if shape != (0,)
    ]  # `cat` ignores empty tensors
    for at, shape in shapes_of[1:]:
        first, reference = shapes_of[0]
        if len(shape) != len(reference):
            continue
        for dim, (size, wanted) in enumerate(zip(shape, reference)):
            if size != wanted and (but is None or dim != but % len(shape)):
                marks[at].add(dim)
                marks[first].add(dim)


def _broadcast(shapes: Shapes, marks: Marks) -> None:
    """Sizes must be equal or 1, starting at the last dimension."""
    for back in range(1, max(map(len, shapes), default=0) + 1):
        sizes = {shape[-back] for shape in shapes if len(shape) >= back} - {1}
        for at, shape in enumerate(shapes):
            if len(sizes) > 1 and len(shape) >= back and shape[-back] != 1:
                marks[at].add(len(shape) - back)
