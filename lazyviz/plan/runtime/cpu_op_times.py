"""Projected time of ops on this machine's CPU, from a calibration in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import chain, pairwise
from pathlib import Path

import torch

from ...graph.ir import Bound, Node, Value
from .bytes_and_launches import Work, operator_class, read_again, work_of
from .flop_count import arguments_of, steps_of
from .gpu_timeline import OpTime, Projection, is_enough
from .op_classes import OpClass, short_name
from .reuse_distances import Access, accesses

FORMAT = 3
Curve = tuple[tuple[float, float], ...]
"""Pairs of an amount (FLOPs or bytes) and the rate of an op of that amount, sorted by amount."""
POINTWISE = "pointwise convolution"
NEAR = 512 * 1024
"""A reuse distance at which operands are in the nearest large cache (L2)."""
ALWAYS_NEW = 32 * 1024**2
"""Bytes from which glibc's ``malloc`` always takes new memory (``DEFAULT_MMAP_THRESHOLD_MAX``)."""
_FUNCTIONS = frozenset(
    {
        "exp", "exp_", "tanh", "tanh_", "sigmoid", "sigmoid_", "gelu", "gelu_backward", "silu",
        "silu_backward", "erf", "log", "sin", "cos", "pow", "softplus", "mish", "elu", "logaddexp",
    }
)  # fmt: skip
"""Elementwise operators that evaluate a polynomial, which takes longer than their memory traffic."""


@dataclass(frozen=True)
class CpuRates:
    """Measured rates of this machine's CPU for a few ops, in FLOPs or bytes per second.

    ``call``: seconds of an op on a single number, called again and again. ``issue``: seconds from one small
    op to the next in a training step, where modules, autograd, or optimizers make the calls. ``operators``:
    seconds of some operators on small tensors, by name.

    The rates of products are by FLOPs. The others are by reuse distance, the bytes that are touched between
    two accesses to the same memory: ``kernels`` has those of some operators, the rest are of classes.
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
        operators = {str(name): float(seconds) for name, seconds in found.pop("operators").items()}
        kernels, fault = (
            {name: _curve(curve) for name, curve in found.pop("kernels").items()},
            float(found.pop("fault")),
        )
        curves = {name: _curve(curve) for name, curve in found.items()}
        rates = CpuRates(call, issue, operators, **curves, kernels=kernels, fault=fault)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    numbers = (call, issue, *operators.values())
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
    known = zip(nodes, accesses(nodes))
    ops = [_timed(node, found, rates) for node, found in known if operator_class(node) != "iterative"]
    if not is_enough(ops, unknown):
        return None
    busy = sum(each.seconds for each in ops)
    covered = sum(each.seconds for each in ops if operator_class(each.node) not in _ROUGH)
    return Projection("cpu", busy, ops, "calibrated", covered / busy if busy else 1.0, unknown)


_ROUGH: tuple[OpClass, ...] = ("other", "attention", "rnn", "indexing", "random", "collective", "reduction")


def _timed(node: Node, found: Sequence[Access], rates: CpuRates) -> OpTime:
    kind, work = operator_class(node), work_of(node)
    waiting = max(rates.issue - rates.call, 0.0)
    if kind in ("view", "allocation"):
        return OpTime(node, (rates.call + waiting) / 2, waiting / 2, "launch", work)
    computing = _computing(node, kind, work, rates)
    moving = _moving(node, kind, work, found, rates)
    call = rates.operators.get(short_name(node.op), rates.call)
    busy = call + computing + moving
    bound: Bound = "launch" if call + waiting > computing + moving else "memory"
    if bound == "memory" and work.flops:
        bound = "compute"
    return OpTime(node, busy + waiting, waiting, bound, work)


def _computing(node: Node, kind: OpClass, work: Work, rates: CpuRates) -> float:
    if not work.executed:
        return 0.0
    steps = steps_of(node) if kind == "rnn" else 1  # the products of consecutive steps run in sequence
    curve = rates.convolution if kind == "convolution" else rates.matmul
    return work.executed / rate_at(curve, work.executed / steps)


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
        moving += _reordered(node) * _reordering(node, rates)
    elif name in ("addmm", "baddbmm", "addmv"):  # these first copy their first argument to the result
        made = [each for each in found if each.written]
        moving += sum(each.nbytes for each in made) * near
    return new + moving


def _seconds_per_byte(curve: Curve, found: Sequence[Access]) -> float:
    """Average over the operands."""
    total = sum(each.nbytes for each in found)
    if not total:
        return 1 / curve[0][1]
    return sum(each.nbytes / rate_at(curve, each.distance) for each in found) / total


def _reordered(node: Node) -> int:
    """Bytes of images that oneDNN converts to or from its own layout; a backward pass is two convolutions."""
    images = [value for value in (*node.inputs, *node.outputs) if len(value.meta.shape) > 2]
    if len(images) < 2:
        return 0
    if "backward" not in short_name(node.op):
        source, result = images[0], images[-1]
        return source.nbytes + result.nbytes
    gradient, source = images[:2]
    passes = sum(1 for value in node.outputs if len(value.meta.shape) > 2)
    return passes * (gradient.nbytes + source.nbytes)


def _reordering(node: Node, rates: CpuRates) -> float:
    """Seconds per reordered byte."""
    weight = arguments_of(node).get("weight")
    pointwise = isinstance(weight, Value) and math.prod(weight.meta.shape[2:]) == 1
    curve = rates.kernels.get(POINTWISE if pointwise else "convolution")
    return 1 / curve[0][1] if curve else 0.0


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
    if kind == "copy" and any(not value.meta.dense or _is_transposed(value.stride) for value in node.inputs):
        return rates.copy
    return rates.function if name in _FUNCTIONS else rates.elementwise


def _is_transposed(stride: Sequence[int]) -> bool:
    return list(stride) != sorted(stride, reverse=True)
