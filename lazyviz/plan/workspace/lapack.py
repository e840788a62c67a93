"""Workspace of matrix decompositions and solvers on the CPU.

Copies are those of ``aten/src/ATen/native`` (BatchLinearAlgebra.cpp, BatchLinearAlgebraKernel.cpp,
LinearAlgebra.cpp).  What LAPACK requests was observed with MKL in the allocator's events; other libraries
request at least LAPACK's documented minimum, where the range begins.
"""

from __future__ import annotations

import math

from ...graph.ir import Node, TensorMeta
from .linalg import matrices, of_eigenvectors, transposing_fortran
from .rules import Rule, argument, exactly, on
from .size import NOTHING, Events, Need, Workspace

TABLE: dict[str, Rule] = {}

_STATUS = 4  # bytes of a matrix's status, and of a pivot


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
    blocked = 17 * (columns + 1) * item
    best = blocked if min(rows, columns) > 32 else (columns + 1) * item
    return Need(best, columns * item, 4 * blocked)


@on(TABLE, "linalg_householder_product")
def _product_of_reflectors(node: Node, threads: int) -> Need:
    """The workspace of ``orgqr``."""
    _, _, columns, item = matrices(node.args[0].meta)
    at_once = 1 if columns < 16 else 16 if columns <= 32 else 32
    return Need((at_once * columns + 1) * item, columns * item, 2 * (32 * columns + 1) * item)


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
