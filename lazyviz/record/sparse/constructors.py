"""Sparse constructors: they create sparse tensors from pending components.

ATen's constructors are composite functions that read indices in memory without the dispatcher, to infer a
missing size and to check invariants. They get a kernel that first evaluates these indices, in the way of
:mod:`lazyviz.record.parity.mode_sensitive_composites`. None of them reads values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...torch_internals import sparse_tensors
from ..eager_fallback import note_region
from ..intercept_ops_outside_blocks import tensors_in
from ..parity.other_modes_and_subclasses import Original
from ..tape import Tape
from .record_on_components import evaluate, stand_in

_COMPRESSED = {"csr": "crow_col", "csc": "ccol_row", "bsr": "crow_col", "bsc": "ccol_row"}
CONSTRUCTORS = (
    "sparse_coo_tensor.indices",
    "sparse_coo_tensor.indices_size",
    "_sparse_coo_tensor_unsafe",
    "_validate_sparse_coo_tensor_args",
    "_sparse_compressed_tensor_unsafe",
    "_validate_sparse_compressed_tensor_args",
    *(
        f"sparse_{kind}_tensor.{parts}_value{size}"
        for kind, parts in _COMPRESSED.items()
        for size in ("", "_size")
    ),
    *(f"_sparse_{kind}_tensor_unsafe" for kind in _COMPRESSED),
    *(f"_validate_sparse_{kind}_tensor_args" for kind in _COMPRESSED),
)


def kernels(tape: Tape) -> dict[str, Callable[..., Any]]:
    """The constructors' kernels, by the names of the operators."""
    return {name: functools.partial(_construct, tape, name.partition(".")[0]) for name in CONSTRUCTORS}


def _construct(tape: Tape, name: str, original: Original, *args: Any, **kwargs: Any) -> Any:
    if not original.is_next:
        return original(*args, **kwargs)
    absent = tape.recording.absent
    if absent is not None and (made := absent.make_sparse(name, args, kwargs)) is not None:
        return None if made is NotImplemented else made
    parts = list(tensors_in((*args, *kwargs.values())))
    if not _is_recording(tape) or not all(part.layout == torch.strided for part in parts):
        return _construct_now(tape, name, original, parts, args, kwargs)
    *indices, values = parts
    if "coo" in name and values.dim() == 0:  # ATen accepts a number as a single value
        values = values.expand(1)
    is_check = name.startswith("_validate")
    count = len(parts)
    is_sized = len(args) > count or "size" in kwargs
    if not (is_check or sparse_tensors.are_checked() or not is_sized):
        return original(*args, **kwargs)
    # Indices are read, values are not.
    evaluate(tape, f"{name} reads indices", indices)
    with tape.recording.paused():
        example = original(*indices, stand_in(values), *args[count:], **kwargs)
    if is_check or example.dtype != values.dtype:
        return example if is_check else _construct_now(tape, name, original, parts, args, kwargs)
    return sparse_tensors.make_differentiable(example, (*indices, values))


def _is_recording(tape: Tape) -> bool:
    recording = tape.recording
    return recording.graph is not None and not recording.pauses and recording.is_on_this_thread()


def _construct_now(
    tape: Tape,
    name: str,
    original: Original,
    parts: Sequence[torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The constructor's own result for real components."""
    evaluate(tape, f"{name} reads its components", parts)
    with tape.recording.paused():
        result = original(*args, **kwargs)
    note_region(tape, name, parts, result)
    return result
