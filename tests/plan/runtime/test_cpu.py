"""Projected time on this CPU: calibration per machine, and comparison with measured time."""

import copy
import pickle
import time

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.plan.runtime.cpu import CpuRates, cache_file, known_rates, project_on_cpu, rate_at, rates_from
from lazyviz.plan.runtime.projection import duration

FLAT = ((1e3, 1e9), (1e6, 1e9))
RATES = CpuRates(1e-6, FLAT, FLAT, FLAT, FLAT, FLAT, FLAT, FLAT)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def _keep(rates):
    cache_file().parent.mkdir(parents=True, exist_ok=True)
    cache_file().write_text(rates.text())


def test_without_a_calibration_no_time_is_given_and_nothing_is_measured():
    with lazyviz.lazy() as graph:
        torch.ones(64, 64) @ torch.ones(64, 64)
    plan = graph.plan()
    assert plan.time is None and plan.seconds is None
    assert graph.evaluate().projected_seconds is None
    assert not cache_file().exists()


def test_calibrating_takes_two_seconds_and_is_kept():
    before = torch.get_rng_state()
    start = time.process_time()
    made = lazyviz.calibrate()
    assert time.process_time() - start < 2 * max(torch.get_num_threads(), 1) + 0.5
    assert torch.equal(torch.get_rng_state(), before)
    assert made.file == cache_file() and made.file.exists()
    assert known_rates() == made.rates
    assert all(rate > 0 for curve in (made.rates.matmul, made.rates.elementwise) for _, rate in curve)
    assert "GFLOP/s" in repr(made) and "stored in" in made.table().text()
    with lazyviz.lazy() as graph:
        torch.ones(64, 64) @ torch.ones(64, 64)
    plan = graph.plan()
    low, high = plan.seconds_range
    assert low < plan.seconds < high
    assert "What limits this step" in plan.explain()


def test_a_block_refuses_calibration():
    with lazyviz.lazy(), pytest.raises(RuntimeError, match="outside the block"):
        lazyviz.calibrate()


def test_where_nothing_can_be_written_it_is_said(monkeypatch, tmp_path):
    file = tmp_path / "a file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    made = lazyviz.calibrate()
    assert made.file is None and "could not be stored" in made.table().text()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 0}', '{"format": 1, "call": 1}', '{"format": 1}']
)
def test_a_file_of_another_kind_is_no_calibration(text):
    assert rates_from(text) is None
    assert rates_from(RATES.text()) == RATES


def test_rates_between_sizes_lie_between():
    curve = ((1e3, 1e9), (1e5, 4e9))
    assert rate_at(curve, 10) == 1e9
    assert rate_at(curve, 1e4) == pytest.approx(2e9)
    assert rate_at(curve, 1e9) == 4e9


def test_seconds_are_calls_products_and_traffic():
    with lazyviz.lazy() as graph:
        a = torch.ones(100, 100)
        (a @ a).t()
    ones, product, view = (
        project_on_cpu(graph.nodes, RATES).ops[0],
        *project_on_cpu(graph.nodes, RATES).ops[-2:],
    )
    assert ones.seconds == pytest.approx(1e-6 + 40_000 / 1e9)
    assert product.seconds == pytest.approx(1e-6 + 2e6 / 1e9)
    assert (ones.bound, product.bound, view.bound) == ("memory", "compute", "launch")


def test_a_report_has_projected_and_measured_seconds():
    _keep(RATES)
    model = nn.Linear(64, 64)
    with lazyviz.lazy() as graph:
        model(torch.ones(8, 64)).sum().backward()
    report = graph.evaluate()
    assert report.projected_seconds == pytest.approx(project_on_cpu(graph.nodes, RATES).seconds)
    projected = report.projected_seconds
    assert projected is not None
    assert f"(projected {duration(projected)}, " in report.table().text()  # not 0.000 of a short step
    assert pickle.loads(pickle.dumps(report)) == report
    copied = copy.deepcopy(report)
    del graph, model
    assert copied.ops_run == report.ops_run


def test_a_report_keeps_no_graph():
    _keep(RATES)
    with lazyviz.lazy() as graph:
        torch.ones(3) + 1
    report = graph.evaluate()
    assert report._record() is graph.ir
    del graph
    import gc

    gc.collect()
    assert report.projected_seconds is None
