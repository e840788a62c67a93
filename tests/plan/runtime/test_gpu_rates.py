"""Rates of GPUs: measured fractions follow from the published measurements in ``benchmarks/data``."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from lazyviz.plan.devices.gpu_rates import RATES, TORCH_MM, Unit

REPORTS = Path(__file__).parents[3] / "benchmarks" / "data" / "matmul_rates.csv"
UNITS: dict[str, Unit] = {"float32": "float32", "tf32": "tf32", "float16": "half", "bfloat16": "half"}


def reported() -> dict[tuple[str, Unit], list[float]]:
    """TFLOP/s of each report, by GPU and unit."""
    found: dict[tuple[str, Unit], list[float]] = defaultdict(list)
    with REPORTS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found[row["card"], UNITS[row["dtype"]]].append(float(row["tflops"]))
    return found


def test_measured_fractions_are_medians_of_the_reports() -> None:
    reports = reported()
    checked = 0
    for name, rates in RATES.items():
        for unit, (fraction, source) in rates.sustained.items():
            if source != TORCH_MM:
                continue
            rows = reports[name, unit]  # type: ignore[index]
            good = [each for each in rows if each >= 0.75 * max(rows)]
            reached = statistics.median(good) * 1e12 / rates.peak(unit)  # type: ignore[arg-type]
            assert fraction == pytest.approx(reached, abs=6e-4), (name, unit)
            checked += 1
    assert checked > 40


def test_every_report_is_of_a_known_gpu() -> None:
    assert {name for name, _ in reported()} <= set(RATES)


def test_other_sources_agree_with_the_reports() -> None:
    """Both sources measured these: neither is off by more than a tenth, but for GPUs that power limits."""
    for (name, unit), rows in reported().items():
        rates = RATES[name]
        if unit in rates.sustained and rates.sustained[unit][1] != TORCH_MM and rates.watts > 75:
            reached = statistics.median(rows) * 1e12 / rates.peak(unit)
            assert rates.fraction(unit) == pytest.approx(reached, rel=0.1), (name, unit)


def test_gpus_that_nobody_measured_go_by_rule() -> None:
    assert RATES["RTX-4080"].known("half") == "rule"
    assert RATES["RTX-4080"].fraction("half") == 1.05  # GeForce: half-rate tensor cores
    assert RATES["A40-48GB"].fraction("half") == 0.8
    assert RATES["H100-NVL-94GB"].fraction("float32") == 0.78
    assert RATES["A10G-24GB"].fraction("float32") == 0.65
    assert RATES["GTX-1080-Ti"].fraction("float32") == 0.78
