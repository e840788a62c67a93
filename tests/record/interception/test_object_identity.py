"""Objects keep their identity: `.data`, moving modules, lazy modules, building in the block."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import lazyviz

from ...bit_equality import difference


def test_data_assignment_keeps_the_parameter():
    p = nn.Parameter(torch.zeros(3))
    x = torch.ones(3)
    with lazyviz.lazy() as graph:
        p.data = x * 2
        y = p * 3
    graph.evaluate()
    assert type(p) is nn.Parameter and p.is_leaf and p.requires_grad
    assert p.tolist() == [2, 2, 2]
    assert y.tolist() == [6, 6, 6]


def test_double_inside_the_block():
    model, eager = nn.Linear(3, 2), None
    eager = copy.deepcopy(model).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    weight = model.weight
    with lazyviz.lazy() as graph:
        model.double()
        out = model(x)
    assert not graph.sync_points
    graph.evaluate()
    assert model.weight is weight and type(weight) is nn.Parameter
    assert torch.equal(out, eager(x))


def test_a_model_built_in_the_block_is_ordinary_afterwards():
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
        loss = model(torch.randn(6, 4)).pow(2).mean()
        loss.backward()
        return model, loss

    expected, expected_loss = build()
    with lazyviz.lazy() as graph:
        model, loss = build()
    assert not graph.sync_points
    graph.evaluate()
    assert torch.equal(loss, expected_loss)
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    for ours, theirs in zip(model.parameters(), expected.parameters()):
        assert type(ours) is nn.Parameter and ours.is_leaf
        assert torch.equal(ours.grad, theirs.grad)
    # and it trains on, eagerly
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.randn(6, 4)).sum().backward()
    optimizer.step()


def test_lazy_modules_materialize():
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2))
        out = model(torch.randn(2, 3, 8, 8))
        out.sum().backward()
        return model, out

    expected, expected_out = build()
    with lazyviz.lazy() as graph:
        model, out = build()
    graph.evaluate()
    assert torch.equal(out, expected_out)
    for ours, theirs in zip(model.parameters(), expected.parameters()):
        assert type(ours) is nn.Parameter
        assert torch.equal(ours, theirs)
        assert torch.equal(ours.grad, theirs.grad)


def test_lazy_modules_are_cast_before_they_have_a_shape():
    with lazyviz.lazy(allow_sync=False) as graph:
        model = nn.LazyLinear(2).double()
        out = model(torch.ones(3, 4, dtype=torch.float64))
    graph.evaluate()
    assert model.weight.dtype == torch.float64
    assert torch.equal(out, model(torch.ones(3, 4, dtype=torch.float64)))


def test_backward_in_a_later_cell_reaches_a_lazily_built_leaf():
    with lazyviz.lazy() as graph:
        w = torch.ones(3, requires_grad=True)
        seen = []
        w.register_hook(lambda grad: seen.append(tuple(grad.shape)))
        y = (w * 2).exp()
        y.retain_grad()
        loss = y.sum()
    graph.evaluate()
    loss.backward()
    assert torch.equal(w.grad, 2 * torch.exp(2 * torch.ones(3)))
    assert torch.equal(y.grad, torch.ones(3))
    assert seen == [(3,)]


def test_backward_in_a_later_cell_without_evaluating_first():
    x = torch.randn(4, 3)
    model = nn.Linear(3, 2)
    with lazyviz.lazy():
        loss = model(x).pow(2).sum()
    loss.backward()
    expected = copy.deepcopy(model)
    expected.zero_grad()
    expected(x).pow(2).sum().backward()
    assert torch.equal(model.weight.grad, expected.weight.grad)


def test_version_counters_still_catch_bad_in_place_writes():
    with lazyviz.lazy() as graph:
        w = torch.ones(3, requires_grad=True)
        y = w.exp()
        loss = (y * y).sum()
    graph.evaluate()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_metadata_changing_in_place_ops():
    x = torch.arange(6.0).reshape(2, 3)
    with lazyviz.lazy() as graph:
        y = x * 1
        z = y + 1
        y.t_()
        y.unsqueeze_(0)
        w = y * 2
    assert y.shape == (1, 3, 2)
    graph.evaluate()
    assert y.shape == (1, 3, 2) and y.stride() == (x * 1).t_().unsqueeze_(0).stride()
    assert torch.equal(w, (x.t() * 2).unsqueeze(0))
    assert torch.equal(z, x + 1)
    y.resize_(1, 3, 3)


def test_deepcopy_of_a_lazily_built_model():
    with lazyviz.lazy():
        model = nn.Linear(3, 3)
        twin = copy.deepcopy(model)
    assert torch.equal(model.weight, twin.weight)
    assert type(twin.weight) is nn.Parameter


def test_metadata_of_an_outside_tensor_changes_at_once():
    def program(x):
        before = x * 2
        x.t_()
        x.unsqueeze_(0)
        after = x + 1
        x.mul_(3)
        x.squeeze_()
        return before, after, x, x.shape

    expected = program(torch.arange(6.0).reshape(2, 3))
    x = torch.arange(6.0).reshape(2, 3)
    with lazyviz.lazy() as graph:
        result = program(x)
    assert not graph.sync_points
    graph.evaluate()
    assert difference(expected, result) is None


def test_resizing_to_the_same_size_is_nothing():
    x = torch.ones(2, 3)
    with lazyviz.lazy() as graph:
        torch.randn(2, 3, out=x)
        y = x * 2
    graph.evaluate()
    assert not graph.sync_points
    assert torch.equal(y, x * 2)


def test_memory_exchanged_between_blocks_is_read_again():
    x, other = torch.ones(2), torch.zeros(2)
    with lazyviz.lazy():
        with pytest.raises(RuntimeError):
            x.add_(torch.ones(3))  # recording has met x
        pending = other + 1
    x.set_(torch.full((2,), 7.0))
    with lazyviz.lazy():
        x.mul_(2)
    assert x.tolist() == [14, 14]
    assert pending.tolist() == [1, 1]


class PassOn(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [lambda: torch.device("cpu"), PassOn], ids=["device", "user's"])
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.half(),
        lambda model: model.to(torch.bfloat16),
        lambda model: [setattr(p, "data", p.data.double()) for p in model.parameters()],
        lambda model: nn.utils.vector_to_parameters(torch.ones(15), model.parameters()),
    ],
    ids=["half", "to", "data", "vector"],
)
@pytest.mark.parametrize("inside", [True, False], ids=["built inside", "built before"])
def test_parameters_are_rebound_under_a_function_mode(mode, change, inside):
    def build():
        torch.manual_seed(0)
        return nn.Linear(4, 3)

    expected = build()
    change(expected)
    model = None if inside else build()
    with lazyviz.lazy() as graph, mode():
        model = build() if inside else model
        change(model)
        turned = torch.ones(2, 3).t_()
    assert not graph.sync_points
    lazyviz.evaluate()
    assert turned.shape == (3, 2)
    for ours, theirs in zip(model.parameters(), expected.parameters()):
        assert type(ours) is nn.Parameter and not difference(ours, theirs)


def test_memory_that_a_tensor_is_given_by_set_has_not_been_resized():
    """It is one memory before and after: a write through one alias shows in the others."""

    def program(block):
        base = torch.arange(12.0).reshape(4, 3) - 4
        with block:
            base.mul_(2)
            first = base.as_strided((3,), (1,))
            alias = base.data
            alias.sum().item()
            rows = alias[2:]
            total = alias.sum()
            total.set_(first.detach())  # 4 bytes before, base's 48 now
            base.exp()
            alias.add_(torch.tensor([2, 0, 1]), alpha=15)
        return base.clone(), alias.clone(), rows.clone(), total.clone()

    expected = program(contextlib.nullcontext())
    assert all(torch.equal(one, other) for one, other in zip(program(lazyviz.lazy()), expected, strict=True))
