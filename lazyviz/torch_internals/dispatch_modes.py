"""Private torch APIs for the dispatch modes of a thread, each with its reason.

Beside :mod:`lazyviz.torch_internals.private_api`.  ``tests/test_torch_internals.py`` checks each entry.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import (
    DispatchKey,
    _dispatch_tls_is_dispatch_key_excluded,
    _dispatch_tls_is_dispatch_key_included,
    _dispatch_tls_set_dispatch_key_excluded,
    _dispatch_tls_set_dispatch_key_included,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

active_dispatch_modes = torch._C._len_torch_dispatch_stack  # their number on this thread's stack


def dispatch_modes() -> list[Any]:
    """The dispatch modes on this thread's stack."""
    return _get_current_dispatch_mode_stack()


def insert_mode_at_bottom(mode: TorchDispatchMode) -> None:
    """Put ``mode`` below the user's modes; leaving a ``with`` pops the top whoever it is.

    Once: the autograd engine puts a thread's modes back by itself when a node fails.
    """
    if active_dispatch_modes():
        _exchange_modes([mode, *[other for other in dispatch_modes() if other is not mode]])
    else:
        _push_mode(mode)


def remove_mode(mode: TorchDispatchMode) -> bool:
    """Take ``mode`` off this thread's stack wherever it is; False if it is not there."""
    if not has_mode(mode):
        return False
    _exchange_modes([other for other in dispatch_modes() if other is not mode])
    return True


def has_mode(mode: TorchDispatchMode) -> bool:
    """Whether ``mode`` is on this thread's stack."""
    depth = active_dispatch_modes()
    if depth == 1:  # as nearly always, and a generator takes longer than the look
        return torch._C._get_dispatch_stack_at(0) is mode
    return any(torch._C._get_dispatch_stack_at(at) is mode for at in range(depth))


_ANY_MODE = TorchDispatchMode()  # comes and goes where there is none: at the first and the last PyTorch looks


def refresh_modes() -> None:
    """Make PyTorch look at this thread's modes again.

    Leaving an inference mode brings back the dispatch keys that were active when it was
    entered, whether or not modes came or went in between; with a stale set modes are
    passed by, or looked for where there are none.
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
    """Have ``modes`` on this thread's stack, the bottom first, or what is there now if it is interrupted."""
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


# Keys that our contexts leave out on a thread while they last: outside of all contexts none is.
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
_OF_MODES = (DispatchKey.Python, DispatchKey.PythonTLSSnapshot)


def stray_keys() -> list[str]:
    """Dispatch keys that this thread has in or leaves out, by name, for no context that is entered."""
    if torch.is_inference_mode_enabled():
        return []
    found = [f"{key.name} left out" for key in _LEFT_OUT if _dispatch_tls_is_dispatch_key_excluded(key)]
    if not active_dispatch_modes():
        found += [
            f"{key.name} without a mode" for key in _OF_MODES if _dispatch_tls_is_dispatch_key_included(key)
        ]
    return found


def drop_stray_keys() -> None:
    """Bring them to what they are outside of all contexts."""
    if stray_keys():
        for key in DispatchKey.__members__.values():
            if key in _LEFT_OUT or key.name.startswith(("Autograd", "FuncTorchDynamicLayer")):
                _dispatch_tls_set_dispatch_key_excluded(key, False)
        for key in _OF_MODES:
            _dispatch_tls_set_dispatch_key_included(key, bool(active_dispatch_modes()))
