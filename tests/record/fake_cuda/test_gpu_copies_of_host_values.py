"""Planning for an absent GPU does not change the user's model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.record.sync_points import AbsentDeviceError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="plans for a GPU that is there can run")


@pytest.fixture(autouse=True)
def nothing_pending():
    yield
    lazyviz.session.lazy_graph.reset()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def copy_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(model, before):
    return all(
        value.device.type == "cpu" and torch.equal(value, before[name])
        for name, value in model.state_dict().items()
    )


def train_on_the_gpu(model):
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(torch.randn(8, 4).cuda()).sum()
    loss.backward()
    optimizer.step()
    return loss


def test_a_model_that_was_only_moved_is_read_as_it_was(model):
    before = copy_of(model)
    with lazyviz.lazy(device="H100-80GB"):
        model.cuda()
    weight = model[0].weight
    assert weight.tolist() == before["0.weight"].tolist()
    assert torch.equal(weight.cpu(), before["0.weight"])
    assert weight[1, 2].item() == before["0.weight"][1, 2].item()
    assert lazyviz.is_lazy(weight) and weight.is_cuda  # still planned
    assert same(model.cpu(), before)
    model(torch.randn(3, 4)).sum().backward()
    assert model[0].weight.grad is not None


def test_a_copy_on_the_gpu_is_its_own_memory_when_it_is_read():
    x = torch.ones(3)
    with lazyviz.lazy(device="H100-80GB"):
        y = x.cuda()
    read = y.cpu()
    read.add_(1)
    assert x.tolist() == [1, 1, 1]


def test_a_copy_to_the_gpu_keeps_its_values_when_the_original_is_written_later():
    x = torch.ones(3)
    with lazyviz.lazy(device="H100-80GB"):
        x.add_(1)
        y = x.cuda()
        x.add_(1)
    assert y.tolist() == [2, 2, 2]


def test_what_the_gpu_would_have_to_compute_is_not_read(model):
    with lazyviz.lazy(device="H100-80GB"):
        model.cuda()
        loss = train_on_the_gpu(model)
    for read in (loss.item, model[0].weight.tolist, model[0].weight.cpu, model[1].running_mean.tolist):
        with pytest.raises(AbsentDeviceError):
            read()


def test_a_copy_in_another_type_is_read_in_that_type(model):
    before = copy_of(model)
    with lazyviz.lazy(device="H100-80GB"):
        model.to("cuda", torch.bfloat16)
    assert torch.equal(model[0].weight.cpu(), before["0.weight"].bfloat16())


@pytest.mark.parametrize("keep_loss", [False, True])
def test_resetting_gives_a_planned_model_back_as_it_was_before(model, keep_loss):
    before, weight = copy_of(model), model[0].weight
    with lazyviz.lazy(device="H100-80GB"):
        model.cuda()
        loss = train_on_the_gpu(model)
    if not keep_loss:
        del loss
    lazyviz.session.lazy_graph.reset()
    assert same(model, before)
    assert model[0].weight is weight and type(weight) is nn.Parameter
    assert weight.requires_grad and weight.grad is None
    model(torch.randn(8, 4)).sum().backward()
    assert weight.grad.device.type == "cpu"
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(weight, before["0.weight"])


def test_gradients_from_before_the_plan_come_back_too(model):
    model(torch.randn(8, 4)).sum().backward()
    before = model[0].weight.grad.clone()
    with lazyviz.lazy(device="H100-80GB"):
        model.cuda()
        train_on_the_gpu(model)
    lazyviz.session.lazy_graph.reset()
    assert torch.equal(model[0].weight.grad, before)


def test_what_was_never_on_the_host_stays_without_a_value():
    with lazyviz.lazy(device="H100-80GB"):
        z = torch.ones(3, device="cuda") * 2
    lazyviz.session.lazy_graph.reset()
    with pytest.raises(RuntimeError, match="forgotten"):
        z + 1
