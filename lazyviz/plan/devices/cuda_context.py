"""CUDA context: its estimated size, and whether this process has one."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Context(NamedTuple):
    """Bytes of a CUDA context with the PyTorch releases before ``until``: best estimate, and the range of
    published sizes.  ``until`` is ``None`` for the last ones.
    """

    until: tuple[int, int] | None
    nbytes: int
    range: tuple[int, int]


CONTEXT_BYTES = 600 << 20
"""Conservative estimate of the size of a CUDA context: reports have 270 to 430 MiB with lazily loaded kernels
(pytorch issues 86509, 107667 and 109888, unsloth-zoo 1053), more with each kernel that a program uses."""
CONTEXT_RANGE = (300 << 20, 1400 << 20)
"""Bytes of a CUDA context: reports begin at 300 MiB with lazily loaded kernels (pytorch issue 109888), and
Hugging Face's docs measured 1,343 MiB on a V100 whose PyTorch loaded all of them."""
CONTEXTS = (
    # CUDA 9 and 10: 719 MiB on a GTX 1080 (pytorch issue 55277), 723 and about 800 MiB with PyTorch 1.4
    # (discuss.pytorch.org 73021 and 81330), 877 MiB on an RTX 2080 Ti (issue 49877, less its tensor), and
    # 1,005 MiB on a Titan V (28394).
    Context((1, 7), 850 << 20, (700 << 20, 1050 << 20)),
    # CUDA 11.0 to 11.6: 1,105 MiB (pytorch issue 60150), 1,343 MiB on a V100 (Hugging Face's docs), 1,486 and
    # 1,685 MiB on an RTX 3090 (issues 49877 and 55277).
    Context((1, 13), 1340 << 20, (1050 << 20, 1750 << 20)),
    # Kernels are loaded when they are first used (pytorch issue 86509).
    Context(None, CONTEXT_BYTES, CONTEXT_RANGE),
)
"""Sizes of CUDA contexts by PyTorch release, which determines whether CUDA loads all kernels."""


def of_release(release: tuple[int, int] | None) -> int:
    """Bytes of the context of a PyTorch release; ``None``: the installed one."""
    known = (each for each in CONTEXTS if each.until is None or (release and release < each.until))
    return next(known).nbytes


def range_of(nbytes: int) -> tuple[int, int]:
    """Published sizes for an estimate of :data:`CONTEXTS`; any other size is known."""
    known = (each.range for each in CONTEXTS if each.nbytes == nbytes)
    return next(known, (nbytes, nbytes))


def exists() -> bool:
    """Whether this process has a CUDA context; queries of the CUDA runtime would create one."""
    return bool(torch.cuda.is_initialized())
