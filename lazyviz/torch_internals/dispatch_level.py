"""The dispatch level at which recorded kernels run, with little overhead per read.

``tests/torch_internals/test_private_apis.py`` checks the assumptions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from ..process.global_state_transaction import Transaction
from . import private_api

# Whether modes see ops before autograd, as tracers' modes do: the compiled form does not disable these.
# PyTorch sets the key with the first of them.
modes_before_autograd: Callable[[], bool] = functools.partial(
    torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch
)
compiled: Callable[[], AbstractContextManager[None]] | None = None  # `_torch.kernels_only`, compiled
_set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled  # the public one is a context as well


def kernels_only() -> AbstractContextManager[None]:
    """Like :func:`lazyviz.torch_internals.private_api.kernels_only`, but cheaper if compiled code is
    available.

    Entering it while it is entered, or leaving it again, has no effect.
    """
    if compiled is not None and not modes_before_autograd():
        return compiled()
    return _KernelsOnly()


class _KernelsOnly:
    __slots__ = ("_entered",)

    def __init__(self) -> None:
        self._entered: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        if self._entered is None:
            context = private_api.kernels_only()
            context.__enter__()
            self._entered = context

    def __exit__(self, *error: object) -> None:
        if self._entered is not None:
            self._entered.__exit__(None, None, None)
            self._entered = None  # not earlier: an exception may come before the first line of that


class NoGrad:
    """A cheaper ``torch.no_grad()``: a plain context, which cannot be used as a decorator.

    Only where signals are deferred; elsewhere use :class:`no_grad`.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        _set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        _set_grad_enabled(self._before)


class no_grad(Transaction):
    """``torch.no_grad()`` that an interrupt cannot leave in effect."""

    def begin(self) -> None:
        self.undo_by(functools.partial(_set_grad_enabled, torch.is_grad_enabled()))
        _set_grad_enabled(False)
