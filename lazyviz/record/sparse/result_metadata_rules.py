"""Result metadata of sparse kernels: rules for what a call returns, if its metadata determines that.

Each rule gets the call's arguments by their names, with a :class:`Form` for each sparse tensor, and returns
what the kernel will return, or ``None`` where that depends on data (how many indices differ, for example) or
PyTorch rejects the call. The facts are those of ATen's kernels in ``aten/src/ATen/native/sparse``;
``tests/record/sparse/test_result_metadata_rules.py`` compares each with what the kernels do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .components import Form

_COO = torch.sparse_coo
_MKL_DTYPES = {torch.float32, torch.float64, torch.complex64, torch.complex128}
_OTHER = {torch.sparse_csr: torch.sparse_csc, torch.sparse_csc: torch.sparse_csr}


@dataclass(frozen=True)
class New:
    """A strided tensor that the kernel creates.

    Attributes:
        strides: ``None`` if it is contiguous.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...] | None = None

    def empty(self) -> torch.Tensor:
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Written:
    """The strided argument that the kernel writes and returns."""

    name: str


@dataclass(frozen=True)
class Row:
    """A row of a component of an argument, in the same memory."""

    part: torch.Tensor
    number: int


@dataclass(frozen=True)
class Made:
    """A sparse tensor; components that are tensors are those of an argument, not copies."""

    layout: torch.layout
    shape: tuple[int, ...]
    parts: tuple[torch.Tensor | Row | New, ...]
    is_coalesced: bool = False


Outcome = New | tuple[New, ...] | Written | Made | None
Rule = Callable[..., Outcome]


def _like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> New:
    """A tensor with the strides of ``tensor.clone()``."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    size, is_dense = 1, True
    for stride, length in sorted((stride, length) for stride, length in zip(strides, shape) if length > 1):
        is_dense = is_dense and stride == size
        size *= length
    return New(shape, dtype or tensor.dtype, tensor.device, strides if is_dense else None)


def _contiguous(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> New:
    return New(tuple(tensor.shape), dtype or tensor.dtype, tensor.device)


def _copy(
    form: Form,
    dtype: torch.dtype | None = None,
    *,
    indices: Callable[[torch.Tensor], New] = _like,
    values: Callable[..., New] = _like,
    is_coalesced: bool | None = None,
) -> Made:
    """A sparse tensor with as many elements as ``form``, in new memory."""
    parts = (*map(indices, form.indices), values(form.values, dtype))
    return Made(form.layout, form.shape, parts, form.is_coalesced if is_coalesced is None else is_coalesced)


def _is_real(dtype: torch.dtype) -> bool:
    """Whether kernels with their own loops, such as that of softmax, support the dtype."""
    return dtype in (torch.float32, torch.float64)


def _is_number(*items: Any) -> bool:
    """Whether all are real numbers that kernels of every dtype accept; booleans are not."""
    return all(type(item) is float or (type(item) is int and -(2**63) <= item < 2**63) for item in items)


def _is_strided(*tensors: Any) -> bool:
    return all(isinstance(each, torch.Tensor) for each in tensors)


# --- products ---------------------------------------------------------------------------


def _product(matrix: Any, dense: Any) -> bool:
    """Whether ``matrix @ dense`` is a product of a sparse matrix and a strided one."""
    return (
        isinstance(matrix, Form)
        and _is_strided(dense)
        and (matrix.is_matrix or (matrix.layout == torch.sparse_csc and len(matrix.shape) == 2))
        and dense.dim() == 2
        and matrix.shape[1] == dense.shape[0]
        and matrix.dtype == dense.dtype
        and (matrix.dtype in _MKL_DTYPES or (matrix.layout == _COO and matrix.dtype.is_floating_point))
    )


def mm(self: Any, mat2: Any) -> Outcome:
    if _product(self, mat2):
        return New((self.shape[0], mat2.shape[1]), mat2.dtype, mat2.device)
    if not (isinstance(mat2, Form) and _is_strided(self) and self.dim() == 2 and mat2.is_matrix):
        return None
    if self.shape[1] != mat2.shape[0] or self.dtype != mat2.dtype or not self.dtype.is_floating_point:
        return None
    if mat2.layout != _COO and self.dtype not in _MKL_DTYPES:
        return None
    strides = (1, max(self.shape[0], 1)) if mat2.layout == _COO else None
    return New((self.shape[0], mat2.shape[1]), self.dtype, self.device, strides)


def addmm(self: Any, mat1: Any, mat2: Any, **factors: Any) -> Outcome:
    if not _is_number(*factors.values()):
        return None
    if not (_is_strided(self) and _product(mat1, mat2)) or self.dtype != mat2.dtype or not mat1.is_matrix:
        return None
    shape = mat1.shape[0], mat2.shape[1]
    if self.dim() != 2 or self.shape != shape or not self.is_contiguous():
        return None
    return New(shape, mat2.dtype, mat2.device)


def mv(self: Any, vec: Any) -> Outcome:
    if not (isinstance(self, Form) and self.is_matrix and _is_strided(vec) and vec.dim() == 1):
        return None
    return New((self.shape[0],), vec.dtype, vec.device) if _product(self, vec.unsqueeze(1)) else None


def bmm(self: Any, mat2: Any) -> Outcome:
    if not (isinstance(self, Form) and self.layout == _COO and _is_strided(mat2) and mat2.dim() == 3):
        return None
    if self.sparse_dims != 3 or len(self.shape) != 3 or self.dtype != mat2.dtype:
        return None
    if self.shape[0] != mat2.shape[0] or self.shape[2] != mat2.shape[1] or not _is_real(self.dtype):
        return None
    return New((*self.shape[:2], mat2.shape[2]), mat2.dtype, mat2.device)


def sampled_addmm(self: Any, mat1: Any, mat2: Any, **factors: Any) -> Outcome:
    if not _is_number(*factors.values()):
        return None
    if not (isinstance(self, Form) and self.layout == torch.sparse_csr and _is_strided(mat1, mat2)):
        return None
    if len(self.shape) != 2 or mat1.dim() != 2 or mat2.dim() != 2 or mat1.shape[1] != mat2.shape[0]:
        return None
    if self.shape != (mat1.shape[0], mat2.shape[1]) or not self.dtype == mat1.dtype == mat2.dtype:
        return None
    return _copy(self) if self.dtype in _MKL_DTYPES and _has_long_indices(self) else None


def mm_reduce(self: Any, other: Any, reduce: str) -> Outcome:
    """The kernel returns the positions of maxima only if autograd needs them."""
    if (
        not _product(self, other)
        or self.dtype.is_complex
        or self.layout != torch.sparse_csr
        or reduce not in ("sum", "mean")
    ):
        return None
    result = New((self.shape[0], other.shape[1]), other.dtype, other.device)
    return result, New((0,), self.parts[0].dtype, other.device)


# --- sums ---------------------------------------------------------------------------------


def add(self: Any, other: Any, alpha: Any = 1) -> Outcome:
    """A strided tensor and a sparse one; how many elements the sum of two sparse ones has depends on data."""
    if not (_is_strided(self) and isinstance(other, Form) and tuple(self.shape) == other.shape):
        return None
    if other.layout not in (_COO, torch.sparse_csr) or not _may_scale(self, other, alpha):
        return None
    if self.dtype != other.dtype and not (self.dtype.is_floating_point and other.dtype.is_floating_point):
        return None
    return New(other.shape, torch.promote_types(self.dtype, other.dtype), self.device)


def add_(self: Any, other: Any, alpha: Any = 1) -> Outcome:
    if not (_is_strided(self) and isinstance(other, Form) and tuple(self.shape) == other.shape):
        return None
    if other.layout != _COO or self.dtype != other.dtype or not _may_scale(self, other, alpha):
        return None
    return Written("self")


def sub(self: Any, other: Any, alpha: Any = 1) -> Outcome:
    if not isinstance(other, Form) or other.layout != _COO or other.dtype == self.dtype == torch.bool:
        return None
    return add(self, other, alpha)


def sub_(self: Any, other: Any, alpha: Any = 1) -> Outcome:
    return None if self.dtype == torch.bool else add_(self, other, alpha)


def _may_scale(self: torch.Tensor, other: Form, alpha: Any) -> bool:
    return _is_number(alpha) and (
        not isinstance(alpha, float) or (self.dtype.is_floating_point and other.dtype.is_floating_point)
    )


def total(self: Any, dtype: torch.dtype | None = None) -> Outcome:
    if not isinstance(self, Form) or self.layout not in (_COO, torch.sparse_csr):
        return None
    whole = not (self.dtype.is_floating_point or self.dtype.is_complex)
    if dtype is not None and self.dtype.is_complex and not dtype.is_complex:
        return None  # PyTorch warns about this
    return New((), dtype or (torch.int64 if whole else self.dtype), self.device)


def norm(self: Any, p: Any = 2) -> Outcome:
    if not isinstance(self, Form) or self.layout != _COO or not self.dtype.is_floating_point:
        return None
    return New((), self.dtype, self.device) if _is_number(p) else None


# --- elements with numbers, or with those of a strided tensor --------------------------------


def _factor(other: Any) -> bool:
    return _is_number(other) or (_is_strided(other) and other.dim() == 0)


def mul(self: Any, other: Any) -> Outcome:
    if isinstance(self, Form) and _factor(other):
        if isinstance(other, torch.Tensor) and not _same_kind(self, other):
            return None
        if self.layout not in (_COO, torch.sparse_csr, torch.sparse_csc):
            return None
        return _copy(self, values=_contiguous) if _keeps_dtype(self, other) else None
    if isinstance(other, Form) and _factor(self):
        return mul(other, self)
    if isinstance(other, Form) and _is_strided(self):
        self, other = other, self
    if not (isinstance(self, Form) and _is_strided(other) and tuple(other.shape) == self.shape):
        return None
    if self.layout != _COO or self.dtype != other.dtype or not _picks_contiguous(other, self):
        return None
    return _copy(self, values=_contiguous)


def _picks_contiguous(dense: torch.Tensor, mask: Form) -> bool:
    """Whether the elements of ``dense`` at the indices of ``mask``, which may be tensors, are contiguous."""
    return mask.values.dim() == 1 or dense.is_contiguous()


def div(self: Any, other: Any) -> Outcome:
    if not isinstance(self, Form) or self.layout != _COO or not _factor(other):
        return None
    if not self.dtype.is_floating_point or (isinstance(other, torch.Tensor) and not _same_kind(self, other)):
        return None
    return _copy(self, indices=_contiguous, values=_contiguous)


def _same_kind(form: Form, number: torch.Tensor) -> bool:
    """Whether a zero-dimensional tensor leaves the dtype of the other operand unchanged."""
    return form.dtype.is_floating_point and (number.dtype.is_floating_point or not number.dtype.is_complex)


def _keeps_dtype(form: Form, number: Any) -> bool:
    return form.dtype.is_floating_point or (form.dtype == torch.int64 and type(number) is int)


def neg(self: Any) -> Outcome:
    return _copy(self) if isinstance(self, Form) and self.dtype != torch.bool else None


def elementwise(self: Any) -> Outcome:
    """Kernels of one operand that coalesce it first because they are not linear."""
    if not isinstance(self, Form) or not self.dtype.is_floating_point:
        return None
    if (self.layout == _COO and not self.is_coalesced) or not self.values.is_contiguous():
        return None
    return _copy(self, values=_contiguous)


def softmax(self: Any, dim: int, half_to_float: bool) -> Outcome:
    if not isinstance(self, Form) or self.layout != _COO or not self.is_coalesced or half_to_float:
        return None
    if not _is_real(self.dtype) or not -len(self.shape) <= dim < len(self.shape):
        return None
    return _copy(self, indices=_contiguous, values=_contiguous)


def softmax_backward(grad_output: Any, output: Any, dim: int, self: Any) -> Outcome:
    for each in (grad_output, output, self):
        if not isinstance(each, Form) or each.layout != _COO or not each.is_coalesced:
            return None
        if each.shape != output.shape or each.sparse_dims != output.sparse_dims or each.dtype != output.dtype:
            return None
    if not _is_real(output.dtype) or not -len(output.shape) <= dim < len(output.shape):
        return None
    return _copy(output, indices=_contiguous, values=_contiguous)


# --- copies and conversions -------------------------------------------------------------------


def clone(self: Any, memory_format: Any = None) -> Outcome:
    return _copy(self) if isinstance(self, Form) and memory_format is None else None


def to_copy(self: Any, dtype: torch.dtype | None = None, **options: Any) -> Outcome:
    if not isinstance(self, Form) or self.layout not in (_COO, torch.sparse_csr):
        return None
    device, layout = options.pop("device", None), options.pop("layout", None)
    if (device is not None and torch.device(device) != self.device) or layout not in (None, self.layout):
        return None
    if any(each for each in options.values()) or (self.dtype.is_complex and dtype is not None):
        return None
    return _copy(self, dtype)


def to_dense(self: Any, dtype: torch.dtype | None = None, masked_grad: Any = None) -> Outcome:
    if not isinstance(self, Form) or self.layout not in (_COO, torch.sparse_csr) or len(self.shape) < 1:
        return None
    if dtype is not None or (self.layout != _COO and len(self.shape) != 2):
        return None
    return New(self.shape, self.dtype, self.device)


def transpose(self: Any, dim0: int, dim1: int) -> Outcome:
    if not isinstance(self, Form):
        return None
    count = len(self.shape)
    if not (-count <= dim0 < count and -count <= dim1 < count):
        return None
    first, second = dim0 % count, dim1 % count
    shape = list(self.shape)
    shape[first], shape[second] = shape[second], shape[first]
    if self.layout == _COO:
        if max(first, second) >= self.sparse_dims:
            return None
        copied = _copy(self, is_coalesced=self.is_coalesced and first == second)
        return Made(_COO, tuple(shape), copied.parts, copied.is_coalesced)
    if self.layout not in _OTHER or count != 2 or first == second:
        return None
    return Made(_OTHER[self.layout], tuple(shape), self.parts)


def matrix_transpose(self: Any) -> Outcome:
    return transpose(self, 0, 1) if isinstance(self, Form) and len(self.shape) == 2 else None


def permute(self: Any, dims: Sequence[int]) -> Outcome:
    if not isinstance(self, Form) or self.layout != _COO:
        return None
    count = len(self.shape)
    if sorted(dim % count for dim in dims if -count <= dim < count) != list(range(count)):
        return None
    order = [dim % count for dim in dims]
    if sorted(order[: self.sparse_dims]) != list(range(self.sparse_dims)) or order == list(range(count)):
        return None
    if order[self.sparse_dims :] != list(range(self.sparse_dims, count)):
        return None
    shape = tuple(self.shape[dim] for dim in order)
    is_coalesced = self.is_coalesced and order[0] == 0
    return Made(_COO, shape, (_contiguous(self.parts[0]), self.values), is_coalesced)


def to_csr(self: Any, dense_dim: int | None = None) -> Outcome:
    if not isinstance(self, Form) or self.layout != _COO or not self.is_coalesced or dense_dim is not None:
        return None
    if not self.is_matrix:
        return None
    rows = New((self.shape[0] + 1,), torch.int64, self.device)
    return Made(torch.sparse_csr, self.shape, (rows, Row(self.parts[0], 1), self.values))


def to_sparse_dims(self: Any, sparse_dim: int) -> Outcome:
    return to_coo(self) if isinstance(self, Form) and sparse_dim == 2 else None


def to_coo(self: Any, layout: Any = None, blocksize: Any = None, dense_dim: Any = None) -> Outcome:
    if layout == torch.sparse_csr and blocksize is None:
        return to_csr(self, dense_dim)
    if not isinstance(self, Form) or self.layout != torch.sparse_csr or len(self.shape) != 2:
        return None
    if layout not in (None, _COO) or blocksize is not None or dense_dim is not None:
        return None
    indices = New((2, self.values.shape[0]), torch.int64, self.device)
    return Made(_COO, self.shape, (indices, self.values), is_coalesced=True)


def sparse_mask(self: Any, mask: Any) -> Outcome:
    """The elements of a tensor at the indices of ``mask``."""
    if not isinstance(mask, Form) or tuple(self.shape) != mask.shape:
        return None
    if isinstance(self, Form):
        if not self.layout == mask.layout == _COO or self.sparse_dims != mask.sparse_dims:
            return None
        is_itself = self.parts[0] is mask.parts[0]
        return None if is_itself or self.dtype != mask.dtype else _copy(mask, self.dtype, values=_contiguous)
    if mask.layout == _COO:
        return _copy(mask, self.dtype, values=_contiguous) if _picks_contiguous(self, mask) else None
    return (
        _copy(mask, self.dtype, values=_contiguous)
        if mask.layout in _OTHER and _has_long_indices(mask)
        else None
    )


def _has_long_indices(form: Form) -> bool:
    """Whether indices have the dtype that conversions give them."""
    return form.parts[0].dtype == torch.int64


_ELEMENTWISE = (
    "abs", "asin", "asinh", "atan", "atanh", "ceil", "erf", "expm1", "floor", "log1p", "relu", "round", "sgn",
    "sign", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip
RULES: dict[str, Rule] = {
    **{f"aten::{name}": elementwise for name in _ELEMENTWISE},
    "aten::_sparse_addmm": addmm,
    "aten::_sparse_log_softmax": softmax,
    "aten::_sparse_log_softmax_backward_data": softmax_backward,
    "aten::_sparse_mm_reduce_impl": mm_reduce,
    "aten::_sparse_softmax": softmax,
    "aten::_sparse_softmax_backward_data": softmax_backward,
    "aten::_to_copy": to_copy,
    "aten::_to_dense": to_dense,
    "aten::_to_sparse": to_coo,
    "aten::_to_sparse.sparse_dim": to_sparse_dims,
    "aten::_to_sparse_csr": to_csr,
    "aten::add.Tensor": add,
    "aten::add_.Tensor": add_,
    "aten::addmm": addmm,
    "aten::bmm": bmm,
    "aten::clone": clone,
    "aten::div.Tensor": div,
    "aten::mm": mm,
    "aten::mul.Tensor": mul,
    "aten::mv": mv,
    "aten::neg": neg,
    "aten::norm.Scalar": norm,
    "aten::native_norm": norm,
    "aten::permute": permute,
    "aten::sparse_mask": sparse_mask,
    "aten::sparse_sampled_addmm": sampled_addmm,
    "aten::sub.Tensor": sub,
    "aten::sub_.Tensor": sub_,
    "aten::sum": total,
    "aten::t": matrix_transpose,
    "aten::transpose.int": transpose,
}
"""By the operator's name, with its overload."""
