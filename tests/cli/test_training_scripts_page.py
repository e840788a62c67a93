"""The page of training scripts matches the measurements, and these are as expected."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from .process import ROOT, SCRIPTS

SCRIPT = ROOT / "benchmarks" / "training_scripts.py"
if not SCRIPT.exists():
    pytest.skip("the benchmarks are in a checkout only", allow_module_level=True)
spec = importlib.util.spec_from_file_location("training_scripts", SCRIPT)
assert spec is not None and spec.loader is not None
benchmark = importlib.util.module_from_spec(spec)
sys.modules["training_scripts"] = benchmark
spec.loader.exec_module(benchmark)
RESULTS = json.loads(benchmark.RESULT.read_text())


def test_the_page_is_that_of_the_results():
    assert benchmark.PAGE.read_text() == benchmark.page(RESULTS)


def test_every_script_was_run():
    scripts = {path.stem for path in SCRIPTS.glob("*.py")}
    assert set(RESULTS["scripts"]) == set(benchmark.SCRIPTS) == scripts


@pytest.mark.parametrize("name", benchmark.SCRIPTS)
def test_a_script_leaves_the_same_bits_and_takes_what_was_planned(name):
    row = RESULTS["scripts"][name]
    assert row["same"]
    close = 0.05 if name == "cnn_argparse" else 0.005
    assert row["planned_bytes"] == pytest.approx(row["measured_bytes"], rel=close)
