"""Wire protocol between this process and workers: a versioned header, followed by data without code.

A message is a line of text with the sender's versions, followed by chunks, each preceded by its length in
eight bytes: JSON (:mod:`lazyviz.execute.microbatch.pickle_free_encoding`), and the bytes that it refers to.
Operators are given by name, tensors as bytes with dtype, shape, and strides.
"""

from __future__ import annotations

import functools
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import torch

from .message_types import CODEC, Failed
from .pickle_free_encoding import MessageError as MessageError

PROTOCOL = 3
MOST_BYTES = 2**40
"""The maximum length of a message; longer ones are neither written nor read."""
MOST_TEXT = 2**28
"""The maximum length of its JSON: some 500,000 steps."""

_MAGIC = b"lazyviz work"
_LENGTH = 8
_Record = TypeVar("_Record")


class MismatchError(RuntimeError):
    """A worker has another version of lazyviz or of PyTorch than this process."""


@functools.cache
def _own_version() -> str:
    try:
        return version("lazyviz")
    except PackageNotFoundError:
        return "unknown"


def _head() -> bytes:
    versions = f"{PROTOCOL}, lazyviz {_own_version()}, PyTorch {torch.__version__}, {sys.byteorder} endian"
    return b"%s %s\n" % (_MAGIC, versions.encode())


def dumps(item: Any) -> bytes:
    """``item`` as a message.

    Raises ``TypeError`` for anything that is not plain data, :class:`MessageError` for messages that are too
    long.
    """
    text, buffers = CODEC.encode(item)
    chunks: list[bytes | bytearray] = [_head()]
    for chunk in (text, *buffers):
        chunks += [len(chunk).to_bytes(_LENGTH, "little"), chunk]
    _bounded(sum(map(len, chunks)), len(text))
    return b"".join(chunks)


def loads(data: bytes, kind: type[_Record]) -> _Record:
    """The inverse of :func:`dumps` in another process: a record of that type.

    Raises:
        MismatchError: the sender has other versions, named in the message.
        MessageError: it is not a lazyviz message, is damaged or too long, or has unexpected contents.
    """
    item = _loads(data)
    if not isinstance(item, kind):
        raise _another(item, kind)
    return item


def answer(data: bytes, kind: type[_Record]) -> _Record | Failed:
    """Like :func:`loads`, for the response of a worker that may have failed."""
    item = _loads(data)
    if not isinstance(item, (kind, Failed)):
        raise _another(item, kind)
    return item


def _loads(data: bytes) -> Any:
    is_data = isinstance(data, (bytes, bytearray, memoryview))  # a cluster may return anything
    head, line, _ = bytes(data[:200] if is_data else b"").partition(b"\n")
    if not line or not head.startswith(_MAGIC):
        raise MessageError("this is not a message between lazyviz and its workers")
    if head + line != (own := _head()):
        theirs, ours = (each.decode(errors="replace").partition(" work ")[2].strip() for each in (head, own))
        raise MismatchError(
            f"sender and worker have different versions: the message has protocol {theirs}, expected {ours}"
        )
    text, *buffers = _chunks(memoryview(data)[len(own) :])
    _bounded(len(data), len(text))
    return CODEC.decode(bytes(text), buffers)


def _another(item: Any, kind: type) -> MessageError:
    words = f"expected {kind.__name__}, got {type(item).__name__}"
    return MessageError(f"a message between lazyviz and its workers has unexpected contents: {words}")


def _chunks(rest: memoryview) -> list[memoryview]:
    """The chunks of a message, whose length must match their headers."""
    found: list[memoryview] = []
    while rest or not found:
        size = int.from_bytes(rest[:_LENGTH], "little")
        if len(rest) < _LENGTH + size:
            raise MessageError("a message between lazyviz and its workers is truncated")
        found.append(rest[_LENGTH : _LENGTH + size])
        rest = rest[_LENGTH + size :]
    return found


def _bounded(total: int, text: int) -> None:
    for size, most, what in ((total, MOST_BYTES, ""), (text, MOST_TEXT, " of text")):
        if size > most:
            raise MessageError(
                f"a message between lazyviz and its workers of {size:,} bytes{what} is longer than {most:,}"
            )
