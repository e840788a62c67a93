"""Replaced tensor methods, for tensor classes that define ``__torch_function__``.

Such a class receives the method that is called. It may look the method up in a table, or pass it to
``torch.overrides.redispatch_function``. Therefore, a replacement compares equal to the method that it
replaces, and does not consume the state that is set for the next call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch

from ..lazy_tensor import LazyTensor
from ..lazy_tensors_of_user_classes import PendingClass

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, LazyTensor})


class Replacement(functools.partial[Any]):
    """A function that replaces one of PyTorch's, and compares equal to it.  Its calls add no frame."""

    original: Callable[..., Any]

    def __new__(cls, original: Callable[..., Any], function: Callable[..., Any]) -> Replacement:
        self = super().__new__(cls, function)
        functools.update_wrapper(self, original)
        self.original = original.original if isinstance(original, Replacement) else original
        return self

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self.func, instance)

    def __eq__(self, other: object) -> bool:
        return self.original == (other.original if isinstance(other, Replacement) else other)

    def __hash__(self) -> int:
        return hash(self.original)

    def __reduce__(self) -> Any:
        """Pickle it by name, like the original."""
        if isinstance(self.original, FunctionType):
            return self.original.__qualname__
        return self.original.__reduce__()


class _Getter:
    """``__get__`` of a :class:`ReplacedProperty`."""

    def __get__(self, instance: ReplacedProperty | None, owner: Any = None) -> Any:
        if instance is None:
            return self
        return _BoundGetter(instance.original.__get__, MethodType(property.__get__, instance))

    def __call__(self, instance: ReplacedProperty, *args: Any) -> Any:
        return property.__get__(instance, *args)


class ReplacedProperty(property):
    """A property in place of an attribute of ``torch.Tensor``, whose ``__get__`` equals the attribute's."""

    original: Any
    __get__: Any = _Getter()

    @classmethod
    def of(cls, original: Any, replacement: property) -> ReplacedProperty:
        self = cls(replacement.fget, replacement.fset, replacement.fdel)
        self.original = original.original if isinstance(original, ReplacedProperty) else original
        return self


# PyTorch reads the class name of an attribute's getter.
_BoundGetter = type("method-wrapper", (Replacement,), {"__module__": __name__})


def replacement_of(owner: Any, original: Any, value: Any) -> Any:
    """``value``, wrapped to replace the attribute ``original`` of a class or module."""
    if owner is not torch and not (isinstance(owner, type) and issubclass(owner, torch.Tensor)):
        return value
    if isinstance(value, FunctionType) and callable(original):
        return Replacement(original, value)
    if isinstance(value, property) and hasattr(original, "__get__"):
        return ReplacedProperty.of(original, value)
    return value


def sees_calls(tensor: torch.Tensor) -> bool:
    """Whether the tensor's class defines ``__torch_function__``, which must only see calls by user code."""
    cls = type(tensor)
    if cls in _PLAIN or isinstance(cls, PendingClass):
        return False
    function = cls.__torch_function__
    return getattr(function, "__func__", function) not in _NEUTRAL


def _functions(*classes: type[torch.Tensor]) -> list[Any]:
    return [getattr(each.__torch_function__, "__func__", each.__torch_function__) for each in classes]


_NEUTRAL = _functions(torch.Tensor, torch.nn.Parameter)  # the default for subclasses, and the disabled one
