"""Strides of pointwise results, as ATen's TensorIterator allocates them.

Pointwise kernels iterate over their operands in memory order and lay out the result in that order, so its
strides depend only on the shapes and strides of the operands.  The rules are those of
``aten/src/ATen/TensorIterator.cpp`` (``compute_fast_setup_type``, ``compute_strides``,
``reorder_dimensions``, ``allocate_or_resize_outputs``); PyTorch's shape rules follow Python references
instead, which differ in dimensions of size 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...graph.ir import is_dense

Operand = tuple[Sequence[int], Sequence[int]]  # shape and stride


def output_stride(shape: Sequence[int], operands: Sequence[Operand]) -> tuple[int, ...]:
    """Stride of a new result of ``shape``, to which the shapes of ``operands`` broadcast."""
    if all(tuple(own) == tuple(shape) for own, _ in operands):
        if all(_is_contiguous(own, stride) for own, stride in operands):
            return _strides_in_order(shape, range(len(shape) - 1, -1, -1))
        if len(shape) == 4 and all(_is_channels_last(own, stride) for own, stride in operands):
            return _strides_in_order(shape, (1, 3, 2, 0))
        first = tuple(operands[0][1])
        if all(is_dense(own, stride) for own, stride in operands) and all(
            tuple(stride) == first for _, stride in operands
        ):
            return first
    return _strides_in_order(shape, _memory_order(shape, [_broadcast(shape, *each) for each in operands]))


def _broadcast(shape: Sequence[int], own: Sequence[int], stride: Sequence[int]) -> list[int]:
    missing = len(shape) - len(own)
    return [0] * missing + [
        0 if size == 1 and shape[missing + at] != 1 else stride[at] for at, size in enumerate(own)
    ]


def _memory_order(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[int]:
    """Dimensions from the innermost to the outermost: an insertion sort, because some pairs cannot be
    compared.
    """
    order = list(range(len(shape) - 1, -1, -1))
    for outer in range(1, len(order)):
        at = outer
        for inner in range(outer - 1, -1, -1):
            comparison = _compare(order[inner], order[at], shape, strides)
            if comparison > 0:
                order[inner], order[at] = order[at], order[inner]
                at = inner
            elif comparison < 0:
                break
    return order


def _compare(left: int, right: int, shape: Sequence[int], strides: Sequence[Sequence[int]]) -> int:
    """1 if dimension ``left`` belongs outside of ``right``, -1 if inside, 0 if no operand decides."""
    for stride in strides:
        if stride[left] == 0 or stride[right] == 0:
            continue
        if stride[left] != stride[right]:
            return 1 if stride[left] > stride[right] else -1
        if shape[left] > shape[right]:
            return 1
    return 0


def _strides_in_order(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Dense strides with the dimensions of ``order`` from the innermost to the outermost."""
    result = [0] * len(shape)
    inverted = list(order) == list(range(len(shape) - 1, -1, -1))
    step = 1
    for dimension in order:
        result[dimension] = step
        # A plain allocation counts empty dimensions as 1, but the iterator's own layout does not.
        step *= max(shape[dimension], 1) if inverted else shape[dimension]
    return tuple(result)


def _is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    return _follows(shape, stride, range(len(shape) - 1, -1, -1))


def _is_channels_last(shape: Sequence[int], stride: Sequence[int]) -> bool:
    return _follows(shape, stride, (1, 3, 2, 0))


def _follows(shape: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    if 0 in shape:
        return True
    step = 1
    for dimension in order:
        if shape[dimension] != 1:
            if stride[dimension] != step:
                return False
            step *= shape[dimension]
    return True
