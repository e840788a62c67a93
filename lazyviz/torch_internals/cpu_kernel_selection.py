"""Private torch APIs that show which CPU kernel PyTorch would select, each with its reason.

In addition to :mod:`lazyviz.torch_internals.private_api`, for planning only.
``tests/torch_internals/test_private_apis.py`` checks each entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any

import torch

from . import dispatcher_bypasses
from .private_api import kernels_only

_ONE = torch.empty(1, device="cpu")


def conv_backend(
    shape: Sequence[int],
    weight: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    dtype: torch.dtype,
) -> str:
    """The kernel that PyTorch selects for a CPU convolution of these sizes: ``"Mkldnn"``, ``"Slow2d"``, ...

    ``at::native::select_conv_backend`` (Convolution.cpp) reads sizes, dtype, threads and flags, so tensors
    without memory are enough; its rules have no public API.
    """
    one = _ONE if dtype == torch.float32 else torch.empty(1, dtype=dtype, device="cpu")
    with torch._C._DisableTorchDispatch():  # hidden from modes, because no user tensors are involved
        backend = torch._C._select_conv_backend(
            one.expand(*shape),
            one.expand(*weight),
            None,
            list(stride),
            list(padding),
            list(dilation),
            transposed,
            list(output_padding),
            groups,
        )
    name = str(backend.name)
    # The Python binding has no name for this value of the C++ enumeration.
    return "MkldnnTranspose" if name == "???" and transposed else name


class Instructions(IntEnum):
    """The instruction sets that oneDNN has separate x86 kernels for, each including those before it."""

    UNKNOWN = 0
    SSE41 = 1
    AVX2 = 2
    AVX512 = 3
    AVX512_BF16 = 4
    AMX = 5


@lru_cache(1)
def onednn_instructions() -> Instructions:
    """The instruction set that oneDNN uses in this process.

    It is the processor's, unless the system or ``ONEDNN_MAX_CPU_ISA`` restricts it; that of ATen's own
    kernels (``get_cpu_capability``) may differ. oneDNN does not export it, but its layouts for small weights
    differ in size, which reveals it.
    """
    known = {4: Instructions.SSE41, 8: Instructions.AVX2, 16: Instructions.AVX512}
    blocks = {32: Instructions.AMX, 64: Instructions.AVX512_BF16}
    ops = torch.ops.mkldnn
    with kernels_only():
        try:
            weight = ops._reorder_convolution_weight(
                torch.zeros(4, 4, 3, 3, device="cpu", dtype=torch.float32)
            )
            found = known.get(ops._nbytes(weight) // (4 * 9 * 4), Instructions.UNKNOWN)
            if found is Instructions.AVX512:
                weight = torch.zeros(17, 3, device="cpu", dtype=torch.bfloat16)
                # 17 x 3 elements in blocks of 32 or 64 outputs by 32 inputs; unblocked without such kernels
                size = ops._nbytes(ops._reorder_linear_weight(weight, 64)) // weight.itemsize
                found = blocks.get(size // 32, found)
        except (AttributeError, RuntimeError):  # a build without oneDNN
            return Instructions.UNKNOWN
    return found


def multiplies_in_onednn(dtype: torch.dtype) -> bool:
    """Whether ATen uses oneDNN for products of matrices of a half-precision dtype
    (``mkldnn_bf16_device_check``, ``mkldnn_fp16_device_check``).
    """
    mkldnn, ops = torch.backends.mkldnn, torch.ops.mkldnn
    if not (mkldnn.is_available() and mkldnn.enabled):
        return False
    if dtype is torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    return dtype is torch.float16 and bool(ops._is_mkldnn_fp16_supported())


def scratch_of_call(
    op: Callable[..., Any], create: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
) -> int | None:
    """Bytes that a kernel holds at most besides its results, called with the arguments that ``create``
    returns.

    ``None``: a profiler is active, there is no such kernel, or the compiled module is missing.
    """
    with kernels_only():
        try:
            args, kwargs = create()
            op(*args, **kwargs)  # the first call may also fill caches that outlive it
            results, held = dispatcher_bypasses.measured(op, args, kwargs)
        except (RuntimeError, NotImplementedError):  # no such kernel; the run will raise the error
            return None
    if held is None:
        return None
    parts = results if isinstance(results, (list, tuple)) else (results,)
    storages = [part.untyped_storage() for part in parts if isinstance(part, torch.Tensor)]
    made = {storage._cdata: storage.nbytes() for storage in storages}
    return max(int(held) - sum(made.values()), 0)
