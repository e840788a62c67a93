"""Scratch memory of CPU kernels that sort or count all elements: unique, isin, histograms."""

from __future__ import annotations

import math

import torch

from ...graph.ir import Node, TensorMeta
from .matrix_product_workspace import transposing
from .workspace_rule import Rule, argument, contiguous, copied, exactly, meta_of, on
from .workspace_size import NOTHING, Need

TABLE: dict[str, Rule] = {}

_POSITION = 8
"""Bytes of an index; the sort has them as its result, and once more while it runs (SortingKernel.cpp)."""


@on(TABLE, "_unique", "_unique2")
def _unique(node: Node, threads: int) -> Need:
    """``unique_cpu_sorted_template`` (Unique.cpp): all elements sorted, then the results beside them.

    Counts are differences of the positions at which the values begin.
    """
    operand, values = node.args[0].meta, node.outputs[0]
    copies, count = copied(operand), math.prod(operand.shape)
    if operand.dtype == torch.bool or not count:
        return exactly(copies and copies + transposing(operand.shape, operand.stride, operand.dtype.itemsize))
    counted = argument(node, 3, "return_counts", False)
    begins = (math.prod(values.shape) + 1) * _POSITION if counted else 0
    results = sum(value.nbytes for value in node.outputs)
    ordered = operand.nbytes + count * _POSITION
    return exactly(copies + max(ordered + count * _POSITION - results, ordered + begins))


@on(TABLE, "unique_dim")
def _unique_dim(node: Node, threads: int) -> Need:
    """The slices, contiguous, and again in their order (``_unique_dim_cpu_template``, Unique.cpp)."""
    operand, dim = node.args[0].meta, node.args[1] % len(node.args[0].meta.shape)
    order = [dim, *(at for at in range(len(operand.shape)) if at != dim)]
    moved = TensorMeta(
        tuple(operand.shape[at] for at in order),
        tuple(operand.stride[at] for at in order),
        operand.offset,
        operand.dtype,
        operand.device,
    )
    return exactly(operand.nbytes + copied(moved))


@on(TABLE, "isin")
def _isin(node: Node, threads: int) -> Need:
    """Few test elements are compared one by one, many are sorted with the others (TensorCompare.cpp).

    How many elements are distinct is unknown: expected are few among integers, and all among floating-point
    numbers.
    """
    operands = [meta_of(argument(node, at, name)) for at, name in enumerate(("elements", "test_elements"))]
    counts = [1 if meta is None else math.prod(meta.shape) for meta in operands]
    if not all(counts) or counts[1] < int(10.0 * counts[0] ** 0.145):
        return NOTHING
    dtypes = [meta.dtype for meta in operands if meta is not None]
    item = max(dtype.itemsize for dtype in dtypes)
    if argument(node, 2, "assume_unique", False):
        return exactly(_merged(sum(counts), item))
    copies = [copied(meta) for meta in operands]
    inverse = counts[0] * _POSITION
    sizes = [copy + count * (item + 2 * _POSITION) for copy, count in zip(copies, counts)]

    def need(elements: int, tests: int) -> int:
        first = max(sizes[0], counts[0] * (item + _POSITION) + copies[0] + inverse + elements * item)
        second = inverse + elements * item + max(sizes[1], sizes[1] - counts[1] * _POSITION + tests * item)
        return max(first, second, inverse + _merged(elements + tests, item))

    low, high = need(1, 1), need(*counts)
    return Need(high if any(dtype.is_floating_point for dtype in dtypes) else low, low, high)


def _merged(count: int, item: int) -> int:
    """The elements of both operands, and the same sorted."""
    return count * (2 * item + 2 * _POSITION)


@on(TABLE, "histc", "histogram")
def _histogram(node: Node, threads: int) -> Need:
    """Each thread's counts (HistogramKernel.cpp), and, if it is not a result, the edges of the bins.

    Operands are flattened; to find the range of the elements, histc reads a contiguous operand.
    """
    operand, counts = node.args[0].meta, node.outputs[0]
    if not operand.nbytes or isinstance(argument(node, 1, "bins", 100), (list, tuple)):
        return NOTHING
    item = operand.dtype.itemsize
    tile = 0 if contiguous(operand) else transposing(operand.shape, operand.stride, item)
    edges = extremes = 0
    if node.op._schema.name.endswith("histc"):
        edges = counts.nbytes + item
        if argument(node, 2, "min", 0) == argument(node, 3, "max", 0):
            extremes = 2 * item + copied(operand) + tile
    flattened = 0 if _is_a_row(operand) else operand.nbytes
    first = flattened + tile - sum(value.nbytes for value in node.outputs) if flattened else 0
    return exactly(max(first, flattened + edges + max(extremes, threads * counts.nbytes)))


def _is_a_row(meta: TensorMeta) -> bool:
    """Whether the elements are equally far apart, so that they can be viewed as one row."""
    expected = None
    for size, stride in zip(reversed(meta.shape), reversed(meta.stride)):
        if size == 1:
            continue
        if expected is not None and stride != expected:
            return False
        expected = stride * size
    return True
