"""Where the warnings go that PyTorch's C++ code gives below an op: to Python, or nowhere.

A function of PyTorch keeps them until it returns, and only then gives them to Python's ``warnings``; what is
called by no such function writes them to the standard error stream.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

from .. import _torch_memory

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_IGNORE: Any = ("ignore", None, Warning, None, 0)


class _Called:
    """An argument with which a function of PyTorch calls another function."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].function()


def in_python(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """``function`` whose warnings have come to Python when it returns."""

    @functools.wraps(function)
    def called(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if not _torch_memory.plain_overrides():  # it would not be called, or a mode would see it
            return function(*args, **kwargs)
        result: Any = torch.neg(_Called(lambda: function(*args, **kwargs)))  # type: ignore[arg-type]
        return result

    return called


@contextmanager
def _ignored() -> Iterator[None]:
    """Without ``warnings.catch_warnings``, after which Python shows again what it has shown."""
    filters: Any = warnings.filters
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # or a warning that comes once would be used up
    filters.insert(0, _IGNORE)
    try:
        yield
    finally:
        filters.remove(_IGNORE)
        torch.set_warn_always(always)


def nowhere(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """``function`` whose warnings nobody sees: it computes what the user did not ask for."""
    below = in_python(function)

    @functools.wraps(function)
    def called(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with _ignored():
            return below(*args, **kwargs)

    return called
