"""Published memory figures: the data, the generated page, and rows that are recorded again."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

import lazyviz
from lazyviz.record.fake_cuda import older_releases as known

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def module(name):
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


harness, models, releases = (
    module("published_memory"),
    module("models.models_of_published_figures"),
    module("older_release_effects"),
)
ROWS = harness.rows()


def recorded(row):
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return harness.judged(row, harness.record(row))
    finally:
        sys.path.remove(str(BENCHMARKS))
        lazyviz.reset()


def test_there_are_figures_of_many_sources_and_cards():
    assert len(ROWS) >= 40
    assert len({row["source"] for row in ROWS}) >= 8
    assert len({row["card"] for row in ROWS}) >= 5


def test_every_figure_says_where_it_is_from_and_what_ran():
    source = (BENCHMARKS / "published_programs.py").read_text(encoding="utf-8")
    programs = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    for row in ROWS:
        assert row["url"].startswith("https://"), row
        assert row["program"] in programs, row
        assert row["kind"] in harness.KINDS and row["unit"] in harness.UNITS, row
        assert isinstance(ast.literal_eval(row["arguments"]), dict), row
        assert float(row["published"]) > float(row["step"]) > 0, row
        known.release(row["torch"])


def test_the_page_is_what_the_results_give():
    data = json.loads(harness.RESULTS.read_text(encoding="utf-8"))
    text = harness.PAGE.read_text(encoding="utf-8")
    assert text == harness.page(data), "python benchmarks/published_memory.py --page-only"


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (lambda: models.VisionTransformer(1024, 24, 16, 4096, 16, 1000), 304_326_632),
        (lambda: models.VisionTransformer(1280, 32, 16, 5120, 14, 1000, fused=True), 632_045_800),
        (lambda: models.Gpt(50257, 1024, "kept mask", plain=True), 163_009_536),
        (lambda: models.Segmentation("fcn", (3, 4, 6, 3)), 49_497_734),
        (lambda: models.Segmentation("psp", (3, 4, 6, 3)), 48_975_494),
        (lambda: models.Segmentation("aspp", (3, 4, 6, 3)), 68_113_030),
    ],
)
def test_a_model_written_again_has_the_parameters_of_the_published_one(make, parameters):
    with torch.device("meta"):
        assert sum(weight.numel() for weight in make().parameters()) == parameters


def test_a_published_run_recorded_again_is_projected_closely():
    pytest.importorskip("transformers")
    row = next(row for row in ROWS if "flash attention" in row["title"])
    result = recorded(row)
    assert abs(result["error"]) < 0.002
    assert result["published"] == float(row["published"]) * 2**30


def judged_rows():
    data = json.loads(harness.RESULTS.read_text(encoding="utf-8"))
    return [(row, harness.judged(row, data["runs"][row["id"]])) for row in ROWS]


def test_nine_in_ten_figures_are_in_a_range_of_15_percent_and_the_median_error_is_below_1_percent():
    total = harness.summary([result for _, result in judged_rows()])
    assert total["median error"] <= 0.01
    assert total["in a narrow range"] >= 0.9 * total["rows"]


def test_ranges_hold_for_sources_that_had_no_part_in_choosing_them():
    lines = harness.left_out(judged_rows())["table"].splitlines()
    rows, inside = (int(lines[-1].split("|")[column]) for column in (2, 5))
    assert rows == len(ROWS) and inside >= 0.9 * rows


def test_a_range_with_the_plan_s_own_margins_is_the_plan_s():
    from lazyviz.plan.uncertainty import ALLOCATED, RESERVED

    for row, result in judged_rows():
        own = ALLOCATED if row["kind"] == "allocated" else RESERVED
        again = harness.widened_again(row, result, own)["range"]
        assert again == pytest.approx(result["range"], rel=1e-6), row


def test_a_row_that_cannot_be_recorded_says_why():
    row = ROWS[0] | {"transformers": "0.1"}
    assert harness.measured([row], None) == {
        row["id"]: {"failed": "transformers 0.1 is not in the folder of --packages"}
    }


def test_a_value_as_exact_as_it_is_published_is_a_hit():
    row = {"published": "5.7", "unit": "GiB", "step": "0.1"}
    near = {"projected": int(5.74 * 2**30), "range": (int(5.74 * 2**30), int(5.74 * 2**30))}
    far = {"projected": int(5.76 * 2**30), "range": (int(5.76 * 2**30), int(5.76 * 2**30))}
    assert harness.judged(row, near)["hit"]
    assert not harness.judged(row, far)["hit"]


@pytest.mark.parametrize(
    ("version", "release"), [("1.10", (1, 10)), ("2.2.1", (2, 2)), ("2.1.0.dev20230623", (2, 0))]
)
def test_a_build_before_a_release_counts_as_the_one_before(version, release):
    assert known.release(version) == release


def allocated_at_most(version, step):
    with releases.of(known.release(version)):
        with lazyviz.lazy(device="A100-40GB", torch_version=version) as graph:
            step()
    peak = graph.plan().peak_bytes
    lazyviz.reset()
    return peak


def test_an_older_softmax_keeps_its_input_as_well():
    def step():
        x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
        torch.nn.functional.softmax(x * 2, dim=-1).sum().backward()

    assert allocated_at_most("1.10", step) - allocated_at_most("1.11", step) == 1024 * 1024 * 4


def test_an_older_cross_entropy_keeps_its_input_as_well():
    def step():
        x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
        target = torch.randint(0, 1024, (1024,), device="cuda")
        torch.nn.functional.cross_entropy(x * 2, target).backward()

    assert allocated_at_most("1.10", step) - allocated_at_most("1.11", step) == 1024 * 1024 * 4


def test_older_gradients_are_kept_when_they_are_cleared():
    def step():
        layer = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
        for _ in range(2):
            layer(torch.randn(8192, 1024, device="cuda")).sum().backward()
            layer.zero_grad()

    assert allocated_at_most("1.13", step) > allocated_at_most("2.0", step)


def test_an_older_adam_has_one_list_more():
    def step():
        layer = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
        optimizer = torch.optim.Adam(layer.parameters())
        layer(torch.randn(8, 1024, device="cuda")).sum().backward()
        optimizer.step()

    assert allocated_at_most("2.0", step) - allocated_at_most("2.1", step) == 1024 * 1024 * 4
