"""Sparse tensors whose components may be pending: construction and access without reading values.

Private:

- ``OpOverload.redispatch``, the dispatch keys of sparse kernels, ``_AutoDispatchBelowAutograd``: these
  kernels only store and return components. Called through the dispatcher, they would reach the dispatch mode,
  or the class of pending tensors, instead.
- ``_sparse_coo_tensor_with_dims_and_tensors``, ``_sparse_compressed_tensor_unsafe``: the functions in which
  all constructors end. They take the components as they are.
- ``_RestorePythonTLSSnapshot``: whether autocast is enabled where an op was called; it is not within dispatch
  modes.
- ``_get_privateuse1_backend_name``: the type of device of a backend outside of PyTorch, whose keys have
  another name.
- ``_set_check_sparse_tensor_invariants``: whether constructors check what they are given, which is global.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.utils._python_dispatch import _disable_current_modes

from ..process.global_state_transaction import Transaction
from .private_api import OpOverload

_aten = torch.ops.aten
MAKE_COO: OpOverload = _aten._sparse_coo_tensor_with_dims_and_tensors.default
"""What every constructor of a sparse COO tensor calls in the end; autograd has a formula for it."""
MAKE_COMPRESSED: OpOverload = _aten.sparse_compressed_tensor.comp_plain_value_size
"""The same for compressed layouts."""
MAKERS = {MAKE_COO, MAKE_COMPRESSED, _aten.sparse_compressed_tensor.comp_plain_value}
_COMPRESSED: OpOverload = _aten._sparse_compressed_tensor_unsafe.default
_DETACH: OpOverload = _aten.detach.default


@functools.cache
def _kernels(layout: torch.layout, device: str) -> Any:
    """The keys with the kernels for tensors of this layout and type of device."""
    kind = "sparse" if layout == torch.sparse_coo else "sparsecsr"
    if device == torch._C._get_privateuse1_backend_name():
        device = "privateuse1"
    return DispatchKeySet(_KEYS[f"{kind}{device}"])


_KEYS = {name.lower(): key for name, key in DispatchKey.__members__.items()}  # "SparseCPU", "SparseMeta"


def call(op: OpOverload, layout: torch.layout, device: torch.device, /, *args: Any, **kwargs: Any) -> Any:
    """Call the sparse kernel of ``op``, past autograd and every dispatch mode.

    The ops that it calls itself reach the class of pending tensors.
    """
    with _disable_current_modes(), torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(_kernels(layout, device.type), *args, **kwargs)


def component(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The component that the operator ``name`` returns; if it is pending, the tensor itself."""
    found: torch.Tensor = call(getattr(_aten, name).default, tensor.layout, tensor.device, tensor)
    return found


def is_coalesced(tensor: torch.Tensor) -> bool:
    """``tensor.is_coalesced()`` of a sparse COO tensor."""
    return bool(call(_aten.is_coalesced.default, tensor.layout, tensor.device, tensor))


def make(
    layout: torch.layout, shape: Sequence[int], parts: Sequence[torch.Tensor], is_coalesced: bool = False
) -> torch.Tensor:
    """A sparse tensor of these components, which may be pending; nothing is copied or checked."""
    values = parts[-1]
    options = {"dtype": values.dtype, "layout": layout, "device": values.device, "pin_memory": False}
    made: torch.Tensor
    if layout == torch.sparse_coo:
        sparse_dims = parts[0].shape[0]
        dims = sparse_dims, len(shape) - sparse_dims
        made = call(
            MAKE_COO, layout, values.device, *dims, shape, *parts, **options, is_coalesced=is_coalesced
        )
        return made
    with _Unchecked():
        made = call(_COMPRESSED, layout, values.device, *parts, shape, **options)
    return made


class _Unchecked(Transaction):
    """Context in which constructors do not read indices to check them."""

    def begin(self) -> None:
        self.undo_by(functools.partial(torch._C._set_check_sparse_tensor_invariants, are_checked()))
        torch._C._set_check_sparse_tensor_invariants(False)


are_checked: Callable[[], bool] = torch.sparse.check_sparse_tensor_invariants.is_enabled
"""Whether the constructors check indices."""


def make_differentiable(example: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A sparse tensor like ``example`` with other components, differentiable with respect to them."""
    made: torch.Tensor
    values = parts[-1]
    options = {"dtype": values.dtype, "layout": example.layout, "device": values.device, "pin_memory": False}
    if example.layout == torch.sparse_coo:
        dims, checked = (example.sparse_dim(), example.dense_dim()), {"is_coalesced": is_coalesced(example)}
        made = MAKE_COO(*dims, example.shape, *parts, **options, **checked)
    else:
        made = MAKE_COMPRESSED(*parts, example.shape, **options)
    return made


def same_components(tensor: torch.Tensor) -> torch.Tensor:
    """Another sparse tensor with the same components, as ``detach`` returns it."""
    with _disable_current_modes(), torch._C._AutoDispatchBelowAutograd():
        copy: torch.Tensor = _DETACH.redispatch(_COMPOSITE, tensor)
    return copy


_COMPOSITE = DispatchKeySet(DispatchKey.CompositeExplicitAutograd)
