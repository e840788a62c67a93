"""Comparison of all known GPUs for one graph: whether it fits, time per step, throughput, price."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..devices.known_gpus import PROFILES, lookup
from ..plan import Plan
from ..result_tables import Table, Tabular
from .gpu_timeline import Projection, duration
from .last_training_step import last_step


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One GPU: its name, whether the graph fits, the projected time of a step, and the price per hour."""

    name: str
    fits: bool | None
    time: Projection | None
    price: float | None = None

    def cost(self, steps: float) -> float | None:
        """The cost of ``steps`` steps, in the currency of the price table."""
        if self.time is None or self.price is None:
            return None
        return self.time.seconds * steps / 3600 * self.price


@dataclass(frozen=True)
class GpuTable(Tabular):
    """A graph on several GPUs, the fastest that fit first. ``samples``: samples per step, if a batch is
    named; ``epoch``: samples per epoch, if the cost of an epoch is requested.
    """

    gpus: Sequence[GpuRow]
    samples: int | None = None
    epoch: int | None = None

    def __repr__(self) -> str:
        return f"<{len(self.gpus)} GPUs, {sum(each.fits is True for each in self.gpus)} fit>"

    _repr_pretty_ = Tabular._repr_pretty_  # IPython uses it in addition to `__repr__`

    def table(self) -> Table:
        """One row per GPU."""
        steps = self.epoch / self.samples if self.epoch and self.samples else 1000.0
        priced = any(each.price is not None for each in self.gpus)
        columns = ["step", "range"]
        columns += ["samples/s"] if self.samples else []
        columns += ["cost per epoch" if steps != 1000.0 else "cost of 1,000 steps"] if priced else []
        rows = []
        for each in self.gpus:
            row = ["", ""]
            time = each.time if each.time is not None and each.time.seconds else None
            if time is not None:
                low, high = time.seconds_range
                row = [duration(time.seconds), f"{duration(low)} to {duration(high)}"]
            elif each.time is not None:
                row = ["no kernel runs", ""]
            if self.samples:
                row.append(f"{self.samples / time.seconds:,.0f}" if time is not None else "")
            if priced:
                cost = each.cost(steps)
                row.append(amount(cost) if cost is not None else "")
            verdict = {True: "fits", False: "does not fit", None: "unknown"}[each.fits]
            rows.append([*row, each.name, verdict])
        return Table(
            "Projected time of the last step on each GPU", (*columns, "GPU", "memory"), rows, len(columns)
        )


def amount(cost: float) -> str:
    """A cost with two decimals, small ones with two digits: ``"1,234.50"``, ``"0.00031"``."""
    if not 0 < cost < 0.1:
        return f"{cost:,.2f}"
    return f"{cost:.{1 - math.floor(math.log10(cost))}f}"


def compare_gpus(
    plan: Plan,
    names: Sequence[str] | None = None,
    prices: Mapping[str, float] | None = None,
    epoch: int | None = None,
) -> GpuTable:
    """The last step of the plan's graph on the GPUs called ``names``, by default all known ones.

    ``prices`` are per hour, by GPU; ``epoch`` is the number of samples per epoch. Raises ``ValueError`` for
    an unknown GPU, and for ``epoch`` without a named batch.
    """
    if epoch is not None and plan.batch_size is None:
        raise ValueError(
            "the cost of an epoch needs a batch: name it when recording, for example batch=[x, y]"
        )
    by_name = {lookup(name).name: price for name, price in (prices or {}).items()}
    found, step = [], last_step(plan._nodes)
    for name in names if names is not None else PROFILES:
        there = plan.replan(batch_size=plan.batch_size, device=name)
        time = there.time_of(step)
        found.append(GpuRow(there.device, there.fits, time, by_name.get(there.device)))
    found.sort(key=lambda each: (each.fits is False, each.time.seconds if each.time is not None else 1e30))
    return GpuTable(found, plan.batch_size, epoch)


def read_prices(file: str | Path) -> dict[str, float]:
    """Prices per hour from a CSV file with a GPU and a number in each line; a header is skipped.

    Raises ``ValueError`` for an invalid line, and ``OSError`` if the file cannot be read.
    """
    prices: dict[str, float] = {}
    with Path(file).open(encoding="utf-8", newline="") as lines:
        for number, row in enumerate(csv.reader(lines), 1):
            cells = [cell.strip() for cell in row]
            if not any(cells) or cells[0].startswith("#"):
                continue
            price = _price(cells)
            if price is None and number == 1 and not _is_gpu(cells[0]):
                continue
            place = f"{file}, line {number}"
            if price is None:
                raise ValueError(f"{place}: expected {_LINE}")
            try:
                prices[lookup(cells[0]).name] = price
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
    if not prices:
        raise ValueError(f"{file} has no prices: expected lines with {_LINE}")
    return prices


_LINE = "a GPU and its price per hour, such as L4-24GB,0.71"


def _is_gpu(name: str) -> bool:
    try:
        return bool(lookup(name))
    except ValueError:
        return False


def _price(cells: Sequence[str]) -> float | None:
    """The number in the second cell; ``None`` if it is none, negative, or not finite."""
    try:
        price = float(cells[1])
    except (IndexError, ValueError):
        return None
    return price if 0 <= price < math.inf else None
