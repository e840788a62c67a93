"""Exported array tracking: memory exported to NumPy and DLPack is tracked by a weak reference.

An array keeps the tensor object alive that it was created from, which proves nothing if the user has that
tensor, too. Therefore, while exports are tracked, arrays are created from another tensor on the same memory,
to which nothing else refers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...torch_internals import private_api, storage_ownership
from ..lazy_tensor import is_lazy
from .attribute_patches import Patches
from .observers_of_deferred_writes import DLPACK, NUMPY, MemoryHolders

BeforeRead = Callable[[torch.Tensor, str], None]  # evaluates what reading a tensor depends on, given a cause
CAUSES = {NUMPY: "numpy", DLPACK: "DLPack"}
METHODS = {"numpy": NUMPY, "__dlpack__": DLPACK}
FUNCTIONS = ((torch.utils.dlpack, "to_dlpack"), (torch, "to_dlpack"))


def export_array(
    holders: MemoryHolders,
    original: Callable[..., Any],
    who: str,
    tensor: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``original(tensor, ...)``, which exports the memory of an ordinary tensor."""
    plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    if not plain or storage_ownership.address_of(tensor) is None:
        return original(tensor, *args, **kwargs)
    # A tensor that requires gradients is rejected, or detached by the function itself.
    given = tensor if tensor.requires_grad else private_api.alias(tensor)
    traced = storage_ownership.is_ordinary(given)
    result = original(given, *args, **kwargs)
    if who is NUMPY:
        base = result
        while isinstance(base, storage_ownership.numpy.ndarray):  # type: ignore[union-attr]
            base = base.base
        if isinstance(base, torch.Tensor):
            holders.note_export(base, who, traced=traced)
    elif given is not tensor:
        holders.note_export(given, who, traced=False)
    return result


def noting_exports(
    holders: MemoryHolders, original: Callable[..., Any], who: str, before_read: BeforeRead
) -> Callable[..., Any]:
    """``original``, which exports the memory of its first argument to ``who``; the export is recorded."""

    @functools.wraps(original)
    def function(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if is_lazy(tensor):
            before_read(tensor, CAUSES[who])  # only exports of real tensors can be recorded
            with holders.recording.paused():
                return export_array(holders, original, who, tensor, *args, **kwargs)
        return export_array(holders, original, who, tensor, *args, **kwargs)

    return function


class ExportPatches:
    """Records exports while no ops are recorded or pending.

    DLPack exports are always recorded, because they leave no trace that could be found later. Arrays do, so
    they are recorded only while the known state of some memory depends on it.
    """

    def __init__(self, holders: MemoryHolders, before_read: BeforeRead) -> None:
        self._holders = holders
        self._before_read = before_read
        self._dlpack = Patches()
        self._numpy = Patches()

    def install(self, *, numpy: bool) -> None:
        if not self._dlpack and not self._dlpack.reapply():
            self._dlpack.set(torch.Tensor, "__dlpack__", self._noting(torch.Tensor.__dlpack__, DLPACK))
            for owner, name in FUNCTIONS:
                self._dlpack.set(owner, name, self._noting(getattr(owner, name), DLPACK))
            self._dlpack.complete()
        if numpy and not self._numpy and not self._numpy.reapply():
            self._numpy.set(torch.Tensor, "numpy", self._noting(torch.Tensor.numpy, NUMPY))
            self._numpy.complete()

    def _noting(self, original: Callable[..., Any], who: str) -> Callable[..., Any]:
        return noting_exports(self._holders, original, who, self._before_read)

    def begin_block(self) -> None:
        """While ops are recorded or pending, other patches record arrays."""
        self.install(numpy=False)
        self._numpy.restore()

    def remove(self) -> None:
        self._numpy.restore()
        self._dlpack.restore()
