"""Private torch APIs of general use, each with its reason.

Check this module after a PyTorch upgrade; ``tests/torch_internals/test_private_apis.py`` checks
each entry against the installed PyTorch.
"""

from __future__ import annotations

import ctypes
import logging
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _ExcludeDispatchKeyGuard,
    _ForceDispatchKeyGuard,
)
from torch._library import simple_registry
from torch._ops import OpOverload as OpOverload  # the class of torch.ops.aten.add.Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
)
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException as DynamicOutputShapeException,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import (
    FakeTensorMode as FakeTensorMode,  # shape inference for every ATen op, on a cache miss
)
from torch._subclasses.fake_tensor import (
    UnsupportedOperatorException as UnsupportedOperatorException,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import (  # type: ignore[attr-defined]
    UninitializedTensorMixin as UninitializedTensorMixin,
)
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

from ..process.global_state_transaction import Transaction
from .dispatch_modes import VMAP_MODES, entering
from .dispatch_modes import active_dispatch_modes as active_dispatch_modes
from .dispatch_modes import dispatch_modes as dispatch_modes
from .dispatch_modes import drop_stray_keys as drop_stray_keys
from .dispatch_modes import has_mode as has_mode
from .dispatch_modes import insert_mode_at_bottom as insert_mode_at_bottom
from .dispatch_modes import refresh_modes as refresh_modes
from .dispatch_modes import remove_mode as remove_mode
from .dispatch_modes import same_dispatch_state as same_dispatch_state
from .dispatch_modes import stray_keys as stray_keys


def is_defined_in_python(op: OpOverload) -> bool:
    """Whether ``torch.library`` defined the operator, so that it may be redefined."""
    return bool(op._defined_in_python)


# The op of `torch.profiler.record_function`, which every optimizer's step calls.
_marks = torch.ops.profiler
PROFILER_MARKS = (_marks._record_function_enter_new.default, _marks._record_function_exit._RecordFunction)


# --- tensors without memory -------------------------------------------------------

# The only call that creates a tensor with true metadata and no memory.
MAKE_WRAPPER_SUBCLASS = "_make_wrapper_subclass"  # DTensor calls it by this name
make_wrapper_subclass = getattr(torch.Tensor, MAKE_WRAPPER_SUBCLASS)
# As `Tensor.__torch_function__`, this makes fast paths of libraries treat a subclass as a plain tensor.
disabled_torch_function = torch._C._disabled_torch_function_impl
_disabled_torch_dispatch = torch._C._disabled_torch_dispatch_impl
set_conj = torch._C._set_conj
set_neg = torch._C._set_neg
TensorBase = torch._C.TensorBase  # its methods are the originals that lazyviz overrides or patches
_get_data = TensorBase.data.__get__  # type: ignore[attr-defined]
_set_data = TensorBase.data.__set__  # type: ignore[attr-defined]


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor on the same memory, with no autograd history and its own version counter."""
    return _get_data(tensor)


def storage_address(tensor: torch.Tensor) -> int:
    """Identity of the tensor's storage (the address of its C++ object)."""
    return torch._C._storage_address(tensor)  # type: ignore[attr-defined]


SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Numbers of a tracer: they cannot be hashed, and comparing them may add a guard to what is traced."""

DEVICES_WITHOUT_STORAGE = frozenset(("lazy", "xla", "vulkan"))
"""Types of devices whose tensors have no storage: PyTorch dereferences a null pointer on access."""


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether there is memory that can be tracked; in C++ because ``untyped_storage`` itself may crash."""
    return torch._C._has_storage(tensor)


class MemoryRef:
    """A weak reference to a tensor's memory.

    A reference to the tensor itself would be noticed: ``torch.utils.swap_tensors`` rejects tensors that have
    any.
    """

    __slots__ = ("_ref",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._ref = StorageWeakRef(TensorBase.untyped_storage(tensor))

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, if it still exists."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._ref.cdata)
        return found


def _python_keys() -> int:
    return int(
        DispatchKeySet(DispatchKey.Python).raw_repr()
        | DispatchKeySet(DispatchKey.PythonTLSSnapshot).raw_repr()
    )


_PYTHON_KEYS = _python_keys()


def word(address: int) -> int:
    """The eight bytes at an address in memory."""
    return ctypes.c_uint64.from_address(address).value


def _key_set_offset() -> int:
    """Byte offset of the dispatch key set inside a ``TensorImpl``.

    It is found by searching for the known key sets of two different tensors, so it does not depend on the
    build. The search starts at the front, because memory behind the object may belong to another object, or
    to none.
    """
    probes = [torch.empty(1, device="cpu"), torch.empty(1, device="meta", dtype=torch.complex64).conj()]
    known = [(probe._cdata, torch._C._dispatch_keys(probe).raw_repr()) for probe in probes]
    for offset in range(0, 320, 8):
        if [word(address + offset) for address, _ in known] == [key_set for _, key_set in known]:
            return offset
    raise ImportError(f"lazyviz does not know the memory layout of tensors in torch {torch.__version__}")


KEY_SET_OFFSET = _key_set_offset()
_LAZY_BITS = DispatchKeySet(DispatchKey.Conjugate) | DispatchKeySet(DispatchKey.Negative)
_LAZY_TENSORS = _LAZY_BITS | DispatchKeySet(DispatchKey.ZeroTensor)


def _set_python_keys(tensor: torch.Tensor, on: bool) -> None:
    key_set = ctypes.c_uint64.from_address(tensor._cdata + KEY_SET_OFFSET)
    key_set.value = key_set.value | _PYTHON_KEYS if on else key_set.value & ~_PYTHON_KEYS


SNAPSHOT_KEY = int(DispatchKeySet(DispatchKey.PythonTLSSnapshot).raw_repr())


def show_as_wrapper(tensor: torch.Tensor, on: bool) -> None:
    """Whether autograd treats a pending tensor as one of a subclass that dispatches to Python.

    For such a tensor, autograd replays a view whose base was written; for an ordinary one, it uses
    ``as_strided``, and then sums gradients of overlapping views in another order. While this is off, an op on
    the tensor reaches us only through a mode on this thread.
    """
    key_set = ctypes.c_uint64.from_address(tensor._cdata + KEY_SET_OFFSET)
    key_set.value = key_set.value | SNAPSHOT_KEY if on else key_set.value & ~SNAPSHOT_KEY


_set_class = object.__dict__["__class__"].__set__


def set_class(tensor: torch.Tensor, cls: type[torch.Tensor]) -> None:
    """``tensor.__class__ = cls`` without the setter of pending tensors, which stores the future class."""
    _set_class(tensor, cls)


def become_real(tensor: torch.Tensor, real: torch.Tensor, cls: type[torch.Tensor]) -> None:
    """Turn a pending wrapper into an ordinary tensor of class ``cls`` on ``real``'s memory, in place.

    ``Tensor.data = `` gives the wrapper ``real``'s storage and metadata but keeps its Python dispatch key,
    for which torch has no setter; without that key, it is an ordinary tensor. The ``TensorImpl`` stays the
    same, so everything that C++ refers to (saved tensors, AccumulateGrad, hooks, ``.grad``, views, version
    counters) stays valid; ``torch._C._swap_tensor_impl`` would leave all of these with the old object.
    """
    _set_python_keys(tensor, False)
    try:
        _take(tensor, real)
    # For example, integers in place of a tensor that requires gradients: it is unchanged.
    except RuntimeError:
        _set_python_keys(tensor, True)
        raise
    set_class(tensor, cls)


def become_pending(tensor: torch.Tensor, wrapper: torch.Tensor, cls: type[torch.Tensor]) -> None:
    """The reverse of :func:`become_real`: ``tensor`` takes the metadata of a memoryless ``wrapper``."""
    _take(tensor, wrapper)
    _set_python_keys(tensor, True)
    set_class(tensor, cls)


def set_metadata(tensor: torch.Tensor, wrapper: torch.Tensor) -> None:
    """Give a pending tensor the metadata of ``wrapper`` (for in-place ops such as ``t_``)."""
    _take(tensor, wrapper)


def _take(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """``tensor.data = other``, which would first compute conjugate and negative views.

    Function modes (such as ``with torch.device(...)``) and UninitializedParameter's ``__torch_function__``
    would call the public setter, which is ours.
    """
    if torch._C._is_torch_function_enabled():
        with torch._C.DisableTorchFunction():
            _take(tensor, other)
    elif tensor.is_conj() or tensor.is_neg() or other.is_conj() or other.is_neg():
        with _ExcludeDispatchKeyGuard(_LAZY_BITS):
            _set_data(tensor, other)
    else:
        _set_data(tensor, other)


# --- dispatch ---------------------------------------------------------------------

_BELOW_EVERYTHING = DispatchKeySet(DispatchKey.Python)
for _name in (
    "PythonTLSSnapshot",
    "ADInplaceOrView",
    "FuncTorchDynamicLayerFrontMode",
    "FuncTorchDynamicLayerBackMode",
    "Functionalize",
    "AutogradFunctionality",
    *(
        key
        for key in DispatchKey.__members__
        if key.startswith(("Autograd", "Autocast")) and key != "Autograd"
    ),
):
    if _name in DispatchKey.__members__:
        _BELOW_EVERYTHING = _BELOW_EVERYTHING | DispatchKeySet(DispatchKey.__members__[_name])
for _key in VMAP_MODES:
    _BELOW_EVERYTHING = _BELOW_EVERYTHING | DispatchKeySet(_key)
_PYTHON_KEY_SET = DispatchKeySet(DispatchKey.Python) | DispatchKeySet(DispatchKey.PythonTLSSnapshot)


def dispatches_itself(cls: type) -> bool:
    """Whether a tensor class has a ``__torch_dispatch__`` of its own."""
    return getattr(cls, "__torch_dispatch__", _disabled_torch_dispatch) is not _disabled_torch_dispatch


def below_autograd() -> Any:
    """Context: ops bypass autograd and autocast, but not dispatch modes."""
    return _ExcludeDispatchKeyGuard(_BELOW_EVERYTHING - _PYTHON_KEY_SET)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast for the op that is being dispatched; ``None`` where it is not enabled."""
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        is_enabled = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if is_enabled else None


@contextmanager
def with_autocast() -> Iterator[None]:
    """Context: kernels of the op that is being dispatched call others as without a dispatch mode, which would
    exclude autocast.
    """
    with torch._C._RestorePythonTLSSnapshot(), excluding_python(), torch._C._AutoDispatchBelowAutograd():  # type: ignore[attr-defined]
        yield


def excluding_python() -> Any:
    """Context: ops go directly to the kernel, without dispatch modes and wrappers (metadata-only kernels)."""
    return _ExcludeDispatchKeyGuard(_PYTHON_KEY_SET)


# Those of a class whose methods are watched while anything is pending: see KEY_GUARDS.
_enter_forced, _leave_forced = _ForceDispatchKeyGuard.__enter__, _ForceDispatchKeyGuard.__exit__


class seeing_lazy_bits(Transaction):
    """Context in which kernels see conjugate and negative bits, as they do in eager mode.

    The handler of a dispatch mode does not see these bits, because its arguments have none. But a kernel may
    create such tensors itself, and would then ignore the bits in computations.
    """

    def begin(self) -> None:
        left_out = _dispatch_tls_local_exclude_set() - _LAZY_TENSORS
        guard = _ForceDispatchKeyGuard(_dispatch_tls_local_include_set(), left_out)
        self.undo_by(partial(_leave_forced, guard, None, None, None))  # no effect if it was not entered
        _enter_forced(guard)


no_dispatch_modes = _disable_current_modes  # TorchScript's tracer must not see one


class kernels_only(same_dispatch_state):
    """Context in which a recorded ATen call reaches the kernel it reached when it was recorded.

    Recording happens below autograd, autocast and every mode; running must start at the same level, whatever
    is active around the sync point.
    """

    def begin(self) -> None:
        super().begin()
        entering(_kernels_only(), self)


@contextmanager
def _kernels_only() -> Iterator[None]:
    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        seeing_lazy_bits(),
        _ExcludeDispatchKeyGuard(_BELOW_EVERYTHING),
    ):
        yield


# C++ calls it for each op that reaches a dispatch mode: it returns the rule that is registered for both, if
# any.
dispatch_rule = simple_registry.find_torch_dispatch_rule
# The module itself, whose functions call each other: `import` returns a wrapper with properties.
mkldnn = torch.backends.mkldnn.m  # type: ignore[attr-defined]
# PyTorch's original `nn.Module.__call__`.
module_call = torch.nn.Module._wrapped_call_impl

# The guard in `torch.inference_mode`, and around compiled functions. When it is left, it restores the
# dispatch keys that were active when it was entered: see `refresh_modes`.
_InferenceGuard = torch._C._InferenceMode
KEY_GUARDS: tuple[Any, ...] = (_InferenceGuard, torch._C._ForceDispatchKeyGuard)
_enter_inference, _leave_inference = _InferenceGuard.__enter__, _InferenceGuard.__exit__


class inference_mode(Transaction):
    """``torch.inference_mode(enabled)`` for internal use, without lazyviz's hooks."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled

    def begin(self) -> None:
        guard = _InferenceGuard(self._enabled)
        self.undo_by(partial(_leave_inference, guard, None, None, None))  # no effect if it was not entered
        _enter_inference(guard)


# --- compilers --------------------------------------------------------------------

# Functions of `torch.jit` that run TorchScript's tracer, with their displayed names; ONNX uses the last.
TRACED_BY = {
    "trace": "torch.jit.trace",
    "trace_module": "torch.jit.trace_module",
    "_get_trace_graph": "tracing a program",
}
# The methods with which Python calls compiled TorchScript.
SCRIPT_CALLS: tuple[tuple[type, str], ...] = (
    (torch._C.ScriptFunction, "__call__"),
    (torch._C.ScriptMethod, "__call__"),
)
# Tensors of torch.export and torch.compile, which are handled by their own modes.
TRACING_TENSORS = (FakeTensor, FunctionalTensor)


def forward_mode_active() -> bool:
    """Whether tensors may have forward-mode derivatives, which cannot be seen below autograd."""
    return forward_ad._current_level >= 0


def tangent_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The forward-mode derivative of ``tensor``, if it has one."""
    return forward_ad.unpack_dual(tensor).tangent if forward_mode_active() else None


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has a forward-mode derivative."""
    return tangent_of(tensor) is not None


# --- autograd ---------------------------------------------------------------------

current_autograd_node = torch._C._current_autograd_node
# The number that the next autograd node will get: it pairs forward and backward ops.
sequence_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


def _owners(arguments: tuple[Any, ...]) -> tuple[int, int]:
    """References to the first argument of an op as a dispatch mode gets it, from C++ and from Python."""
    return arguments[0]._use_count(), sys.getrefcount(arguments[0])


def _owners_in_the_engine() -> tuple[int, int]:
    """The result of ``_owners`` for a gradient that only the autograd engine holds."""
    found: list[tuple[int, int]] = []

    class Count(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # skipping it would import all of Dynamo, for only two ops

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.add.Tensor:
                found.append(_owners(args))
            return func(*args, **(kwargs or {}))

    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(1, requires_grad=True, device="cpu") * 1
        total = (x.exp().sum(), x.sin().sum())
    with Count():
        torch.autograd.backward(total)
    return found[0]


def engine_is_sole_owner(arguments: tuple[Any, ...]) -> bool:
    """Whether only the autograd engine holds the first argument of an op that it calls."""
    return _owners(arguments) == _OWNERS_IN_THE_ENGINE


_OWNERS_IN_THE_ENGINE = _owners_in_the_engine()
# Tells TorchScript's compiler which operator a function is, by the function's `id`; the table is created on
# first use.
_BUILTINS: Any = sys.modules["torch.jit._builtins"]
FIND_BUILTIN = (_BUILTINS, "_find_builtin")


def table_of_builtins() -> tuple[dict[int, str], bool]:
    """Operators of TorchScript by the ``id`` of their functions, and whether the table is new."""
    is_new = _BUILTINS._builtin_table is None
    return _BUILTINS._get_builtin_table(), is_new


# The name of the node that stores a gradient in ``.grad``.
ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"
# Modules whose `_engine_run_backward` is called for every backward pass.
BACKWARD_ENTRIES: tuple[Any, ...] = (torch.autograd, torch.autograd.graph)
# The functions by which a context that allows writes to saved tensors recognizes a tensor, and its memory.
SAVED_TENSOR_KEYS = (torch.autograd.graph, "_get_tid", "_get_sid")
_ENGINE_CALL = torch.autograd.graph._engine_run_backward.__code__


def is_engine_call(frame: FrameType | None) -> bool:
    """Whether the autograd engine is what ``frame`` has called; ``None``: it is, on another thread."""
    return frame is None or frame.f_code is _ENGINE_CALL


# Functions of torch.nn.functional that are implemented in C++, by name.
nn_functions: Any = torch._C._nn


# Whether the gradient of `cumprod` has another formula for tensors that are not plain, even if it will not be
# differentiated again: in torch 2.11 it has, in 2.13 not.
CUMPROD_ASKS_ALWAYS = torch.__version__ < "2.13"  # compares like versions


def gradient_metadata(node: Any) -> Any:
    """Shape, dtype and device of each gradient that an autograd node receives; unpacks no saved tensor."""
    return node._input_metadata


_AUTOGRAD_KEY_SET = DispatchKeySet(DispatchKey.ADInplaceOrView)
for _name, _key in DispatchKey.__members__.items():
    if _name.startswith("Autograd") and _name != "Autograd":
        _AUTOGRAD_KEY_SET = _AUTOGRAD_KEY_SET | DispatchKeySet(_key)


def leaves_autograd_to_its_parts(op: OpOverload) -> bool:
    """Whether an op from outside of ATen has no autograd formula, so that autograd differentiates the ops in
    its kernel.
    """
    return op.namespace != "aten" and not any(
        torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)
        for key in ("Autograd", "AutogradCPU", "AutogradCUDA")
    )


def with_autograd() -> Any:
    """Context, in a dispatch mode: autograd records ops as it does in a kernel in eager mode."""
    included, excluded = (
        torch._C._dispatch_tls_local_include_set(),
        torch._C._dispatch_tls_local_exclude_set(),
    )
    return torch._C._ForceDispatchKeyGuard(
        included | DispatchKeySet(DispatchKey.ADInplaceOrView),
        excluded - _AUTOGRAD_KEY_SET - _LAZY_TENSORS,
    )


# --- shape inference --------------------------------------------------------------

VF = torch._VF  # the functions that nn.utils.rnn and nn.RNN call
is_zero_tensor = torch._is_zerotensor
neg_view = torch._neg_view
# Errors that FakeTensor raises if metadata is not enough.
DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    NotImplementedError,
)


@contextmanager
def quiet_shape_rules() -> Iterator[None]:
    """Context in which FakeTensor does not log the errors that it also raises."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def is_redispatched(tensor: torch.Tensor) -> bool:
    """Whether the class of ``tensor`` has redispatched the next function call; can be queried only once.

    ``torch.overrides.redispatch_function`` sets a flag that the first query in C++ consumes.
    """
    return torch._C._is_torch_function_enabled() and not torch._C._has_torch_function_unary(tensor)


def redispatching(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` without ``__torch_function__`` of its arguments' class, which redispatched the call."""

    def redispatched(*args: Any, **kwargs: Any) -> Any:
        return torch._C._skip_one_hop_torch_function(function, (), args, kwargs)

    return redispatched


def no_function_modes() -> Any:
    """Context without ``__torch_function__`` modes (``torch.set_default_device``, ``with torch.device``)."""
    return torch._C.DisableTorchFunction()


def use_count(tensor: torch.Tensor) -> int:
    """C++ references to the tensor, including Python's: more than 1 if autograd has saved it."""
    return tensor._use_count()  # type: ignore[attr-defined]


base_of = operator.attrgetter("_base")  # the tensor that a view keeps alive, None if it is not a view
