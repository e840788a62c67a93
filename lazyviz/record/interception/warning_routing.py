"""Warning routing: warnings of PyTorch's C++ code go to Python, or are dropped.

A PyTorch function collects warnings until it returns, and only then passes them to Python's ``warnings``.
Code that is not called by such a function writes them to standard error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch

from ...process.transaction import no_warnings
from ...torch_internals import tensor_memory
from ...torch_internals.dispatch_handlers import past_torch_function

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class _Called:
    """An argument through which a PyTorch function calls another function."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].function()


def in_python(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """``function``; its warnings have been passed to Python when it returns."""

    @functools.wraps(function)
    def called(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if not tensor_memory.plain_overrides():  # the override would not be called, or a mode would see it
            return function(*args, **kwargs)
        if tensor_memory.overrides_are_called():
            return torch.neg(_Called(lambda: function(*args, **kwargs)))  # type: ignore[arg-type, return-value]

        def within() -> Result:  # in a mode's handler, function modes are already done
            with past_torch_function():
                return function(*args, **kwargs)

        with tensor_memory.calling_overrides():
            return torch.neg(_Called(within))  # type: ignore[arg-type, return-value]

    return called


class _Ignored(no_warnings):
    """The PyTorch setting applies to all threads: the last of several overlapping contexts restores it."""

    before = False  # the setting before the first one
    active: ClassVar[list[_Ignored]] = []

    def begin(self) -> None:
        if not self.active:
            _Ignored.before = torch.is_warn_always_enabled()
        self.undo_by(self._stop)
        self.active.append(self)
        torch.set_warn_always(True)  # otherwise a warning that is shown only once would be used up
        super().begin()

    def _stop(self) -> None:
        if not [each for each in self.active if each is not self]:
            torch.set_warn_always(_Ignored.before)
        # Not earlier, so that contexts that begin meanwhile do not take our setting for the user's.
        if self in self.active:
            self.active.remove(self)


def silenced(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """``function`` without its warnings, because it computes something that the user did not request."""
    below = in_python(function)

    @functools.wraps(function)
    def called(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with _Ignored():
            return below(*args, **kwargs)

    return called
