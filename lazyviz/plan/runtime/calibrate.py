"""Calibration of this machine's CPU: measures ops of several sizes, in under two seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .cpu import CpuRates, Curve

SECONDS = 0.045  # duration of each timing
_KIB = 1024


def measure() -> CpuRates:
    """Time matrix products, a convolution, elementwise ops, copies, softmax, and norms, on new tensors."""
    generator = torch.Generator().manual_seed(0)  # the state of the user's generator does not change

    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="cpu").uniform_(-1, 1, generator=generator)

    with torch.inference_mode(False), torch.no_grad():
        one = tensor(1)
        call = _seconds(lambda: one + one)
        return CpuRates(
            call,
            matmul=_products(tensor, call),
            convolution=_convolutions(tensor, call),
            elementwise=_by_bytes(tensor, lambda x: x + x, 3, call),
            function=_by_bytes(tensor, torch.tanh, 2, call),
            copy=_by_bytes(tensor, lambda x: x.t().contiguous(), 2, call),
            softmax=_by_bytes(tensor, lambda x: x.softmax(-1), 2, call),
            norm=_by_bytes(tensor, lambda x: F.layer_norm(x, x.shape[-1:]), 2, call),
        )


def _seconds(f: Callable[[], Any]) -> float:
    """The minimum time of a call, over as many calls as fit, after one warm-up call."""
    f()
    best, start = float("inf"), time.perf_counter()
    while True:
        before = time.perf_counter()
        f()
        after = time.perf_counter()
        best = min(best, after - before)
        if after - start > SECONDS:
            return best


def _net(f: Callable[[], Any], call: float) -> float:
    """The same without the overhead of a call."""
    seconds = _seconds(f)
    return max(seconds - call, seconds / 10)


def _products(tensor: Callable[..., torch.Tensor], call: float) -> Curve:
    found = []
    for size in (16, 48, 128, 384, 768):
        a, b = tensor(size, size), tensor(size, size)
        found.append((2.0 * size**3, 2.0 * size**3 / _net(lambda a=a, b=b: a @ b, call)))  # type: ignore[misc]
    return tuple(found)


def _convolutions(tensor: Callable[..., torch.Tensor], call: float) -> Curve:
    found = []
    for channels, pixels in ((8, 16), (32, 32), (64, 56)):
        x, weight = tensor(1, channels, pixels, pixels), tensor(channels, channels, 3, 3)
        flops = 2.0 * 9 * channels**2 * pixels**2
        seconds = _net(lambda x=x, w=weight: F.conv2d(x, w, padding=1), call)  # type: ignore[misc]
        found.append((flops, flops / seconds))
    return tuple(found)


def _by_bytes(
    tensor: Callable[..., torch.Tensor], f: Callable[[torch.Tensor], Any], passes: int, call: float
) -> Curve:
    """Bytes moved, and bytes per second, of ``f``, which reads and writes ``passes`` tensors."""
    found = []
    for size in (4 * _KIB, 256 * _KIB, 4096 * _KIB, 32768 * _KIB):
        x = tensor(size // 4 // 256 or 1, 256)
        moved = float(passes * size)
        found.append((moved, moved / _net(lambda x=x: f(x), call)))  # type: ignore[misc]
    return tuple(found)
