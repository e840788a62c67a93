"""Private torch APIs for the dispatch modes of a thread, each with its reason.

In addition to :mod:`lazyviz.torch_internals.private_api`.
``tests/torch_internals/test_private_apis.py`` checks each entry.
"""

from __future__ import annotations

import functools
import sys
import traceback
from typing import Any

import torch
from torch._C import (  # type: ignore[attr-defined]
    DispatchKey,
    DispatchKeySet,
    _dispatch_tls_is_dispatch_key_excluded,
    _dispatch_tls_is_dispatch_key_included,
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _dispatch_tls_set_dispatch_key_excluded,
    _dispatch_tls_set_dispatch_key_included,
    _ForceDispatchKeyGuard,
    _get_torch_function_state,
    _set_torch_function_state,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from ..process.global_state_transaction import Transaction

active_dispatch_modes = torch._C._len_torch_dispatch_stack  # their number on this thread's stack


def dispatch_modes() -> list[Any]:
    """The dispatch modes on this thread's stack."""
    return _get_current_dispatch_mode_stack()


def insert_mode_at_bottom(mode: TorchDispatchMode) -> None:
    """Put ``mode`` below the user's modes, because leaving a ``with`` pops the top mode, whichever it is.

    It is inserted only once: the autograd engine restores a thread's modes by itself when a node fails.
    """
    if active_dispatch_modes():
        _exchange_modes([mode, *[other for other in dispatch_modes() if other is not mode]])
    else:
        _push_mode(mode)


def remove_mode(mode: TorchDispatchMode) -> bool:
    """Remove ``mode`` from this thread's stack, wherever it is; False if it is not there."""
    if not has_mode(mode):
        return False
    _exchange_modes([other for other in dispatch_modes() if other is not mode])
    return True


def has_mode(mode: TorchDispatchMode) -> bool:
    """Whether ``mode`` is on this thread's stack."""
    depth = active_dispatch_modes()
    if depth == 1:  # the most frequent case, and a generator is slower than this check
        return torch._C._get_dispatch_stack_at(0) is mode
    return any(torch._C._get_dispatch_stack_at(at) is mode for at in range(depth))


# Pushed and popped if there is none: PyTorch updates its state at the first and the last mode.
_ANY_MODE = TorchDispatchMode()


def refresh_modes() -> None:
    """Make PyTorch update its state for this thread's current modes.

    Leaving inference mode restores the dispatch keys that were active when it was entered, even if modes were
    pushed or popped in between. With stale keys, modes are skipped, or looked up although there are none.
    """
    modes = [mode for mode in dispatch_modes() if mode is not _ANY_MODE]
    try:
        _put_modes(modes or [_ANY_MODE])
    finally:
        try:
            _put_modes(modes)
        except BaseException:
            _put_modes(modes)
            raise


def _exchange_modes(modes: list[Any]) -> None:
    """Set this thread's stack to ``modes``, the bottom first, or leave it unchanged if interrupted."""
    before = dispatch_modes()
    try:
        _put_modes(modes)
    except BaseException:
        _put_modes(before)
        raise


def _put_modes(modes: list[Any]) -> None:
    while active_dispatch_modes():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


# Keys that our contexts exclude on a thread while they are active; outside of all contexts, none is excluded.
_LEFT_OUT = [
    DispatchKey.__members__[name]
    for name in (
        "Python",
        "PythonTLSSnapshot",
        "ADInplaceOrView",
        "AutogradCPU",
        "AutogradCUDA",
        "AutogradOther",
    )
]
# Those of functorch, and of gradients of several outputs at once (`is_grads_batched`), which refuse to draw
# random numbers. The enumeration does not list the second one.
_VMAP_NAMES = ("FuncTorchVmapMode", "VmapMode")
VMAP_MODES = [key for name in _VMAP_NAMES if (key := torch._C._parse_dispatch_key(name)) is not None]
_OF_MODES = (DispatchKey.Python, DispatchKey.PythonTLSSnapshot)


def stray_keys() -> list[str]:
    """Names of dispatch keys that this thread includes or excludes although no context is active."""
    if torch.is_inference_mode_enabled():
        return []
    found = [f"{key.name} left out" for key in _LEFT_OUT if _dispatch_tls_is_dispatch_key_excluded(key)]
    if not active_dispatch_modes():
        found += [
            f"{key.name} without a mode" for key in _OF_MODES if _dispatch_tls_is_dispatch_key_included(key)
        ]
    if torch._C._meta_in_tls_dispatch_include():
        found.append("Meta of PyTorch's fake tensors")
    return found


def drop_stray_keys() -> None:
    """Restore their state outside of all contexts."""
    if torch._C._meta_in_tls_dispatch_include():
        torch._C._set_meta_in_tls_dispatch_include(False)
    if stray_keys():
        for key in (*DispatchKey.__members__.values(), *VMAP_MODES):
            if key in (*_LEFT_OUT, *VMAP_MODES) or key.name.startswith(
                ("Autograd", "FuncTorchDynamicLayer", "Functionalize")
            ):
                _dispatch_tls_set_dispatch_key_excluded(key, False)
        for key in _OF_MODES:
            _dispatch_tls_set_dispatch_key_included(key, bool(active_dispatch_modes()))


_DispatchState = tuple[int, int, list[Any], Any, bool]


def _dispatch_state() -> _DispatchState:
    """How this thread dispatches ops: the keys that it includes and excludes, its modes, and whether
    ``__torch_function__`` and autograd take part.
    """
    return (
        _dispatch_tls_local_include_set().raw_repr(),
        _dispatch_tls_local_exclude_set().raw_repr(),
        dispatch_modes(),
        _get_torch_function_state(),
        torch.is_grad_enabled(),
    )


_enter_forced = _ForceDispatchKeyGuard.__enter__  # without what watches it while anything is pending
_kept: list[Any] = []  # these restore their changes when they are freed


def _set_dispatch_state(state: _DispatchState) -> None:
    included, excluded, modes, function, grad = state
    _exchange_modes(modes)
    _set_torch_function_state(function)
    torch._C._set_grad_enabled(grad)
    sets = DispatchKeySet.from_raw_repr(included), DispatchKeySet.from_raw_repr(excluded)
    _kept.append(_ForceDispatchKeyGuard(*sets))
    _enter_forced(_kept[-1])


class same_dispatch_state(Transaction):
    """Context after which this thread dispatches ops as before, even if an exception ended it.

    Contexts in Python, such as those of PyTorch's fake tensors, are not exited if an exception of another
    thread arrives as their exit begins.
    """

    def begin(self) -> None:
        self._before = _dispatch_state()
        self.undo_by(self._restore)

    def _restore(self) -> None:
        if _dispatch_state() == self._before:
            return
        seen = sys.exc_info()[1]
        while seen is not None:  # their frames would exit contexts only when they are freed
            traceback.clear_frames(seen.__traceback__)
            seen = seen.__context__
        if _dispatch_state() != self._before:
            _set_dispatch_state(self._before)


def entering(context: Any, transaction: Transaction) -> None:
    """Enter ``context`` in ``transaction``, which exits it."""
    context.__enter__()
    transaction.undo_by(functools.partial(context.__exit__, None, None, None))
