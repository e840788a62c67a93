"""Lazy tensors of user-defined classes: subclasses of LazyTensor that behave like the user's class.

A pending tensor is a ``LazyTensor``, or a ``LazyParameter`` if it will be an ``nn.Parameter``.  For a
user-defined class, such as a quantized ``nn.Parameter``, it has a class created here that derives from both,
so that it has the methods, properties, and overrides of its class while it is pending.  Code that creates a
tensor of ``type(self)``, compares it with ``==``, looks it up in a dictionary, or writes to it gets the real
class; only ``is`` distinguishes them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..torch_internals import private_api

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_made: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()


class PendingClass(type(torch.Tensor)):  # type: ignore[misc]
    """Metaclass of pending tensors' classes: except for their identity, they behave like the real class."""

    _lazyviz_of: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._lazyviz_of(*args, **kwargs)

    def __eq__(cls, other: object) -> bool:
        return cls is other or real_class(other) is cls._lazyviz_of

    def __hash__(cls) -> int:
        return hash(cls._lazyviz_of)

    def __setattr__(cls, name: str, value: Any) -> None:
        setattr(cls._lazyviz_of, name, value)

    def __delattr__(cls, name: str) -> None:
        delattr(cls._lazyviz_of, name)


class _SkipInitSubclass:
    """Precedes the user's class in the bases, so that ``__init_subclass__`` does not register the created
    class.
    """

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        pass


def real_class(cls: Any) -> Any:
    """The user's class that ``cls`` represents, if it is a class of pending tensors; otherwise ``cls``
    itself.
    """
    return type.__getattribute__(cls, "_lazyviz_of") if isinstance(cls, PendingClass) else cls


def pending_class(cls: type[torch.Tensor], lazy: type[torch.Tensor]) -> type[torch.Tensor] | None:
    """The class of pending tensors that will have class ``cls``; ``lazy`` is LazyTensor.

    ``None`` if there cannot be one: such a tensor is never pending.
    """
    if cls in _PLAIN:
        return lazy
    found = _made.get(cls)
    if found is None and not private_api.dispatches_itself(cls):
        try:
            found = _made[cls] = _combined(cls, lazy)
        except TypeError:  # incompatible layouts or metaclasses
            return None
    return found


def _combined(cls: type[torch.Tensor], lazy: type[torch.Tensor]) -> type[torch.Tensor]:
    def __new__(made: type, *args: Any, **kwargs: Any) -> Any:
        return cls.__new__(cls, *args, **kwargs)

    names: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__slots__": (),
        "__new__": __new__,
        "__repr__": lazy.__repr__,  # printing evaluates nothing
        "__class__": vars(lazy)["__class__"],
        "_lazyviz_of": cls,
    }
    override = cls.__torch_function__
    if override is not private_api.disabled_torch_function:

        def __torch_function__(
            made: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            return cls.__torch_function__(func, tuple(map(real_class, types)), args, kwargs)

        names["__torch_function__"] = classmethod(__torch_function__)
    for name in ("__reduce_ex__", "__reduce__"):
        if getattr(cls, name) not in [getattr(plain, name) for plain in _PLAIN]:
            names[name] = _evaluate_first(name)
    meta = type(cls)
    if not issubclass(meta, PendingClass):
        meta = type(meta.__name__, (PendingClass, meta), {})
    return type.__new__(meta, cls.__name__, (_SkipInitSubclass, cls, lazy), names)


def _evaluate_first(name: str) -> Any:
    """A method of the user's class that depends on the tensor's class, so the value is computed first."""

    def method(tensor: torch.Tensor, *args: Any) -> Any:
        tensor.untyped_storage()
        return getattr(tensor, name)(*args)

    return method
