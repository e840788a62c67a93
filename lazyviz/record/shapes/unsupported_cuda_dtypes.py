"""Dtypes for which operators have no CUDA kernel: the errors of a GPU that is not on this machine.

Shape rules ignore dtypes: the product of two integer matrices has a shape, but CUDA has no kernel for it. The
table is written by ``scripts/write_unsupported_cuda_dtypes.py`` from PyTorch's operator database, whose
entries PyTorch's own tests check on GPUs. Operators that are not in it are assumed to have a kernel.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...torch_internals.private_api import OpOverload

# Names of dtypes in error messages of PyTorch's kernels.
_SCALAR_TYPES = {
    torch.bool: "Bool", torch.uint8: "Byte", torch.int8: "Char", torch.int16: "Short", torch.int32: "Int",
    torch.int64: "Long", torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float",
    torch.float64: "Double", torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble",
}  # fmt: skip
_KERNELS = {"mm": "addmm", "bmm": "baddbmm", "addmv": "addmv_impl", "mv": "addmv_impl"}
"""Names of kernels in errors that are not those of their operators."""


@functools.cache
def _table() -> Mapping[str, frozenset[torch.dtype]]:
    text = (Path(__file__).parent / "unsupported_cuda_dtypes.json").read_text()
    found: dict[str, list[str]] = json.loads(text)
    return {name: frozenset(getattr(torch, dtype) for dtype in dtypes) for name, dtypes in found.items()}


def refuse(op: OpOverload, inputs: Sequence[Any]) -> None:
    """Raise CUDA's error for a call on an absent GPU if CUDA has no kernel for its operands.

    Raises:
        NotImplementedError: as ``'"addmm_cuda" not implemented for 'Long'``.
    """
    if not inputs:
        return
    dtype = inputs[0].meta.dtype
    if dtype in _table().get(op.name(), ()):
        name = op._schema.name.rpartition("::")[2].strip("_")
        kernel = _KERNELS.get(name, name)
        raise NotImplementedError(f'"{kernel}_cuda" not implemented for {_SCALAR_TYPES[dtype]!r}')
