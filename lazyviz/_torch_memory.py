"""Private torch APIs around a tensor's memory: who gets at it past the dispatcher."""

from __future__ import annotations

from typing import Any

import torch

from ._torch import make_wrapper_subclass

# A read of an address is an error where there is no memory yet, as for PyTorch's own fake tensors: not null.
_refuse_addresses = torch._C._set_throw_on_mutable_data_ptr

EXPORTS = (torch._C._to_dlpack,)  # C functions that hand out an argument's memory
# `torch.FloatTensor` and its like, which read tensors in lists.
LEGACY_TYPES = tuple(sorted(torch._tensor_classes, key=str))
FILE_WRITER = torch._C.PyTorchFileWriter  # writes the storages that `torch.save` finds
# `UntypedStorage.data_ptr` without our patch.
storage_data_ptr = torch._C.StorageBase.data_ptr  # type: ignore[attr-defined]


def make_wrapper(
    cls: type,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """A strided tensor of class ``cls`` with true metadata (strides and offset in elements) and no memory."""
    tensor: Any = make_wrapper_subclass(cls, shape, stride, offset, None, dtype, torch.strided, device)
    _refuse_addresses(tensor)
    return tensor


def plain_overrides() -> bool:
    """Whether ``__torch_function__`` of an argument is called, and no mode's before it."""
    return torch._C._is_torch_function_enabled() and not torch._C._len_torch_function_stack()
