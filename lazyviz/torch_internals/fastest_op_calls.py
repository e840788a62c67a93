"""Fastest equivalent call of a recorded operator, found by trying functions under a dispatch mode.

``torch.ops.aten.add.Tensor(x, y)`` matches its arguments with the schema of the operator and boxes them;
``torch.add(x, y)`` is compiled for them, and is faster.  Which overload it calls depends on its arguments, so
each is tried: a dispatch mode sees which operator is called, with which arguments.
``tests/torch_internals/test_private_apis.py`` checks the assumptions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..process.global_state_transaction import no_warnings
from . import private_api
from .private_api import OpOverload

# PyTorch's own C functions and methods, which patches of `torch` and `torch.Tensor` do not affect.
_PLACES: tuple[Any, ...] = (torch._C.TensorBase, torch._C._VariableFunctions, torch._C._nn)

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled  # the public one is a context as well


class _CalledError(Exception):
    """An operator was reached; it has not run."""

    def __init__(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.call = op, args, kwargs


class _Catch(private_api.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _CalledError(func, args, kwargs or {})


@contextlib.contextmanager
def proving() -> Iterator[Callable[[OpOverload, Sequence[Any], Mapping[str, Any]], Callable[..., Any]]]:
    """Context that provides a function which finds the fastest callable for a call of an operator.

    Its arguments are the operator, and arguments like those of the call: tensors of the same shape and dtype,
    on any device, none of which requires a gradient.
    """
    with (
        no_warnings(),  # of functions that are tried and rejected
        private_api.no_dispatch_modes(),
        torch._C.DisableTorchFunction(),
        private_api.below_autograd(),
        _Catch(),
        torch.no_grad(),
    ):
        yield _quickest


def plain(op: OpOverload) -> Callable[..., Any]:
    """The function that ``op`` itself calls."""
    return op._op


def _quickest(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    if op.namespace == "aten":
        name = op._schema.name.partition("::")[2]
        for place in _PLACES:
            function = getattr(place, name, None)
            if function is not None and _calls(function, op, args, kwargs):
                return function
    return plain(op)


def _calls(
    function: Callable[..., Any], op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether ``function(*args, **kwargs)`` is equivalent to ``op(*args, **kwargs)``."""
    try:
        function(*args, **kwargs)
    except _CalledError as reached:
        called, given, named = reached.call
        return called is op and _same(given, args) and _same(dict(named), dict(kwargs))
    except Exception:  # it has other parameters
        return False
    return False  # it has not called an operator


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(item, other[name]) for name, item in one.items())
    if type(one) is not type(other):
        return False
    return repr(one) == repr(other) if isinstance(one, (float, complex)) else bool(one == other)


# For the compiled form of `private_api.kernels_only`: the keys that it excludes, and those that it includes.
LEVEL_KEYS = private_api._BELOW_EVERYTHING.raw_repr(), private_api._LAZY_TENSORS.raw_repr()
