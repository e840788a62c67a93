"""Pending ops whose results are unreachable are dropped, whatever memory they write."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.record import tracked_storages as storage_module
from lazyviz.record.tape import tape

TO_DLPACK = torch.utils.dlpack.to_dlpack  # as a program imports it before any block


def train(steps: int) -> None:
    """Steps that read their loss, in a block that is dropped with all that it was of."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(8, 4)
    with lazyviz.lazy():
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            loss.item()


def test_step_counters_of_a_dropped_optimizer_are_forgotten():
    train(20)
    gc.collect()
    lazyviz.session.lazy_graph.cell_boundary()
    assert not tape.pending


def test_dropped_blocks_leave_nothing_behind():
    left = []
    for _ in range(60):
        model = nn.Linear(4, 1)
        counter, held = torch.tensor(0.0), torch.zeros(100)
        with lazyviz.lazy():
            model(torch.ones(2, 4)).sum().backward()
            counter.add_(1)
            held.add_(1)
            assert counter.item() == 1
        del model, counter, held
        left.append(len(tape.pending))
    assert max(left[30:]) <= max(left[:30]) + 5


SHOWN = {
    "a view": lambda base: base[1:],
    "a detached tensor": torch.Tensor.detach,
    "a storage": torch.Tensor.untyped_storage,
    "a typed storage": torch.Tensor.storage,
    "an array": torch.Tensor.numpy,
    "a capsule": torch.utils.dlpack.to_dlpack,
}


@pytest.mark.parametrize("show", SHOWN.values(), ids=SHOWN)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_write_that_shows_elsewhere_is_made(show):
    base = torch.arange(4.0)
    shown = show(base)
    with lazyviz.lazy():
        base.add_(1)
    del base
    lazyviz.session.lazy_graph.cell_boundary()
    found = torch.from_dlpack(shown) if type(shown).__name__ == "PyCapsule" else shown
    expected = torch.arange(4.0) + 1
    if show is not SHOWN["a storage"]:
        assert found.tolist() == expected[4 - len(found) :].tolist()
    else:
        assert found.tolist() == expected.untyped_storage().tolist()


def test_an_array_that_a_tensor_was_made_of_shows_the_write():
    array = np.zeros(3, dtype=np.float32)
    with lazyviz.lazy():
        torch.from_numpy(array).add_(1)
    lazyviz.session.lazy_graph.cell_boundary()
    lazyviz.sync()
    assert array.tolist() == [1, 1, 1]


def test_after_a_reset_gradients_start_from_zero():
    def trained(reset):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.ones(4, 3)
        if reset:
            with lazyviz.lazy():
                model(x).sum().backward()
            if reset == "some have been read":
                model.weight.grad.tolist()
                model.weight.grad = None
            lazyviz.reset()
            assert model.weight.grad is model.bias.grad is None
        model(x).sum().backward()
        optimizer.step()
        return torch.cat([model.weight[0], model.bias]).detach()

    assert torch.equal(trained("all at once"), trained(None))
    assert torch.equal(trained("some have been read"), trained(None))


def test_after_a_reset_nothing_is_pending():
    with lazyviz.lazy() as graph:
        x = torch.ones(3) + 1
    assert (graph.pending, graph.state) == (2, "pending")
    lazyviz.reset()
    assert (graph.pending, graph.state) == (0, "failed")
    assert "2 ops, 0 pending" in repr(graph)
    with pytest.raises(RuntimeError, match="forgotten before it ran"):
        graph.evaluate()
    with pytest.raises(RuntimeError, match="forgotten before it ran"):
        x.tolist()


def test_a_reset_leaves_gradients_that_are_there():
    model = nn.Linear(3, 1)
    model(torch.ones(4, 3)).sum().backward()
    before = model.weight.grad.clone()
    with lazyviz.lazy():
        model(torch.ones(4, 3)).sum()
    lazyviz.reset()
    assert torch.equal(model.weight.grad, before)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_capsule_of_a_tensor_that_was_pending_shows_later_writes(at_once):
    with lazyviz.lazy():
        x = torch.arange(3.0) + 1
        capsule = TO_DLPACK(x)
        if at_once:
            x.mul_(2)
    if not at_once:
        with lazyviz.lazy():
            x.mul_(2)
    shown = torch.from_dlpack(capsule)
    assert shown.tolist() == [2, 4, 6]


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")  # PyTorch's, of NumPy 2
def test_a_method_looked_up_before_the_evaluation_works_after_a_reset():
    with lazyviz.lazy():
        torch.ones(2) + 1
    lazyviz.reset()  # from now on, methods of pending tensors look for forgotten ops
    with lazyviz.lazy():
        x = torch.ones(2) * 2
        export, values = x.__array__, x.tolist
        x.sum().item()
        assert np.array(torch.ones(2) * 3).tolist() == [3, 3]  # NumPy calls `__array__` a second time
        assert export().tolist() == values() == [2, 2]


def test_tensors_that_die_when_the_modules_of_the_process_have_been_cleared_raise_nothing(monkeypatch):
    x = torch.randn(8)
    with lazyviz.lazy() as graph:
        y = x * 2
    monkeypatch.setattr(storage_module, "TrackedStorage", None)
    noticed = []
    monkeypatch.setattr(sys, "unraisablehook", noticed.append)
    del x
    gc.collect()
    monkeypatch.undo()
    assert not noticed
    assert len(graph.nodes) == 1 and y.sum().isfinite()
