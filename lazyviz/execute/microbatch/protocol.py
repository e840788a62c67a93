"""Protocol between this process and workers: a header that says whose message it is, then data, no code.

The data are pickled, since operators' arguments are of many kinds, but only plain values, our own records and
PyTorch's dtypes, devices, layouts and errors are read back: a message can name no other class, and no
function but those that a piece calls in place of operators.  Tensors are bytes with their dtype, shape and
strides (:mod:`lazyviz.execute.microbatch.serialization`).
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType
from typing import Any

import torch

PROTOCOL = 1
MOST_BYTES = 2**40
"""The longest message that is read."""

_MAGIC = b"lazyviz work"
_VALUES = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
_KERNELS = (
    "lazyviz.execute.microbatch.program",
    "lazyviz.execute.microbatch.masks",
    "lazyviz.execute.microbatch.rng",
    "lazyviz.execute.compiler.bernoulli",
)
"""Modules whose functions a piece calls as it calls operators."""
_RECORDS = (
    *(f"lazyviz.execute.microbatch.{name}" for name in ("worker", "program", "serialization", "rng")),
    "lazyviz.graph.ir",
    "lazyviz.plan.batch.placement",
)
"""Modules whose classes messages are made of."""
_PLAIN = {
    "bytearray",
    "complex",
    "set",
    "frozenset",
    "slice",
    "range",
    "int",
    "float",
    "bool",
    "str",
    "bytes",
}


class MismatchError(RuntimeError):
    """A worker has another version of lazyviz or of PyTorch than this process."""


@functools.cache
def _own_version() -> str:
    try:
        return version("lazyviz")
    except PackageNotFoundError:
        return "unknown"


def _head() -> bytes:
    own, of_torch = _own_version().encode(), torch.__version__.encode()
    return b"%s %d, lazyviz %s, PyTorch %s\n" % (_MAGIC, PROTOCOL, own, of_torch)


def dumps(item: Any) -> bytes:
    """``item`` as a message."""
    return _head() + pickle.dumps(item, protocol=5)


def loads(data: bytes) -> Any:
    """What :func:`dumps` was given, in another process.

    Raises:
        MismatchError: the sender has other versions, named in the message.
        pickle.UnpicklingError: it is no message of ours, is too long, or names what may not be in one.
    """
    if len(data) > MOST_BYTES:
        raise pickle.UnpicklingError(f"a message of {len(data):,} bytes is longer than {MOST_BYTES:,}")
    head, line, _ = bytes(data[:200]).partition(b"\n")
    if not line or not head.startswith(_MAGIC):
        raise pickle.UnpicklingError("not a message between lazyviz and its workers")
    if head + b"\n" != (own := _head()):
        theirs, ours = (each.decode(errors="replace").partition(" work ")[2].strip() for each in (head, own))
        raise MismatchError(f"sender and worker differ: the message is of protocol {theirs}, this is {ours}")
    return _Reader(io.BytesIO(memoryview(data)[len(head) + 1 :])).load()


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.serialization", "_get_layout"):  # by which PyTorch pickles layouts
            return _layout
        root = module.partition(".")[0]
        if root in ("lazyviz", "torch", "builtins") and module in sys.modules and "__" not in name:
            found = super().find_class(module, name)
            if _may_travel(found, root, name):
                return found
        raise pickle.UnpicklingError(
            f"a message between lazyviz and its workers may not name {module}.{name}"
        )


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name.rpartition(".")[2], None)
    if not isinstance(found, torch.layout):
        raise pickle.UnpicklingError(f"{name!r} is no layout")
    return found


def _may_travel(found: Any, root: str, name: str) -> bool:
    if isinstance(found, type) and issubclass(found, Exception):
        return root != "lazyviz"
    if root == "lazyviz":
        known = _KERNELS if isinstance(found, FunctionType) else _RECORDS
        return isinstance(found, (type, FunctionType)) and found.__module__ in known
    if root == "torch":
        return isinstance(found, _VALUES) or found in (torch.device, torch.Size)
    return name in _PLAIN
