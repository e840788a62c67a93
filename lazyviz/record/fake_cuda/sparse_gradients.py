"""Sparse gradients of embeddings on an absent GPU.

Before it is coalesced, a gradient has one entry for each index.  Coalescing leaves one for each distinct
index, whose number depends on data: a plan assumes that all indices differ, which is the maximum, and says
so.  A sparse tensor consists of its indices and values, two planned tensors.  Operations of optimizers on it
are recorded as the ops of ATen's CUDA kernels (SparseCUDATensor.cpp, SparseCUDATensorMath.cu).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...torch_internals import fake_cuda_devices, private_api
from ..parity.inplace_gradient_sums import is_taken_over
from ..sync_points import AbsentDeviceError
from ..tape import Tape

_aten = torch.ops.aten
_DIFFER = "all indices of a sparse gradient differ"
_NO_PADDING = "no index of a sparse embedding is the padding index"
_device_below = private_api.TensorBase.device.__get__


class PlannedSparse(torch.Tensor):
    """A sparse COO tensor of planned indices and values."""

    _tape: Tape
    _parts: tuple[torch.Tensor, torch.Tensor]
    _is_coalesced: bool

    __torch_function__ = private_api.disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, tape: Tape, indices: torch.Tensor, values: torch.Tensor, shape: Any, is_coalesced: bool = False
    ) -> PlannedSparse:
        self: PlannedSparse = private_api.make_wrapper_subclass(
            cls,
            torch.Size(shape),
            dtype=values.dtype,
            layout=torch.sparse_coo,
            device=fake_cuda_devices.STAND_INS[values.device],
        )
        self._tape, self._parts, self._is_coalesced = tape, (indices, values), is_coalesced
        return self

    def __init__(self, *args: Any) -> None: ...

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _aten.clone.default and is_taken_over(args, _parts_of):
            return args[0]._like(*args[0]._parts)
        name = func._schema.name.removeprefix("aten::")
        if name.startswith("_foreach_"):
            return _one_by_one(name.removeprefix("_foreach_"), args, kwargs or {})
        answer = _ANSWERS.get(name)
        if answer is None:
            raise AbsentDeviceError(
                f"{func} of a sparse tensor is not supported for a GPU that is not on this machine."
            )
        return answer(*args, **(kwargs or {}))

    def _like(self, indices: torch.Tensor, values: torch.Tensor, is_coalesced: bool = False) -> PlannedSparse:
        return PlannedSparse(self._tape, indices, values, self.shape, is_coalesced)

    def new(self, indices: torch.Tensor, values: torch.Tensor, size: Any) -> PlannedSparse:  # type: ignore[override]
        """``Tensor.new``, with which ``SparseAdam`` creates its updates."""
        return PlannedSparse(self._tape, indices, values, size)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        dtype, count = str(self.dtype).removeprefix("torch."), self._parts[1].shape[0]
        return f"lazy{list(self.shape)} {dtype} {self.device}, sparse, nnz={count}, pending"

    def type(self, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return super().type(*args, **kwargs)
        return self._parts[1].type().replace("torch.cuda.", "torch.cuda.sparse.")

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return fake_cuda_devices.stands_for(_device_below(self))

    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)

    def get_device(self) -> int:
        return self.device.index


def _parts_of(sparse: PlannedSparse) -> tuple[torch.Tensor, torch.Tensor]:
    return sparse._parts


def made_of(tape: Tape, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a constructor of sparse tensors for planned components; ``None`` for any other call.

    The result has no autograd history.
    """
    if name.startswith("_validate_sparse_coo"):
        return NotImplemented if _is_planned(args[1]) else None
    if name not in ("sparse_coo_tensor", "_sparse_coo_tensor_unsafe") or len(args) < 3:
        return None
    indices, values, size = args[:3]
    if not _is_planned(values) or (torch.is_grad_enabled() and values.requires_grad):
        return None
    return PlannedSparse(tape, indices, values, size, bool(kwargs.get("is_coalesced")))


def _is_planned(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.device in fake_cuda_devices.STAND_INS


def _assume(tape: Tape, what: str) -> None:
    if tape.recording.graph is not None:
        tape.recording.graph.assumed.add(what)


# --- the backward passes of layers ------------------------------------------------------


def embedding_backward(tape: Tape, original: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of ``embedding_sparse_backward``."""

    def kernel(
        grad: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int, scale_by_freq: bool
    ) -> Any:
        if not _is_planned(grad) or scale_by_freq:  # which is an error
            return original(grad, indices, num_weights, padding_idx, scale_by_freq)
        return _rows(tape, grad, indices, num_weights, padding_idx)

    return kernel


def bag_backward(
    tape: Tape,
    grad: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    bag_of: torch.Tensor,
    bag_size: torch.Tensor,
    maximum_indices: torch.Tensor,
    num_weights: int,
    scale_by_freq: bool,
    mode: int,
    sparse: bool,
    weights: torch.Tensor | None,
    padding_idx: int = -1,
) -> Any:
    """``_embedding_bag_sparse_backward`` (EmbeddingBag.cpp): a row of the gradient for each index."""
    rows = grad.index_select(0, bag_of)
    if mode == 1:
        sizes = bag_size.to(rows.dtype)  # alive as long as the other temporaries in C++
        shares = 1 / sizes
        rows *= shares.unsqueeze(1).index_select(0, bag_of)
        del sizes, shares
    if weights is not None:
        rows.mul_(weights.unsqueeze(1))
    return _rows(tape, rows, indices, num_weights, padding_idx)


def _rows(
    tape: Tape, grad: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int
) -> PlannedSparse:
    """A row of the gradient for each index (Embedding.cpp); with padding, the other rows are copied."""
    if padding_idx != -1:
        kept = indices != padding_idx
        indices, grad = indices.clone(), grad.clone()
        del kept
        _assume(tape, _NO_PADDING)
    width = grad.shape[-1]
    indices, values = indices.reshape(1, -1), grad.reshape(-1, width)
    return PlannedSparse(tape, indices.to(torch.long), values, (num_weights, width))


# --- operations on sparse tensors ------------------------------------------------------


def _flat(indices: torch.Tensor) -> torch.Tensor:
    return indices.squeeze(0)


def _coalesce(sparse: PlannedSparse) -> PlannedSparse:
    """Sort the indices with their positions, and sum the values of equal indices into new rows."""
    if sparse._is_coalesced:
        return sparse
    indices, values = sparse._parts
    _assume(sparse._tape, _DIFFER)
    keys, places = torch.sort(_flat(indices))
    offsets = torch.empty_like(places)
    rows = values.index_select(0, places)
    del offsets
    return sparse._like(keys.unsqueeze(0), rows, True)


def _add(
    left: torch.Tensor, right: torch.Tensor, alpha: Any = 1, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``left + alpha * right``, in the memory of ``out`` if that is given."""
    if not isinstance(left, PlannedSparse):
        if not isinstance(right, PlannedSparse):
            raise AssertionError("none of them is sparse")
        indices, values = right._parts
        result = left.clone() if out is None else out
        return result.index_add_(0, _flat(indices), values.to(left.dtype), alpha=alpha)
    if not isinstance(right, PlannedSparse):
        raise RuntimeError("add(sparse, dense) is not supported. Use add(dense, sparse) instead.")
    (indices, values), (others, added) = left._parts, right._parts
    together = torch.cat([indices, others], 1), torch.cat([values, added if alpha == 1 else added * alpha])
    if out is None:
        return left._like(*together)
    left._parts, left._is_coalesced = together, False
    return left


def _by_values(work: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A pointwise op on the values, out of place or in place."""

    def apply(sparse: Any, *rest: Any, **kwargs: Any) -> Any:
        if not isinstance(sparse, PlannedSparse):  # a number times a sparse tensor
            sparse, rest = rest[0], (sparse, *rest[1:])
        if any(isinstance(item, torch.Tensor) and item.dim() for item in rest):
            raise AbsentDeviceError(
                "Products of sparse tensors are not supported for a GPU that is not on this machine."
            )
        indices, values = sparse._parts
        result = work(values, *rest, **kwargs)
        if result is values:
            return sparse
        return sparse._like(indices, result, sparse._is_coalesced)

    return apply


def _mask(dense: torch.Tensor, mask: PlannedSparse, *rest: Any) -> PlannedSparse:
    """The rows of ``dense`` at the indices of ``mask``: selected, and multiplied by ones."""
    indices, values = mask._parts
    ones = torch.ones(1, dtype=values.dtype, device=values.device).expand_as(values)
    rows = dense.index_select(0, _flat(indices)) * ones
    return mask._like(indices, rows, mask._is_coalesced)


def _to_dense(sparse: PlannedSparse, dtype: torch.dtype | None = None, *rest: Any) -> torch.Tensor:
    indices, values = sparse._parts
    dtype = dtype or values.dtype
    result = torch.zeros(sparse.shape, dtype=dtype, device=sparse.device)
    return result.index_add_(0, _flat(indices), values.to(dtype))


def _one_by_one(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A foreach op: ATen's kernels take sparse tensors one by one."""
    work = getattr(torch.Tensor, name)
    results = [
        work(*[item[at] if isinstance(item, (list, tuple)) else item for item in args], **kwargs)
        for at in range(len(args[0]))
    ]
    return None if name.endswith("_") else results


def _zero(sparse: PlannedSparse) -> PlannedSparse:
    indices, values = sparse._parts
    sparse._parts = indices.new_empty((1, 0)), values.new_empty((0, *values.shape[1:]))
    return sparse


def _mark(sparse: PlannedSparse, is_coalesced: bool) -> PlannedSparse:
    sparse._is_coalesced = is_coalesced
    return sparse


def _clone(sparse: PlannedSparse, **kwargs: Any) -> PlannedSparse:
    indices, values = sparse._parts
    return sparse._like(indices.clone(), values.clone(), sparse._is_coalesced)


def _to_copy(
    sparse: PlannedSparse, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any
) -> PlannedSparse:
    place = sparse.device if device is None else fake_cuda_devices.stands_for(torch.device(device))
    if place not in fake_cuda_devices.STAND_INS:
        raise AbsentDeviceError(
            "A sparse tensor on a GPU that is not on this machine cannot be copied to another device."
        )
    indices, values = [part.to(place, copy=True) for part in sparse._parts]
    return sparse._like(indices, values.to(dtype or values.dtype), sparse._is_coalesced)


_VALUES = ["neg", "mul", "mul_", "div", "div_", "abs", "sgn", "sqrt", "sqrt_", "pow"]
_ANSWERS: dict[str, Callable[..., Any]] = {
    "_indices": lambda sparse: sparse._parts[0].detach(),
    "indices": lambda sparse: sparse._parts[0].detach(),
    "_values": lambda sparse: sparse._parts[1].detach(),
    "values": lambda sparse: sparse._parts[1].detach(),
    "_nnz": lambda sparse: sparse._parts[1].shape[0],
    "sparse_dim": lambda sparse: 1,
    "_dimI": lambda sparse: 1,
    "dense_dim": lambda sparse: sparse.dim() - 1,
    "_dimV": lambda sparse: sparse.dim() - 1,
    "is_coalesced": lambda sparse: sparse._is_coalesced,
    "is_same_size": lambda left, right: left.shape == right.shape,
    "coalesce": _coalesce,
    "_coalesce": _coalesce,
    "_coalesced_": _mark,
    "detach": lambda sparse: sparse._like(*sparse._parts, sparse._is_coalesced),
    "alias": lambda sparse: sparse._like(*sparse._parts, sparse._is_coalesced),
    "clone": _clone,
    "add": lambda left, right, alpha=1: _add(left, right, alpha),
    "add_": lambda left, right, alpha=1: _add(left, right, alpha, out=left),
    "sub": lambda left, right, alpha=1: _add(left, right, -alpha),
    "sub_": lambda left, right, alpha=1: _add(left, right, -alpha, out=left),
    "sparse_mask": _mask,
    "_to_dense": _to_dense,
    "to_dense": _to_dense,
    "_to_copy": _to_copy,
    "zero_": _zero,
    **{name: _by_values(getattr(torch.Tensor, name)) for name in _VALUES},
}
