"""Calibration of this machine's CPU: measures ops of several sizes, in under two seconds."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .cpu_op_times import ALWAYS_NEW, POINTWISE, CpuRates, Curve

SECONDS = 1.7  # duration of all timings
TURN = 0.003  # minimum; timings are interleaved, so that noise affects all functions equally
ISSUED_LAYERS = 8  # pairs of a linear layer and tanh
ISSUED_OPS = 17 + 48 + (8 + 40) / 2
"""Ops of a step with these layers, forward and backward, and sums of gradients; a view is half an op."""
SMALL_CALLS = 10  # calls of an op on a single number per clock reading
SMALL_ROUNDS = 20  # rounds of calling all operators on small tensors
WEIGHTS = 8
_KIB = 1024
TENSOR = 1024 * _KIB
"""Bytes of the largest tensors of kernels that move memory."""
DISTANCES = (16 * _KIB, 512 * _KIB, 4096 * _KIB, 32768 * _KIB)
PRODUCTS = (16, 48, 128, 384, 640)
COMPUTING, MOVING, AT_POINTS = (4, 128, 128, 14, 3), (8, 16, 16, 32, 3), (4, 64, 256, 28, 1)
"""Batch, channels, output channels, pixels, and kernel of convolutions. Products take nearly all of the
first's time; the others spend much of theirs on converting images to another layout."""

_Function = Callable[[], Any]
_New = Callable[..., torch.Tensor]
_OfTensors = Callable[[torch.Tensor, torch.Tensor], Any]


class _Timing:
    """The time of a function. Its last ``kept`` results are kept, as in a model that is being trained."""

    def __init__(self, function: _Function, kept: int = 0, repeat: int = 1) -> None:
        self.function, self.kept, self.repeat = function, kept, repeat
        self.taken: list[float] = []

    def once(self, clock: float) -> None:
        """Time one call; reading the clock takes ``clock`` seconds."""
        before = _now()
        self.function()
        self.taken.append(max(_now() - before - clock, 0.1 * clock))

    def turn(self) -> None:
        results = deque[Any](maxlen=self.kept)
        for _ in range(self.kept + 1):
            results.append(self.function())
        start = now = _now()
        while now - start < TURN:
            before = now
            for _ in range(self.repeat):
                results.append(self.function())
            now = _now()
            self.taken.append((now - before) / self.repeat)

    @property
    def seconds(self) -> float:
        return statistics.median(self.taken)


def _now() -> float:
    """Seconds; with one thread, only those in which it ran."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def measure() -> CpuRates:
    """Time matrix products, convolutions, and kernels that move memory, on new tensors."""
    generator = torch.Generator().manual_seed(0)  # the state of the user's generator does not change

    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="cpu").uniform_(-1, 1, generator=generator)

    with torch.inference_mode(False), torch.no_grad():
        one = tensor(1)
        call, issue = _Timing(lambda: one + one, repeat=SMALL_CALLS), _Timing(_training_step(tensor))
        small = {name: _Timing(f) for name, f in _operators(tensor).items()}
        products = dict(_products(tensor))
        images = {shape: _convolution(tensor, *shape) for shape in (COMPUTING, MOVING, AT_POINTS)}
        moved = _movers(tensor)
        fault = [_first_touch() for _ in range(2)]
        _take_turns(small.values(), [call, issue, *products.values(), *images.values(), *moved.values()])
    operators = {name: each.seconds for name, each in small.items()}
    again = {name: min(each.taken) for name, each in small.items()}  # called repeatedly, like the others
    curves = _by_distance(moved, {"elementwise": call.seconds} | again)
    convolution, layouts = _image_rates({s: each.seconds for s, each in images.items()}, again["convolution"])
    return CpuRates(
        call.seconds,
        issue.seconds / ISSUED_OPS,
        operators,
        matmul=_rates([(flops, _net(each.seconds, again["mm"])) for flops, each in products.items()]),
        convolution=convolution,
        elementwise=curves.pop("elementwise"),
        function=curves.pop("function"),
        copy=curves.pop("copy"),
        softmax=curves["_softmax"],
        norm=curves["native_layer_norm"],
        kernels=curves | layouts,
        fault=min(fault),
    )


def _take_turns(small: Collection[_Timing], timings: Sequence[_Timing]) -> None:
    """Time all functions, interleaved. Operators on ``small`` tensors are called one after another, so that
    the code of each has been evicted from the nearest cache when it is called, as in a model.
    """
    start = now = _now()
    clock = statistics.median(-_now() + _now() for _ in range(100))
    taken = 0.0
    while now + taken - start < SECONDS:
        for each in timings:
            each.turn()
        for each in small:
            each.function()
        for each in [*small] * SMALL_ROUNDS:
            each.once(clock)
        taken, now = _now() - now, _now()


def _operators(tensor: _New) -> dict[str, _Function]:
    """Calls of common operators on small tensors, where overhead takes most of the time."""
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


def _training_step(tensor: _New) -> _Function:
    """A training step of modules whose kernels take no time."""
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

    return step


def _net(seconds: float, call: float) -> float:
    """``seconds`` without the overhead of a call."""
    return max(seconds - call, seconds / 10)


def _products(tensor: _New) -> Iterator[tuple[float, _Timing]]:
    for size in PRODUCTS:
        # As in a model, each linear layer transposes different weights.
        a, weights = tensor(size, size), itertools.cycle([tensor(size, size).t() for _ in range(WEIGHTS)])
        yield 2.0 * size**3, _Timing(lambda a=a, w=weights: torch.mm(a, next(w)))  # type: ignore[misc]


def _rates(found: list[tuple[float, float]]) -> Curve:
    """The rates of amounts in seconds: those of small ops, which are short differences, are not above the
    rates of large ones.
    """
    peak = max(amount / seconds for amount, seconds in found[-2:])
    return tuple((amount, min(amount / seconds, peak)) for amount, seconds in found)


def _convolution(tensor: _New, batch: int, channels: int, outputs: int, pixels: int, kernel: int) -> _Timing:
    x, weight = tensor(batch, channels, pixels, pixels), tensor(outputs, channels, kernel, kernel)
    return _Timing(lambda: F.conv2d(x, weight, padding=kernel // 2))


def _image_rates(
    seconds: Mapping[tuple[int, int, int, int, int], float], call: float
) -> tuple[Curve, dict[str, Curve]]:
    """The rate of products, and the rates of converting image layouts for 3x3 and 1x1 convolutions.

    Two convolutions determine both rates: the time per FLOP and per byte is assumed to be the same in both.
    """

    def work(batch: int, channels: int, outputs: int, pixels: int, kernel: int) -> tuple[float, float]:
        images = float(batch * pixels**2)
        return 2 * images * channels * outputs * kernel**2, 4 * images * (channels + outputs)

    (flops, moved), (few, more) = work(*COMPUTING), work(*MOVING)
    computing, moving = _net(seconds[COMPUTING], call), _net(seconds[MOVING], call)
    per_flop = (computing * more - moving * moved) / (flops * more - few * moved)
    per_flop = min(max(per_flop, 0.5 * computing / flops), computing / flops)
    known: dict[str, Curve] = {}
    for name, shape in (("convolution", MOVING), (POINTWISE, AT_POINTS)):
        few, more = work(*shape)
        left = _net(seconds[shape], call) - few * per_flop
        known[name] = ((more, more / max(left, 0.01 * seconds[shape])),)
    return ((flops, 1 / per_flop),), known


def _movers(tensor: _New) -> dict[tuple[str, int], _Timing]:
    """Kernels that move memory, by operator or class and reuse distance."""
    kernels, found = _kernels(tensor), {}
    pool = [tensor(TENSOR // _KIB, 256) for _ in range(DISTANCES[-1] // TENSOR // 2)]
    for distance in DISTANCES:
        count = max(distance // TENSOR // 2, 1)  # the results take as many bytes again
        rows = min(distance // 2, TENSOR) // _KIB
        tensors = [each[:rows] for each in pool[:count]]
        for name, function in kernels.items():
            if distance not in (DISTANCES[1], DISTANCES[-1]) and name not in (
                "elementwise",
                "function",
                "copy",
            ):
                continue
            given = itertools.cycle(zip(tensors, tensors[1:] + tensors[:1]))
            found[name, distance] = _Timing(
                lambda f=function, given=given: f(*next(given)),  # type: ignore[misc]
                count if count > 1 else 0,
            )
    return found


def _kernels(tensor: _New) -> dict[str, _OfTensors]:
    """The functions to time, by operator, on pairs of tensors with 256 columns."""
    b, channel, positive, aten = tensor(256), tensor(8), torch.ones(8, device="cpu"), torch.ops.aten
    column, masks = torch.ones(TENSOR // _KIB, 1, device="cpu"), [True, True, True]

    def image(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 8, 2, 256)

    return {
        "elementwise": lambda x, y: x + y,
        "function": lambda x, _: torch.tanh(x),
        "copy": lambda x, _: x.t().contiguous(),
        "gelu": lambda x, _: F.gelu(x),
        "gelu_backward": lambda x, y: aten.gelu_backward.default(x, y),
        "_softmax": lambda x, _: x.softmax(-1),
        "_softmax_backward_data": lambda x, y: aten._softmax_backward_data.default(x, y, -1, x.dtype),
        "native_layer_norm": lambda x, _: F.layer_norm(x, (256,)),
        "native_layer_norm_backward": lambda x, y: aten.native_layer_norm_backward.default(
            x, y, [256], column[: len(x)], column[: len(x)], b, b, masks
        ),
        "native_batch_norm": lambda x, _: F.batch_norm(
            image(x), channel, positive, channel, channel, training=True
        ),
        "native_batch_norm_backward": lambda x, y: aten.native_batch_norm_backward.default(
            image(x), image(y), channel, channel, positive, channel, positive, True, 1e-5, masks
        ),
        "sum": lambda x, _: x.sum(0),
    }


PASSES = {
    "elementwise": 3,
    "gelu_backward": 3,
    "_softmax_backward_data": 3,
    "native_layer_norm_backward": 3,
    "native_batch_norm_backward": 3,
    "sum": 1,
}
"""Tensors that a call reads and writes; of the others, two."""


def _by_distance(timings: Mapping[tuple[str, int], _Timing], calls: Mapping[str, float]) -> dict[str, Curve]:
    """The rates of kernels that move memory; ``calls``: the overhead of each."""
    found: dict[str, list[tuple[float, float]]] = {}
    for (name, distance), each in timings.items():
        moved = PASSES.get(name, 2) * min(distance // 2, TENSOR)
        seconds = _net(each.seconds, calls.get(name, calls["elementwise"]))
        found.setdefault(name, []).append((float(distance), moved / seconds))
    return {name: tuple(curve) for name, curve in found.items()}


def _first_touch() -> float:
    """Seconds per byte that writing to new memory takes longer."""
    start = _now()
    new = torch.empty(ALWAYS_NEW, dtype=torch.uint8, device="cpu").fill_(1)
    middle = _now()
    new.fill_(1)
    return max(2 * middle - start - _now(), 0.0) / ALWAYS_NEW
