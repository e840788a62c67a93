"""Scratch memory of composite CPU operators, whose intermediate results are not nodes.

The files named are below ``aten/src/ATen/native``.
"""

from __future__ import annotations

import math

import torch

from ...graph.ir import Node, Value
from .casts import cast_bytes, common_dtype
from .rules import Rule, argument, contiguous, exactly, on
from .size import NOTHING, Need

TABLE: dict[str, Rule] = {}


@on(TABLE, "abs", "angle")
def _complex_to_real(node: Node, threads: int) -> Need:
    """Results as complex numbers, whose real parts are copied

    ``unary_op_impl_with_complex_to_float_out`` in UnaryOps.cpp.
    ."""
    operand = node.args[0].meta
    return exactly(operand.nbytes if operand.dtype.is_complex else 0)


@on(TABLE, "isinf")
def _infinite(node: Node, threads: int) -> Need:
    """Absolute values; for complex numbers, those of one part, and the mask of infinite ones (``isinf``,
    TensorCompare.cpp).
    """
    operand = node.args[0].meta
    if operand.dtype.is_complex:
        return exactly(operand.nbytes // 2 + node.outputs[0].nbytes)
    return exactly(operand.nbytes if operand.dtype.is_floating_point else 0)


@on(TABLE, "dist")
def _distance(node: Node, threads: int) -> Need:
    """The differences, of operands in one dtype (``dist``, Distance.cpp)."""
    left, right = node.args[0].meta, node.args[1].meta
    count, common = math.prod(torch.broadcast_shapes(left.shape, right.shape)), common_dtype(node.args[:2])
    return exactly(count * common.itemsize + cast_bytes((left, right), common))


@on(TABLE, "roll")
def _rolled(node: Node, threads: int) -> Need:
    """One dimension after the other, or a contiguous copy for all at once (TensorTransformations.cpp)."""
    operand, dims = node.args[0].meta, argument(node, 2, "dims", [])
    if not dims:
        return exactly(0 if contiguous(operand) else operand.nbytes)
    return exactly((len(dims) - 1) * operand.nbytes)


@on(TABLE, "masked_select")
def _selected(node: Node, threads: int) -> Need:
    """The mask as integers, whose sum is the number of results (TensorAdvancedIndexing.cpp).

    Several threads need as many integers for the mask, and for its running sums.
    """
    operand, mask = node.args[0].meta, node.args[1].meta
    count, result = math.prod(torch.broadcast_shapes(operand.shape, mask.shape)), node.outputs[0].nbytes
    counted = max(math.prod(mask.shape) * 8 + 8 - result, 0)
    return Need(counted, counted, max(counted, 2 * count * 8 if threads > 1 else 0))


@on(TABLE, "index")
def _indexed(node: Node, threads: int) -> Need:
    """Positions of a mask's elements, one integer per dimension (``expandTensors``, IndexingUtils.h)."""
    indices = [each for each in node.args[1] if isinstance(each, Value)]
    masks = [each.meta for each in indices if each.dtype in (torch.bool, torch.uint8)]
    if len(masks) != 1 or len(indices) != 1:
        return NOTHING
    (mask,), operand = masks, node.args[0].meta
    rest = math.prod(operand.shape) // max(math.prod(mask.shape), 1)
    count = math.prod(node.outputs[0].shape) // max(rest, 1)
    return exactly(count * len(mask.shape) * 8)


@on(TABLE, "_ctc_loss_backward")
def _backward_variables(node: Node, threads: int) -> Need:
    """As many backward variables as forward ones (``ctc_loss_backward_cpu_template``, LossCTC.cpp)."""
    return exactly(argument(node, 6, "log_alpha").nbytes)


@on(TABLE, "std", "var", "std_mean", "var_mean")
def _variance(node: Node, threads: int) -> Need:
    """For complex numbers, the variances of both parts (``std_var_out``, ReduceOps.cpp)."""
    operand = node.args[0].meta
    return exactly(2 * node.outputs[0].nbytes if operand.dtype.is_complex else 0)
