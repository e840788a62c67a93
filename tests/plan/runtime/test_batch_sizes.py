"""Projected time of other batch sizes: that of the same program recorded with them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz
from lazyviz.plan.runtime.gpu_price_comparison import amount, compare_gpus


def _sum(model, x, y):
    return model(x).sum()  # its gradient is expanded to the batch, in no dimension that is known to be it


def _cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


def _mean(model, x, y):
    return model(x).square().mean()


PROGRAMS = {
    "sum": (lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)), (64,), _sum),
    "classes": (lambda: nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 10)), (64,), _cross_entropy),
    "images": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 16, 3, groups=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, groups=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        ),
        (3, 32, 32),
        _cross_entropy,
    ),
    "sequences": (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (10, 32), _mean),
}  # fmt: skip


def _recorded(name, batch):
    make, shape, loss = PROGRAMS[name]
    model, x, y = make(), torch.randn(batch, *shape), torch.zeros(batch, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    with lazyviz.lazy(device="T4-16GB", batch=[x, y]) as graph:
        loss(model, x, y).backward()
        optimizer.step()
    return graph, (model, x, y, optimizer)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("batch", [8, 24, 4096])
def test_a_planned_batch_takes_as_long_as_a_recorded_one(name, batch):
    graph, _keep = _recorded(name, 16)
    there, _keep_too = _recorded(name, batch)
    plan, wanted = graph.plan(batch_size=batch), there.plan()
    assert plan.flops == wanted.flops == plan.time.flops
    assert plan.seconds == pytest.approx(wanted.seconds, rel=1e-6)
    assert plan.seconds_range == pytest.approx(wanted.seconds_range, rel=1e-6)
    for phase, each in plan.by_phase.items():
        assert each == pytest.approx(wanted.by_phase[phase], rel=1e-6)
    assert [each.node for each in plan.time.ops] == list(graph.nodes)
    assert set(plan.time.by_module) == set(graph.plan().time.by_module)
    text = plan.explain()
    assert "What limits this step" in text and "What would make it faster" not in text


def test_gpus_are_compared_with_the_batch_of_the_plan():
    graph, _keep = _recorded("classes", 16)
    large = graph.plan(batch_size=1 << 16)
    (gpu,) = compare_gpus(large, ["A100-40GB"]).gpus
    assert gpu.time.seconds == pytest.approx(graph.plan("A100-40GB", batch_size=1 << 16).seconds)


@pytest.mark.parametrize(
    ("cost", "text"),
    [(0, "0.00"), (1234.5, "1,234.50"), (0.1, "0.10"), (0.000312, "0.00031"), (0.0099, "0.0099")],
)
def test_small_costs_keep_two_digits(cost, text):
    assert amount(cost) == text


@pytest.mark.parametrize("pair", [False, True])
def test_a_batch_that_each_round_of_a_loop_makes_anew_changes_size_in_all_of_them(pair):
    with lazyviz.lazy(device="A100-80GB", batch="x") as graph:
        net = torch.nn.Linear(512, 512, device="cuda")
        for _ in range(2):
            if pair:  # the second tensor is not the batch, although it has the same form
                x, other = torch.randn(40_000, 512, device="cuda"), torch.randn(40_000, 512, device="cuda")
                other.sum()
            else:
                x = torch.randn(40_000, 512, device="cuda")
            net(x).square().mean().backward()
    (recorded,) = {node.graph for node in graph.nodes}
    made = [node for node in graph.nodes if node.name.startswith("randn")]
    assert {value.node for value in recorded.batch} == set(made[:: 2 if pair else 1])
    half, whole = graph.plan(batch_size=20_000), graph.plan()
    if not pair:
        assert half.seconds == pytest.approx(whole.seconds / 2, rel=0.1)
        assert half.peak_bytes < 0.6 * whole.peak_bytes
