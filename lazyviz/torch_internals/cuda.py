"""Private torch APIs that replace CUDA if it is absent, each with its reason.

For C++, a planned tensor must never be a CUDA tensor: without a CUDA runtime, the autograd engine and device
guards terminate the process.  For C++, it is on a device of type ``meta``, whose backward pass runs on the
CPU thread, with an index that distinguishes it from the user's own ``meta`` tensors; Python sees ``cuda:N``.
``tests/test_torch_internals_cuda.py`` checks each entry.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _ExcludeDispatchKeyGuard,
)
from torch.optim import adam
from torch.optim.optimizer import _foreach_supported_types
from torch.utils import _device, _foreach_utils

from ..process.transaction import no_warnings
from .private_api import KEY_SET_OFFSET, OpOverload

cuda_is_present: Callable[[], bool] = torch.cuda.is_available
"""Whether this process can run on CUDA; ``torch.cuda.is_available`` itself answers for the planned card."""
_BUILT_WITH_CUDA = torch.backends.cuda.is_built()


def may_have_cuda() -> bool:
    """As :func:`cuda_is_present`, at no cost where PyTorch is built without CUDA."""
    return _BUILT_WITH_CUDA and cuda_is_present()


# What waits for the GPU, or asks for its memory, is a sync point of the user's while ops are pending.
synchronize: Callable[..., None] = torch.cuda.synchronize
max_memory_allocated: Callable[..., int] = torch.cuda.max_memory_allocated

MOST_DEVICES = 8
_FIRST_INDEX = 100  # of the meta device that stands for cuda:0; users have no reason to number theirs
STAND_INS: dict[torch.device, torch.device] = {}
"""The device that C++ sees for each ``cuda:N``; empty where CUDA is present."""
_STANDS_FOR: dict[torch.device, torch.device] = {}


def missing_cuda() -> str:
    """Why nothing can run on CUDA here, in the words of a backend that needs it; or ""."""
    if cuda_is_present():
        return ""
    if torch.version.cuda is None:
        return "needs a CUDA device, and this PyTorch is built without CUDA"
    return "needs a CUDA device, and PyTorch finds none"


def stand_in() -> None:
    """From now on tensors on ``cuda:N`` are planned, in this process."""
    if not STAND_INS and not cuda_is_present():
        for index in range(MOST_DEVICES):
            STAND_INS[torch.device("cuda", index)] = torch.device("meta", _FIRST_INDEX + index)
        _STANDS_FOR.update({below: above for above, below in STAND_INS.items()})


def stands_for(device: torch.device) -> torch.device:
    """What Python shows for a device that C++ names."""
    return _STANDS_FOR.get(device, device)


# --- autocast -----------------------------------------------------------------------

# C++ casts for a device type whose key tensors carry, and only tensors that say `is_cuda()`.
AUTOCAST_KEYS = int(DispatchKeySet(DispatchKey.AutocastCUDA).raw_repr())


def mark(tensor: torch.Tensor) -> None:
    """Have ops on a planned tensor reach the kernels for ``torch.autocast("cuda")`` where that is on."""
    key_set = ctypes.c_uint64.from_address(tensor._cdata + KEY_SET_OFFSET)
    key_set.value |= AUTOCAST_KEYS


def without_autocast() -> Any:
    """Context: ops go past the kernels for ``torch.autocast("cuda")``."""
    return _ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCUDA))


def has_autocast(name: str) -> bool:
    """Whether ``torch.autocast("cuda")`` has a rule for ATen's operator of that name (``"norm.Scalar"``)."""
    name = f"aten::{name}"  # which may not be there: an error for the second question
    return torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(
        name, "AutocastCUDA"
    )


def override(kernels: Mapping[str, Callable[..., Any]], key: str, undo: list[Callable[[], object]]) -> None:
    """Replace ATen's kernels for a dispatch key; notes in ``undo``, first, what puts them back."""
    library = torch.library.Library("aten", "IMPL")
    undo.append(library._destroy)
    with no_warnings():  # "overriding a previously registered kernel" is what is wanted
        for name, kernel in kernels.items():
            library.impl(name, kernel, key)


def operator_named(name: str) -> Any:
    """ATen's operator of a name such as ``"softmax.int"``; without an overload the default one."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def run_as_one(names: Iterable[str], undo: list[Callable[[], object]]) -> None:
    """Have autograd's own formulas for operators used on planned tensors; ``undo`` puts it back.

    Where a device has no kernel for an operator that can be made of others, it is, and its formula is
    passed by.  A CUDA build has these kernels; here one has to be named, which planned tensors do not reach.
    ``torch.library`` would not let us.
    """
    library: Any = torch._C._dispatch_library("IMPL", "aten", "", __file__, 0)
    undo.append(library.reset)
    for name in names:  # the user's own meta tensors do reach it
        library.impl(name, "Meta", getattr(torch.ops.aten, name).default.decompose, False)


# --- tensors ------------------------------------------------------------------------

_device_below = torch._C.TensorBase.device.__get__
# What a CPU tensor's key set has and a meta tensor's lacks.
_CPU_BIT = int(DispatchKeySet(DispatchKey.CPU).raw_repr() & ~DispatchKeySet(DispatchKey.Meta).raw_repr())


@contextmanager
def as_on_cpu(*tensors: torch.Tensor) -> Iterator[None]:
    """Context in which ``set_data`` takes planned tensors for the same kind as CPU tensors.

    It refuses tensors of other backends by their dispatch keys; CPU and CUDA tensors it
    takes for each other.
    """
    key_sets = [ctypes.c_uint64.from_address(tensor._cdata + KEY_SET_OFFSET) for tensor in tensors]
    for key_set in key_sets:
        key_set.value |= _CPU_BIT
    try:
        yield
    finally:
        for tensor, key_set in zip(tensors, key_sets):
            if _device_below(tensor).type != "cpu":
                key_set.value &= ~_CPU_BIT


# --- initialization, guards ---------------------------------------------------------

_LIBRARIES = os.path.join(os.path.dirname(torch.__file__), "lib")
_CUDA = 1  # c10::DeviceType::CUDA
_META = 14  # c10::DeviceType::Meta


def require_init() -> None:
    """Have C++ call ``torch.cuda._lazy_init`` again: it remembers a call of ours, which does nothing."""
    library = ctypes.PyDLL(os.path.join(_LIBRARIES, "libtorch_python.so"))
    library["_ZN5torch5utils24set_requires_device_initEN3c1010DeviceTypeEb"](
        ctypes.c_int8(_CUDA), ctypes.c_bool(True)
    )


def make_on_cpu_first(on: bool) -> None:
    """Whether ``torch.tensor(..., device="cuda")`` makes a CPU tensor, shows it to modes, and copies it then.

    Otherwise it copies where no mode sees it.
    """
    torch._C._set_only_lift_cpu_tensors(on)


@contextmanager
def cuda_guards() -> Iterator[None]:
    """Context in which C++ may guard a CUDA device, as shape rules written in Python make it do.

    A build without CUDA has no guard; that of meta tensors, which does nothing, stands in.
    """
    registry = (ctypes.c_void_p * (_META + 1)).in_dll(
        ctypes.CDLL(os.path.join(_LIBRARIES, "libc10.so")), "_ZN3c104impl26device_guard_impl_registryE"
    )
    before = registry[_CUDA]
    if before is None:
        registry[_CUDA] = registry[_META]
    try:
        yield
    finally:
        registry[_CUDA] = before


# --- optimizers -------------------------------------------------------------------

# Of torch.optim, and of what clips gradients.
_FOREACH_TYPES: tuple[list[Any], ...] = (_foreach_supported_types, _foreach_utils._foreach_supported_types)


# The foreach form of Adam and AdamW, of which one older release held more.
FOREACH_ADAM: tuple[Any, str] = (adam, "_multi_tensor_adam")

# What it adds epsilon by, in place, and what that older release added it by: PyTorch has no public names.
FOREACH_ADD_IN_PLACE = "_foreach_add_"
foreach_add: Callable[..., Sequence[torch.Tensor]] = torch._foreach_add


def foreach_choices() -> list[tuple[Any, str]]:
    """Where each optimizer's module has the function that chooses its form; older releases chose another."""
    name = "_default_to_fused_or_foreach"
    modules = [module for key, module in list(sys.modules.items()) if key.startswith("torch.optim.")]
    return [(module, name) for module in modules if hasattr(module, name)]


def support_foreach(cls: type[torch.Tensor]) -> None:
    """PyTorch picks its foreach paths by exact type; lazy tensors must not change the choice."""
    for types in _FOREACH_TYPES:
        if cls not in types:
            types.append(cls)


def supports_foreach(cls: type[torch.Tensor]) -> bool:
    """Whether :func:`support_foreach` holds for ``cls``."""
    return any(cls in types for types in _FOREACH_TYPES)


def withdraw_foreach(cls: type[torch.Tensor]) -> None:
    for types in _FOREACH_TYPES:
        if cls in types:
            types.remove(cls)


# --- functions that are replaced while a card is planned ------------------------------

# What groups the optimizer's tensors asks C++ for their device.
group_tensors = torch._C._group_tensors_by_device_and_dtype
GROUP_TENSORS = (torch._C, "_group_tensors_by_device_and_dtype")
# Module.to asks it whether `parameter.data = ` may change the device.
compatible_tensors = torch._has_compatible_shallow_copy_type
COMPATIBLE_TENSORS = (torch, "_has_compatible_shallow_copy_type")

# What `torch.cuda.nvtx` marks ranges with.
NVTX = (torch.cuda.nvtx, "_nvtx")
# What FSDP2 asks for the kind of card that its mesh is of.
GET_ACCELERATOR = (torch._C, "_get_accelerator")
# The order in which scaled_dot_product_attention tries kernels; torch.nn.attention.sdpa_kernel sets it.
attention_order: Callable[[], list[int]] = torch._C._get_sdp_priority_order
# What Module.to reads its arguments with.
PARSE_TO = (torch._C._nn, "_parse_to")
# torch.nn.init.trunc_normal_, which draws until every number is within its bounds.
TRUNC_NORMAL = (torch.nn.init, "_no_grad_trunc_normal_")
# Zeros without memory, as which autograd passes a tangent on that is none.
EFFICIENT_ZEROS: OpOverload = torch.ops.aten._efficientzerotensor.default
# DataParallel compares its cards by it.
CHECK_BALANCE = (sys.modules["torch.nn.parallel.data_parallel"], "_check_balance")
# What DataParallel hands a batch out with, and the threads on which it runs its replicas.
SCATTER: Any = torch.nn.parallel._functions.Scatter
THREADS_OF_REPLICAS = (sys.modules["torch.nn.parallel.parallel_apply"], "threading")
# What makes a bag's sparse gradient: of other operators on a card, in one kernel to a dispatch mode.
EMBEDDING_BAG_BACKWARD: OpOverload = torch.ops.aten._embedding_bag_backward.default
# How tensors are put into one buffer, and are taken out of it again.
flattened: Callable[[Sequence[torch.Tensor]], torch.Tensor] = torch._utils._flatten_dense_tensors
unflattened: Callable[[torch.Tensor, Sequence[torch.Tensor]], Sequence[torch.Tensor]] = (
    torch._utils._unflatten_dense_tensors
)
# Which device is current, by torch.accelerator.
EXCHANGE_ACCELERATOR = tuple(
    (torch._C, name) for name in ("_accelerator_exchangeDevice", "_accelerator_maybeExchangeDevice")
)
# What torch.load puts storages with, and makes tensors of them with.
RESTORE_LOCATION = (torch.serialization, "default_restore_location")
REBUILD_TENSOR = (torch._utils, "_rebuild_tensor")
# The same for dtypes that have no typed storage, uint16 for one; and the functions, by name, that
# torch.load may call, which is a cached dictionary.
REBUILD_TENSOR_OF_DTYPE = (torch._utils, "_rebuild_tensor_v3")
ALLOWED_WHEN_LOADING = (torch._weights_only_unpickler, "_get_allowed_globals")


@functools.cache
def is_made_of_others(op: OpOverload) -> bool:
    """Whether ATen has one kernel for all devices, made of other operators."""
    return op._can_decompose()


# Which functions take the device of ``with torch.device(...)`` is noted at the first of them: before
# anything of ours stands in for one.
_CONSTRUCTORS = _device._device_constructors()
# Functions that take a device, which C++ looks up in the driver if it is a number.
FACTORIES: list[tuple[Any, str]] = [
    *((torch, name) for name, item in vars(torch).items() if callable(item) and item in _CONSTRUCTORS),
    *((torch, name) for name in vars(torch) if name.endswith("_like") and not name.startswith("_")),
    *((torch.Tensor, name) for name in dir(torch.Tensor) if name.startswith("new_")),
]
