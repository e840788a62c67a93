"""Time track of the memory chart: projected seconds at the positions of the timeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ...graph.ir import Bound
from ...plan.runtime.cpu_op_times import known_rates
from ...plan.runtime.gpu_timeline import RANGE, OpTime, Projection, duration
from ...plan.units import format_share
from .memory_chart import MOST_PHASES, spans, stretches
from .plan_protocol import PlanLike
from .scene import Scene

BOUNDS: tuple[Bound, ...] = ("compute", "memory", "launch")
ASKED = "track"  # key in the set of requested numbers

_HOW = {
    "measured": "for a GPU whose matmul rate was measured",
    "rule": "for a GPU estimated from its data sheet",
    "power-limited": "for a GPU limited by its power, which varies from GPU to GPU",
    "calibrated": "from the calibration of this CPU",
}


_NOTHING = {"text": "", "title": "", "seconds": [], "bounds": "", "phases": [], "sums": {}, "keys": []}


def why_unknown(plan: PlanLike) -> str:
    """Why nothing is projected for ``plan``, as a short text; "" if a time may be projected."""
    if plan.split.pieces > 1:
        return "time: of one piece only"
    if plan.time is not None:
        return ""
    calibrate = plan.device == "cpu" and known_rates() is None
    return "time: lazyviz.calibrate() first" if calibrate else f"time: unknown on {plan.device}"


def projected(scene: Scene) -> Projection | None:
    """The time of the displayed plan, if its positions are those of the projection."""
    return None if why_unknown(scene.plan) else scene.plan.time


def track_json(scene: Scene, start: int = 0, stop: int | None = None) -> dict[str, Any]:
    """The projected time of positions ``start`` to before ``stop`` as JSON: per point, per phase, and total.

    ``bounds`` has one letter per point: the initial of the bound that applies to most of its time.
    """
    plan = scene.plan
    time = projected(scene)
    if time is None:
        return {**_NOTHING, "words": why_unknown(plan)}
    stop = len(plan.timeline) if stop is None else stop
    known = {each.node.index: each for each in time.ops}
    waiting = _waiting([known.get(index) for index, _ in plan.timeline])
    phases = _phases(scene, time)
    seconds: list[float] = []
    bounds: list[str] = []
    for span in spans(start, stop):
        by: dict[Bound, float] = dict.fromkeys(BOUNDS, 0.0)
        for position in span:
            by["launch"] += waiting[position]
            each = known.get(plan.timeline[position][0])
            if each is not None:
                by[each.bound] += each.seconds - each.waiting
        seconds.append(sum(by.values()))
        bounds.append(max(BOUNDS, key=lambda bound: by[bound])[0])
    low, high = map(duration, time.seconds_range)
    return {
        "text": duration(time.seconds),
        "words": f"{duration(time.seconds)} projected, ±{format_share(time.margin)}",
        "title": f"Projected for {time.device}: {low} to {high}, {known_text(time)}",
        "seconds": [float(f"{each:.3g}") for each in seconds],
        "bounds": "".join(bounds),
        "phases": [duration(each) if each else "" for each in phases],
        "sums": _sums(scene, phases),
        "keys": [bound for bound, size in time.by_bound.items() if size > 0.005 * time.seconds],
    }


def _waiting(ops: Sequence[OpTime | None]) -> list[float]:
    """How long the device waits for Python at each position.

    While Python runs ops on the CPU, such as the initialization of a model that is moved to the GPU, the
    device waits at their positions. The projection charges this to the next kernel alone, whose bar would
    then dwarf all others.
    """
    found = [0.0] * len(ops)
    host: list[int] = []
    for position, each in enumerate(ops):
        if each is None:
            continue
        if not each.seconds:
            host += [position] if each.work.launches else []
            continue
        shared = (*host, position)
        for at in shared:
            found[at] += each.waiting / len(shared)
        host.clear()
    return found


def known_text(time: Projection) -> str:
    """The source of a time, and the share of it that is based on measurements."""
    text = f"{_HOW[time.known]} (±{format_share(RANGE[time.known])}); "
    text += f"{format_share(time.coverage)} of it in kernels with measurements"
    if time.unknown:
        count = len(time.unknown)
        text += f"; without {count:,} op{'' if count == 1 else 's'} of unknown duration"
    return text


def _sums(scene: Scene, seconds: Sequence[float]) -> dict[str, str]:
    """The total time of each phase, over all of its sections."""
    sums: dict[str, float] = defaultdict(float)
    for (phase, _), each in zip(stretches(scene), seconds):
        sums[phase] += each
    return {phase: duration(each) for phase, each in sums.items() if each}


def _phases(scene: Scene, time: Projection) -> list[float]:
    """The seconds of each section of a phase, in the order of the chart's axis."""
    found = stretches(scene)
    if len(found) > MOST_PHASES:
        return []
    known = {each.node.index: each.seconds for each in time.ops}
    ends = [first for _, first in found[1:]] + [len(scene.plan.timeline)]
    return [
        sum(known.get(index, 0.0) for index, _ in scene.plan.timeline[first:end])
        for (_, first), end in zip(found, ends, strict=True)
    ]
