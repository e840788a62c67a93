"""Private torch APIs for the dispatch modes of a thread, each with its reason.

Beside :mod:`lazyviz.torch_internals.private_api`.
``tests/torch_internals/test_private_apis.py`` checks each entry.
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
    """Put ``mode`` below the user's modes, because leaving a ``with`` pops the top mode, whichever it is.

    It is there only once: the autograd engine restores a thread's modes by itself when a node fails.
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
    """Make PyTorch read this thread's modes again.

    Leaving inference mode restores the dispatch keys that were active when it was entered, even if modes were
    pushed or popped in between. With stale keys, modes are skipped, or looked for when there are none.
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
    """Dispatch keys that this thread includes or excludes although no context is active, by name."""
    if torch.is_inference_mode_enabled():
        return []
    found = [f"{key.name} left out" for key in _LEFT_OUT if _dispatch_tls_is_dispatch_key_excluded(key)]
    if not active_dispatch_modes():
        found += [
            f"{key.name} without a mode" for key in _OF_MODES if _dispatch_tls_is_dispatch_key_included(key)
        ]
    return found


def drop_stray_keys() -> None:
    """Restore their state outside of all contexts."""
    if stray_keys():
        for key in (*DispatchKey.__members__.values(), *VMAP_MODES):
            if key in (*_LEFT_OUT, *VMAP_MODES) or key.name.startswith(
                ("Autograd", "FuncTorchDynamicLayer", "Functionalize")
            ):
                _dispatch_tls_set_dispatch_key_excluded(key, False)
        for key in _OF_MODES:
            _dispatch_tls_set_dispatch_key_included(key, bool(active_dispatch_modes()))
