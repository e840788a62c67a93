"""Scratch memory of composite CPU operators, whose intermediate results are not nodes.

The files named are below ``aten/src/ATen/native``.
"""

from __future__ import annotations

import math

import torch

from ...graph.ir import Node, TensorMeta, Value
from .elementwise_casts import cast_bytes, common_dtype
from .matrix_product_workspace import transposing
from .workspace_rule import Rule, argument, contiguous, copied, exactly, on
from .workspace_size import NOTHING, Events, Need

TABLE: dict[str, Rule] = {}

_HALVES = (torch.bfloat16, torch.float16)


@on(TABLE, "abs", "angle")
def _complex_to_real(node: Node, threads: int) -> Need:
    """Complex results, whose real parts are copied (``unary_op_impl_with_complex_to_float_out``)."""
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
    """The mask as integers, whose sum is the number of results (TensorAdvancedIndexing.cpp)."""
    return exactly(_selecting(node.args[0].meta, node.args[1].meta, node.outputs[0].nbytes, threads))


def _selecting(operand: TensorMeta, mask: TensorMeta, result: int, threads: int) -> int:
    """Bytes of ``masked_select``, which the serial kernel needs only before the result is there.

    Several threads, and operands that do not follow each other in memory, need as many integers for the mask,
    and for its running sums.
    """
    count = math.prod(torch.broadcast_shapes(operand.shape, mask.shape))
    serial = threads == 1 or count < _GRAIN
    serial = serial and all(math.prod(meta.shape) == count and contiguous(meta) for meta in (operand, mask))
    return max(math.prod(mask.shape) * 8 + 8 - result, 0 if serial else 2 * count * 8)


_GRAIN = 32768  # elements that are not worth another thread: ``at::internal::GRAIN_SIZE``


@on(TABLE, "masked_scatter", "masked_scatter_")
def _scattered(node: Node, threads: int) -> Need:
    """A contiguous source (TensorAdvancedIndexing.cpp); the result is a copy, which may go through a tile."""
    operand, _, source = (value.meta for value in node.args)
    tiles = [transposing(meta.shape, meta.stride, meta.dtype.itemsize) for meta in (operand, source)]
    copy = copied(source)
    return exactly(max(0 if node.writes else tiles[0], copy + tiles[1] if copy else 0))


@on(TABLE, "masked_scatter_backward")
def _scattered_back(node: Node, threads: int) -> Need:
    """The selected elements; fewer than the source has are filled up with zeros, and copied together
    (TensorAdvancedIndexing.cpp). The estimate assumes that every element of the source was used.
    """
    operand, mask, result = node.args[0].meta, node.args[1].meta, node.outputs[0].nbytes
    expected = _selecting(operand, mask, result, threads)
    return Need(expected, max(expected - result, 0), max(expected, result))


@on(TABLE, "index", "index_put", "index_put_", "_index_put_impl_")
def _indexed(node: Node, threads: int) -> Need:
    """Positions of a mask's elements, one integer per dimension (``expandTensors``, IndexingUtils.h)."""
    indices = [each for each in node.args[1] if isinstance(each, Value)]
    masks = [each.meta for each in indices if each.dtype in (torch.bool, torch.uint8)]
    if len(masks) != 1 or len(indices) != 1:
        return NOTHING
    (mask,), operand = masks, node.args[0].meta
    rest = math.prod(operand.shape) // max(math.prod(mask.shape), 1)
    of_each = len(mask.shape) * 8
    if node.op._schema.name == "aten::index":
        return exactly(math.prod(node.outputs[0].shape) // max(rest, 1) * of_each)
    values = node.args[2].meta
    if math.prod(values.shape) == 1 and not argument(node, 3, "accumulate", False):
        return NOTHING  # filled (``canDispatchToMaskedFill``, TensorAdvancedIndexing.cpp)
    if len(values.shape) > node.args[1].index(indices[0]) and math.prod(values.shape) > rest:
        return exactly(math.prod(values.shape) // max(rest, 1) * of_each)
    most = math.prod(mask.shape) * of_each  # one value for all selected elements
    return Need(most // 2, 0, most)


@on(TABLE, "unfold_backward")
def _unfolded(node: Node, threads: int) -> Need:
    """Positions along the dimension, if windows overlap (UnfoldBackward.h)."""
    sizes, dim, size, step = node.args[1:5]
    return exactly(sizes[dim] * 8 if step < size and sizes else 0)


@on(TABLE, "fractional_max_pool2d_backward", "fractional_max_pool3d_backward")
def _contiguous_gradient(node: Node, threads: int) -> Need:
    """A contiguous gradient (FractionalMaxPool2d.cpp, FractionalMaxPool3d.cpp)."""
    return exactly(copied(node.args[0].meta))


@on(TABLE, "_ctc_loss_backward")
def _backward_variables(node: Node, threads: int) -> Need:
    """As many backward variables as forward ones (``ctc_loss_backward_cpu_template``, LossCTC.cpp)."""
    return exactly(argument(node, 6, "log_alpha").nbytes)


@on(TABLE, "std", "var", "std_mean", "var_mean")
def _variance(node: Node, threads: int) -> Need:
    """For complex numbers, the variances of both parts (``std_var_out``, ReduceOps.cpp)."""
    operand = node.args[0].meta
    return exactly(2 * node.outputs[0].nbytes if operand.dtype.is_complex else 0)


@on(TABLE, "_sample_dirichlet")
def _dirichlet(node: Node, threads: int) -> Need:
    """Gamma variates in double precision, and their sums (``_s_dirichlet_cpu``, Distributions.cpp)."""
    shape = node.outputs[0].shape
    count = math.prod(shape)
    return exactly((count + count // max(shape[-1], 1)) * 8)


@on(TABLE, "mvlgamma", "mvlgamma_")
def _multivariate(node: Node, threads: int) -> Need:
    """One number for each of ``p`` shifted operands (UnaryOps.cpp); in place, also their sum."""
    result = node.outputs[0].nbytes
    shifted = argument(node, 1, "p") * (result + node.outputs[0].dtype.itemsize)
    return exactly(shifted + (result if node.writes else 0))


@on(TABLE, "renorm", "renorm_")
def _renormed(node: Node, threads: int) -> Need:
    """Norms, as factors in another dtype where they are real numbers of higher precision, and the operand
    in theirs (``renorm_out``, Normalization.cpp).
    """
    operand = node.args[0].meta
    half = operand.dtype in _HALVES
    norms = operand.shape[node.args[2]] * (4 if half else operand.dtype.itemsize)
    if operand.dtype.is_complex:
        return exactly(2 * norms)
    return exactly(norms + (math.prod(operand.shape) * 4 if half else 0))


@on(TABLE, "searchsorted", "bucketize")
def _searched(node: Node, threads: int) -> Need:
    """Contiguous operands, then in one dtype (``searchsorted_maybe_trim_input_tensors``,
    BucketizationUtils.h).
    """
    operands = [item for item in node.args[:2] if isinstance(item, Value)]
    if len(operands) < 2:
        return NOTHING
    if node.op._schema.name == "aten::bucketize":
        operands.reverse()
    boundaries, values = operands
    common, run = common_dtype(operands), Events()
    sorter = argument(node, 6, "sorter")
    run.take(*(copied(item.meta) for item in (values, boundaries, sorter) if isinstance(item, Value)))
    for item in (values, boundaries):
        if item.dtype != common:
            run.take(cast_bytes((item.meta,), common))
            run.free(copied(item.meta))
    return run.need(0)


@on(TABLE, "count_nonzero")
def _counted(node: Node, threads: int) -> Need:
    """Along dimensions: the mask, and as the integers that are summed (TensorAdvancedIndexing.cpp)."""
    count = math.prod(node.args[0].meta.shape)
    return exactly(count * 9 if argument(node, 1, "dim") is not None else 0)


@on(TABLE, "argmax", "argmin")
def _position(node: Node, threads: int) -> Need:
    """Of all elements: those of a contiguous copy (``argmax_argmin_impl``, ReduceOps.cpp)."""
    return exactly(copied(node.args[0].meta) if argument(node, 1, "dim") is None else 0)


@on(TABLE, "_safe_softmax")
def _safe_softmax(node: Node, threads: int) -> Need:
    """Masks of elements that are minus infinity, and of rows of only such elements (SoftMax.cpp)."""
    operand, dim = node.args[0].meta, node.args[1]
    count = math.prod(operand.shape)
    rows = count // operand.shape[dim] if count else 0
    return exactly(max(copied(operand), count + rows))


@on(TABLE, "index_select", "index_add", "index_add_", "embedding")
def _by_index(node: Node, threads: int) -> Need:
    """A contiguous index (TensorAdvancedIndexing.cpp, Embedding.cpp)."""
    position = 1 if node.op._schema.name == "aten::embedding" else 2
    return exactly(copied(node.args[position].meta))


@on(TABLE, "index_reduce", "index_reduce_")
def _reduced_by_index(node: Node, threads: int) -> Need:
    """A contiguous index; of a mean, the counts and the ones that are added to them
    (``index_reduce_func_impl``, TensorAdvancedIndexing.cpp).
    """
    index, source, reduction = node.args[2].meta, node.args[3].meta, node.args[4]
    counted = source.nbytes + node.outputs[0].nbytes + copied(index) if reduction == "mean" else 0
    return exactly(copied(index) + counted)


@on(
    TABLE, "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"
)
def _by_positions(node: Node, threads: int) -> Need:
    """The result of halves in float32 (``create_acc_buffer``, cpu/ScatterGatherKernel.cpp); of a mean, ones,
    their counts, and the mask of those that are zero (``scatter_reduce_two``).
    """
    result = node.outputs[0]
    count = math.prod(result.shape)
    sums = count * 4 if result.dtype in _HALVES else 0
    if not node.op._schema.name.startswith("aten::scatter_reduce") or node.args[4] != "mean":
        return exactly(sums)
    return exactly(
        math.prod(node.args[3].meta.shape) * result.dtype.itemsize + result.nbytes + max(sums, count)
    )
