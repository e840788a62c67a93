"""Export of graphs to ``torch.fx``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.graph.fx_export import fx_inputs, fx_outputs, to_fx
from lazyviz.session.lazy_graph import reset


@pytest.fixture(autouse=True)
def forget():
    yield
    reset()


def inputs_of(graph):
    """Copies of the outside tensors, in the order the module wants them."""
    return [value.real.detach().clone() for value in fx_inputs(graph.ir)]


def test_the_module_recomputes_what_the_graph_would():
    x, w = torch.randn(3, 4), torch.randn(4, 2)
    with lazyviz.lazy() as graph:
        h = (x @ w).relu()
        y = h.softmax(-1).sum()
    module = to_fx(graph.ir)
    results = module(*inputs_of(graph))
    assert graph.pending  # exporting runs nothing
    graph.evaluate()
    assert [tuple(value.shape) for value in fx_outputs(graph.ir)] == [(3, 2), ()]
    assert torch.equal(results[0], h)
    assert torch.equal(results[1], y)


def test_outputs_in_lists_and_left_out_outputs_find_their_place():
    image = torch.randn(2, 3, 8, 8)
    conv = nn.Conv2d(3, 4, 3)
    with lazyviz.lazy() as graph:
        top, bottom = conv(image).chunk(2, dim=2)  # backward makes no gradient of the image
        (top * bottom).sum().backward()
    module = to_fx(graph.ir)
    results = module(*inputs_of(graph))
    graph.evaluate()
    by_shape = {tuple(result.shape): result for result in results}
    assert torch.equal(by_shape[tuple(conv.weight.shape)], conv.weight.grad)
    assert torch.equal(by_shape[tuple(conv.bias.shape)], conv.bias.grad)


@pytest.mark.parametrize("foreach", [False, True])
def test_a_whole_training_step_in_place_updates_included(foreach):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), foreach=foreach)
    x = torch.randn(5, 4)
    # Copied before recording: reading a parameter with a pending write would evaluate.
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with lazyviz.lazy() as graph:
        model(x).square().mean().backward()
        optimizer.step()
    values = fx_inputs(graph.ir)
    module = to_fx(graph.ir)
    others = {(5, 4): x, (): torch.tensor(0.0)}
    copies = [before.get(value.storage.name, others.get(tuple(value.shape))) for value in values]
    copies = [copy.clone() for copy in copies]
    module(*copies)
    graph.evaluate()
    updated = dict(model.named_parameters())
    found = {
        value.storage.name: copy
        for value, copy in zip(values, copies, strict=True)
        if value.storage.name in updated
    }
    assert set(found) == set(updated)
    for name, parameter in updated.items():
        assert torch.equal(found[name], parameter), name


def test_nodes_carry_the_user_s_line():
    x = torch.ones(3)
    with lazyviz.lazy() as graph:
        y = x.exp()  # the line in question
    module = to_fx(graph.ir)
    (call,) = [node for node in module.graph.nodes if node.op == "call_function"]
    assert "the line in question" in call.stack_trace
    assert y is not None


def test_a_graph_with_nothing_alive_returns_its_last_result():
    x = torch.ones(3)
    with lazyviz.lazy() as graph:
        x.exp().sin()
    (result,) = to_fx(graph.ir)(torch.zeros(3))
    assert torch.equal(result, torch.ones(3).sin())


def test_an_empty_graph_is_an_empty_module():
    with lazyviz.lazy() as graph:
        pass
    assert to_fx(graph.ir)() == ()
