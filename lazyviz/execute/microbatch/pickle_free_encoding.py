"""JSON encoding of plain data in messages between this process and its workers.

Supported are numbers, strings, lists, dictionaries, bytes, PyTorch's dtypes, devices, and layouts, common
errors, and the records registered with a codec, each by its name in a table.  Decoding creates nothing else:
it imports nothing, calls nothing from the message, and rejects records whose fields do not have the declared
types.  Bytes are stored separately, so that tensors are not converted to text.
"""

from __future__ import annotations

import builtins
import json
import math
import struct
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch


class MessageError(ValueError):
    """A received message is damaged, or is not a lazyviz message."""


# Exceptions that decoding a damaged message can raise. Others, such as a signal handler's, have other causes.
_DAMAGE = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError,
    struct.error,
)  # fmt: skip


def _of_torch(*kinds: type) -> dict[str, Any]:
    return {name: item for name, item in vars(torch).items() if isinstance(item, kinds)}


_CONSTANTS: Mapping[str, Any] = _of_torch(torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
_CONSTANT_NAMES = {item: name for name, item in _CONSTANTS.items()}
_ERRORS: dict[str, type[Exception]] = {
    **{
        name: item
        for name, item in vars(builtins).items()
        if isinstance(item, type) and issubclass(item, Exception)
    },
    "torch.OutOfMemoryError": torch.OutOfMemoryError,
    "torch.LinAlgError": torch.linalg.LinAlgError,  # type: ignore[attr-defined]
    "lazyviz.MessageError": MessageError,
}
_ERROR_NAMES = {item: name for name, item in _ERRORS.items()}
_ARGUMENTS = (str, int, type(None))
"""The error classes that decoding can create."""


class Codec:
    """JSON for plain data and for ``records``, classes that are constructed from all their fields."""

    def __init__(self, records: Sequence[type]) -> None:
        self.records = {cls.__name__: cls for cls in records}
        self.fields = {cls: _fields(cls) for cls in records}

    def encode(self, item: Any) -> tuple[bytes, list[bytes | bytearray]]:
        """``item`` as JSON, in which bytes are referenced by number.

        Raises ``TypeError`` for anything that is not plain data.
        """
        buffers: list[bytes | bytearray] = []
        text = json.dumps(self._written(item, buffers), allow_nan=False, separators=(",", ":"))
        return text.encode("ascii"), buffers

    def decode(self, text: bytes, buffers: Sequence[memoryview]) -> Any:
        """The inverse of :meth:`encode`; raises :class:`MessageError` for JSON that it cannot have
        created.
        """
        try:
            parsed = json.loads(text, parse_constant=_no_number)
            return _Reader(self, buffers).message(parsed)
        except _DAMAGE as error:
            why = str(error).partition("\n")[0][:200]
            raise MessageError(
                f"a damaged message between lazyviz and its workers ({type(error).__name__}: {why})"
            ) from None

    def _written(self, item: Any, buffers: list[bytes | bytearray]) -> Any:
        if item is None or isinstance(item, (bool, str)):
            return item
        if isinstance(item, int):
            return int(item)
        if isinstance(item, float):
            return float(item) if math.isfinite(item) else {"float": struct.pack("<d", item).hex()}
        if isinstance(item, (bytes, bytearray)):
            buffers.append(item)
            return {"bytes" if isinstance(item, bytes) else "bytearray": len(buffers) - 1}
        if isinstance(item, list):
            return [self._written(each, buffers) for each in item]
        if isinstance(item, tuple):
            name = "size" if isinstance(item, torch.Size) else "tuple"
            return {name: [self._written(each, buffers) for each in item]}
        if isinstance(item, dict):
            pairs = [[self._written(each, buffers) for each in pair] for pair in item.items()]
            return {"dict": pairs}
        if (hints := self.fields.get(type(item))) is not None:
            return {type(item).__name__: [self._written(getattr(item, name), buffers) for name in hints]}
        return _leaf(item)


def _leaf(item: Any) -> dict[str, Any]:
    """PyTorch's own types, complex numbers and errors."""
    if isinstance(item, torch.device):
        return {"device": str(item)}
    if isinstance(item, complex):
        return {"complex": struct.pack("<dd", item.real, item.imag).hex()}
    if isinstance(item, Exception):
        return {"error": _error(item)}
    if isinstance(item, (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)):
        return {"torch": _CONSTANT_NAMES[item]}
    raise TypeError(f"{type(item).__qualname__} is not plain data and cannot be sent to or from a worker")


def _error(error: Exception) -> list[Any]:
    """An error class in the table and its arguments: the error's own class, or the nearest base class with
    the message.
    """
    text, given = str(error), list(error.args)
    plain = all(type(each) in _ARGUMENTS for each in given)
    ways = [(type(error), given if plain else [text], text)]
    text = f"{type(error).__name__}: {text}"
    ways += [(cls, [text], text) for cls in type(error).__mro__[1:] if cls is not Exception]
    for cls, args, words in ways:
        try:
            if cls in _ERROR_NAMES and str(cls(*args)) == words:
                return [_ERROR_NAMES[cls], args]
        except TypeError:  # its arguments are more than a text
            pass
    return ["RuntimeError", [text]]


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


class _Reader:
    """Decodes one message."""

    def __init__(self, codec: Codec, buffers: Sequence[memoryview]) -> None:
        self._codec = codec
        self._buffers = dict(enumerate(buffers))
        self._kinds = {
            "float": lambda item: struct.unpack("<d", bytes.fromhex(item))[0],
            "complex": lambda item: complex(*struct.unpack("<dd", bytes.fromhex(item))),
            "tuple": lambda item: tuple(self._list(item)),
            "size": lambda item: torch.Size(self._list(item)),
            "dict": lambda item: {self._read(name): self._read(each) for name, each in item},
            "bytes": lambda item: bytes(self._buffers.pop(item)),  # only once, because they are copied
            "bytearray": lambda item: bytearray(self._buffers.pop(item)),
            "torch": lambda item: _CONSTANTS[item],
            "device": lambda item: torch.device(_text(item)),
            "error": lambda item: _ERRORS[item[0]](*map(_plain, item[1])),
        }

    def message(self, parsed: Any) -> Any:
        item = self._read(parsed)
        if self._buffers:
            raise ValueError("unreferenced bytes")
        return item

    def _read(self, item: Any) -> Any:
        if type(item) is list:
            return self._list(item)
        if type(item) is not dict:
            return item
        ((name, content),) = item.items()
        if (cls := self._codec.records.get(name)) is not None:
            return self._record(cls, self._list(content))
        if name not in self._kinds:
            raise ValueError(f"unknown kind {name[:100]!r}")
        return self._kinds[name](content)

    def _list(self, items: Any) -> list[Any]:
        if type(items) is not list:
            raise ValueError("expected a list")
        return [self._read(each) for each in items]

    def _record(self, cls: type, content: list[Any]) -> Any:
        hints = self._codec.fields[cls]
        for (name, hint), item in zip(hints.items(), content, strict=True):
            if not _fits(item, hint):
                raise ValueError(f"{cls.__name__}.{name} has the wrong type")
        return cls(*content)


def _text(item: Any) -> str:
    if type(item) is not str:
        raise ValueError("expected a string")
    return item


def _plain(item: Any) -> Any:
    if type(item) not in _ARGUMENTS:
        raise ValueError("arguments of an error must be strings and numbers")
    return item


# --- types of fields ------------------------------------------------------------------------------


def _fields(cls: type) -> dict[str, Any]:
    """The fields that a record is constructed from, in order, with their types."""
    if is_dataclass(cls):
        hints = get_type_hints(cls)
        return {field.name: hints[field.name] for field in fields(cls)}
    hints = get_type_hints(getattr(cls, "__init__"))  # noqa: B009
    return {name: hints[name] for name in signature(cls).parameters}


def _fits(item: Any, hint: Any) -> bool:
    """Whether ``item`` has the type that a field declares."""
    if hint is Any:
        return True
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(item, each) for each in inner)
    if origin is None:
        if isinstance(hint, type) and issubclass(hint, (torch.device, torch.dtype, Exception)):
            return isinstance(item, hint)
        return type(item) is hint  # exactly: True is not a number of samples
    if origin is tuple and inner[-1] is not Ellipsis:
        return type(item) is tuple and len(item) == len(inner) and all(map(_fits, item, inner))
    if isinstance(item, Mapping):
        return issubclass(origin, Mapping) and all(
            _fits(name, inner[0]) and _fits(each, inner[1]) for name, each in item.items()
        )
    kinds = (list, tuple) if origin is Sequence else (origin,)
    return type(item) in kinds and all(_fits(each, inner[0]) for each in item)
