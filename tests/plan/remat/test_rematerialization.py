"""Plans with recomputation: additional time, saved memory, and the timeline of the run."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.plan.devices.device_lookup import DeviceProfile
from lazyviz.plan.remat.recompute_selection import work
from lazyviz.view.scene.details import describe_moment
from lazyviz.view.scene.memory_chart import memory_json
from lazyviz.view.scene.scene import Scene


def recorded(layers: int = 12, rows: int = 1024, width: int = 32, **options) -> lazyviz.LazyGraph:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(layers))
    )
    x = torch.randn(rows, width)
    with lazyviz.lazy(**options) as graph:
        model(x).square().mean().backward()
    graph.keeps = model
    return graph


def test_the_plan_shows_what_is_paid_and_what_is_saved():
    graph = recorded()
    whole = graph.plan()
    least = graph.plan(recompute=1).recompute.least_bytes
    dear, cheap = graph.plan(recompute=least), graph.plan(recompute=int(0.9 * whole.peak_bytes))
    for plan in (dear, cheap):
        assert plan.recompute.saves_bytes == whole.peak_bytes - plan.peak_bytes
        assert f"Recomputing: {plan.recompute.ops} ops recomputed (about" in plan.explain()
        assert plan.eager_peak_bytes == whole.eager_peak_bytes
    assert 0 < cheap.recompute.ops < dear.recompute.ops
    assert 0 < cheap.recompute.share < dear.recompute.share < 0.5
    assert cheap.recompute.seconds is None, "nothing has run"
    assert whole.recompute.ops == 0
    assert "Recomputing" not in whole.explain()


def test_once_it_has_run_the_seconds_are_those_measured():
    graph = recorded()
    least = graph.plan(recompute=1).recompute.least_bytes
    graph.evaluate(recompute=least)
    again = graph.plan(recompute=least).recompute
    assert again.seconds == pytest.approx(sum(node.seconds for node in again.nodes))


def test_products_of_matrices_are_dearer_than_what_moves_as_many_bytes():
    x, y = torch.randn(512, 512), torch.randn(512, 512)
    with lazyviz.lazy() as graph:
        z = x @ y
        z = z + y
        z = z.t()
    by_name = {node.op._schema.name: work(node) for node in graph.nodes}
    assert by_name["aten::mm"] > 5 * by_name["aten::add"] > 0
    assert by_name["aten::t"] == 0
    graph.evaluate()


def test_the_cheapest_are_computed_again_first():
    graph = recorded(width=512)
    again = graph.plan(recompute=int(0.85 * graph.plan().peak_bytes)).recompute
    assert again.nodes
    assert not [node for node in again.nodes if "mm" in node.op._schema.name]


def test_timeline_chart_and_exports_are_those_of_the_run_that_recomputes(tmp_path):
    graph = recorded()
    least = graph.plan(recompute=1).recompute.least_bytes
    graph.choices.recompute = least
    plan = graph.plan()
    assert len(plan.timeline) == len(graph.nodes) + plan.recompute.ops
    assert max(size for _, size in plan.timeline) == plan.peak_bytes <= least
    assert [sum(levels) for levels in zip(*plan.category_timeline.values())] == [n for _, n in plan.timeline]
    scene = Scene(graph.ir, plan)
    memory = memory_json(scene)
    assert memory["count"] == len(plan.timeline)
    assert plan.timeline[memory["peakAt"]][1] == plan.peak_bytes
    assert memory["peakAt"] in memory["points"]["at"]
    moment = describe_moment(scene, memory["peakAt"])
    assert sum(row.nbytes for row in plan.at(memory["peakAt"]).alive) == plan.peak_bytes
    assert moment["name"]
    for name in ("run.pickle", "run.json", "run.svg", "run.html"):
        graph.save(tmp_path / name)
        assert (tmp_path / name).stat().st_size
    with open(tmp_path / "run.pickle", "rb") as file:
        assert pickle.load(file)["lazyviz"]["peak_bytes"] == plan.peak_bytes


def test_auto_recomputes_no_more_than_the_device_needs():
    graph = recorded()
    whole = graph.plan()
    roomy = DeviceProfile("roomy", 2 * whole.peak_bytes)
    tight = DeviceProfile("tight", int(0.7 * whole.peak_bytes))
    tiny = DeviceProfile("tiny", 10_000)
    assert graph.plan(device=roomy, recompute="auto").recompute.ops == 0
    plan = graph.plan(device=tight, recompute="auto")
    assert plan.fits
    assert plan.recompute.ops
    assert graph.plan(device=tight).fits is False
    plan = graph.plan(device=tiny, recompute="auto")
    assert plan.fits is False
    assert "even with all activations recomputed" in plan.recompute.reason
    assert plan.recompute.reason in plan.explain()


@pytest.mark.parametrize("gpu", ["RTX-3060", "A100-40GB"])
def test_auto_counts_what_the_allocator_of_a_gpu_adds(gpu):
    with lazyviz.lazy(device=gpu) as graph:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(12))).cuda()
        rows = 2**19 if gpu == "RTX-3060" else 1_500_000
        model(torch.randn(rows, 512, device="cuda")).square().mean().backward()
    assert graph.plan().fits is False
    plan = graph.plan(recompute="auto")
    assert plan.fits
    assert plan.recompute.ops
    assert plan.reserved_bytes >= plan.peak_bytes


def test_a_batch_is_split_before_anything_is_recomputed():
    torch.manual_seed(0)
    x = torch.randn(1024, 32)

    def record(norm: nn.Module) -> lazyviz.LazyGraph:
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(12)), norm, nn.Linear(32, 1)
        )
        with lazyviz.lazy(batch=[x]) as graph:
            model(x).square().mean().backward()
        graph.keeps = model
        return graph

    graph = record(nn.LayerNorm(32))
    tight = DeviceProfile("tight", int(0.6 * graph.plan().peak_bytes))
    plan = graph.plan(device=tight, split="auto", recompute="auto")
    assert plan.fits
    assert plan.split.pieces > 1
    assert plan.recompute.ops == 0
    graph.evaluate()
    graph = record(nn.BatchNorm1d(32))
    plan = graph.plan(device=tight, split="auto", recompute="auto")
    assert plan.fits
    assert plan.split.pieces == 1
    assert plan.split.blocked_by
    assert plan.recompute.ops


def test_an_evaluation_that_may_split_or_recompute_does_what_the_plan_says():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU()) for _ in range(8)), nn.Linear(32, 1)
    )
    x = torch.randn(1024, 32)
    with lazyviz.lazy(batch=[x], split="auto", recompute="auto", device="cpu") as graph:
        model(x).square().mean().backward()
    whole = graph.plan(split="off", recompute="off").peak_bytes
    graph.device = DeviceProfile("tight", int(0.6 * whole))
    report = graph.evaluate()
    assert report.recomputed
    assert report.peak_bytes <= 0.6 * whole


@pytest.mark.parametrize("split", [2, "auto"])
def test_a_budget_and_a_split_are_refused_together_by_name(split):
    x = torch.randn(8, 8)
    with (
        pytest.raises(ValueError, match="recompute and split can be combined only"),
        lazyviz.lazy(batch=[x], split=split, recompute="1 MiB"),
    ):
        pass
    graph = recorded(2)
    with pytest.raises(ValueError, match="recompute and split can be combined only"):
        graph.plan(split=split, recompute=1000)


class AsIs:
    def compile(self, segment, example_inputs):
        raise AssertionError("never asked")


def test_another_backend_is_refused_by_name():
    lazyviz.register_backend("as_is", AsIs())
    with pytest.raises(ValueError, match="needs the backend 'eager', not 'as_is'"):
        recorded(2).evaluate(recompute=1000, backend="as_is")


def test_another_batch_size_recomputes_for_that_size():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(12)))
    x = torch.randn(256, 32)
    with lazyviz.lazy(batch=[x]) as graph:
        model(x).square().mean().backward()
    whole = graph.plan(batch_size=1024)
    plan = graph.plan(batch_size=1024, recompute=int(0.6 * whole.peak_bytes))
    assert plan.recompute.ops
    assert plan.peak_bytes <= 0.6 * whole.peak_bytes
    tight = DeviceProfile("tight", int(0.6 * whole.peak_bytes))
    without, auto = (graph.plan(device=tight, recompute=each).max_batch_size for each in ("off", "auto"))
    assert without < 1024 < auto
    assert graph.plan(device=tight, batch_size=auto, recompute="auto").fits
