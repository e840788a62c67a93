"""Calibration of this machine's CPU: measures ops of several sizes, in under two seconds."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from . import cpu_convolutions
from .cpu_op_times import (
    ALWAYS_NEW,
    ATTENTION,
    ATTENTION_BACKWARD,
    BATCHED,
    DEPTHWISE,
    OF_WIDE_DEPTHWISE,
    OUTER,
    POINTWISE,
    THIN,
    WEIGHTS,
    CpuRates,
    Curve,
    bytes_of_cube,
    rate_at,
)
from .cpu_timed_kernels import PASSES, Function, New, counted_kernels, moving_kernels, operators

SECONDS = 1.5  # duration of all timings
TURN = 0.003  # minimum; timings are interleaved, so that noise affects all functions equally
ISSUED_LAYERS = 8  # pairs of a linear layer and tanh
ISSUED_OPS = 17 + 48 + (8 + 40) / 2
"""Ops of a step with these layers, forward and backward, and sums of gradients; a view is half an op."""
SMALL_CALLS = 10  # calls of an op on a single number per clock reading
SMALL_ROUNDS = 20  # rounds of calling all operators on small tensors
LAYERS = 8  # of different weights
_KIB = 1024
TENSOR = 1024 * _KIB
"""Bytes of the largest tensors of kernels that move memory."""
DISTANCES = (16 * _KIB, 512 * _KIB, 4096 * _KIB, 32768 * _KIB)
PRODUCTS = (16, 48, 128, 384, 640)
COMPUTING, MOVING, AT_POINTS, WEIGHING = (
    (4, 128, 128, 14, 3),
    (8, 16, 16, 32, 3),
    (16, 64, 64, 12, 1),
    (2, 192, 192, 3, 3),
)
"""Batch, channels, output channels, pixels, and kernel of convolutions that oneDNN runs. Products take nearly
all of the first's time; the second has few terms in each sum, and the others spend much of their time on
converting images or weights to another layout."""
DEPTH = (4, 64, 28, 3)
"""The same of a depthwise convolution, without output channels."""
WIDE_DEPTH = (2, 32, 14, 5)
"""And of one that is wider than three pixels."""
HEADS = ((16, 4, 16, 32), (2, 4, 64, 32))
"""Batch, heads, length, and width of a head of attention."""
BATCH_OF_PRODUCTS = (16, 64, 32)
"""Matrices, rows and columns, and terms of a batched product, as of attention heads."""
BY_ATEN = (512, (2, 3, 4, 6))
"""Channels, and pixels in a row and column, of images for 1x1 convolutions that ATen runs by itself."""
THIN_SHAPE, OUTER_SHAPE = (8, 512, 256), (256, 4, 512)
"""Rows, terms and columns of the products whose operands, or results, take most of the time."""


class _Timing:
    """The time of a function. Its last ``kept`` results are kept, as in a model that is being trained."""

    def __init__(self, function: Function, kept: int = 0, repeat: int = 1) -> None:
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
        new = torch.empty(*shape, dtype=torch.float32, device="cpu")
        return new.uniform_(-1, 1, generator=generator)

    with torch.inference_mode(False), torch.no_grad():
        one = tensor(1)
        call, issue = _Timing(lambda: one + one, repeat=SMALL_CALLS), _Timing(_training_step(tensor))
        small = {name: _Timing(f) for name, f in operators(tensor).items()}
        products, unequal = dict(_products(tensor)), _unequal_products(tensor)
        images = {shape: _convolution(tensor, *shape) for shape in (COMPUTING, MOVING, AT_POINTS, WEIGHING)}
        by_aten = _convolutions_by_aten(tensor)
        others = {DEPTHWISE: _depthwise_convolution(tensor), BATCHED: _batched_product(tensor)}
        others[OF_WIDE_DEPTHWISE] = _wide_depthwise_gradient(tensor)
        heads = dict(_attention(tensor))
        moved, counts = _movers(tensor), counted_kernels(tensor)
        elements = {name: _Timing(function) for name, (function, _) in counts.items()}
        fault = [_first_touch() for _ in range(2)]
        several = (products, unequal, images, by_aten, others, heads, moved, elements)
        _take_turns(small.values(), [call, issue, *(each for known in several for each in known.values())])
    again = {name: min(each.taken) for name, each in small.items()}  # called repeatedly, like the others
    curves = _by_distance(moved, {"elementwise": call.seconds} | again)
    matmul = _rates([(flops, _net(each.seconds, again["mm"])) for flops, each in products.items()])
    layouts = _other_rates(others, again, matmul)
    convolution, of_images = _image_rates(
        {shape: each.seconds for shape, each in images.items()},
        again["convolution"],
        1 / layouts[DEPTHWISE][0][1],
    )
    layouts |= of_images
    layouts |= _rates_of_bytes(
        {name: _net(each.seconds, again["mm"]) for name, each in unequal.items()}, matmul
    )
    layouts |= _rates_by_aten(by_aten, again, matmul)
    layouts |= _rates_of_heads(heads, call.seconds, matmul)
    return CpuRates(
        call.seconds,
        issue.seconds / ISSUED_OPS,
        {name: each.seconds for name, each in small.items()},
        matmul=matmul,
        convolution=convolution,
        elementwise=curves.pop("elementwise"),
        function=curves.pop("function"),
        copy=curves.pop("copy"),
        softmax=curves["_softmax"],
        norm=curves["native_layer_norm"],
        kernels=curves | layouts,
        elements={
            name: _net(elements[name].seconds, again.get(name, call.seconds)) / count
            for name, (_, count) in counts.items()
        },
        repeated=again,
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


def _training_step(tensor: New) -> Function:
    """A training step of modules whose kernels take no time."""
    with torch.random.fork_rng(devices=[]):
        layers = [
            layer
            for _ in range(ISSUED_LAYERS)
            for layer in (torch.nn.Linear(8, 8, dtype=torch.float32, device="cpu"), torch.nn.Tanh())
        ]
    model, x = torch.nn.Sequential(*layers), tensor(2, 8)

    def step() -> None:
        with torch.enable_grad():
            model(x).sum().backward()

    return step


def _net(seconds: float, call: float) -> float:
    """``seconds`` without the overhead of a call."""
    return max(seconds - call, seconds / 10)


def _products(tensor: New) -> Iterator[tuple[float, _Timing]]:
    for size in PRODUCTS:
        # As in a model, each linear layer transposes different weights.
        a, weights = tensor(size, size), itertools.cycle([tensor(size, size).t() for _ in range(LAYERS)])
        yield 2.0 * size**3, _Timing(lambda a=a, w=weights: torch.mm(a, next(w)))  # type: ignore[misc]


def _rates(found: list[tuple[float, float]]) -> Curve:
    """The rates of amounts in seconds: those of small ops, which are short differences, are not above the
    rates of large ones.
    """
    peak = max(amount / seconds for amount, seconds in found[-2:])
    return tuple((amount, min(amount / seconds, peak)) for amount, seconds in found)


def _convolution(tensor: New, batch: int, channels: int, outputs: int, pixels: int, kernel: int) -> _Timing:
    x, weight = tensor(batch, channels, pixels, pixels), tensor(outputs, channels, kernel, kernel)
    return _Timing(lambda: F.conv2d(x, weight, padding=kernel // 2))


def _image_rates(
    seconds: Mapping[tuple[int, int, int, int, int], float], call: float, per_byte: float
) -> tuple[Curve, dict[str, Curve]]:
    """The rates of products by the terms of each sum, and of converting images and weights to other layouts.

    ``per_byte``: seconds per byte of images, as of depthwise convolutions, which do little else.
    """

    def work(batch: int, channels: int, outputs: int, pixels: int, kernel: int) -> tuple[float, float]:
        images = float(batch * pixels**2)
        return 2 * images * channels * outputs * kernel**2, 4 * images * (channels + outputs)

    found = []
    few_terms = float(MOVING[1] * MOVING[4] ** 2)
    # With twice as many channels, each result is as fast as with many.
    for shape, terms in ((MOVING, few_terms), (COMPUTING, 2 * few_terms)):
        flops, moved = work(*shape)
        taken = _net(seconds[shape], call)
        found.append((terms, flops / max(taken - moved * per_byte, taken / 2)))

    def without_products(shape: tuple[int, int, int, int, int]) -> float:
        return _net(seconds[shape], call) - work(*shape)[0] / found[-1][1]

    images = work(*AT_POINTS)[1]
    pointwise = max(without_products(AT_POINTS), 0.01 * seconds[AT_POINTS])
    weights = 4.0 * WEIGHING[1] * WEIGHING[2] * WEIGHING[4] ** 2
    converting = without_products(WEIGHING) - work(*WEIGHING)[1] * per_byte
    return tuple(found), {
        "convolution": ((images, 1 / per_byte),),
        POINTWISE: ((images, images / pointwise),),
        WEIGHTS: ((weights, weights / max(converting, 0.01 * seconds[WEIGHING])),),
    }


def _unequal_products(tensor: New) -> dict[str, _Timing]:
    """Products with few rows, as of small batches, and over few terms, as for their weights' gradients."""
    rows, terms, columns = THIN_SHAPE
    x, weights = tensor(rows, terms), itertools.cycle([tensor(columns, terms).t() for _ in range(2)])
    made, few, wide = OUTER_SHAPE
    left, right = tensor(few, made).t(), tensor(few, wide)
    return {
        THIN: _Timing(lambda: torch.mm(x, next(weights))),
        OUTER: _Timing(lambda: torch.mm(left, right)),
    }


def _rates_of_bytes(seconds: Mapping[str, float], matmul: Curve) -> dict[str, Curve]:
    """What these products take longer than cubes of as many FLOPs, by the bytes that they have more."""

    def left(name: str, shape: tuple[int, int, int]) -> tuple[float, float]:
        rows, terms, columns = shape
        flops = 2.0 * rows * terms * columns
        more = 4 * (rows * terms + terms * columns + rows * columns) - bytes_of_cube(flops)
        return more, max(seconds[name] - flops / rate_at(matmul, flops), 0.01 * seconds[name])

    more, thin = left(THIN, THIN_SHAPE)
    operands, outer = left(OUTER, OUTER_SHAPE)
    made = 4.0 * OUTER_SHAPE[0] * OUTER_SHAPE[2]
    outer = max(outer - operands * thin / more, 0.01 * seconds[OUTER])
    return {THIN: ((more, more / thin),), OUTER: ((made, made / outer),)}


def _convolutions_by_aten(tensor: New) -> dict[tuple[str, int], _Timing]:
    """Each pass of convolutions on single small images."""
    channels, sizes = BY_ATEN
    weight, found = tensor(channels, channels, 1, 1), {}
    backward, pair = torch.ops.aten.convolution_backward.default, [1, 1]
    for size in sizes:
        image = tensor(1, channels, size, size)

        def gradients(*wanted: bool, image: torch.Tensor = image) -> Function:
            return lambda: backward(
                image, image, weight, None, pair, [0, 0], pair, False, [0, 0], 1, [*wanted, False]
            )

        found[cpu_convolutions.FORWARD, size] = _Timing(lambda x=image: F.conv2d(x, weight))  # type: ignore[misc]
        found[cpu_convolutions.OF_INPUT, size] = _Timing(gradients(True, False))
        found[cpu_convolutions.OF_WEIGHT, size] = _Timing(gradients(False, True))
    return found


def _rates_by_aten(
    timings: Mapping[tuple[str, int], _Timing], calls: Mapping[str, float], matmul: Curve
) -> dict[str, Curve]:
    """The rates by pixels; with many of them, they are those of other products."""
    channels, sizes = BY_ATEN
    found: dict[str, list[tuple[float, float]]] = {}
    for (name, size), each in timings.items():
        call = calls["convolution" if name == cpu_convolutions.FORWARD else "convolution_backward"]
        rate = 2 * channels**2 * size**2 / _net(each.seconds, call)
        found.setdefault(name, []).append((float(size**2), rate))
    many = float(sizes[-1] ** 2 * 8)
    return {name: (*curve, (many, matmul[-1][1])) for name, curve in found.items()}


def _depthwise_convolution(tensor: New) -> _Timing:
    batch, channels, pixels, kernel = DEPTH
    x, weight = tensor(batch, channels, pixels, pixels), tensor(channels, 1, kernel, kernel)
    return _Timing(lambda: F.conv2d(x, weight, padding=kernel // 2, groups=channels))


def _wide_depthwise_gradient(tensor: New) -> _Timing:
    batch, channels, pixels, kernel = WIDE_DEPTH
    x, weight = tensor(batch, channels, pixels, pixels), tensor(channels, 1, kernel, kernel)
    backward, ones, around = torch.ops.aten.convolution_backward.default, [1, 1], [kernel // 2] * 2
    wanted = [False, True, False]
    return _Timing(lambda: backward(x, x, weight, None, ones, around, ones, False, [0, 0], channels, wanted))


def _attention(tensor: New) -> Iterator[tuple[tuple[str, int], _Timing]]:
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    for number, shape in enumerate(HEADS):
        x = tensor(*shape)
        result, sums = forward(x, x, x)
        yield (ATTENTION, number), _Timing(lambda x=x: forward(x, x, x))  # type: ignore[misc]
        yield (
            (ATTENTION_BACKWARD, number),
            _Timing(lambda x=x, y=result, s=sums: backward(x, x, x, x, y, s, 0.0, False)),  # type: ignore[misc]
        )


def _rates_of_heads(
    timings: Mapping[tuple[str, int], _Timing], call: float, matmul: Curve
) -> dict[str, Curve]:
    """The rates by the FLOPs of a head; long sequences reach the rate of other products."""
    found: dict[str, list[tuple[float, float]]] = {}
    for (name, number), each in timings.items():
        batch, heads, length, width = HEADS[number]
        one = 4.0 * length**2 * width * (2.5 if name == ATTENTION_BACKWARD else 1)
        found.setdefault(name, []).append((one, batch * heads * one / _net(each.seconds, call)))
    return {name: (*curve, (32 * curve[-1][0], matmul[-1][1])) for name, curve in found.items()}


def _batched_product(tensor: New) -> _Timing:
    count, size, terms = BATCH_OF_PRODUCTS
    left, right = tensor(count, size, terms), tensor(count, terms, size)
    return _Timing(lambda: torch.bmm(left, right))


def _other_rates(
    timings: Mapping[str, _Timing], calls: Mapping[str, float], matmul: Curve
) -> dict[str, Curve]:
    batch, channels, pixels, _ = DEPTH
    images = 8.0 * batch * channels * pixels**2
    count, size, terms = BATCH_OF_PRODUCTS
    one = 2.0 * size**2 * terms
    small = min(count * one / _net(timings[BATCHED].seconds, calls["bmm"]), matmul[-1][1])
    batch, channels, pixels, kernel = WIDE_DEPTH
    flops = 2.0 * batch * channels * pixels**2 * kernel**2
    wide = _net(timings[OF_WIDE_DEPTHWISE].seconds, calls["convolution_backward"])
    return {
        OF_WIDE_DEPTHWISE: ((flops, flops / wide),),
        DEPTHWISE: ((images, images / _net(timings[DEPTHWISE].seconds, calls["convolution"])),),
        BATCHED: ((one, small), (16 * one, matmul[-1][1])),
    }


def _movers(tensor: New) -> dict[tuple[str, int], _Timing]:
    """Kernels that move memory, by operator or class and reuse distance."""
    kernels, found = moving_kernels(tensor, TENSOR // _KIB), {}
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
