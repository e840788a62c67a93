"""Private torch APIs for what bypasses the dispatcher: memory access, overrides, allocator events.

Private:

- ``ProfilerStateBase`` in ``c10::ThreadLocalDebugInfo``: the allocator reports to it what a thread allocates
  and frees; the public profilers that read this do far more for each call (``allocations.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import native_module_loader
from .private_api import make_wrapper_subclass

# Without memory, reading the data pointer raises an error, as for PyTorch's own fake tensors.
_refuse_addresses = torch._C._set_throw_on_mutable_data_ptr

EXPORTS = (torch._C._to_dlpack,)  # C functions that export an argument's memory
# `torch.FloatTensor` and similar types, which read tensors in lists.
LEGACY_TYPES = tuple(sorted(torch._tensor_classes, key=str))
# Methods that C++ code calls to read numbers in a list when it creates a tensor or an index from it.
NUMBERS = ("__index__", "__int__", "__float__", "__bool__", "__complex__")
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
FILE_WRITER = torch._C.PyTorchFileWriter  # writes the storages that `torch.save` finds
# TorchScript's files: this writes the memory of a module's tensors, and of those that `__getstate__` creates.
SCRIPT_WRITERS = (
    *((torch._C.ScriptModule, name) for name in dir(torch._C.ScriptModule) if "save" in name),
    *((torch._C.ScriptFunction, name) for name in dir(torch._C.ScriptFunction) if "save" in name),
    (torch._C.ScriptModuleSerializer, "serialize"),
    (torch._C, "_pickle_save"),
)
# Readers assign memory to tensors that an op has created.
_READ = ("import_ir_module", "_load_for_", "_load_jit_", "_load_mobile_", "_pickle_load_obj")
SCRIPT_READERS = tuple((torch._C, name) for name in dir(torch._C) if any(part in name for part in _READ))
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


def bypasses_modes() -> bool:
    """Whether a call now bypasses every dispatch mode, because C++ code is reading a number itself."""
    return _is_excluded(torch._C.DispatchKey.Python)


calling_overrides = torch._C._EnableTorchFunction
"""Context: an argument's ``__torch_function__`` is called, even where only that of subclasses is disabled."""


def overrides_exist() -> bool:
    """Whether an argument's ``__torch_function__`` can be called."""
    return not torch._C._is_torch_function_all_disabled()


def function_modes() -> list[Any]:
    """The active function modes (``with torch.device("cuda")``), called before an argument's override."""
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def put_function_modes(modes: list[Any]) -> None:
    """Set the function modes to ``modes``; only the last ones may differ from the current ones."""
    while len(now := function_modes()) > len(modes):
        torch._C._pop_torch_function_stack()
    for mode in modes[len(now) :]:
        torch._C._push_on_torch_function_stack(mode)


def overrides_are_called() -> bool:
    """Whether an argument's ``__torch_function__`` is called."""
    return torch._C._is_torch_function_enabled()


_native: Any = native_module_loader.load("allocations.cpp")


def begin_measuring() -> None:
    """Record this thread's CPU allocations until :func:`end_measuring`.

    Does nothing without the compiled module, or if a profiler is active.  Until the end, no older memory
    should be freed, because the allocator warns about that.
    """
    if _native is not None:
        _native.begin()


def end_measuring() -> int | None:
    """Peak bytes since :func:`begin_measuring`, in addition to older memory; ``None``: not measured."""
    held: int | None = _native.end() if _native is not None else None
    return held


def measured(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, int | None]:
    """The result of a call, and its peak bytes as in :func:`end_measuring`."""
    if _native is None:
        return function(*args, **kwargs), None
    found: tuple[Any, int | None] = _native.measured(function, args, kwargs)
    return found
