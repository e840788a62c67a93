"""Sparse gradients in a plan: what a sparse tensor is made of, or hands out, is counted once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz

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
        # Not with SGD: its peak is where the gradient is copied, which eager takes over (docs/limits.md).
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
