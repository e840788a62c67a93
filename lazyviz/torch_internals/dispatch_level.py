"""The dispatch level at which recorded kernels run, with little overhead per read.

``tests/test_torch_internals.py`` checks what is relied on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from . import private_api

# Whether modes see ops before autograd, as tracers': the compiled form leaves them there.  PyTorch sets the
# key with the first of them.
modes_before_autograd: Callable[[], bool] = functools.partial(
    torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch
)
compiled: Callable[[], AbstractContextManager[None]] | None = None  # `_torch.kernels_only`, compiled
_set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled  # the public one is a context as well


def kernels_only() -> AbstractContextManager[None]:
    """As :func:`lazyviz.torch_internals.private_api.kernels_only`, at less cost where there is compiled code
    for it.

    Entered again while it is entered, or left again, it does nothing.
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
        context, self._entered = self._entered, None
        if context is not None:
            context.__exit__(None, None, None)


class NoGrad:
    """``torch.no_grad()``, at less cost: a plain context, which decorates nothing."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        _set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        _set_grad_enabled(self._before)
