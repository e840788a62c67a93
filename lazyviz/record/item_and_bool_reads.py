"""Scalar reads: ``item``, ``float`` and ``if`` on pending tensors, the most frequent reads of programs.

The compiled recorder reads most of them; this is what it shares with the reads in Python.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from ..process.tracebacks import shortened
from ..torch_internals import private_api
from .interception import torchscript_calls
from .tracked_storages import TrackedNode, TrackedValue

_read = torch.ops.aten._local_scalar_dense.default


def needed_by(value: TrackedValue) -> list[TrackedNode]:
    """The pending nodes on which the content of ``value`` depends directly."""
    made_by, writer = value.node, value.storage.writer
    needed = [made_by] if made_by is not None and made_by.state != "done" else []
    if writer is not None and writer.state != "done":
        needed.append(writer)
    return needed


@shortened
def raise_from_read(error: BaseException) -> NoReturn:
    """Raise what a read by the compiled recorder has raised, with a shortened traceback."""
    torchscript_calls.note(error)
    raise error


def number_in(tensor: torch.Tensor) -> float | int | bool | complex:
    """The number in a real tensor, read in a mode's handler."""
    if not (tensor.is_conj() or tensor.is_neg()):
        return _read(tensor)
    with private_api.seeing_lazy_bits():
        return _read(tensor)
