"""Sparse gradients in a plan: what a sparse tensor is made of, or hands out, is counted once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.cli.plan_data import plan_of

from .profiler import allocated_by


def training(layer, optimizer):
    """Two steps of an embedding table whose gradients are sparse."""

    def program():
        torch.manual_seed(0)
        table = layer(5000, 32, sparse=True)
        chosen = optimizer(list(table.parameters()), lr=0.1)
        for _ in range(2):
            chosen.zero_grad()
            table(torch.randint(5000, (512, 6))).pow(2).sum().backward()
            chosen.step()
        return table, chosen

    return program


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize(
    ("layer", "optimizer"),
    [
        (nn.Embedding, torch.optim.SGD),
        (nn.Embedding, torch.optim.SparseAdam),
        (nn.Embedding, torch.optim.Adagrad),
        (nn.EmbeddingBag, torch.optim.SGD),
        (nn.EmbeddingBag, torch.optim.SparseAdam),
        (nn.EmbeddingBag, torch.optim.Adagrad),
    ],
)
def test_training_with_sparse_gradients_is_planned_as_it_is_measured(layer, optimizer):
    program = training(layer, optimizer)
    program()
    measured, _ = allocated_by(program)
    with lazyviz.lazy() as graph:
        kept = program()
    assert graph.plan().eager_peak_bytes == pytest.approx(measured, abs=256)  # numbers of an op's own
    del kept


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_a_plan_in_which_sparse_gradients_are_added_has_remedies():
    with lazyviz.lazy() as graph:
        table = nn.Embedding(500, 32, sparse=True)
        first, second = torch.randint(500, (2, 64))
        (table(first) * table(second)).sum().backward()
    assert {"autocast", "bf16"} & {each.kind for each in plan_of(graph).remedies}


@pytest.mark.parametrize("keep", ["sparse", "values"])
def test_memory_that_a_sparse_tensor_shares_stays_as_long_as_either(keep):
    with lazyviz.lazy() as graph:
        indices, values = torch.arange(1000).reshape(1, -1), torch.randn(1000, 8)
        sparse = torch.sparse_coo_tensor(indices, values, (1000, 8), check_invariants=False)
        if keep == "sparse":
            kept = sparse
            del values, indices
        else:
            kept = sparse._values()
            del indices
        del sparse
        values = None
        other = torch.ones(1)
    expected = 32000 + (8000 if keep == "sparse" else 0) + 4
    assert graph.plan().eager_timeline[-1][1] == expected
    del kept, other


def ids():
    return torch.randint(5000, (512, 6))


def momentum():
    table = nn.Embedding(5000, 32, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        table(ids()).pow(2).sum().backward()
        optimizer.step()
    return table, optimizer


def gradients_set_to_zero():
    table = nn.Embedding(5000, 32, sparse=True)
    for _ in range(2):
        table.zero_grad(set_to_none=False)
        table(ids()).pow(2).sum().backward()
    return table


def padded_bags():
    table = nn.EmbeddingBag(5000, 32, sparse=True, padding_idx=0)
    table(ids()).pow(2).sum().backward()
    return table


def weighted_bags(sparse=True):
    table = nn.EmbeddingBag(5000, 32, mode="sum", sparse=sparse)
    table(ids(), per_sample_weights=torch.rand(512, 6)).pow(2).sum().backward()
    return table


def dense_weighted_bags():
    return weighted_bags(sparse=False)


@pytest.mark.parametrize(
    "program",
    [momentum, gradients_set_to_zero, padded_bags, weighted_bags, dense_weighted_bags],
)
def test_sparse_tensors_that_are_written_and_bags_are_planned_as_measured(program):
    program()
    measured, _ = allocated_by(program)
    with lazyviz.lazy() as graph:
        kept = program()
    # Ids that are the padding, and what coalesces, are other ones in the recorded run.
    assert graph.plan().eager_peak_bytes == pytest.approx(measured, rel=0.002)
    del kept


def gradient_of(keep):
    """Where a sparse gradient's values are, when a hook gets it and when it is in ``.grad``."""
    table = nn.EmbeddingBag(50, 4, sparse=True)
    seen = []

    def hook(gradient):
        seen.append(gradient._values().data_ptr())
        keep.append(gradient)

    table.weight.register_hook(hook if keep is not None else lambda g: seen.append(g._values().data_ptr()))
    table(torch.arange(12).view(3, 4)).sum().backward()
    return seen[0] == table.weight.grad._values().data_ptr()


@pytest.mark.parametrize("kept", [False, True])
def test_a_sparse_gradient_is_taken_over_unless_a_hook_has_kept_it(kept):
    def program():
        return gradient_of([] if kept else None)

    expected = program()
    assert expected is not kept
    with lazyviz.lazy() as graph:
        pending = torch.ones(2) + 1
        assert program() is expected
    assert program() is expected  # while something is pending, in a later cell
    assert graph.pending and pending.tolist() == [2, 2]
