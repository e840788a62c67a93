"""The op that PyTorch rejected while a block was recorded, and the sizes that do not match."""

from __future__ import annotations

from collections.abc import Sequence

from .ir import RefusedOp

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "addbmm")


def clashes(refused: RefusedOp) -> list[set[int]]:
    """For each input, the dimensions whose sizes do not match those of another input; empty if unknown."""
    shapes = [tuple(value.meta.shape) for value in refused.inputs]
    marks: list[set[int]] = [set() for _ in shapes]
    if refused.name in _PRODUCTS:
        _products(shapes, marks)
    elif "conv" in refused.name:
        if len(shapes) > 1 and min(map(len, shapes[:2])) > 2:
            marks[0].add(1)
            marks[1].add(1)
    elif refused.name in ("cat", "stack"):
        _equal(shapes, marks)
    else:
        _broadcast(shapes, marks)
    return marks


def _products(shapes: Sequence[tuple[int, ...]], marks: list[set[int]]) -> None:
    """The last two operands are multiplied; an addend comes before them."""
    if len(shapes) < 2 or not shapes[-2] or not shapes[-1]:
        return
    left, right = len(shapes[-2]) - 1, max(len(shapes[-1]) - 2, 0)
    if shapes[-2][left] != shapes[-1][right]:
        marks[-2].add(left)
        marks[-1].add(right)


def _equal(shapes: Sequence[tuple[int, ...]], marks: list[set[int]]) -> None:
    for at, shape in enumerate(shapes[1:], start=1):
        for dim, (size, first) in enumerate(zip(shape, shapes[0])):
            if size != first:
                marks[at].add(dim)
                marks[0].add(dim)


def _broadcast(shapes: Sequence[tuple[int, ...]], marks: list[set[int]]) -> None:
    """From the last dimension on, sizes are equal or 1."""
    for back in range(1, max(map(len, shapes), default=0) + 1):
        sizes = {shape[-back] for shape in shapes if len(shape) >= back} - {1}
        for at, shape in enumerate(shapes):
            if len(sizes) > 1 and len(shape) >= back and shape[-back] != 1:
                marks[at].add(len(shape) - back)
