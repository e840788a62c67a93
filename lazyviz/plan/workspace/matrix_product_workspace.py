"""Workspace of matrix products on the CPU, of distances by them, and of copies into another order.

Copies are those of the named files below ``aten/src/ATen/native``.  oneDNN computes products in half
precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...graph.ir import Node, TensorMeta, Value
from ...torch_internals.cpu_kernel_selection import (
    Instructions,
    multiplies_in_onednn,
    onednn_instructions,
)
from .workspace_rule import Rule, argument, copied, exactly, on
from .workspace_size import NOTHING, Events, Need

TABLE: dict[str, Rule] = {}


@on(TABLE, "_euclidean_dist", "_cdist_forward")
def _distances(node: Node, threads: int) -> Need:
    """Squares, their sums and ones, and wider operands (``_euclidean_dist``, Distance.cpp).

    ``_cdist_forward`` does this for p = 2, if one operand has more than 25 rows or the call requires it.
    """
    left, right = node.args[0].meta, node.args[1].meta
    rows = (math.prod(left.shape[:-1]), math.prod(right.shape[:-1]))
    item = left.dtype.itemsize
    if node.op._schema.name == "aten::_cdist_forward":
        mode = node.args[3]
        many = left.shape[-2] > 25 or right.shape[-2] > 25
        if left.shape[:-2] != right.shape[:-2]:
            return NOTHING
        if node.args[2] != 2 or mode == 2 or (not many and mode != 1):
            return exactly(copied(left, right))
    run = Events()
    sums = [count * item for count in rows]
    run.take(left.nbytes, sums[0])
    run.free(left.nbytes)
    run.take(sums[0], right.nbytes, sums[1])
    run.free(right.nbytes)
    run.take(sums[1], left.nbytes, left.nbytes + 2 * sums[0])
    run.free(*sums[:1] * 2, left.nbytes)
    run.take(right.nbytes + 2 * sums[1])
    run.free(*sums[1:] * 2)
    run.take(node.outputs[0].nbytes)
    return run.need(node.outputs[0].nbytes)


@on(TABLE, "_trilinear")
def _trilinear(node: Node, threads: int) -> Need:
    """``nn.Bilinear`` and its gradients: for each position of one dimension, the product of the first two
    operands, and that with the third; dimensions are summed as soon as possible (Linear.cpp).
    """
    summed = node.args[6]
    unrolled = argument(node, 7, "unroll_dim", 1)
    expanded = [
        _with_ones(value.meta.shape, dims) for value, dims in zip(node.args[:3], node.args[3:6], strict=True)
    ]
    early = [dim for dim in summed if dim in node.args[5]]  # those that the third operand does not have
    first = _product(expanded[0], expanded[1], (unrolled, *early))
    second = _product(first, expanded[2], (unrolled, *summed))
    return exactly((math.prod(first) + math.prod(second)) * node.outputs[0].dtype.itemsize)


def _with_ones(shape: tuple[int, ...], dims: Sequence[int]) -> tuple[int, ...]:
    sizes = list(shape)
    for dim in dims:
        sizes.insert(dim, 1)
    return tuple(sizes)


def _product(left: tuple[int, ...], right: tuple[int, ...], ones: Sequence[int]) -> tuple[int, ...]:
    return tuple(1 if dim in ones else max(sizes) for dim, sizes in enumerate(zip(left, right, strict=True)))


@on(TABLE, "mm", "addmm", "bmm", "baddbmm", "mv", "addmv")
def _matrix_product(node: Node, threads: int) -> Need:
    """Operands without a BLAS leading dimension are copied; what is added is copied into the result before
    (``addmm_impl_cpu_``, LinearAlgebra.cpp).
    """
    left, right = [value.meta for value in node.args if isinstance(value, Value)][-2:]
    if multiplies_in_onednn(left.dtype):
        return _in_blocks(left, right, threads)
    name = node.op._schema.name.rpartition("::")[2]
    if name in ("mv", "addmv"):
        return exactly(0 if _leading(left) else left.nbytes)
    if len(left.shape) == 3:
        if left.shape[1] * left.shape[2] * right.shape[2] < 400:  # ATen's own (``bmm_out_or_baddbmm_``)
            return exactly(sum(meta.nbytes for meta in (left, right) if meta.flags & 1))
        return exactly(sum(map(_of_a_batch, (left, right))))
    if len(left.shape) != 2 or len(right.shape) != 2:
        return NOTHING
    copies = sum(meta.nbytes for meta in (left, right) if not _leading(meta) or _conjugated(meta))
    return exactly(max(copies, _into_result(node) if name == "addmm" else 0))


def _into_result(node: Node) -> int:
    """Bytes of the tile through which ``addmm`` copies a transposed matrix into its result."""
    added, result = node.args[0].meta, node.outputs[0].meta
    if added.shape != result.shape or argument(node, 3, "beta", 1) == 0:
        return 0
    return transposing(added.shape, added.stride, added.dtype.itemsize)


def _conjugated(meta: TensorMeta) -> bool:
    """Whether a lazily conjugated operand has to be resolved: BLAS takes it only transposed."""
    return bool(meta.flags & 1) and meta.stride[-1] == 1


def _of_a_batch(meta: TensorMeta) -> int:
    """Bytes of a batch that is copied: all of it if conjugated, otherwise one matrix at a time."""
    if meta.flags & 1:
        return meta.nbytes
    return 0 if _leading(meta) else math.prod(meta.shape[-2:]) * meta.dtype.itemsize


def _leading(meta: TensorMeta) -> bool:
    """Whether a matrix, or those of a batch, have a leading dimension of BLAS."""
    if not meta.nbytes:
        return True
    (rows, cols), (row, col) = meta.shape[-2:], meta.stride[-2:]
    return (col == 1 and row >= max(1, cols)) or (row == 1 and col >= max(1, rows)) or rows == cols == 1


def _in_blocks(left: TensorMeta, right: TensorMeta, threads: int) -> Need:
    """oneDNN's product in half precision: for each thread, a packed block of the right operand, and sums in
    float32.

    The scratchpad is that of ``init_scratchpad`` (oneDNN, x64/matmul/brgemm_matmul_utils.cpp). The sizes of
    blocks were observed in the allocator's events of 170 products of bfloat16 with each of the three
    instruction sets and oneDNN 3.12. All are estimates, because the division of work among threads is
    internal to oneDNN, and float16 has kernels of its own.
    """
    *batch, rows, steps = left.shape
    columns = right.shape[-1] if len(right.shape) > 1 else 1
    count = math.prod(batch)
    if count * rows * steps * columns <= 16**3:  # ATen computes these itself (mkldnn/Matmul.cpp)
        return NOTHING
    instructions = onednn_instructions()
    other_order = left.stride[-1] != 1 and rows > 1
    pad = 128  # for each entry: common/memory_tracking.hpp
    deep = -(-steps // 32) * 32
    if instructions < Instructions.AVX512_BF16:  # the sums of the whole result
        size = count * rows * columns * 4 + pad
    elif instructions is Instructions.AMX:  # all steps of a block of columns, and one page for the tiles
        size = threads * (deep * min(-(-columns // 64) * 64, 128) * 2 + 4096 + 5 * pad) + 3 * pad
        if other_order:
            size += threads * min(rows, 256) * deep * 2
    else:  # 64 columns, 512 steps (1024 if there are more than 1024), rows in equal parts of at most 256
        at_once = min(deep, 512 if steps <= 1024 else 1024)
        tasks = count * -(-columns // 64)
        parts = max(-(-threads // tasks), -(-rows // 256))
        height = max(-(-rows // parts), min(rows, 16))
        size = threads * (at_once * 64 * 2 + height * min(columns, 64) * 4 + 5 * pad) + 3 * pad
        if other_order:
            aside = at_once + 32 if at_once % 512 == 0 else at_once  # rows that do not share a cache set
            size += threads * height * aside * 2 + pad
    packed = (count * rows * (deep + 32) + count * deep * -(-columns // 64) * 64) * 2
    sums = count * rows * max(columns, 64) * 4
    return Need(size, 0, 2 * size + packed + sums + threads * (deep * 64 * 2 + 16 * 1024))


def transposing(shape: tuple[int, ...], stride: tuple[int, ...], item: int, *, fortran: bool = False) -> int:
    """Bytes of the tile through which a matrix is copied into the other order (``copy_transpose_valid``,
    Copy.cpp): 60 x 60 elements, if the matrix has as many. ``fortran``: its transpose is copied.
    """
    if len(shape) != 2 or math.prod(shape) < 60 * 60:
        return 0
    if fortran:
        shape, stride = shape[::-1], stride[::-1]
    return 60 * 60 * item if stride == (1, shape[0]) else 0


@on(TABLE, "clone", "copy_")
def _copy(node: Node, threads: int) -> Need:
    """A matrix that is copied into the other order goes through a tile."""
    source = node.args[1 if node.op._schema.name == "aten::copy_" else 0]
    if not isinstance(source, Value) or not node.outputs:
        return NOTHING
    made, given = node.outputs[0].meta, source.meta
    if len(given.shape) != 2 or made.dtype != given.dtype or made.shape != given.shape:
        return NOTHING
    if made.stride != (made.shape[1], 1):
        return NOTHING
    return exactly(transposing(given.shape, given.stride, given.dtype.itemsize))
