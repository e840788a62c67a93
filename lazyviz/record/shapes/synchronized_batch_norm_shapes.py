"""Results of the kernels of ``nn.SyncBatchNorm``, which only CUDA has, and PyTorch has no shape rules for.

They follow ``ATen/native/cuda/Normalization.cu``: statistics of half-precision images have single
precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_HALF = (torch.float16, torch.bfloat16)


def _statistics(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    image = arguments["input"]
    dtype = torch.float32 if image.dtype in _HALF else image.dtype
    return image.new_empty(image.shape[1], dtype=dtype), image.new_empty(image.shape[1], dtype=dtype)


def _image(arguments: dict[str, Any]) -> torch.Tensor:
    return torch.empty_like(arguments["input"])


def _sums(arguments: dict[str, Any]) -> tuple[torch.Tensor | None, ...]:
    mean, weight = arguments["mean"], arguments["weight"]
    of_channels = mean if weight is None else weight
    of_image = [torch.empty_like(mean) if arguments["input_g"] else None for _ in range(2)]
    return (
        *of_image,
        torch.empty_like(of_channels) if arguments["weight_g"] else None,
        torch.empty_like(of_channels) if arguments["bias_g"] else None,
    )


RULES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "batch_norm_stats": _statistics,
    "batch_norm_gather_stats_with_counts": _statistics,
    "batch_norm_elemt": _image,
    "batch_norm_backward_reduce": _sums,
    "batch_norm_backward_elemt": _image,
}
"""By operator. Only for absent GPUs: the schema does not say that running statistics are updated."""
