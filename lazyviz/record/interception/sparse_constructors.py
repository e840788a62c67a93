"""Sparse constructors: run immediately on real values, with at most one sync point.

ATen's constructors are composite functions that read indices in memory without the dispatcher, to infer a
missing size and to check invariants.  They get a kernel that first evaluates what they read, in the way of
:mod:`lazyviz.record.parity.composites`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..fallback import note_region
from ..parity.plain_tensors import Original
from ..tape import Tape
from ..unrecorded_ops import nodes_before_access, tensors_in

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


def _cause(name: str) -> str:
    if name.startswith("_validate"):
        return f"{name} reads indices"
    kind = next((kind for kind in ("coo", *_COMPRESSED) if kind in name), None)
    return f"{name} (its {f'sparse_{kind}' if kind else 'sparse'} result cannot be deferred)"


def _construct(tape: Tape, name: str, original: Original, *args: Any, **kwargs: Any) -> Any:
    if not original.is_next:
        return original(*args, **kwargs)
    absent = tape.recording.absent
    if absent is not None and (made := absent.make_sparse(name, args, kwargs)) is not None:
        return None if made is NotImplemented else made
    tensors = list(tensors_in((*args, *kwargs.values())))
    needed = [node for tensor in tensors for node in nodes_before_access(tape, tensor, write=False)]
    if needed:
        with tape.runs.lock:
            nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            tape.runs.sync(_cause(name), needed, nbytes)
    with tape.recording.paused():
        result = original(*args, **kwargs)
    note_region(tape, name, tensors, result)
    return result
