"""A block's split and recompute budget are kept by whatever evaluates its ops."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.execute import backend_registry
from lazyviz.execute.backend_protocol import Refused

SAMPLES = 64


def perceptron():
    torch.manual_seed(0)
    layers = [m for _ in range(8) for m in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(SAMPLES, 32)


def step(net, x):
    loss = net(x).square().mean()
    loss.backward()
    return loss


def eager():
    net, x = perceptron()
    loss = step(net, x)
    return [loss.detach(), *(p.grad for p in net.parameters())]


def without_arguments(graph, loss):
    return lazyviz.sync()


def one_tensor(graph, loss):
    return lazyviz.evaluate(loss)


def to_eager(graph, loss):
    lazyviz.to_eager(loss)
    return graph.report


def read(graph, loss):
    loss.item()
    return graph.report


def written(graph, loss):
    loss.detach().add_(0)
    return graph.report


WAYS = [without_arguments, one_tensor, to_eager, read, written]


def budget():
    net, x = perceptron()
    with lazyviz.lazy() as graph:
        step(net, x)
    recorded = graph.plan(recompute="1 GiB").peak_bytes
    lazyviz.reset()
    return recorded - 2 * x.nbytes


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_split_is_kept(way):
    net, x = perceptron()
    with lazyviz.lazy(batch=[x], split=4) as graph:
        loss = step(net, x)
    report = way(graph, loss)
    assert report.pieces == 4
    assert graph.pending == 0
    for mine, expected in zip([loss.detach(), *(p.grad for p in net.parameters())], eager(), strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_recompute_budget_is_kept(way):
    limit = budget()
    net, x = perceptron()
    with lazyviz.lazy(recompute=limit) as graph:
        loss = step(net, x)
    report = way(graph, loss)
    assert report.recomputed > 0
    assert report.peak_bytes <= limit
    assert graph.pending == 0
    results = [loss.detach(), *(p.grad for p in net.parameters())]
    assert all(map(torch.equal, results, eager()))


def test_other_graphs_run_as_usual_beside_a_split_one():
    net, x = perceptron()
    with lazyviz.lazy() as plain:
        other = torch.ones(3) * 2
    with lazyviz.lazy(batch=[x], split=4) as split:
        loss = step(net, x)
    report = lazyviz.sync()
    assert plain.pending == split.pending == 0
    assert report.ops_run == len(plain.nodes) + len(split.nodes)
    assert report.pieces == 4
    assert other.tolist() == [2, 2, 2]
    torch.testing.assert_close(loss.detach(), eager()[0])


def test_an_earlier_graph_is_split_by_a_later_ones_evaluation():
    net, x = perceptron()
    with lazyviz.lazy(batch=[x], split=4) as first:
        h = net(x)
    with lazyviz.lazy() as second:
        h = h.square().mean()
        h.backward()
    second.evaluate()
    assert first.report.pieces == 4
    torch.testing.assert_close(h.detach(), eager()[0])


@pytest.mark.parametrize("pieces", ["all", "one tensor"])
def test_what_a_part_that_was_split_leaves_pending_finds_its_inputs(pieces):
    """Activations of which no variable is left, and that only pending ops need, are kept whole."""
    net, x = perceptron()
    with lazyviz.lazy(batch=[x], split=4) as graph:
        loss = step(net, x)
    assert graph.evaluate(loss).pieces == 4
    assert graph.pending
    if pieces == "all":
        graph.evaluate()
    else:
        graph.evaluate(net[0].weight.grad)
        lazyviz.sync()
    for mine, expected in zip([loss.detach(), *(p.grad for p in net.parameters())], eager(), strict=True):
        torch.testing.assert_close(mine, expected)


def test_a_later_cell_finds_the_results_of_a_split_one():
    net, x = perceptron()
    with lazyviz.lazy(batch=[x], split=4) as first:
        h = net(x)
    with lazyviz.lazy():
        h = h.square().mean()  # nothing refers to the network's result any more
        h.backward()
    report = first.evaluate()
    assert report.pieces == 4
    assert report.projected_bytes is None  # the plan is of the graph alone
    lazyviz.sync()
    for mine, expected in zip([h.detach(), *(p.grad for p in net.parameters())], eager(), strict=True):
        torch.testing.assert_close(mine, expected)


def test_a_split_that_is_refused_leaves_other_graphs_evaluated():
    x = torch.randn(8, 4)
    with lazyviz.lazy(batch=[x], split=2) as refused:
        y = x.cumsum(0)
    with lazyviz.lazy():
        other = torch.ones(3) * 2
    with pytest.raises(lazyviz.SplitError, match="cumsum"):
        lazyviz.sync()
    assert not lazyviz.is_lazy(other)
    assert lazyviz.is_lazy(y)
    with pytest.raises(lazyviz.SplitError, match="cumsum"):
        y.sum().item()
    refused.evaluate(split="off")
    assert torch.equal(y, x.cumsum(0))


def test_a_read_needs_no_op_that_has_failed_in_a_split_graph():
    x, rows = torch.randn(8, 4), torch.tensor([9])
    with lazyviz.lazy(batch=[x], split=2) as graph:
        y = x * 2
        bad = torch.ones(3)[rows]
    with pytest.raises(IndexError):
        graph.evaluate()
    assert y[0].tolist() == (x[0] * 2).tolist()
    assert lazyviz.is_lazy(bad)


class Refusing:
    """A backend that leaves every op to eager PyTorch."""

    def compile(self, segment, inputs):
        raise Refused("not supported")


@pytest.fixture
def refusing():
    lazyviz.register_backend("refusing", Refusing())
    yield "refusing"
    del backend_registry._backends["refusing"]


def test_a_blocks_backend_runs_what_is_evaluated_without_arguments(refusing):
    with lazyviz.lazy(backend=refusing) as graph:
        y = torch.ones(3) * 2
    report = lazyviz.sync()
    assert report.backend == graph.report.backend == refusing
    assert "not supported" in report.fallbacks[0]
    assert y.tolist() == [2, 2, 2]
