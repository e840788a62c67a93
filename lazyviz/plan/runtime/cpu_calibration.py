"""Calibration of this machine's CPU: measures ops of several sizes, in under two seconds."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .cpu_op_times import CpuRates, Curve

SECONDS = 0.045  # duration of each timing
ISSUED_LAYERS = 8  # pairs of a linear layer and tanh
ISSUED_OPS = 17 + 48 + (8 + 40) / 2
"""Ops of a step with these layers, forward and backward, and sums of gradients; a view is half an op."""
SMALL_SECONDS = 0.008  # duration of the timing of an operator on small tensors
WEIGHTS = 8
_KIB = 1024


def measure() -> CpuRates:
    """Time matrix products, a convolution, elementwise ops, copies, softmax, and norms, on new tensors."""
    generator = torch.Generator().manual_seed(0)  # the state of the user's generator does not change

    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="cpu").uniform_(-1, 1, generator=generator)

    with torch.inference_mode(False), torch.no_grad():
        one = tensor(1)
        call = _seconds(lambda: one + one)
        small = {name: _seconds(f, SMALL_SECONDS) for name, f in _operators(tensor).items()}
        return CpuRates(
            call,
            _issue(tensor),
            small,
            matmul=_products(tensor, small["mm"]),
            convolution=_convolutions(tensor, small["convolution"]),
            elementwise=_by_bytes(tensor, lambda x: x + x, 3, call),
            function=_by_bytes(tensor, torch.tanh, 2, call),
            copy=_by_bytes(tensor, lambda x: x.t().contiguous(), 2, call),
            softmax=_by_bytes(tensor, lambda x: x.softmax(-1), 2, small["_softmax"]),
            norm=_by_bytes(tensor, lambda x: F.layer_norm(x, x.shape[-1:]), 2, small["native_layer_norm"]),
        )


def _operators(tensor: Callable[..., torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Calls of common operators on small tensors, where their own preparations take most of the time."""
    a, b, column = tensor(8, 8), tensor(8), tensor(8, 1)
    image, weight = tensor(1, 8, 8, 8), tensor(8, 8, 3, 3)
    number = torch.zeros(8, dtype=torch.long, device="cpu")
    mean, variance = tensor(8), torch.ones(8, device="cpu")
    aten = torch.ops.aten
    pairs, masks = [1, 1], [True, True, True]
    return {
        "mm": lambda: torch.mm(a, a),
        "addmm": lambda: torch.addmm(b, a, a),
        "bmm": lambda: torch.bmm(a[None], a[None]),
        "convolution": lambda: F.conv2d(image, weight, padding=1),
        "convolution_backward": lambda: aten.convolution_backward.default(
            image, image, weight, None, pairs, pairs, pairs, False, [0, 0], 1, [True, True, False]
        ),
        "gelu": lambda: F.gelu(a),
        "gelu_backward": lambda: aten.gelu_backward.default(a, a),
        "_softmax": lambda: a.softmax(-1),
        "_softmax_backward_data": lambda: aten._softmax_backward_data.default(a, a, -1, torch.float32),
        "_log_softmax": lambda: a.log_softmax(-1),
        "native_layer_norm": lambda: F.layer_norm(a, (8,)),
        "native_layer_norm_backward": lambda: aten.native_layer_norm_backward.default(
            a, a, [8], column, column, b, b, masks
        ),
        "native_batch_norm": lambda: F.batch_norm(image, mean, variance, b, b, training=True),
        "native_batch_norm_backward": lambda: aten.native_batch_norm_backward.default(
            image, image, b, mean, variance, b, variance, True, 1e-5, masks
        ),
        "max_pool2d_with_indices": lambda: F.max_pool2d(image, 2, return_indices=True),
        "embedding": lambda: F.embedding(number, a),
        "sum": lambda: a.sum(0, keepdim=True),
        "cat": lambda: torch.cat([a, a]),
    }


def _seconds(f: Callable[[], Any], duration: float = SECONDS) -> float:
    """The median time of a call, over as many calls as fit, after one warm-up call."""
    f()
    taken, start = [], time.perf_counter()
    while True:
        before = time.perf_counter()
        f()
        after = time.perf_counter()
        taken.append(after - before)
        if after - start > duration:
            return statistics.median(taken)


def _issue(tensor: Callable[..., torch.Tensor]) -> float:
    """Seconds from one op to the next in a training step of modules whose kernels take no time."""
    with torch.random.fork_rng(devices=[]):
        layers = [
            layer
            for _ in range(ISSUED_LAYERS)
            for layer in (torch.nn.Linear(8, 8, device="cpu"), torch.nn.Tanh())
        ]
    model, x = torch.nn.Sequential(*layers), tensor(2, 8)

    def step() -> None:
        with torch.enable_grad():
            model(x).sum().backward()

    return _seconds(step) / ISSUED_OPS


def _net(f: Callable[[], Any], call: float) -> float:
    """The same without the overhead of a call."""
    seconds = _seconds(f)
    return max(seconds - call, seconds / 10)


def _products(tensor: Callable[..., torch.Tensor], call: float) -> Curve:
    found = []
    for size in (16, 48, 128, 384, 768):
        # As in a model, whose linear layers transpose their weights, and have others each time.
        a, weights = tensor(size, size), itertools.cycle([tensor(size, size).t() for _ in range(WEIGHTS)])
        found.append((2.0 * size**3, _net(lambda a=a, w=weights: torch.mm(a, next(w)), call)))  # type: ignore[misc]
    return _rates(found)


def _convolutions(tensor: Callable[..., torch.Tensor], call: float) -> Curve:
    found = []
    for channels, pixels in ((8, 16), (32, 32), (64, 56)):
        x, weight = tensor(1, channels, pixels, pixels), tensor(channels, channels, 3, 3)
        seconds = _net(lambda x=x, w=weight: F.conv2d(x, w, padding=1), call)  # type: ignore[misc]
        found.append((2.0 * 9 * channels**2 * pixels**2, seconds))
    return _rates(found)


def _rates(found: list[tuple[float, float]]) -> Curve:
    """The rates of amounts in seconds: those of small ops, which are short differences, are not above the
    rates of large ones.
    """
    peak = max(amount / seconds for amount, seconds in found[-2:])
    return tuple((amount, min(amount / seconds, peak)) for amount, seconds in found)


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
