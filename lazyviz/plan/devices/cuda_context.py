"""CUDA context: its estimated size, and whether this process has one."""

from __future__ import annotations

import torch

CONTEXT_BYTES = 600 << 20
"""Conservative estimate of the size of a CUDA context: reports have 300 to 430 MiB with lazily loaded kernels
(pytorch issues 107667 and 109888), more with each kernel that a program uses."""
CONTEXT_RANGE = (300 << 20, 1400 << 20)
"""Bytes of a CUDA context: reports begin at 300 MiB with lazily loaded kernels (pytorch issue 109888), and
Hugging Face's docs measured 1,343 MiB on a V100 whose PyTorch loaded all of them."""


def exists() -> bool:
    """Whether this process has a CUDA context; queries of the CUDA runtime would create one."""
    return bool(torch.cuda.is_initialized())
