"""A block planned for an absent GPU can be recorded as an older PyTorch release would run it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz
from lazyviz.graph.nested_blocks import flattened
from lazyviz.plan.make_plan import make_plan
from lazyviz.record.fake_cuda import older_releases

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
GPU = "A100-40GB"
ROWS, WIDTH = 256, 512


@pytest.fixture(autouse=True)
def reset():
    yield
    lazyviz.reset()


def plan_of(program, version=None):
    lazyviz.reset()
    torch.manual_seed(0)
    with lazyviz.lazy(device=GPU, torch_version=version) as graph:
        kept = program()
    plan = graph.plan()
    del kept
    return plan


def softmaxes():
    x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
    y = x
    for _ in range(4):
        y = (y * 2).softmax(-1)
    F.cross_entropy(y, torch.zeros(ROWS, dtype=torch.long, device="cuda")).backward()
    return x


def trained(optimizer=torch.optim.Adam, steps=2):
    def program():
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]).cuda()
        made = optimizer(model.parameters())
        for _ in range(steps):
            made.zero_grad()
            model(torch.ones(4, WIDTH, device="cuda")).sum().backward()
            made.step()
        return model, made

    return program


PARAMETERS = 4 * (WIDTH * WIDTH + WIDTH) * 4


def test_softmax_kept_its_input_until_1_10():
    kept, now = plan_of(softmaxes, "1.10"), plan_of(softmaxes)
    assert kept.peak_bytes - now.peak_bytes == pytest.approx(4 * ROWS * WIDTH * 4, rel=0.3)
    assert plan_of(softmaxes, "1.11").peak_bytes == now.peak_bytes
    assert plan_of(softmaxes, "1.10.2").peak_bytes == kept.peak_bytes


def test_gradients_were_filled_with_zeros_before_2_0():
    with lazyviz.lazy(device=GPU, torch_version="1.13") as graph:
        weight = nn.Parameter(torch.ones(8, device="cuda"))
        optimizer = torch.optim.SGD([weight], 0.1)
        (weight * 2).sum().backward()
        optimizer.zero_grad()
        assert weight.grad is not None
        optimizer.zero_grad(set_to_none=True)
        assert weight.grad is None
    assert any(node.name.startswith("zero_") for node in graph.nodes)


def test_optimizers_stepped_one_by_one_before_2_0():
    plan, now = plan_of(trained(), "1.13"), plan_of(trained())
    names = {node.op._schema.name for node in plan._nodes if node.phase == "optimizer"}
    assert not any("_foreach_" in name for name in names)
    assert plan.peak_bytes < now.peak_bytes


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_2_0_held_the_square_roots_twice(optimizer):
    two, now = plan_of(trained(optimizer), "2.0"), plan_of(trained(optimizer))
    assert two.peak_bytes - now.peak_bytes == pytest.approx(PARAMETERS, rel=0.01)
    assert plan_of(trained(optimizer), "2.1").peak_bytes == now.peak_bytes


def test_a_plan_for_an_older_release_names_it_and_the_differences():
    plan = plan_of(softmaxes, "1.10")
    assert plan.torch_version == "1.10"
    text = plan.explain()
    assert "plain eager PyTorch 1.10" in text and "softmax and log_softmax save their input" in text
    assert "Differences in PyTorch" not in plan_of(softmaxes).explain()


def test_after_the_block_pytorch_is_the_installed_release():
    before = torch.optim.Optimizer.zero_grad, torch._foreach_add_
    plan_of(trained(), "2.0")
    assert (torch.optim.Optimizer.zero_grad, torch._foreach_add_) == before


@pytest.mark.parametrize("version", ["1.3", "3.1", "1.14", "latest", "", "2", 2.0])
def test_a_release_that_nothing_is_known_of_is_refused(version):
    with pytest.raises(ValueError, match="torch_version must be a PyTorch release from 1.4 to"):
        lazyviz.lazy(device=GPU, torch_version=version).__enter__()


def test_a_release_is_for_gpus_that_are_absent():
    with pytest.raises(ValueError, match="not on this machine"):
        lazyviz.lazy(device="cpu", torch_version="1.13").__enter__()


def test_each_difference_has_a_source():
    for difference in older_releases.DIFFERENCES:
        assert difference.source.startswith("https://github.com/pytorch/pytorch/")
        assert difference.since < difference.until <= older_releases.installed()


def test_a_block_around_another_keeps_its_release_as_one_program():
    with lazyviz.lazy(device="V100-16GB", torch_version="1.10") as outer:
        x = torch.randn(256, 256, device="cuda", requires_grad=True)
        with lazyviz.lazy(device="V100-16GB", torch_version="1.10"):
            (x * 2).softmax(1).sum().backward()
    plan = make_plan(flattened(outer.ir))
    assert plan.torch_version == "1.10"
    assert "Differences in PyTorch 1.10: " in plan.explain()
