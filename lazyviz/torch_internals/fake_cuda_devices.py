"""Private torch APIs for fake CUDA devices, which replace CUDA if it is absent, each with its reason.

For C++, a planned tensor must never be a CUDA tensor: without a CUDA runtime, the autograd engine and device
guards terminate the process.  For C++, it is on a device of type ``meta``, whose backward pass runs on the
CPU thread, with an index that distinguishes it from the user's own ``meta`` tensors; Python sees ``cuda:N``.
``tests/torch_internals/test_fake_cuda_devices.py`` checks each entry.
"""

from __future__ import annotations

import ctypes
import functools
import operator
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

from ..process.global_state_transaction import no_warnings
from .private_api import KEY_SET_OFFSET, OpOverload

cuda_is_present: Callable[[], bool] = torch.cuda.is_available
"""Whether this process can run on CUDA; ``torch.cuda.is_available`` itself answers for the planned GPU."""
BUILT_WITH_CUDA = torch.backends.cuda.is_built()


def may_have_cuda() -> bool:
    """Like :func:`cuda_is_present`, but free if PyTorch is built without CUDA."""
    return BUILT_WITH_CUDA and cuda_is_present()


# Functions that wait for the GPU, or query its memory, are sync points of the user while ops are pending.
synchronize: Callable[..., None] = torch.cuda.synchronize
max_memory_allocated: Callable[..., int] = torch.cuda.max_memory_allocated

MOST_DEVICES = 8
# Index of the meta device that represents cuda:0; users have no reason to number their meta devices.
_FIRST_INDEX = 100
STAND_INS: dict[torch.device, torch.device] = {}
"""The device that C++ sees for each ``cuda:N``; empty where CUDA is present."""
_STANDS_FOR: dict[torch.device, torch.device] = {}


def missing_cuda() -> str:
    """Why nothing can run on CUDA here, as an error message of a backend that needs it; or ""."""
    if cuda_is_present():
        return ""
    if torch.version.cuda is None:
        return "needs a CUDA device, and this PyTorch is built without CUDA"
    return "needs a CUDA device, and PyTorch finds none"


def stand_in() -> None:
    """From now on, tensors on ``cuda:N`` are planned in this process."""
    if not STAND_INS and not cuda_is_present():
        for index in range(MOST_DEVICES):
            STAND_INS[torch.device("cuda", index)] = torch.device("meta", _FIRST_INDEX + index)
        _STANDS_FOR.update({below: above for above, below in STAND_INS.items()})


def stands_for(device: torch.device) -> torch.device:
    """The device that Python shows for a C++ device."""
    return _STANDS_FOR.get(device, device)


# --- autocast -----------------------------------------------------------------------

# C++ casts for a device type whose key the tensors have, and only tensors with `is_cuda()`.
AUTOCAST_KEYS = int(DispatchKeySet(DispatchKey.AutocastCUDA).raw_repr())


def mark(tensor: torch.Tensor) -> None:
    """Let ops on a planned tensor reach the kernels for ``torch.autocast("cuda")`` if that is enabled."""
    key_set = ctypes.c_uint64.from_address(tensor._cdata + KEY_SET_OFFSET)
    key_set.value |= AUTOCAST_KEYS


def without_autocast() -> Any:
    """Context: ops bypass the kernels for ``torch.autocast("cuda")``."""
    return _ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCUDA))


def has_autocast(name: str) -> bool:
    """Whether ``torch.autocast("cuda")`` has a rule for ATen's operator of that name (``"norm.Scalar"``)."""
    name = f"aten::{name}"  # it may not exist, and then the second query raises an error
    return torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(
        name, "AutocastCUDA"
    )


def override(kernels: Mapping[str, Callable[..., Any]], key: str, undo: list[Callable[[], object]]) -> None:
    """Replace ATen's kernels for a dispatch key; the entries in ``undo``, from the last on, restore them.

    PyTorch's table of Python kernels (``python_registrations_``, python_dispatch.cpp) keeps the last function
    of each operator forever.  Therefore it gets functions that look up the kernels, which may refer to a
    recorded graph.
    """
    library = torch.library.Library("aten", "IMPL")
    found = dict(kernels)
    undo += [found.clear, library._destroy]
    with no_warnings():  # "overriding a previously registered kernel" is intended
        for name in kernels:
            library.impl(name, _by_name(found, name), key)


def _by_name(kernels: Mapping[str, Callable[..., Any]], name: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return kernels[name](*args, **kwargs)

    return kernel


def operator_named(name: str) -> Any:
    """ATen's operator with a name such as ``"softmax.int"``; without an overload, the default one."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def run_as_one(names: Iterable[str], undo: list[Callable[[], object]]) -> None:
    """Use autograd's own formulas for operators on planned tensors; ``undo`` reverts this.

    If a device has no kernel for a decomposable operator, it is decomposed, and its formula is not used. A
    CUDA build has these kernels. Here, a kernel has to be registered, which planned tensors do not reach.
    ``torch.library`` does not allow that.
    """
    library: Any = torch._C._dispatch_library("IMPL", "aten", "", __file__, 0)
    undo.append(library.reset)
    for name in names:  # the user's own meta tensors do reach it
        library.impl(name, "Meta", getattr(torch.ops.aten, name).default.decompose, False)


# --- tensors ------------------------------------------------------------------------

_device_below = torch._C.TensorBase.device.__get__
# Keys that a CPU tensor has and a meta tensor lacks.
_CPU_BIT = int(DispatchKeySet(DispatchKey.CPU).raw_repr() & ~DispatchKeySet(DispatchKey.Meta).raw_repr())


@contextmanager
def as_on_cpu(*tensors: torch.Tensor) -> Iterator[None]:
    """Context in which ``set_data`` treats planned tensors like CPU tensors.

    It rejects tensors of other backends by their dispatch keys, but treats CPU and CUDA tensors as
    compatible.
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
    """Let C++ call ``torch.cuda._lazy_init`` again: it remembers a call of our replacement, which does
    nothing.
    """
    library = ctypes.PyDLL(os.path.join(_LIBRARIES, "libtorch_python.so"))
    library["_ZN5torch5utils24set_requires_device_initEN3c1010DeviceTypeEb"](
        ctypes.c_int8(_CUDA), ctypes.c_bool(True)
    )


def make_on_cpu_first(on: bool) -> None:
    """Whether ``torch.tensor(..., device="cuda")`` creates a CPU tensor that modes see, and then copies it.

    Otherwise, modes do not see the copy.
    """
    torch._C._set_only_lift_cpu_tensors(on)


@contextmanager
def cuda_guards() -> Iterator[None]:
    """Context in which C++ may create guards for a CUDA device, as shape rules written in Python do.

    A build without CUDA has no guard. That of meta tensors, which does nothing, replaces it.
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

# In torch.optim and in gradient clipping.
_FOREACH_TYPES: tuple[list[Any], ...] = (_foreach_supported_types, _foreach_utils._foreach_supported_types)


# The foreach form of Adam and AdamW, which held more memory in one older release.
FOREACH_ADAM: tuple[Any, str] = (adam, "_multi_tensor_adam")

# The in-place function that it adds epsilon with, and the one of that older release: PyTorch has no public
# names for them.
FOREACH_ADD_IN_PLACE = "_foreach_add_"
foreach_add: Callable[..., Sequence[torch.Tensor]] = torch._foreach_add


def foreach_choices() -> list[tuple[Any, str]]:
    """The function in each optimizer's module that chooses its form; older releases chose another one."""
    name = "_default_to_fused_or_foreach"
    modules = [module for key, module in list(sys.modules.items()) if key.startswith("torch.optim.")]
    return [(module, name) for module in modules if hasattr(module, name)]


def support_foreach(cls: type[torch.Tensor]) -> None:
    """PyTorch picks its foreach paths by exact type; lazy tensors must not change the choice."""
    for types in _FOREACH_TYPES:
        if not _holds(types, cls):
            types.insert(0, cls)


def supports_foreach(cls: type[torch.Tensor]) -> bool:
    """Whether :func:`support_foreach` holds for ``cls``."""
    return any(_holds(types, cls) for types in _FOREACH_TYPES)


def withdraw_foreach(cls: type[torch.Tensor]) -> None:
    for types in _FOREACH_TYPES:
        if _holds(types, cls):
            types[:] = [each for each in types if each is not cls]


def _holds(types: list[Any], cls: type[torch.Tensor]) -> bool:
    """Whether ``cls`` itself is among ``types``, not a class that is equal to it."""
    return any(map(functools.partial(operator.is_, cls), types))  # entirely in C, so nothing interrupts it


# --- functions that are replaced while a GPU is planned ------------------------------

# The function that groups the optimizer's tensors asks C++ for their device.
group_tensors = torch._C._group_tensors_by_device_and_dtype
GROUP_TENSORS = (torch._C, "_group_tensors_by_device_and_dtype")
# Module.to calls it to ask whether `parameter.data = ` may change the device.
compatible_tensors = torch._has_compatible_shallow_copy_type
COMPATIBLE_TENSORS = (torch, "_has_compatible_shallow_copy_type")

# What `torch.cuda.nvtx` marks ranges with.
NVTX = (torch.cuda.nvtx, "_nvtx")
# FSDP2 calls it to get the device module of its mesh.
GET_ACCELERATOR = (torch._C, "_get_accelerator")
# The order in which scaled_dot_product_attention tries kernels; torch.nn.attention.sdpa_kernel sets it.
attention_order: Callable[[], list[int]] = torch._C._get_sdp_priority_order
# The function with which Module.to parses its arguments.
PARSE_TO = (torch._C._nn, "_parse_to")
# torch.nn.init.trunc_normal_, which draws until every number is within its bounds.
TRUNC_NORMAL = (torch.nn.init, "_no_grad_trunc_normal_")
# Zeros without memory, which autograd passes on as a missing tangent.
EFFICIENT_ZEROS: OpOverload = torch.ops.aten._efficientzerotensor.default
# The function with which DataParallel compares its GPUs.
CHECK_BALANCE = (sys.modules["torch.nn.parallel.data_parallel"], "_check_balance")
# The function with which DataParallel scatters a batch, and the threads on which it runs its replicas.
SCATTER: Any = torch.nn.parallel._functions.Scatter
THREADS_OF_REPLICAS = (sys.modules["torch.nn.parallel.parallel_apply"], "threading")
# The function that creates a bag's sparse gradient: decomposed on a GPU, but one kernel for a dispatch mode.
EMBEDDING_BAG_BACKWARD: OpOverload = torch.ops.aten._embedding_bag_backward.default
# Functions that pack tensors into one buffer, and unpack it.
flattened: Callable[[Sequence[torch.Tensor]], torch.Tensor] = torch._utils._flatten_dense_tensors
unflattened: Callable[[torch.Tensor, Sequence[torch.Tensor]], Sequence[torch.Tensor]] = (
    torch._utils._unflatten_dense_tensors
)
# The current device, according to torch.accelerator.
EXCHANGE_ACCELERATOR = tuple(
    (torch._C, name) for name in ("_accelerator_exchangeDevice", "_accelerator_maybeExchangeDevice")
)
# The functions with which torch.load places storages, and creates tensors from them.
RESTORE_LOCATION = (torch.serialization, "default_restore_location")
REBUILD_TENSOR = (torch._utils, "_rebuild_tensor")
# The same for dtypes without a typed storage, such as uint16; and the functions that torch.load may call, by
# name, which are a cached dictionary.
REBUILD_TENSOR_OF_DTYPE = (torch._utils, "_rebuild_tensor_v3")
ALLOWED_WHEN_LOADING = (torch._weights_only_unpickler, "_get_allowed_globals")


@functools.cache
def is_made_of_others(op: OpOverload) -> bool:
    """Whether ATen has one composite kernel of the operator for all devices."""
    return op._can_decompose()


# The list of functions that take the device of ``with torch.device(...)`` is cached on first use, so it must
# be read before any of them is replaced.
_CONSTRUCTORS = _device._device_constructors()
# Functions with a device argument, which C++ looks up in the driver if it is a number.
FACTORIES: list[tuple[Any, str]] = [
    *((torch, name) for name, item in vars(torch).items() if callable(item) and item in _CONSTRUCTORS),
    *((torch, name) for name in vars(torch) if name.endswith("_like") and not name.startswith("_")),
    *((torch.Tensor, name) for name in dir(torch.Tensor) if name.startswith("new_")),
]
