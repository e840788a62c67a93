"""SDPA backend selection: the kernel of ``scaled_dot_product_attention`` on an absent GPU.

The conditions are those of ATen's ``transformers/cuda/sdp_utils.cpp`` (``select_sdp_backend``) and
``transformers/sdp_utils_cpp.h``, the calls those of ``transformers/attention.cpp``, for dense tensors.
Conditions on cuDNN are answered for the wheels that PyTorch publishes for CUDA 13, whose cuDNN is newer than
9.15.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from ...torch_internals import fake_cuda_devices

_aten = torch.ops.aten
_flash_attention = _aten._scaled_dot_product_flash_attention.default
_HALVES = (torch.float16, torch.bfloat16)
MATH, FLASH, EFFICIENT, CUDNN = 0, 1, 2, 3  # at::SDPBackend
_DEFAULT_ORDER = (FLASH, EFFICIENT, MATH, CUDNN)
_CUDNN_FIRST = (CUDNN, FLASH, EFFICIENT, MATH)
_CUDNN_MOST_HEADS = 65535


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the function; ``grouped``: keys and values may have fewer heads than queries."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    grouped: bool

    @property
    def differentiated(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))

    def of_dtype(self, *dtypes: torch.dtype) -> bool:
        dtype = self.query.dtype
        return dtype in dtypes and dtype == self.key.dtype == self.value.dtype


def choose(call: Call, capability: tuple[int, int]) -> int:
    """The kernel that PyTorch selects for ``call`` on a GPU of this compute capability.

    Raises:
        RuntimeError: no kernel that the user allows supports the call.
    """
    order = tuple(fake_cuda_devices.attention_order())
    prefers_cudnn = capability[0] in (9, 10) and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    if prefers_cudnn and order[:4] == _DEFAULT_ORDER:
        order = _CUDNN_FIRST
    for kernel in order:
        takes = _TAKES.get(kernel)
        if takes is not None and takes(call, capability):
            return kernel
    raise RuntimeError("No available kernel. Aborting execution.")


def _math(call: Call, capability: tuple[int, int]) -> bool:
    return torch.backends.cuda.math_sdp_enabled()


def _flash(call: Call, capability: tuple[int, int]) -> bool:
    size = call.query.size(-1)
    if not (
        torch.backends.cuda.flash_sdp_enabled()
        and call.mask is None
        and (8, 0) <= capability <= (12, 1)
        and _are_dense(call)
        and size == call.key.size(-1) == call.value.size(-1) <= 256
        and call.of_dtype(*_HALVES)
        and _heads_match(call, grouping=True)
        and _last_strides_are_1(call, ignore_single=True)
    ):
        return False
    if call.causal and call.query.size(-2) != call.key.size(-2):
        return False
    if call.differentiated and ((8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)):
        return size <= 192 or (size > 224 and not call.dropout)
    return True


def _efficient(call: Call, capability: tuple[int, int]) -> bool:
    half = call.query.dtype in _HALVES
    alignment = 4 if capability >= (8, 0) else 1
    if capability >= (8, 0) or (capability >= (7, 0) and half):  # tensor cores
        alignment = max(alignment, 128 // (16 if half else 32))
    size, dtypes = call.query.size(-1), [torch.float16, torch.float32]
    if capability >= (8, 0):
        dtypes.append(torch.bfloat16)
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and (5, 0) <= capability <= (12, 1)
        and _are_dense(call)
        and size == call.key.size(-1)
        and all(t.size(-1) > 0 and t.size(-1) % alignment == 0 for t in (call.query, call.value))
        and _last_strides_are_1(call, ignore_single=False)
        and _heads_match(call, grouping=False)
        and call.of_dtype(*dtypes)
    )


def _cudnn(call: Call, capability: tuple[int, int]) -> bool:
    query, key, value = call.query, call.key, call.value
    halves = _HALVES if capability >= (8, 0) else (torch.float16,)
    if not (
        torch.backends.cuda.cudnn_sdp_enabled()
        and (8, 0) <= capability <= (12, 1)
        and _are_dense(call)
        and call.of_dtype(*halves)
        and _mask_fits(call)
        and (call.dropout * 16).is_integer()
        and _last_strides_are_1(call, ignore_single=True)
        and _heads_match(call, grouping=True, same=False)
    ):
        return False
    if torch.are_deterministic_algorithms_enabled():
        return torch.is_deterministic_algorithms_warn_only_enabled()
    sizes = (query.size(-1), value.size(-1))
    narrow = max(sizes) <= 128 or (capability[0] in (9, 10) and sizes == (192, 128))
    return (
        narrow
        and not any(size % 8 for size in sizes)
        and max(query.size(0), query.size(1)) <= _CUDNN_MOST_HEADS
        and key.size(2) != 1
        and not (call.dropout and query.size(2) == 1)
    )


_TAKES: dict[int, Callable[[Call, tuple[int, int]], bool]] = {
    MATH: _math,
    FLASH: _flash,
    EFFICIENT: _efficient,
    CUDNN: _cudnn,
}


# These run for every layer of every generated token, and therefore ask each tensor once.


def _are_dense(call: Call) -> bool:
    query, key = call.query.shape, call.key.shape
    return len(query) == len(key) == call.value.dim() == 4 and query[-2] > 0 and key[-2] > 0


def _heads_match(call: Call, *, grouping: bool, same: bool = True) -> bool:
    (batch, queries, *_), (of_keys, keys, *_), (of_values, values, *_) = (
        call.query.shape,
        call.key.shape,
        call.value.shape,
    )
    if not batch == of_keys == of_values:
        return False
    if call.grouped and grouping:
        return (keys == values or not same) and queries % keys == 0 and queries % values == 0
    return queries == keys == values


def _last_strides_are_1(call: Call, *, ignore_single: bool) -> bool:
    ones = call.query.stride(-1) == call.key.stride(-1) == call.value.stride(-1) == 1
    if ignore_single and call.query.size(-1) == 1:
        ones = True
    return ones and (call.mask is None or call.mask.stride(-1) == 1)


def _mask_fits(call: Call) -> bool:
    mask = call.mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    wanted = (call.query.size(0), call.query.size(1), call.query.size(2), call.key.size(2))[-mask.dim() :]
    return all(size in (1, full) for size, full in zip(mask.shape, wanted))


def fused(call: Call, kernel: int, scale: float | None) -> torch.Tensor:
    """The result of ``call`` by one of the kernels other than ``MATH``."""
    query, key, value, dropout, causal = call.query, call.key, call.value, call.dropout, call.causal
    if kernel == FLASH:
        size = query.size(-1)
        scale = 1 / math.sqrt(size) if scale is None else scale
        if size % 8:
            query, key, value = (_padded(t) for t in (query, key, value))
        result = _flash_attention(query, key, value, dropout, causal, False, scale=scale)[0]
        return result[..., :size] if size % 8 else result
    mask = call.mask
    if mask is not None and mask.dtype == torch.bool:
        hidden = torch.scalar_tensor(-torch.inf, dtype=query.dtype, device=mask.device)
        mask = torch.where(mask, 0.0, hidden)
    if kernel == CUDNN:
        return _aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, call.differentiated, dropout, causal, False, scale=scale
        )[0]
    if mask is not None:
        if mask.stride(-1) != 1 or any(step % 8 for step in mask.stride()[:-1]):
            mask = pad(mask, (0, 8 - mask.size(-1) % 8))[..., : mask.size(-1)]
        mask = mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, call.differentiated, dropout, causal, scale=scale
    )[0]


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with its last dimension padded to a multiple of 8."""
    missing = -tensor.size(-1) % 8
    return pad(tensor, (0, missing)) if missing else tensor
