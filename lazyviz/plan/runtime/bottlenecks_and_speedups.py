"""Bottlenecks of a step as text: the slowest lines, what bounds the time, and what would help."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from ...graph.ir import Node, Value
from ..devices.device_lookup import Device, DeviceProfile
from ..devices.known_gpus import PROFILES
from ..node_formatting import folded_modules, line_with_text
from ..units import format_bytes, format_flops, format_share
from .bytes_and_launches import operator_class, touched
from .gpu_kernel_times import Gpu
from .gpu_timeline import OpTime, Projection, duration, project
from .run_time_projection import gpu_of, without_time
from .time_at_lower_precision import in_dtype

LINES = 5
MOSTLY = 0.75  # above this share, a single line, such as a Trainer's, is not informative
WORTH = 0.03  # minimum share of the time that a listed change saves
FASTER_GPUS = ("H100-80GB", "A100-80GB", "RTX-4090")
_KNOWN = {
    "measured": "its matmul rate was measured",
    "rule": "its matmul rate is estimated from its data sheet",
    "calibrated": "from the calibration of this machine",
    "power-limited": "its power limit, which varies from GPU to GPU, determines its speed",
}
Target: TypeAlias = Device | DeviceProfile


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the program, described by ``text``, and the seconds of the step with it."""

    text: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.text}: {duration(self.seconds)}"


def not_given(nodes: Sequence[Node], target: Target) -> list[str]:
    """Why there is no projected time, as text, if ops of unknown duration are the reason."""
    names = sorted({node.name.rpartition("_")[0] for node in without_time(nodes, target)})
    if not names:
        return []
    return [
        f"Projected time on {target.name}: not given, because these ops of unknown duration may take most of "
        f"it: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}."
    ]


def limits(
    time: Projection, nodes: Sequence[Node] | None, target: Target, twice: Sequence[Node] | None = None
) -> list[str]:
    """A projection as text: seconds and their range, bounds, the slowest lines, and possible changes.

    ``nodes``: the projected ones; without them, changes are left out. ``twice``: these with twice the batch.
    """
    if not time.seconds:
        return [f"Projected time on {time.device}: no kernel runs."]
    low, high = time.seconds_range
    lines = [
        f"Projected time on {time.device}: {duration(time.seconds)} ({duration(low)} to {duration(high)}); "
        f"{_KNOWN[time.known]}, and measurements cover {format_share(time.coverage)} of the time.",
    ]
    if time.unknown:
        names = sorted({node.name.rpartition("_")[0] for node in time.unknown})
        ops = "op" if len(time.unknown) == 1 else "ops"
        lines.append(
            f"Not included: {len(time.unknown):,} {ops} of unknown duration: {', '.join(names[:5])}."
        )
    shares = [
        f"{name} {format_share(seconds / time.seconds)}"
        for name, seconds in sorted(time.by_bound.items(), key=lambda item: -item[1])
        if seconds >= 0.005 * time.seconds
    ]
    mfu = f", MFU {format_share(time.mfu)}" if time.mfu is not None else ""
    work = f"{format_flops(time.flops)}, {format_bytes(time.work.bytes_moved)} moved{mfu}"
    lines.append(f"What limits this step: {', '.join(shares)}; {work}.")
    if time.by_bound["launch"] > 0.5 * time.seconds:
        lines.append(
            "  The device waits for Python. Fewer, larger ops or more samples would take no extra time."
        )
    if time.exposed or time.hidden:
        lines.append(
            f"  Collectives take {duration(time.exposed + time.hidden)}, of which kernels wait for "
            f"{duration(time.exposed)}."
        )
    by_line = {line: seconds for line, (seconds, _) in time.by_line.items() if seconds}
    lines.append("Slowest lines, including their backward passes:")
    for line, seconds in list(by_line.items())[:LINES]:
        text = line_with_text(line) if line is not None else "(no line)"
        lines.append(_slow(seconds, time, text))
    if max(by_line.values(), default=0) > MOSTLY * time.seconds:
        modules = folded_modules({name: seconds for name, (seconds, _) in time.by_module.items() if name})
        slowest = sorted(modules.items(), key=lambda each: -each[1])[:LINES]
        if len(slowest) > 1:
            lines += ["Slowest modules:", *(_slow(seconds, time, name) for name, seconds in slowest)]
    if nodes is not None and (found := changes(time, nodes, target, twice)):
        lines += ["What would make it faster:", *(f"  {each}" for each in found)]
    return lines


def _slow(seconds: float, time: Projection, what: str) -> str:
    return f"  {duration(seconds):>8} {format_share(seconds / time.seconds):>6}  {what}"


def changes(
    time: Projection, nodes: Sequence[Node], target: Target, twice: Sequence[Node] | None = None
) -> list[Change]:
    """The effect of another precision, fused kernels, more samples, or another GPU, largest first."""
    gpu = gpu_of(target)
    if gpu is None or not time.seconds:
        return []
    found = [
        *_precision(nodes, gpu),
        *_attention(time, gpu),
        *_fused(time),
        *_batch(twice, gpu),
        *_gpus(nodes, gpu),
    ]
    worth = [each for each in found if each.seconds < (1 - WORTH) * time.seconds]
    return sorted(worth, key=lambda each: each.seconds)


def _precision(nodes: Sequence[Node], gpu: Gpu) -> Iterable[Change]:
    for dtype in (torch.bfloat16, torch.float16):
        if gpu.unit(dtype, "matmul") is not None:
            changed = project(in_dtype(nodes, dtype), gpu)
            if changed is not None:
                name = str(dtype).removeprefix("torch.")
                rest = "the rest of the " if _has_half(nodes) else ""
                yield Change(f"{rest}forward and backward pass in {name}", changed.seconds)
            break
    if gpu.rates.tf32 and not gpu.tf32_products:
        changed = project(nodes, replace(gpu, tf32_products=True))
        if changed is not None:
            yield Change('torch.set_float32_matmul_precision("high") (TF32)', changed.seconds)


def _has_half(nodes: Sequence[Node]) -> bool:
    """Whether a part of the forward and backward pass is in 16 bits already, as with autocast."""
    return any(
        value.dtype in (torch.bfloat16, torch.float16)
        for node in nodes
        if node.phase in ("forward", "backward")
        for value in node.outputs
    )


def _attention(time: Projection, gpu: Gpu) -> Iterable[Change]:
    """The ops on score matrices, replaced by one kernel that keeps the matrices on the chip."""
    softmaxes = {
        node.outputs[0].shape
        for each in time.ops
        if operator_class(node := each.node) == "softmax" and len(node.outputs[0].shape) == 4
    }
    scores = {(*shape[-2:], shape[0] * shape[1]) for shape in softmaxes}
    if not scores:
        return

    def is_score(value: Value) -> bool:
        shape = tuple(value.shape)
        return len(shape) in (3, 4) and (
            (*shape[-2:], shape[0] * (shape[1] if len(shape) == 4 else 1)) in scores
        )

    saved = 0.0
    for each in time.ops:
        node = each.node
        if node.outputs and is_score(node.outputs[0]) and operator_class(node) in _ON_SCORES:
            saved += each.seconds - each.waiting
    if saved:
        yield Change("attention with F.scaled_dot_product_attention, at best", time.seconds - saved)


_ON_SCORES = ("softmax", "elementwise", "copy", "random")


def _fused(time: Projection) -> Iterable[Change]:
    """Elementwise ops, each fused with the producer of its operand, which saves the memory traffic between
    them.
    """
    pointwise = {each.node for each in time.ops if operator_class(each.node) == "elementwise"}
    users: dict[int, int] = {}
    for each in time.ops:
        for value in each.node.inputs:
            users[value.id] = users.get(value.id, 0) + 1
    by_node: dict[Node, OpTime] = {each.node: each for each in time.ops}
    saved = 0.0
    for node in pointwise:
        moved = by_node[node].work.bytes_moved
        rate = by_node[node].seconds / moved if moved else 0.0
        for value in node.inputs:
            if value.node in pointwise and users[value.id] == 1:
                saved += 2 * touched(value.meta) * rate
    if saved:
        yield Change("elementwise ops fused by torch.compile, at best", max(time.seconds - saved, 0.0))


def _batch(twice: Sequence[Node] | None, gpu: Gpu) -> Iterable[Change]:
    changed = project(twice, gpu) if twice is not None else None
    if changed is not None:
        yield Change("twice the batch size, per half", changed.seconds / 2)


def _gpus(nodes: Sequence[Node], gpu: Gpu) -> Iterable[Change]:
    for name in FASTER_GPUS:
        other = gpu_of(PROFILES[name])
        if name != gpu.name and other is not None:
            changed = project(nodes, other)
            if changed is not None:
                yield Change(f"on {name}", changed.seconds)
