"""Redispatch from a dispatch mode's handler: to tensor subclasses, and to decompositions of composite ops.

Private:

- ``_push_mode``, ``_pop_mode``: PyTorch removes a mode from the stack while its handler runs, but calls that
  it redispatches must reach the mode.
- ``DisableTorchFunctionSubclass``: a mode's handler runs with ``__torch_function__`` enabled, although
  the op has already passed it.
- ``torch.distributed.tensor._api``, ``DTensor.__torch_dispatch__``: a DTensor's ops are dispatched in C++.
- ``HigherOrderOperator.py_kernels``: the kernels of such operators outside of tracing and compilation.
- ``_dispatch_tls_local_include_set``, ``_dispatch_tls_local_exclude_set``, ``_ForceDispatchKeyGuard``:
  user functions that are called while a mode's handler runs (signal handlers, for example) would run at
  its level, where neither autograd nor modes see ops.
- ``OpOverload.decompose``, ``_can_decompose``, the dispatcher's keys: in inference mode, composite
  functions reach modes as one op, without passing the layer that tracks views; their own ops pass it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from ..process.global_state_transaction import Transaction
from .dispatch_modes import has_mode, remove_mode
from .private_api import _LAZY_TENSORS, OpOverload

past_torch_function = torch._C.DisableTorchFunctionSubclass
"""Context: ``__torch_function__`` of subclasses is not called."""
_HIDDEN = _LAZY_TENSORS | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
_SNAPSHOT = torch._C.DispatchKeySet(
    torch._C.DispatchKey.PythonTLSSnapshot
)  # the key at which lazyviz's kernels are registered


def _seeing_views() -> Any:
    """Context: ops skip the layer that tracks views, and see conjugate and negative bits, like kernels in
    eager mode.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set() - _HIDDEN - _SNAPSHOT
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _keys_of_autocast() -> Any:
    names = ("CPU", "CUDA", "HPU", "IPU", "MAIA", "MPS", "MTIA", "PrivateUse1", "XLA", "XPU")
    found = [torch._C._parse_dispatch_key(f"Autocast{name}") for name in names]
    return functools.reduce(
        torch._C.DispatchKeySet.__or__, [torch._C.DispatchKeySet(key) for key in found if key is not None]
    )


_AUTOCAST = _keys_of_autocast()


is_in_op: Callable[[], bool] = functools.partial(
    torch._C._dispatch_tls_is_dispatch_key_excluded, torch._C.DispatchKey.PythonTLSSnapshot
)
"""Whether an op is being dispatched on this thread."""


def user_level(mode: TorchDispatchMode) -> AbstractContextManager[Any]:
    """The dispatch level of the user's code, for the user's functions that are called while an op is
    dispatched: ``mode`` is on the stack, and autograd and ``__torch_function__`` see the ops.  No effect
    where no op is dispatched, and in inference mode, whose keys differ.

    Autocast is restored only as far as the op's level shows it: it is off if the op has passed it.
    """
    if not is_in_op() or torch.is_inference_mode_enabled():
        return nullcontext()
    return _UserLevel(mode)


class _UserLevel(Transaction):
    def __init__(self, mode: TorchDispatchMode) -> None:
        self._mode = mode

    def begin(self) -> None:
        views = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
        included = torch._C._dispatch_tls_local_include_set() | views
        excluded = torch._C._dispatch_tls_local_exclude_set() & _AUTOCAST
        level = torch._C._ForceDispatchKeyGuard(included, excluded)
        self.undo_by(functools.partial(level.__exit__, None, None, None))
        level.__enter__()
        if not has_mode(self._mode):
            self.undo_by(functools.partial(remove_mode, self._mode))
            _push_mode(self._mode)
        functions = torch._C._EnableTorchFunction()
        self.undo_by(functools.partial(functions.__exit__, None, None, None))
        functions.__enter__()


@contextmanager
def _in_place(mode: TorchDispatchMode | None) -> Iterator[None]:
    if mode is None:
        yield
        return
    _push_mode(mode)
    try:
        yield
    finally:
        _pop_mode()


def is_dispatched_in_cpp(cls: type) -> bool:
    """Whether ops on this class are dispatched in C++, as for DTensor, whose handler only requests that.

    To request it, a mode, and any class before it, returns ``NotImplemented``.
    """
    module = sys.modules.get("torch.distributed.tensor._api")
    if module is None:
        return False
    return getattr(cls, "__torch_dispatch__", None) == module.DTensor.__torch_dispatch__


def ask_subclasses(
    mode: TorchDispatchMode | None,
    classes: Sequence[type],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The result of the first of ``classes`` that handles the call; ``NotImplemented`` if none does.

    The handlers get only these classes as types; ``mode`` sees the ops that they call.
    """
    with _in_place(mode):
        for cls in classes:
            result = cls.__torch_dispatch__(func, classes, args, kwargs)  # type: ignore[attr-defined]
            if result is not NotImplemented:
                return result
    return NotImplemented


def consists_of_ops(op: OpOverload) -> bool:
    """Whether ``op`` is composite on every device, like ``matmul``.

    ``max_pool1d`` is excluded, because a mode would see other ops than eager mode runs.
    """
    if op is torch.ops.aten.max_pool1d.default:
        return False
    has_kernel = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, op.name())
    return has_kernel("CompositeImplicitAutograd") and not has_kernel("CPU") and not has_kernel("CUDA")


def makes_views_by_decomposition(op: OpOverload) -> bool:
    """Whether ``op`` may return views of its arguments that are tracked only by the ops in its
    decomposition.
    """
    returns = op._schema.returns
    if not any(item.alias_info is not None and not item.alias_info.is_write for item in returns):
        return False
    tracked = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "ADInplaceOrView")
    return bool(op._can_decompose()) and not tracked


def dense_kernel(op: Any) -> Callable[..., Any] | None:
    """The kernel with which a higher-order operator (flex attention, ``torch.cond``) runs ordinary ops, if it
    has one.
    """
    kernels: Any = getattr(op, "py_kernels", {})
    kernel: Callable[..., Any] | None = kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
    if isinstance(kernel, FunctionType) and _CURRENT_MODE in kernel.__globals__:
        # It refuses to run under a mode, expecting that the mode should have traced it.
        names = {**kernel.__globals__, _CURRENT_MODE: _no_mode}
        copy = FunctionType(kernel.__code__, names, kernel.__name__, kernel.__defaults__, kernel.__closure__)
        copy.__kwdefaults__ = kernel.__kwdefaults__
        return copy
    return kernel


_CURRENT_MODE = "_get_current_dispatch_mode"


def _no_mode() -> None:
    """Replacement for the function that returns the active mode."""


def call_kernel(
    mode: TorchDispatchMode, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call :func:`dense_kernel`'s kernel; ``mode`` sees the ops in it."""
    with _in_place(mode):
        return kernel(*args, **kwargs)


def call_decomposed(
    mode: TorchDispatchMode, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call the ops that ``op`` consists of; ``mode`` sees them."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    with _in_place(mode), _seeing_views():
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), composite):
            # The kernel of eager mode, not a Python decomposition.
            return op._op_dk(composite, *args, **kwargs)
        return op.decompose(*args, **kwargs)
