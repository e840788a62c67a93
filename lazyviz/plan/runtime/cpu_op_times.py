"""Projected time of ops on this machine's CPU, from a calibration in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain, pairwise
from pathlib import Path

import torch

from ...graph.ir import Bound, Node
from .flop_rules import steps_of
from .gpu_timeline import OpTime, Projection, is_enough
from .op_classes import OpClass, short_name
from .op_costs import operator_class, read_again, work_of

FORMAT = 2
Curve = tuple[tuple[float, float], ...]
"""Pairs of an amount (FLOPs or bytes) and the rate of an op of that amount, sorted by amount."""
_FUNCTIONS = frozenset(
    {
        "exp", "exp_", "tanh", "tanh_", "sigmoid", "sigmoid_", "gelu", "gelu_backward", "silu",
        "silu_backward", "erf", "log", "sin", "cos", "pow", "softplus", "mish", "elu", "logaddexp",
    }
)  # fmt: skip
"""Elementwise operators that evaluate a polynomial, which takes longer than their memory traffic."""


@dataclass(frozen=True)
class CpuRates:
    """Measured rates of this machine's CPU for a few ops of several sizes, in FLOPs or bytes per second.

    ``call``: seconds of an op on a single number, called again and again. ``issue``: seconds from one small
    op to the next in a training step, where modules, autograd, or optimizers make the calls. ``operators``:
    seconds of some operators on small tensors, by name.
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
        curves = {name: tuple((float(a), float(r)) for a, r in curve) for name, curve in found.items()}
        rates = CpuRates(call, issue, operators, **curves)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    numbers = (call, issue, *operators.values())
    return rates if all(map(_is_positive, numbers)) and all(map(_is_curve, curves.values())) else None


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
    ops = [_timed(node, rates) for node in nodes if operator_class(node) != "iterative"]
    if not is_enough(ops, unknown):
        return None
    busy = sum(each.seconds for each in ops)
    covered = sum(each.seconds for each in ops if operator_class(each.node) not in _ROUGH)
    return Projection("cpu", busy, ops, "calibrated", covered / busy if busy else 1.0, unknown)


_ROUGH: tuple[OpClass, ...] = ("other", "attention", "rnn", "indexing", "random", "collective", "reduction")


def _timed(node: Node, rates: CpuRates) -> OpTime:
    kind, work = operator_class(node), work_of(node)
    waiting = max(rates.issue - rates.call, 0.0)
    if kind in ("view", "allocation"):
        return OpTime(node, (rates.call + waiting) / 2, waiting / 2, "launch", work)
    moved = work.bytes_moved + (read_again(node) if kind == "norm" else 0)
    flops = work.executed
    steps = steps_of(node) if kind == "rnn" else 1  # the products of a step wait for those of the one before
    computing = flops / rate_at(_products(kind, rates), flops / steps) if flops else 0.0
    moving = moved / rate_at(_traffic(node, kind, rates), moved) if moved and not work.flops else 0.0
    call = rates.operators.get(short_name(node.op), rates.call)
    busy = call + computing + moving
    bound: Bound = "launch" if call + waiting > computing + moving else "memory"
    if bound == "memory" and work.flops:
        bound = "compute"
    return OpTime(node, busy + waiting, waiting, bound, work)


def _products(kind: OpClass, rates: CpuRates) -> Curve:
    return rates.convolution if kind == "convolution" else rates.matmul


def _traffic(node: Node, kind: OpClass, rates: CpuRates) -> Curve:
    if kind == "softmax":
        return rates.softmax
    if kind == "norm":
        return rates.norm
    if kind == "copy" and any(not value.meta.dense or _is_transposed(value.stride) for value in node.inputs):
        return rates.copy
    return rates.function if short_name(node.op) in _FUNCTIONS else rates.elementwise


def _is_transposed(stride: Sequence[int]) -> bool:
    return list(stride) != sorted(stride, reverse=True)
