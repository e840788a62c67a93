"""Benchmarks: alternatives are measured in turns, and unmet criteria are reported."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lazyviz

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"


def module(name):
    """A module of ``benchmarks/``, which is run as scripts are and is no package of the tests."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


figures, table, timing = module("speed.figures"), module("speed.results_table"), module("speed.timing")
programs = module("speed.measured_programs")


def results(*found):
    """Results as a run has them, with these figures in the part "totals-small"."""
    part = {
        "figures": [figure.to_json() for figure in found],
        "process": {"recorder": "compiled", "threads": 1},
        "machine": {"cpu": "a CPU", "cores": 2, "torch": torch.__version__},
        "settings": {"rounds": 9},
    }
    return {"totals-small": part}


@pytest.mark.parametrize(
    ("criterion", "value", "met"),
    [("<= 1.05", 1.05, True), ("<= 1.05", 1.06, False), (">= 25", 24, False), ("< 1", 1.0, False)],
)
def test_a_criterion_is_judged_by_its_own_sign(criterion, value, met):
    assert figures.Figure("a", "b", value, criterion).met is met


def test_a_figure_without_value_or_criterion_is_neither_met_nor_missed():
    assert figures.Figure("a", "b", None, "<= 1", note="not installed").met is None
    assert figures.Figure("a", "b", 3.0).met is None


def test_a_figure_survives_its_json():
    figure = figures.Figure("a", "b", 1.5, "<= 2", note="n", detail={"ops": 3})
    assert figures.Figure.from_json(json.loads(json.dumps(figure.to_json()))) == figure


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0003, "1.0003"), (1.0, "1.00"), (1.37, "1.37"), (0.0512, "0.051"), (1234.5, "1,234")],
)
def test_a_number_that_just_misses_does_not_look_as_if_it_did_not(value, text):
    assert figures.number(value) == text


def test_turns_alternate_and_each_round_begins_with_another():
    order = []

    def turn(name):
        def take():
            order.append(name)
            return {name: 1.0}

        return take

    times = timing.interleaved([turn("a"), turn("b")], 2, warm_up=False)
    assert order == ["a", "b", "b", "a"]
    assert times == {"a": [1.0, 1.0], "b": [1.0, 1.0]}


def test_a_ratio_is_of_times_of_the_same_round():
    # The machine was three times slower in the second round, for both.
    assert timing.ratio({"a": [2.0, 6.0, 2.0], "b": [1.0, 3.0, 1.0]}, "a", "b") == 2.0


def test_a_lazy_turn_times_recording_and_running():
    x = torch.ones(3)
    ours = timing.lazily(lambda: (x + 1) * 2)
    times = ours.turn()
    assert ours.ops == 2
    assert times["lazyviz record"] + times["lazyviz run"] == pytest.approx(times["lazyviz total"])


@pytest.mark.parametrize("name", ["mlp", "lstm", "transformer"])
def test_a_program_is_the_same_step_recorded_and_eager(name):
    torch.manual_seed(0)
    program = getattr(programs, name)()
    eager, recorded = program.on("cpu"), program.on("cpu")
    torch.manual_seed(1)
    eager.training_step()()
    torch.manual_seed(1)
    with lazyviz.lazy() as graph:
        recorded.training_step()()
    graph.evaluate()
    for one, other in zip(eager.model.parameters(), recorded.model.parameters()):
        assert torch.equal(one, other)


def test_the_table_shows_what_is_not_met_in_bold_and_what_is_missing_as_such():
    name = "lazy total / eager"
    text = table.table(
        results(
            figures.Figure(name, "small", 2.5, "<= 2.0"),
            figures.Figure(name, "large", 1.01, "<= 1.05"),
            figures.Figure("LTC total / eager", "small", None, note="no LTC"),
        )
    )
    assert "small: **2.50** | ≤ 2.0 |" in text
    assert "large: 1.01 | ≤ 1.05 |" in text
    assert "small: —" in text


def test_a_part_that_runs_out_of_time_is_reported_and_is_not_a_success(tmp_path):
    target = tmp_path / "speed.json"
    command = [sys.executable, BENCHMARKS / "run.py", "chain", "--quick", "--limit", "0.2", "--json", target]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "stopped after its limit" in done.stdout
    part = json.loads(target.read_text())["parts"]["chain"]
    assert part["figures"] == []
    assert part["failed"].startswith("stopped after its limit")


def test_an_unknown_part_is_one_clear_line(tmp_path):
    command = [sys.executable, BENCHMARKS / "run.py", "chian", "--json", tmp_path / "speed.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no part is called chian" in done.stderr


def test_the_table_of_performance_is_what_the_results_give():
    run = module("run")
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert text == table.put(text, run.read(run.RESULT)), "python benchmarks/write_performance_table.py"


def test_every_criterion_of_the_results_is_in_the_table_of_performance():
    run = module("run")
    parts = run.read(run.RESULT)
    shown = {figure.name for row in table.ROWS for figure in table.found(parts, row)}
    every = [figures.Figure.from_json(data) for part in parts.values() for data in part["figures"]]
    assert {figure.name for figure in every if figure.criterion} <= shown


def test_the_worst_of_many_cases_stands_for_all_of_them():
    name = "peak while evaluating with eager / eager's + held"
    cases = [("a", 0.9), ("b", 1.2), ("the worst of 2 models: b", 1.2)]
    parts = {
        "memory": results(*(figures.Figure(name, case, value, "<= 1") for case, value in cases))[
            "totals-small"
        ]
    }
    assert "| the worst of 2 models: b: **1.20** |" in table.table(parts)
    assert "| a: " not in table.table(parts)
