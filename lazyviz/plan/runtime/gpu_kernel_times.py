"""Projected time of one GPU kernel: matrix products by tiles and waves, others by memory traffic.

The data and its sources are in ``gpu_kernel_calibration.json``.  The time of a matrix product is the minimum
over a few tile shapes and splits of the inner dimension.  For each, it is computed from waves of tiles, in
which each multiprocessor processes one tile at a time at its share of the sustained rate, and combined with
the memory time by a norm of four.  Each tile begins and ends with a latency (its prologue and epilogue).
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...graph.ir import Bound, Node, Value
from ..devices.gpu_rates import ProductKernel, Rates, Unit
from .bytes_and_launches import compute_dtype, operator_class, read_again, work_key, work_of
from .flop_count import arguments_of, groups_of
from .op_classes import OpClass, class_of, short_name

CALIBRATED: dict[str, Any] = json.loads(Path(__file__).with_name("gpu_kernel_calibration.json").read_text())
# Kernels without measurements in the calibration: shares of the bandwidth that elementwise kernels reach.
# Kernels that gather scattered rows, or write to a few locations, reach less.
_LIKE_ELEMENTWISE: dict[OpClass, float] = {
    "copy": 0.9, "reduction": 0.85, "indexing": 0.6, "random": 0.8, "optimizer": 0.9, "other": 0.6,
}  # fmt: skip
# Fused attention, as a share of the throughput of matrix products, forward and backward. FlashAttention-2's
# paper (arXiv 2307.08691) has 60 to 70 and 50 to 60 % of an A100's peak, github.com/gpu-mode/ring-attention,
# issue 10, 73 and 63 of an RTX A5000's, gau-nernst's "Writing Speed-of-Light Flash Attention" 89 forward of
# an RTX 5090's (``F.scaled_dot_product_attention``), FlashAttention-3's paper (arXiv 2407.08608) 37 forward
# of an H100's for FlashAttention-2, which PyTorch has.  Hopper's backward pass is reduced by the same factor
# as on an A100; data-center Blackwell uses Hopper's values.
_ATTENTION = {"forward": 0.8, "backward": 0.7}
_ATTENTION_ON_HOPPER = {"forward": 0.46, "backward": 0.4}
HALF = frozenset((torch.float16, torch.bfloat16))
_PER_ELEMENT: frozenset[OpClass] = frozenset(("elementwise", "copy", "random", "softmax", "norm"))
"""Classes of kernels whose instructions per 16-bit element are calibrated."""
WINOGRAD = 1.35
"""Speedup of 3x3 convolutions with stride 1 over matrix products with as many FLOPs, on the calibrated
GPUs."""
_DIRECT = 0.25
"""Share of the float32 units' peak that direct kernels of convolutions in groups reach, without tensor
cores: an estimate.  Tiles of matrix products would mostly be empty if a group has few channels."""
_DEPTHWISE = 0.6
"""The bandwidth of depthwise convolutions, as a share of that of elementwise kernels: an estimate, between
0.33 of PyTorch's kernels in github.com/pytorch/pytorch, issue 18631 (1.02 ms for two float32 images of
32 x 512 x 512 on a Titan Xp), and cuDNN's, which are faster."""
_SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
_SPLITS_OF_CONVOLUTIONS = _SPLITS[:4]
"""Parts that the inner dimension of a product may be split into; cuDNN is not known to split further."""
MOST_KNOWN = 50_000


@dataclass(frozen=True, slots=True)
class Gpu:
    """What kernel times depend on: name, rates, and compute capability of a GPU, and whether TF32 is allowed.

    ``host_apart``: the graph has tensors on a GPU, so that tensors on the CPU are in host memory;
    ``several``: it has tensors on more than one GPU.
    """

    name: str
    rates: Rates
    capability: tuple[int, int] | None
    tf32_products: bool
    tf32_convolutions: bool
    host_apart: bool = False
    several: bool = False

    def share(self, kind: str, row: float = 0) -> float:
        """The share of the bandwidth that a class of kernels reaches on large tensors.

        ``row``: the elements of a row of softmax or normalization. Kernels keep short rows in registers, and
        read long ones more than once.
        """
        gpus, memory = CALIBRATED["gpus"], CALIBRATED["memory"]
        if self.name in gpus:
            return _of_row(gpus[self.name], kind, row)
        copies = CALIBRATED["copies"]
        copying = copies["gpus"].get(self.name, copies["memory"].get(self.rates.memory))
        if copying is not None:  # elementwise kernels reach as much as copies; others proportionally less
            return float(copying * _of_row(memory["GDDR6"], kind, row) / memory["GDDR6"]["elementwise"])
        family = "HBM" if self.rates.memory.startswith("HBM") else self.rates.memory.rstrip("X")
        return _of_row(memory.get(family, memory["GDDR6"]), kind, row)

    def unit(self, dtype: torch.dtype, kind: OpClass) -> Unit | None:
        """The unit that computes products of ``dtype``; ``None`` if its rate on the GPU is unknown."""
        newer = self.capability is None or self.capability >= (8, 0)
        if dtype == torch.float32:
            allowed = self.tf32_convolutions if kind == "convolution" else self.tf32_products
            return "tf32" if allowed and self.rates.tf32 else "float32"
        if dtype == torch.float16 or (dtype == torch.bfloat16 and newer):
            return "half" if self.rates.half else None
        return None


def _of_row(shares: Mapping[str, Any], kind: str, row: float) -> float:
    if kind == "elementwise":
        return float(shares[kind])
    return float(shares[kind][bisect.bisect_left(CALIBRATED["row_lengths"], row)])


class Kernel(NamedTuple):
    """Seconds of one op on the GPU, their bound, and whether the calibration has data on its class.

    ``unit``: the unit that computes its matrix products, if it has any.
    """

    seconds: float
    bound: Bound
    covered: bool
    unit: Unit | None = None


class Product(NamedTuple):
    """``batch`` products of an m x k by a k x n matrix.

    ``aligned``: whether all rows begin at multiples of 16 bytes, which the kernels of tensor cores load.
    """

    batch: int
    m: int
    n: int
    k: int
    kernel: ProductKernel = "single"
    aligned: bool = True


NO_TIME = Kernel(0.0, "launch", True)
Times = dict[object, "Kernel | None"]
"""The times of ops on one GPU, by the object that ops with the same work share."""
_memo: dict[Gpu, Times] = {}


def times_on(gpu: Gpu) -> Times:
    """The cached times on ``gpu``, for :func:`kernel_time` of many ops."""
    found = _memo.setdefault(gpu, {})
    if len(found) > MOST_KNOWN:
        found.clear()
    return found


def kernel_time(node: Node, gpu: Gpu, times: Times) -> Kernel | None:
    """The time of one op on ``gpu``; ``None`` if unknown. Cached by the work of the op."""
    if gpu.several and len({*map(str, gpus_of((*node.inputs, *node.outputs)))}) > 1:
        return _between_gpus(node, gpu)
    key = work_key(node)
    if key is None:
        return _timed(node, gpu)
    if key not in times:
        times[key] = _timed(node, gpu)
    return times[key]


def _timed(node: Node, gpu: Gpu) -> Kernel | None:
    kind, work = operator_class(node), work_of(node)
    if not work.launches:
        return NO_TIME
    if kind == "iterative":
        return None
    launch = work.launches * float(CALIBRATED["kernel_seconds"])
    places = {value.device.type for value in (*node.inputs, *node.outputs)} if gpu.host_apart else set()
    if places == {"cpu"}:
        return NO_TIME  # work of the host
    if kind == "copy" and "cpu" in places:
        return Kernel(launch + work.bytes_read / _host_link(gpu), "memory", False)
    if kind == "collective":
        if not gpu.rates.link_gbps:
            return None if work.bytes_read else NO_TIME
        return Kernel(launch + work.bytes_read / (gpu.rates.link_gbps * 1e9), "memory", False)
    bandwidth = gpu.rates.gbps * 1e9
    if not work.flops:
        share = gpu.share(kind, _row_of(node)) if kind in ("softmax", "norm") else gpu.share("elementwise")
        moved = work.bytes_moved + (read_again(node) if kind == "norm" else 0)
        moving = moved / (bandwidth * share * _LIKE_ELEMENTWISE.get(kind, 1.0))
        moving = max(moving, _issuing(node, kind, gpu))
        covered = kind in ("softmax", "norm", "elementwise")
        return Kernel(launch + moving, "memory" if moving > launch else "launch", covered)
    unit = gpu.unit(compute_dtype(node), kind)
    if unit is None:
        return None
    computing = _computing(node, kind, gpu, unit, work.executed)
    share = _DEPTHWISE if kind == "convolution" and _is_depthwise(node) else 1.0
    moving = work.bytes_moved / (bandwidth * gpu.share("elementwise") * share)
    seconds = (computing**4 + moving**4) ** 0.25
    bound: Bound = "compute" if computing >= moving else "memory"
    covered = _is_measured(node, kind) and (unit == "float32" or unit in gpu.rates.sustained)
    return Kernel(launch + seconds, bound if seconds > launch else "launch", covered, unit)


def _issuing(node: Node, kind: OpClass, gpu: Gpu) -> float:
    """The least time of a kernel on 16-bit elements on GPUs with much bandwidth for their float32 rate.

    An element takes as many instructions as one of float32, which has twice the bytes.
    """
    slots = CALIBRATED["16 bit"]["slots"].get("{}.{}".format(*gpu.capability) if gpu.capability else "")
    values = (*node.inputs, *node.outputs)
    if slots is None or kind not in _PER_ELEMENT or not any(value.dtype in HALF for value in values):
        return 0.0
    elements = max(math.prod(value.shape) for value in values)
    return elements * float(slots) / (gpu.rates.peak("float32") / 2)


def _row_of(node: Node) -> float:
    """The number of elements that a softmax or a normalization reduces together."""
    named = arguments_of(node)
    given = next((each for each in node.inputs if each.shape), None)
    if given is None:
        return 0
    if class_of(node.op) == "softmax":
        dim = named.get("dim", -1)
        return given.shape[dim] if isinstance(dim, int) else given.shape[-1]
    if isinstance(shape := named.get("normalized_shape"), (tuple, list)):
        return math.prod(shape)
    return math.inf if read_again(node) else 0  # one kernel reduces a channel of all images


def _is_measured(node: Node, kind: OpClass) -> bool:
    """Whether the calibration has data on products like these: of convolutions, only on float32 forward."""
    if kind == "convolution":
        forward = "backward" not in short_name(node.op)
        return forward and compute_dtype(node) == torch.float32 and groups_of(node) == 1
    return kind in ("matmul", "batched matmul")


def gpus_of(values: Iterable[Value]) -> list[torch.device]:
    """The GPUs that ``values`` are on, in order."""
    return [value.device for value in values if value.device.type == "cuda"]


def _between_gpus(node: Node, gpu: Gpu) -> Kernel:
    """The time of a copy or sum between GPUs: over NVLink if present, otherwise over the PCIe bus."""
    moved = sum(value.nbytes for value in node.inputs if value not in node.outputs)
    rate = gpu.rates.link_gbps * 1e9 if gpu.rates.link_gbps else _host_link(gpu)
    return Kernel(float(CALIBRATED["kernel_seconds"]) + moved / rate, "memory", False)


def _host_link(gpu: Gpu) -> float:
    """Bytes per second of copies between pageable host memory and a GPU: half of the bandwidth of its bus."""
    newest = gpu.capability is not None and gpu.capability >= (9, 0)
    return {16: 6e9, 12: 6e9}.get(gpu.rates.process, 25e9 if newest else 12e9)


def _computing(node: Node, kind: OpClass, gpu: Gpu, unit: Unit, flops: int) -> float:
    attainable = gpu.rates.peak(unit) * gpu.rates.fraction(unit)
    if kind == "attention":
        hopper = gpu.capability is not None and (9, 0) <= gpu.capability < (12, 0)
        shares = _ATTENTION_ON_HOPPER if hopper else _ATTENTION
        return flops / (attainable * shares["backward" if "backward" in short_name(node.op) else "forward"])
    products = products_of(node, kind)
    if not products:
        return flops / (attainable * 0.5)
    width = least_width(gpu.capability) if kind == "batched matmul" and unit == "float32" else 0
    seconds = sum(product_seconds(each, gpu.rates, unit, width) for each in products)
    counted = sum(2 * each.batch * each.m * each.n * each.k for each in products)
    seconds *= flops / counted if counted else 1.0
    if kind == "convolution" and unit == "float32" and _winograd(node):
        seconds /= WINOGRAD
    if kind == "convolution" and groups_of(node) > 1:
        seconds = min(seconds, flops / (gpu.rates.peak("float32") * _DIRECT))
    return seconds


def least_width(capability: tuple[int, int] | None) -> int:
    """The width of the narrowest tiles that the library has for batched products in float32."""
    if capability is None:
        return 0
    return int(CALIBRATED["tiles"]["batched float32"].get("{}.{}".format(*capability), 0))


@cache
def product_seconds(product: Product, rates: Rates, unit: Unit, narrowest: int = 0) -> float:
    """The minimum time of the waves of tiles, over tile shapes and splits of the inner dimension."""
    table = CALIBRATED["tiles"]["float32" if unit == "float32" else "tensor"]
    each = rates.peak(unit) * rates.fraction(unit, product.kernel) / rates.sms
    if unit != "float32" and not product.aligned:
        unaligned = CALIBRATED["tiles"]["unaligned"]
        most = unaligned["teraflops"]["7 nm" if rates.process == 7 else "others"]
        each = min(each * unaligned["rate"], most * 1e12)
    # Latency in steps of the inner dimension.
    prologue = table["prologue"] + table["prologue_per_teraflops"] * each / 1e12
    count, m, n, k = product[:4]
    best = math.inf
    for height, width, rate in table["shapes"]:
        if width < narrowest:
            continue
        tiles = count * math.ceil(m / height) * math.ceil(n / width)
        for split in _SPLITS_OF_CONVOLUTIONS if product.kernel == "convolution" else _SPLITS:
            if split > 1 and k / split < 256:
                break
            waves = math.ceil(tiles * split / rates.sms)
            depth = math.ceil(k / split) + prologue
            seconds = waves * 2 * height * width * depth / (each * rate)
            if split > 1:  # partial sums are written and added up
                seconds += 8 * split * count * m * n / (rates.gbps * 1e9)
            best = min(best, seconds)
    return best


def products_of(node: Node, kind: OpClass) -> list[Product]:
    """The matrix products that an op computes, as far as its operands determine them."""
    if kind in ("matmul", "batched matmul"):
        operands = [value for value in node.inputs if len(value.shape) in (2, 3)]
        if len(operands) < 2 or not node.outputs:
            return []
        first, second = operands[-2].shape, operands[-1].shape
        if short_name(node.op) == "_grouped_mm" and min(len(first), len(second)) == 2:
            return [_product_in_groups(first, second, node.outputs[0].shape)]
        count = first[0] if kind == "batched matmul" else 1
        rows = math.prod(first[:-1]) if kind == "matmul" else first[-2]
        columns = second[0] if short_name(node.op) == "linear" else second[-1]
        aligned = all(map(_is_aligned, (*operands[-2:], node.outputs[0])))
        kernel: ProductKernel = "batched" if kind == "batched matmul" else "single"
        return [Product(count, rows, columns, first[-1], kernel, aligned)]
    if kind == "convolution":
        return _convolutions(node)
    return []


def _is_aligned(value: Value) -> bool:
    """Whether each row (or column, if these are contiguous) begins at a multiple of 16 bytes."""
    steps = [step for size, step in zip(value.shape, value.meta.stride) if size > 1 and step != 1]
    return all(step * value.dtype.itemsize % 16 == 0 for step in steps)


def _product_in_groups(first: Sequence[int], second: Sequence[int], out: Sequence[int]) -> Product:
    """``_grouped_mm`` with groups of equal size; the sizes are data."""
    if len(second) == 3:
        return Product(second[0], math.ceil(first[0] / second[0]), second[-1], first[-1])
    if len(first) == 3:
        return Product(first[0], first[1], math.ceil(second[-1] / first[0]), first[-1])
    return Product(out[0], first[0], second[-1], math.ceil(first[-1] / out[0]))


def _convolutions(node: Node) -> list[Product]:
    """A convolution as matrix products: pixels x filters x taps; its two gradients are two of them."""
    kernel: ProductKernel = "convolution"
    backward = "backward" in short_name(node.op)
    out = node.inputs[0].shape if backward else node.outputs[0].shape
    weight = node.inputs[2 if backward else 1].shape
    pixels = out[0] * math.prod(out[2:])
    groups = groups_of(node)
    filters, taps = max(weight[0] // groups, 1), math.prod(weight[1:])
    if not backward:
        return [Product(groups, pixels, filters, taps, kernel)]
    given = [value.index for value in node.outputs]
    found = [Product(groups, pixels, taps, filters, kernel)] if 0 in given else []
    return found + ([Product(groups, filters, taps, pixels, kernel)] if 1 in given else [])


def _is_depthwise(node: Node) -> bool:
    """Whether each filter has one input channel, of several."""
    if groups_of(node) == 1:
        return False
    named = arguments_of(node)
    weight = named["weight"].shape
    channels = weight[0] // groups_of(node) if named.get("transposed") else weight[1]
    return int(channels) == 1


def _winograd(node: Node) -> bool:
    named = arguments_of(node)
    return (
        tuple(named["weight"].shape[2:]) == (3, 3)
        and groups_of(node) == 1
        and not any(each != 1 for name in ("stride", "dilation") for each in named.get(name, ()))
    )
