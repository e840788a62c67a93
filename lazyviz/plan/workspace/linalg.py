"""Workspace of linear algebra on the CPU: LAPACK copies and workspace, distances, half-precision products.

Copies are those of the named files below ``aten/src/ATen/native``.  Workspace is what LAPACK requests; its
sizes were observed with MKL 2024 in the allocator's events, and have a range.
"""

from __future__ import annotations

import math

from ...graph.ir import Node, TensorMeta, Value
from ...torch_internals.cpu_kernel_selection import (
    Instructions,
    multiplies_in_onednn,
    onednn_instructions,
)
from .rules import Rule, argument, copied, exactly, on
from .size import NOTHING, Events, Need

TABLE: dict[str, Rule] = {}


def matrices(meta: TensorMeta) -> tuple[int, int, int, int]:
    """The number of matrices, rows, columns, and bytes of an element."""
    *batch, rows, columns = meta.shape
    return math.prod(batch), rows, columns, meta.dtype.itemsize


@on(TABLE, "linalg_inv_ex", "inverse")
def _inverse(node: Node, threads: int) -> Need:
    """LU factors, pivots, checks of them (``linalg_solve_ex_out``, BatchLinearAlgebra.cpp)."""
    matrix = node.args[0].meta
    count, rows, _, _ = matrices(matrix)
    return exactly(matrix.nbytes + count * rows * (4 + 1) + 12)


@on(TABLE, "_linalg_det", "_linalg_slogdet")
def _determinant(node: Node, threads: int) -> Need:
    """The parity of the pivots: which of them have moved, as numbers (``lu_det_P``,
    BatchLinearAlgebra.cpp); for the determinant itself, also the product of the diagonal.
    """
    count, rows, _, item = matrices(node.args[0].meta)
    product = count * item if node.op._schema.name == "aten::_linalg_det" else 0
    return exactly(rows * 4 + count * rows * (1 + 8) + 12 * count + product)


@on(TABLE, "_linalg_svd")
def _singular(node: Node, threads: int) -> Need:
    """A copy in Fortran order, which LAPACK overwrites (``_linalg_svd_out``), and its status."""
    matrix = node.args[0].meta
    return exactly(matrix.nbytes + transposing_fortran(matrix) + 4 * matrices(matrix)[0])


@on(TABLE, "_linalg_eigh")
def _eigenvalues(node: Node, threads: int) -> Need:
    """LAPACK's ``syevd`` or ``heevd`` (``apply_lapack_eigh``, BatchLinearAlgebraKernel.cpp)."""
    matrix = node.args[0].meta
    if argument(node, 2, "compute_v", True):
        return of_eigenvectors(matrix)
    count, size, _, item = matrices(matrix)
    known = matrix.nbytes + 4 * count
    work = (22 * size + 1) * item + 4
    if matrix.dtype.is_complex:
        columns = 2 if size <= 10 else 25 if item == 8 else 21
        work = (columns * size + 1) * item + (size + 1) * item // 2 + 4
    return Need(
        known + max(work, transposing_fortran(matrix)), known, known + 3 * work + transposing_fortran(matrix)
    )


def of_eigenvectors(matrix: TensorMeta) -> Need:
    """The status of Hermitian matrices, and what LAPACK requests if their eigenvectors are computed, too."""
    count, size, _, item = matrices(matrix)
    integers, status = (5 * size + 3) * 4, 4 * count
    if not matrix.dtype.is_complex:
        work = (2 * size * size + 6 * size + 2) * item + integers
        return Need(work + status, work - item, work + 32 * size * item + status)
    reals = (2 * size * size + 5 * size + 2) * item // 2
    least = (size * size + 2 * size + 1) * item + reals + integers
    best = least + (31 * size * item if size > 10 else 0)
    return Need(best + status, least - 2 * item, best + 32 * size * item + status)


@on(TABLE, "linalg_qr")
def _orthogonal(node: Node, threads: int) -> Need:
    """The reflectors' factors, and the workspace of ``geqrf`` and ``orgqr`` (``linalg_qr_out``)."""
    count, rows, columns, item = matrices(node.args[0].meta)
    order = min(rows, columns)
    factors = count * order * item
    work = 17 * (columns + 1)
    if node.outputs[0].nbytes:
        work = max(work, 32 * node.outputs[0].shape[-1] + 1)
    return Need(factors + work * item, factors, factors + 4 * work * item)


@on(TABLE, "linalg_matrix_exp")
def _exponential(node: Node, threads: int) -> Need:
    """Powers of the matrix, and the terms that they are combined from (LinearAlgebra.cpp): an estimate.

    The norms of the matrices select the polynomial: four matrices for the smallest, twelve for the largest.
    For several matrices, the kernel computes on copies of those with similar norms: ten for each.
    """
    matrix = node.args[0].meta
    several = math.prod(matrix.shape[:-2]) > 1
    return Need((10 if several else 12) * matrix.nbytes, 4 * matrix.nbytes, 13 * matrix.nbytes + 4096)


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
def _bilinear(node: Node, threads: int) -> Need:
    """``nn.Bilinear``: one output feature at a time, times one input, then the other (Linear.cpp)."""
    left, weight, right, *expand, summed = node.args[:7]
    if [list(dims) for dims in (*expand, summed)] != [[1, 3], [0], [1, 2], [2, 3]]:
        return NOTHING
    return exactly(left.meta.shape[0] * (right.meta.shape[-1] + 1) * weight.meta.dtype.itemsize)


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


def transposing_fortran(meta: TensorMeta) -> int:
    """Bytes of the tile through which a matrix is copied into Fortran order."""
    return transposing(meta.shape, meta.stride, meta.dtype.itemsize, fortran=True)


def transposing(shape: tuple[int, ...], stride: tuple[int, ...], item: int, *, fortran: bool = False) -> int:
    """Bytes of the tile through which a matrix is copied into the other order (``copy_transpose_valid``,
    Copy.cpp): 60 x 60 elements, if the matrix has as many. ``fortran``: its transpose is copied.
    """
    if len(shape) != 2 or math.prod(shape) < 60 * 60:
        return 0
    if fortran:
        shape, stride = shape[::-1], stride[::-1]
    return 60 * 60 * item if stride == (1, shape[0]) else 0


@on(TABLE, "lu_unpack")
def _lu_unpack(node: Node, threads: int) -> Need:
    """The permutation as positions, one row, and in a batch one for each matrix (BatchLinearAlgebra.cpp)."""
    if not argument(node, 3, "unpack_pivots", True):
        return NOTHING
    *batch, rows, _ = node.args[0].meta.shape
    matrices = math.prod(batch)
    return exactly(8 * rows * (1 + (matrices if matrices > 1 else 0)))


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
