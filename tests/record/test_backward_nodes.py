"""Autograd nodes that a backward pass calls: found in C++ as in Python."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from lazyviz.record import backward_nodes
from lazyviz.record.parity.derivative_formulas import COMPLEX_GRADIENTS, GRADIENTS, GRADIENTS_WITH_GRAPH

NAMES = GRADIENTS | GRADIENTS_WITH_GRAPH | COMPLEX_GRADIENTS


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def tied():
    layer = nn.Linear(4, 4)
    return [layer(torch.relu(layer(leaf(2, 4)))).sum()]


def several():
    x = leaf(3, 3)
    parts = (
        x.prod(),
        x.cumprod(0).sum(),
        torch.linalg.eigh(x @ x.mT).eigenvalues.sum(),
        x.max(0).values.sum(),
    )
    return [sum(parts), Twice.apply(x).prod()]


def in_place():
    x = leaf(4, 4)
    y = x * 1
    y[0].mul_(y[1])
    return [y.sum(), y[2].prod()]


def nothing():
    return [leaf(2)]


PROGRAMS = (tied, several, in_place, nothing)
compiled = pytest.mark.skipif(backward_nodes._module is None, reason="nothing is compiled")


@compiled
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_found_is_the_same_in_both_ways(program):
    outputs = program()
    asking, adding = backward_nodes._module.below(outputs, NAMES)
    expected = backward_nodes.in_python(outputs, NAMES)
    assert set(asking) == set(expected[0])
    assert set(adding.nodes()) == set(expected[1].nodes())
    assert len(asking) == len(set(asking))
    assert len(adding.nodes()) == len(set(adding.nodes()))


def test_sums_and_names_are_found():
    asking, adding = backward_nodes.below(several(), NAMES)
    assert {node.name() for node in asking} >= {"ProdBackward0", "CumprodBackward0", "LinalgEighBackward0"}
    assert any("Twice" in node.name() for node in adding.nodes())


def test_a_node_of_python_is_found_by_its_name():
    outputs = [Twice.apply(leaf(2)).sum()]  # kept: in torch 2.11 such a node's object does not keep the node
    asking, _ = backward_nodes.below(outputs, frozenset({"TwiceBackward"}))
    assert [node.name() for node in asking] == ["TwiceBackward"]


def test_gradient_edges_are_followed():
    loss = several()[0]
    edge = torch.autograd.graph.get_gradient_edge(loss)
    asking, adding = backward_nodes.below([edge], NAMES)
    expected = backward_nodes.below([loss], NAMES)
    assert set(asking) == set(expected[0])
    assert set(adding.nodes()) == set(expected[1].nodes())


def test_nothing_is_kept():
    outputs = several()
    asking, adding = backward_nodes.below(outputs, NAMES)
    node = weakref.ref(outputs[0])
    assert asking
    assert adding.nodes()
    del asking, adding, outputs
    gc.collect()
    assert node() is None
