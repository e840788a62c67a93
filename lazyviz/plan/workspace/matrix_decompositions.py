"""Workspace of matrix decompositions and solvers on the CPU.

Copies are those of ``aten/src/ATen/native`` (BatchLinearAlgebra.cpp, BatchLinearAlgebraKernel.cpp,
LinearAlgebra.cpp).  What LAPACK requests was observed with MKL 2024 in the allocator's events, and has a
range; other libraries request at least LAPACK's documented minimum, where the range begins.
"""

from __future__ import annotations

import math

from ...graph.ir import Node, TensorMeta
from .matrix_product_workspace import transposing
from .workspace_rule import Rule, argument, exactly, on
from .workspace_size import NOTHING, Events, Need, Workspace

TABLE: dict[str, Rule] = {}

_STATUS = 4  # bytes of a matrix's status, and of a pivot


def matrices(meta: TensorMeta) -> tuple[int, int, int, int]:
    """The number of matrices, rows, columns, and bytes of an element."""
    *batch, rows, columns = meta.shape
    return math.prod(batch), rows, columns, meta.dtype.itemsize


def transposing_fortran(meta: TensorMeta) -> int:
    """Bytes of the tile through which a matrix is copied into Fortran order."""
    return transposing(meta.shape, meta.stride, meta.dtype.itemsize, fortran=True)


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
def _hermitian_eigenvalues(node: Node, threads: int) -> Need:
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


def _work_of_reflectors(rows: int, columns: int, threads: int) -> tuple[int, int]:
    """The elements that ``geqrf`` requests, and the most; with several threads MKL selects other blocks."""
    blocked = 17 * (columns + 1)
    return blocked if min(rows, columns) > 32 else columns + 1, 4 * blocked + 10 * (threads - 1) * columns


def _work_of_product(rows: int, columns: int, threads: int, is_complex: bool) -> tuple[int, int]:
    """The same for ``orgqr``, which has copies of the blocks of rows and columns for its threads."""
    if threads > 1 and columns >= 16:
        copied = rows + 2 * columns
        return (16 if columns <= 64 and not is_complex else 32) * copied + 1, 64 * copied + 1
    at_once = 1 if columns < 16 else 16 if columns <= 32 else 32
    return at_once * columns + 1, 2 * (32 * columns + 1)


@on(TABLE, "linalg_qr")
def _orthogonal(node: Node, threads: int) -> Need:
    """The reflectors' factors, and the workspace of ``geqrf`` and ``orgqr`` (``linalg_qr_out``)."""
    matrix = node.args[0].meta
    count, rows, columns, item = matrices(matrix)
    known = count * min(rows, columns) * item
    work, most = 17 * (columns + 1), _work_of_reflectors(rows, columns, threads)[1]
    if node.outputs[0].nbytes:
        made = node.outputs[0].shape[-1]
        of_product = _work_of_product(rows, made, threads, matrix.dtype.is_complex)
        work = max(work, 32 * made + 1, of_product[0])
        most = max(most, of_product[1])
    elif rows > columns:  # mode "r": the reflectors are in a matrix of their own
        known += matrix.nbytes
        work = max(work, 3600)  # as measured, from 16 to 200 columns
    return Need(known + work * item, known, known + max(4 * work, most) * item)


@on(TABLE, "linalg_matrix_exp")
def _exponential(node: Node, threads: int) -> Need:
    """Powers of the matrix, and the terms that they are combined from (LinearAlgebra.cpp): an estimate.

    The norms of the matrices select the polynomial: four matrices for the smallest, twelve for the largest.
    For several matrices, the kernel computes on copies of those with similar norms: ten for each.
    """
    matrix = node.args[0].meta
    several = math.prod(matrix.shape[:-2]) > 1
    return Need((10 if several else 12) * matrix.nbytes, 4 * matrix.nbytes, 13 * matrix.nbytes + 4096)


@on(TABLE, "lu_unpack")
def _lu_unpack(node: Node, threads: int) -> Need:
    """The permutation as positions, one row, and in a batch one for each matrix (BatchLinearAlgebra.cpp)."""
    if not argument(node, 3, "unpack_pivots", True):
        return NOTHING
    *batch, rows, _ = node.args[0].meta.shape
    matrices = math.prod(batch)
    return exactly(8 * rows * (1 + (matrices if matrices > 1 else 0)))


@on(TABLE, "linalg_eig")
def _eigenvectors(node: Node, threads: int) -> Need:
    """A copy of the matrices, for real ones also their results as real numbers, and the workspace of
    ``geev``.
    """
    matrix = node.args[0].meta
    count, size, _, item = matrices(matrix)
    known = count * _STATUS + matrix.nbytes
    wide = (max(34, 2 * size + 4) * size + 1) * item
    if matrix.dtype.is_complex:
        return Need(known + wide, known + 3 * size * item, known + max(wide, (386 * size + 1) * item))
    known += count * 2 * size * item + matrix.nbytes
    least = (4 * size + 1) * item
    work = least if item == 8 else (34 if size < 16 else 386) * size * item + item
    return Need(known + work, known + least - item, known + max(work, wide, (386 * size + 1) * item))


@on(TABLE, "_linalg_eigvals")
def _eigenvalues(node: Node, threads: int) -> Need:
    """The same without vectors."""
    matrix = node.args[0].meta
    count, size, _, item = matrices(matrix)
    known = count * _STATUS + matrix.nbytes
    most = (34 * size + 1) * item
    if matrix.dtype.is_complex:
        return Need(known + most, known + 3 * size * item, known + 2 * most)
    known += count * 2 * size * item
    least = 3 * size * item
    return Need(known + (least + item if item == 8 else most), known + least, known + 2 * most)


@on(TABLE, "geqrf")
def _reflectors(node: Node, threads: int) -> Need:
    _, rows, columns, item = matrices(node.args[0].meta)
    work, most = _work_of_reflectors(rows, columns, threads)
    return Need(work * item, columns * item, most * item)


@on(TABLE, "linalg_householder_product")
def _product_of_reflectors(node: Node, threads: int) -> Need:
    """The workspace of ``orgqr``."""
    matrix = node.args[0].meta
    _, rows, columns, item = matrices(matrix)
    work, most = _work_of_product(rows, columns, threads, matrix.dtype.is_complex)
    return Need(work * item, columns * item, most * item)


@on(TABLE, "linalg_ldl_factor_ex")
def _symmetric_factors(node: Node, threads: int) -> Need:
    """The workspace of ``sytrf``."""
    _, size, _, item = matrices(node.args[0].meta)
    at_once = 1 if size < 16 else 48 if node.args[0].dtype.is_complex else 24
    return Need(at_once * size * item, size * item, 2 * 48 * size * item)


@on(TABLE, "linalg_ldl_solve")
def _by_symmetric_factors(node: Node, threads: int) -> Need:
    """A copy of the pivots, and a check of them."""
    count, size, _, _ = matrices(node.args[0].meta)
    return exactly(count * size * (_STATUS + 1) + 12)


@on(TABLE, "linalg_lu_solve", "_linalg_solve_ex")
def _by_factors(node: Node, threads: int) -> Need:
    """A check of the pivots."""
    count, size, _, _ = matrices(node.args[0].meta)
    return exactly(count * size + 12)


@on(TABLE, "linalg_lu")
def _lu(node: Node, threads: int) -> Need:
    """Both factors in one matrix, with pivots and status, from which the results are unpacked."""
    matrix = node.args[0].meta
    count, rows, columns, _ = matrices(matrix)
    return exactly(matrix.nbytes + transposing_fortran(matrix) + count * (min(rows, columns) + 1) * _STATUS)


@on(TABLE, "cholesky_solve")
def _by_cholesky(node: Node, threads: int) -> Need:
    """A copy of the factors in Fortran order, and their status."""
    factor = node.args[1].meta
    count = matrices(factor)[0]
    return exactly(factor.nbytes + max(transposing_fortran(factor), count * (_STATUS + 1) + 1))


@on(TABLE, "linalg_pinv")
def _pseudo_inverse(node: Node, threads: int) -> Need:
    """A decomposition; the inverse singular values or eigenvalues, with which one factor is multiplied.

    Complex factors are copied to be conjugated.
    """
    matrix: TensorMeta = node.args[0].meta
    if not matrix.nbytes:
        return NOTHING
    count, rows, columns, item = matrices(matrix)
    is_complex = matrix.dtype.is_complex
    order = min(rows, columns)
    scaled = count * order * item  # the inverse values, as elements of the matrix
    values = scaled // 2 if is_complex else scaled
    run = Events()
    if argument(node, 3, "hermitian", False):
        left = scaled_factor = matrix.nbytes
        run.take(left, values)
        work = Workspace(*of_eigenvectors(matrix))
        tolerance = 12 * count + 16
        kept: tuple[int, ...] = values, scaled  # magnitudes, and inverse values
    else:
        left, scaled_factor = count * rows * order * item, count * order * columns * item
        run.take(left, values, scaled_factor)
        copy = matrix.nbytes + transposing_fortran(matrix) + count * _STATUS
        work = Workspace(copy, copy, copy)
        tolerance = 8 * count + 16
        kept = (scaled,)
    run.take(work)
    run.free(work)
    run.take(*kept, scaled_factor, Workspace(tolerance, 0, tolerance))
    if is_complex:
        run.take(scaled_factor)
        run.free(scaled_factor)
        run.take(left)
    run.take(math.prod(node.outputs[0].shape) * item)
    return run.need(node.outputs[0].nbytes)
