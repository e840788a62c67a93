"""Subclass detection: whether ATen would see a subclass or a mode other than lazyviz's own."""

from __future__ import annotations

import torch

from ...torch_internals import composite_ops, private_api
from ..lazy_tensor import LazyTensor
from ..recorder import RecorderMode

Original = composite_ops.CompositeCall
_PLAIN = (torch.Tensor, torch.nn.Parameter, LazyTensor)


def is_plain(original: Original, *tensors: torch.Tensor) -> bool:
    """Whether eager PyTorch would see plain tensors here, and no mode."""
    return (
        original.is_next
        and all(type(mode) is RecorderMode for mode in private_api.dispatch_modes())
        and all(
            type(tensor) in _PLAIN
            and not composite_ops.is_functorch_wrapper(tensor)
            and tensor.device.type != "meta"
            for tensor in tensors
        )
    )
