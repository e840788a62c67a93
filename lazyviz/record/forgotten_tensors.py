"""Tensors whose ops were forgotten: reads below the dispatcher are refused, also where nothing is patched.

Without a value, C++ code that such a read calls would say something misleading, or follow a null pointer.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..graph.ir import Failure, failure_of
from ..process.tracebacks import shortened
from .lazy_tensor import LazyTensor, refusal

_READS = (
    *("tolist", "numpy", "__array__", "__format__", "new_tensor", "new", "apply_", "map_", "map2_"),
    *("untyped_storage", "storage", "_typed_storage", "set_", "resize_", "share_memory_", "is_shared"),
    *("__dlpack__", "as_subclass", "is_pinned", "pin_memory", "data_ptr"),
)
"""Methods that read or exchange memory, or ask for it, before the dispatcher is called."""


def refuse_reads() -> None:
    """Make :data:`_READS` refuse forgotten tensors; for other tensors, they behave as before."""
    for name in _READS:
        if name not in vars(LazyTensor):
            # Ordinary assignment to this class is forwarded to torch.Tensor.
            type.__setattr__(LazyTensor, name, _refusing(name))


def _refusing(name: str) -> Any:
    @functools.wraps(getattr(torch.Tensor, name))
    @shortened
    def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not issubclass(type(tensor), LazyTensor):  # evaluated since this method was looked up
            return getattr(tensor, name)(*args, **kwargs)
        value = tensor.__dict__.get("_lazyviz")
        node = value.node if value is not None else None
        if node is not None and failure_of(node.error) is Failure.FORGOTTEN:
            raise RuntimeError(refusal(value))
        return getattr(super(LazyTensor, tensor), name)(*args, **kwargs)

    return read
