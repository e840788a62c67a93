"""Projected time of ops on this machine's CPU, from a calibration in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import chain, pairwise
from pathlib import Path

import torch

from ...graph.ir import Bound, Node, Value
from . import cpu_convolutions
from .bytes_and_launches import Work, operator_class, read_again, work_of
from .cpu_counted_kernels import counted
from .flop_count import arguments_of, steps_of
from .gpu_timeline import OpTime, Projection, is_enough
from .op_classes import OpClass, short_name
from .reuse_distances import Access, accesses

FORMAT = 4
Curve = tuple[tuple[float, float], ...]
"""Pairs of an amount (FLOPs or bytes) and the rate of an op of that amount, sorted by amount."""
POINTWISE, DEPTHWISE = "pointwise convolution", "depthwise convolution"
NEAR = 512 * 1024
"""A reuse distance at which operands are in the nearest large cache (L2)."""
ALWAYS_NEW = 32 * 1024**2
"""Bytes from which glibc's ``malloc`` always takes new memory (``DEFAULT_MMAP_THRESHOLD_MAX``)."""
THIN, OUTER, WEIGHTS = "thin product", "outer product", "weights of convolutions"
"""Names of rates in bytes: of operands that a product with few rows uses only a few times, of results of
products over few terms, and of weights that oneDNN converts to its own layout."""
BATCHED, ATTENTION, ATTENTION_BACKWARD = "batched product", "attention", "attention backward"
"""Names of rates in FLOPs, by the FLOPs of one matrix, or one head."""
OF_WIDE_DEPTHWISE = "weight gradient of wide depthwise convolution"
"""Name of a rate in FLOPs: for kernels that are wider than three pixels, oneDNN has no fast one."""
FEW_TERMS = 16
"""Products over fewer terms wait for each result: measured with MKL on an AMD EPYC with AVX-512."""
_FUNCTIONS = frozenset({"tanh", "tanh_", "sinh", "cosh", "asinh", "acosh", "atanh", "lgamma", "digamma"})
"""Elementwise operators that evaluate long polynomials, like the hyperbolic tangent, and are not timed
themselves."""


@dataclass(frozen=True)
class CpuRates:
    """Measured rates of this machine's CPU for a few ops, in FLOPs or bytes per second.

    ``call``: seconds of an op on a single number, called again and again. ``issue``: seconds from one small
    op to the next in a training step, where modules, autograd, or optimizers make the calls. ``operators``:
    seconds of some operators on small tensors, by name, called one after another, so that caches have lost
    the code of each; ``repeated``: the same, called again and again.

    The rates of products are by FLOPs, those of convolutions by the terms of each sum. The others are by
    reuse distance, the bytes that are touched between two accesses to the same memory: ``kernels`` has those
    of some operators, the rest are of classes.
    ``elements``: seconds per element of kernels that :mod:`.cpu_counted_kernels` counts elements of.
    ``fault``: seconds per byte until the operating system has provided new memory.
    """

    call: float
    issue: float
    operators: Mapping[str, float]
    matmul: Curve
    convolution: Curve
    elementwise: Curve
    function: Curve
    copy: Curve
    softmax: Curve
    norm: Curve
    kernels: Mapping[str, Curve] = field(default_factory=dict)
    elements: Mapping[str, float] = field(default_factory=dict)
    repeated: Mapping[str, float] = field(default_factory=dict)
    fault: float = 0.0

    def text(self) -> str:
        return json.dumps({"format": FORMAT} | asdict(self), indent=1)


def rates_from(text: str) -> CpuRates | None:
    """Parse the output of :meth:`CpuRates.text`; ``None`` for any other text, and for impossible rates."""
    try:
        found = json.loads(text)
        if found.pop("format") != FORMAT:
            return None
        call, issue = float(found.pop("call")), float(found.pop("issue"))
        operators, elements, repeated = (
            {str(name): float(seconds) for name, seconds in found.pop(which).items()}
            for which in ("operators", "elements", "repeated")
        )
        kernels, fault = (
            {name: _curve(curve) for name, curve in found.pop("kernels").items()},
            float(found.pop("fault")),
        )
        curves = {name: _curve(curve) for name, curve in found.items()}
        rates = CpuRates(
            call,
            issue,
            operators,
            **curves,
            kernels=kernels,
            elements=elements,
            repeated=repeated,
            fault=fault,
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    numbers = (call, issue, *operators.values(), *elements.values(), *repeated.values())
    if not all(map(_is_positive, numbers)) or not 0 <= fault < math.inf:
        return None
    return rates if all(map(_is_curve, chain(curves.values(), kernels.values()))) else None


def _curve(points: Iterable[tuple[float, float]]) -> Curve:
    return tuple((float(amount), float(rate)) for amount, rate in points)


def _is_positive(number: float) -> bool:
    return 0 < number < math.inf


def _is_curve(curve: Curve) -> bool:
    """Whether rates can be interpolated: they and the amounts are positive, and the amounts increase."""
    amounts = [amount for amount, _ in curve]
    return (
        bool(curve)
        and all(map(_is_positive, chain.from_iterable(curve)))
        and all(map(operator.lt, amounts, amounts[1:]))
    )


def rate_at(curve: Curve, amount: float) -> float:
    """The rate of an op of ``amount``, interpolated logarithmically between the measured ones."""
    if amount <= curve[0][0]:
        return curve[0][1]
    for (low, slow), (high, fast) in pairwise(curve):
        if amount <= high:
            part = math.log(amount / low) / math.log(high / low)
            return slow * (fast / slow) ** part
    return curve[-1][1]


def cache_file() -> Path:
    """The path of this machine's calibration; depends on the processor, threads, and PyTorch version."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    what = f"{platform.node()} {_processor()} {torch.get_num_threads()} {torch.__version__}"
    return Path(home) / "lazyviz" / f"cpu-{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"


@cache
def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


_read: dict[Path, tuple[int, CpuRates | None]] = {}


def known_rates() -> CpuRates | None:
    """The calibration of this machine, if there is one; read again if the file has changed."""
    file = cache_file()
    try:
        changed = file.stat().st_mtime_ns
        if file not in _read or _read[file][0] != changed:
            _read[file] = changed, rates_from(file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return _read[file][1]


def without_time_on_cpu(nodes: Sequence[Node]) -> list[Node]:
    """Those of ``nodes`` whose time depends on their data."""
    return [node for node in nodes if operator_class(node) == "iterative"]


def project_on_cpu(nodes: Sequence[Node], rates: CpuRates) -> Projection | None:
    """The time of ``nodes`` on the CPU, in sequence; ``None`` if most of their work is unknown."""
    unknown = without_time_on_cpu(nodes)
    ops = [
        _timed(node, found, rates, _coldness(distance))
        for node, found, distance in zip(nodes, accesses(nodes), _since_called(nodes))
        if operator_class(node) != "iterative"
    ]
    if not is_enough(ops, unknown):
        return None
    busy = sum(each.seconds for each in ops)
    covered = sum(each.seconds for each in ops if _is_timed(each.node, rates))
    return Projection("cpu", busy, ops, "calibrated", covered / busy if busy else 1.0, unknown)


_ROUGH: tuple[OpClass, ...] = ("other", "attention", "rnn", "indexing", "random", "collective", "reduction")


def _is_timed(node: Node, rates: CpuRates) -> bool:
    """Whether the calibration has timed kernels like those of the op."""
    if operator_class(node) not in _ROUGH or _attention_kernel(node) in rates.kernels:
        return True
    counts = counted(node)
    return bool(counts) and all(name in rates.elements for name, _ in counts)


WARM, COLD = 64 * 1024, 2 * 1024**2
"""Bytes that are touched between two calls of an operator: up to these, the nearest large cache keeps its
code, and from these on it has lost it. Such caches have 0.25 to 2 MiB."""


def _since_called(nodes: Sequence[Node]) -> Iterator[int]:
    """For each op, the bytes touched since the last call of its operator, in a loop that runs ``nodes``."""
    sizes = [work_of(node).bytes_moved for node in nodes]
    touched, last = 0, dict.fromkeys((node.op for node in nodes), -sum(sizes))
    for node, size in zip(nodes, sizes):
        yield touched - last[node.op]
        touched += size
        last[node.op] = touched


def _coldness(distance: int) -> float:
    """From 0 to 1, how much of an op's code the caches have lost when it is called again."""
    if distance <= WARM:
        return 0.0
    return min(math.log(distance / WARM) / math.log(COLD / WARM), 1.0)


def _call(name: str, rates: CpuRates, cold: float) -> float:
    """Seconds of the overhead of a call."""
    slow = rates.operators.get(name) or rates.operators.get("add", rates.call)
    fast = rates.repeated.get(name, slow if name in rates.operators else rates.call)
    return slow if fast >= slow else fast + cold * (slow - fast)


def _timed(node: Node, found: Sequence[Access], rates: CpuRates, cold: float) -> OpTime:
    kind, work = operator_class(node), work_of(node)
    waiting = max(rates.issue - rates.call, 0.0)
    if kind in ("view", "allocation"):
        return OpTime(node, (_call("add", rates, cold) + waiting) / 2, waiting / 2, "launch", work)
    computing = _computing(node, kind, work, rates)
    moving = _moving(node, kind, work, found, rates)
    one_by_one = sum(rates.elements.get(name, 0.0) * count for name, count in counted(node))
    call = _call(short_name(node.op), rates, cold)
    # Rows that are looked up one by one are not found in the cache by prefetching.
    rest = moving + one_by_one if kind == "indexing" else max(moving, one_by_one)
    busy = call + computing + rest
    bound: Bound = "launch" if call + waiting > busy - call else "memory"
    if bound == "memory" and (work.flops or one_by_one > moving):
        bound = "compute"
    return OpTime(node, busy + waiting, waiting, bound, work)


def _computing(node: Node, kind: OpClass, work: Work, rates: CpuRates) -> float:
    if not work.executed:
        return 0.0
    if kind == "convolution":
        return _convolving(node, work, rates)
    if kind == "rnn" and "mkldnn" in short_name(node.op):
        return work.executed / rates.convolution[-1][1] + _recurring(node, rates)
    if kind == "batched matmul" and BATCHED in rates.kernels:
        matrix = work.executed / max(math.prod(node.outputs[0].shape[:-2]), 1) if node.outputs else 0
        return work.executed / rate_at(rates.kernels[BATCHED], matrix)
    if (curve := rates.kernels.get(_attention_kernel(node))) is not None:
        query = next(value.shape for value in node.inputs if len(value.shape) > 2)
        return work.executed / rate_at(curve, work.executed / max(math.prod(query[:-2]), 1))
    steps = steps_of(node) if kind == "rnn" else 1  # the products of consecutive steps run in sequence
    return work.executed / rate_at(rates.matmul, work.executed / steps)


def _attention_kernel(node: Node) -> str:
    name = short_name(node.op)
    if "flash_attention_for_cpu" not in name:
        return ""
    return ATTENTION_BACKWARD if name.endswith("_backward") else ATTENTION


def _recurring(node: Node, rates: CpuRates) -> float:
    """Seconds in which the weights of the hidden state are read again in each step of a recurrent layer."""
    if THIN not in rates.kernels:
        return 0.0
    weights = max((value.nbytes for value in node.inputs if _is_recurrent(value)), default=0)
    return steps_of(node) * weights / rates.kernels[THIN][0][1]


def _is_recurrent(value: Value) -> bool:
    """Whether it has the shape of weights of a hidden state: of one, three, or four gates."""
    shape = value.meta.shape
    return len(shape) == 2 and shape[0] in (shape[1], 3 * shape[1], 4 * shape[1])


def _convolving(node: Node, work: Work, rates: CpuRates) -> float:
    if cpu_convolutions.in_onednn(node):
        if DEPTHWISE in rates.kernels and cpu_convolutions.is_depthwise(node):
            return _of_depthwise(node, work, rates)
        flops = work.executed * cpu_convolutions.padding(node)
        return flops / rate_at(rates.convolution, cpu_convolutions.terms(node))
    passes = cpu_convolutions.directions(node)
    curves = [rates.kernels.get(each, rates.matmul) for each in passes]
    count = cpu_convolutions.pixels(node)
    return sum(work.executed / len(passes) / rate_at(curve, count) for curve in curves)


def _of_depthwise(node: Node, work: Work, rates: CpuRates) -> float:
    """Seconds of computing; most depthwise convolutions wait for memory."""
    passes = cpu_convolutions.directions(node)
    curve = rates.kernels.get(OF_WIDE_DEPTHWISE)
    if curve is None or cpu_convolutions.OF_WEIGHT not in passes or cpu_convolutions.width(node) <= 3:
        return 0.0
    return work.executed / len(passes) / curve[0][1]


def _moving(node: Node, kind: OpClass, work: Work, found: Sequence[Access], rates: CpuRates) -> float:
    """Seconds of memory traffic. The rates of products include that of operands in the nearest cache."""
    new = sum(each.nbytes for each in found if each.written and each.nbytes >= ALWAYS_NEW) * rates.fault
    name = short_name(node.op)
    if not work.flops:
        moved = work.bytes_moved
        if kind == "norm" and name not in rates.kernels:
            moved += read_again(node)
        return new + moved * _seconds_per_byte(_traffic(node, kind, rates), found)
    near = 1 / rate_at(rates.elementwise, NEAR)
    moving = sum(
        each.nbytes * max(1 / rate_at(rates.elementwise, each.distance) - near, 0.0) for each in found
    )
    if kind == "convolution":
        if cpu_convolutions.in_onednn(node):
            moving += _reordering(node, rates)
    elif kind == "matmul":
        moving += _of_thin_product(node, work, found, rates)
    if name in ("addmm", "baddbmm", "addmv"):  # these first copy their first argument to the result
        made = [each for each in found if each.written]
        moving += sum(each.nbytes for each in made) * near
    return new + moving


def _of_thin_product(node: Node, work: Work, found: Sequence[Access], rates: CpuRates) -> float:
    """Seconds that a product takes longer than a cube of as many FLOPs, whose rate is known.

    Its operands are larger, so each of their bytes is used less often.
    """
    more = max(sum(each.nbytes for each in found) - bytes_of_cube(work.flops), 0.0)
    seconds = more / rates.kernels[THIN][0][1] if THIN in rates.kernels else 0.0
    matrices = [value.shape for value in node.inputs if len(value.shape) > 1][-2:]
    if OUTER in rates.kernels and matrices and 1 < matrices[0][-1] < FEW_TERMS:
        made = sum(each.nbytes for each in found if each.written)
        seconds += made / rates.kernels[OUTER][0][1]
    return seconds


def bytes_of_cube(flops: float) -> float:
    """Bytes of the operands and the result of a product of square matrices in float32 with ``flops``."""
    return 3 * 4 * (flops / 2) ** (2 / 3)


def _seconds_per_byte(curve: Curve, found: Sequence[Access]) -> float:
    """Average over the operands."""
    total = sum(each.nbytes for each in found)
    if not total:
        return 1 / curve[0][1]
    return sum(each.nbytes / rate_at(curve, each.distance) for each in found) / total


def _reordering(node: Node, rates: CpuRates) -> float:
    """Seconds in which oneDNN converts images and weights."""
    name = "convolution"
    if cpu_convolutions.is_depthwise(node) and DEPTHWISE in rates.kernels:
        name = DEPTHWISE
    elif cpu_convolutions.is_pointwise(node):
        name = POINTWISE
    images = rates.kernels.get(name)
    seconds = cpu_convolutions.reordered_images(node) / images[0][1] if images else 0.0
    if weights := rates.kernels.get(WEIGHTS):
        seconds += cpu_convolutions.reordered_weights(node) / weights[0][1]
    return seconds


def _traffic(node: Node, kind: OpClass, rates: CpuRates) -> Curve:
    name = short_name(node.op)
    if kind == "norm" and not arguments_of(node).get("training", True):
        return rates.elementwise  # in evaluation mode: one scale and one shift per channel
    if name in rates.kernels:
        return rates.kernels[name]
    if kind == "softmax":
        return rates.softmax
    if kind == "norm":
        return rates.norm
    if kind == "copy" and any(map(_scatters_elements, node.inputs)):
        return rates.copy
    return rates.function if name in _FUNCTIONS else rates.elementwise


def _scatters_elements(value: Value) -> bool:
    """Whether copying a tensor to contiguous memory reads its rows in pieces smaller than a cache line."""
    meta = value.meta
    if meta.dense and list(meta.stride) == sorted(meta.stride, reverse=True):
        return False
    innermost, steps = zip(*[each for each in zip(meta.shape, meta.stride) if each[0] > 1][-1:] or [(1, 1)])
    return steps not in ((0,), (1,)) or innermost[0] * meta.dtype.itemsize < _CACHE_LINE


_CACHE_LINE = 64
