"""A GPU as one of which nothing was measured: its data sheet, and rules made from the other GPUs.

Left out are all measurements of the GPU and of others with the same chip (both A100, both V100).  The share
of a peak that products reach is the median of the other GPUs of its class, as in the rules of
``plan/devices/gpu_rates.py``; the shares of the bandwidth are the mean of those with the same kind of memory.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lazyviz import DeviceProfile
from lazyviz.plan.devices.gpu_rates import RATES, Rates, Unit
from lazyviz.plan.devices.known_gpus import lookup
from lazyviz.plan.runtime.gpu_kernel_times import CALIBRATED

UNITS: tuple[Unit, ...] = ("float32", "tf32", "half")


def _same_chip(name: str, other: str) -> bool:
    return name == other or (name[0] in "AV" and name.split("-")[0] == other.split("-")[0])


def _class(rates: Rates, unit: Unit) -> object:
    """What decides which rule holds for a unit of a GPU."""
    if unit == "float32":
        return rates.lanes, rates.lanes > 64 and rates.memory.startswith("HBM")
    return rates.half < 2.1 * rates.fp32


def _share(name: str, unit: Unit) -> float | None:
    """The median share of the peak of the other GPUs of the class; ``None`` if the rule is by watts."""
    rates = RATES[name]
    if rates.watts <= 75 or rates.known(unit) == "power-limited":
        return None
    others = [
        each.sustained[unit][0]
        for other, each in RATES.items()
        if unit in each.sustained and each.watts > 150 and not _same_chip(name, other)
        if _class(each, unit) == _class(rates, unit)
    ]
    return statistics.median(others) if others else None


def projected(graph: Any, name: str, nodes: Sequence[Any]) -> dict[str, Any] | None:
    """The projected seconds of ``nodes`` on a GPU of which nothing is measured, their range, and the rule."""
    with left_out(name):
        found = graph.plan(device=profile(name)).time_of(nodes)
    if found is None:
        return None
    return {"seconds": found.seconds, "range": found.seconds_range, "known": found.known}


def profile(name: str) -> DeviceProfile:
    """The profile of ``name`` without its measurements, with the shipped rule if the GPU is power-limited."""
    known, rates = lookup(name), RATES[name]
    unmeasured = dataclasses.replace(rates, sustained={})
    shares = {unit: share for unit in UNITS if (share := _share(name, unit)) is not None}
    # The shares are put into the data sheet's peaks relative to the rule's, so that they stay "by rule".
    factor = {unit: share / unmeasured.fraction(unit) for unit, share in shares.items()}
    return DeviceProfile(
        f"{name}, data sheet",
        known.total_bytes,
        known.source,
        known.context_bytes,
        known.compute_capability,
        dataclasses.replace(
            unmeasured,
            fp32=rates.fp32 * factor.get("float32", 1.0),
            tf32=rates.tf32 * factor.get("tf32", 1.0),
            half=rates.half * factor.get("half", 1.0),
        ),
    )


@contextmanager
def left_out(name: str) -> Iterator[None]:
    """Makes the shares of the bandwidth, which depend on the kind of memory, from the other GPUs."""
    memory: dict[str, Any] = CALIBRATED["memory"]
    kind = RATES[name].memory
    family = "HBM" if kind.startswith("HBM") else kind.rstrip("X")
    others = [
        shares
        for other, shares in CALIBRATED["gpus"].items()
        if not _same_chip(name, other) and RATES[other].memory.startswith(family)
    ]
    shipped = memory.get(family)
    if others:
        memory[family] = {
            "elementwise": statistics.mean(each["elementwise"] for each in others),
            **{
                key: [statistics.mean(column) for column in zip(*(each[key] for each in others))]
                for key in ("softmax", "norm")
            },
        }
    try:
        yield
    finally:
        if shipped is not None:
            memory[family] = shipped
        else:
            memory.pop(family, None)
