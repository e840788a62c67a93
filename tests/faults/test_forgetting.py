"""Dropping pending ops is complete, even if exceptions are raised meanwhile."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.record.tape import tape
from lazyviz.session import lazy_graph

from .support.inject_faults import Fault, State, inject, points, sampled

# What is raised while an object is freed is not to be seen but by a warning.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def recorded(step: int = 3) -> list[torch.Tensor]:
    """Pending tensors of a step of training, and the parameters that it owes writes to."""
    torch.manual_seed(step)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Dropout(0.5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    with lazyviz.lazy():
        loss = model(torch.randn(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
    return [loss, *model.parameters()]


def eager_results() -> list[torch.Tensor]:
    """Of plain PyTorch, whose tensors may be where forgotten ones were."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(4, 5) for _ in range(8)]
    return [model(torch.ones(3, 4)).detach() for model in models]


def assert_plain_and_forgotten(expected: list[torch.Tensor]) -> None:
    for result, known in zip(eager_results(), expected, strict=True):
        assert type(result) is torch.Tensor and torch.equal(result, known)
    lazyviz.sync()  # does not meet anything that cannot run
    assert not tape.pending
    again = recorded()
    lazyviz.sync()
    assert all(tensor.isfinite().all() for tensor in again)


@pytest.mark.parametrize("error", [KeyboardInterrupt, Fault])
@pytest.mark.slow
def test_an_interrupted_reset_has_forgotten_everything(error, request):
    expected, state = eager_results(), State()
    every = 1 if request.config.getoption("--all") else 17
    without_error = 0
    for at in range(0, 100_000, every):
        kept = recorded()
        count = len(tape.pending)
        if inject(lazy_graph.reset, at, error) is None:  # it has fewer points, or drops errors at this one
            without_error += 1
            if without_error > 20:
                break
        else:
            without_error = 0
        assert len(tape.pending) in (0, count)  # all, where it had not begun
        assert_plain_and_forgotten(expected)
        assert not state.differences()
        assert kept
    assert at > 50 * every


@pytest.mark.parametrize("error", [KeyboardInterrupt, Fault])
def test_an_interrupt_between_two_cells_loses_nothing_that_can_be_seen(error, request):
    expected, state = eager_results(), State()
    most = 10_000 if request.config.getoption("--all") else 80
    torch.manual_seed(3)
    known = [tensor.detach().clone() for tensor in evaluated(recorded())]

    def dropped_and_kept() -> list[torch.Tensor]:
        recorded(4)  # nobody has its tensors
        return recorded()

    dropped_and_kept()
    count = points(lazy_graph.cell_boundary)
    lazy_graph.reset()
    for at in sampled(count, most):
        kept = dropped_and_kept()
        inject(lazy_graph.cell_boundary, at, error)
        for found, right in zip(evaluated(kept), known, strict=True):
            assert torch.equal(found, right)
        lazy_graph.cell_boundary()
        assert_plain_and_forgotten(expected)
        assert not state.differences()


def evaluated(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    lazyviz.evaluate(*tensors)
    return tensors


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize(
    "order",
    ["graph model optimizer data loss", "loss data optimizer model graph", "loss graph data model optimizer"],
)
def test_nothing_stays_pending_of_a_block_dropped_with_its_model(steps, optimizer, order, monkeypatch):
    """Plain PyTorch would be looked at, and slower, until then; values that were read leave a part behind."""
    monkeypatch.setattr(
        tape.pending_ops, "_looked_for", 0.0
    )  # what was looked at under a tracer has taken long
    before = dict.fromkeys(tape.pending)
    kept = dropped_later(steps, optimizer)
    assert tape.pending.keys() - before
    for name in order.split():
        del kept[name]
    gc.collect()  # optimizers refer to themselves
    torch.ones(2) + 1
    assert not tape.pending.keys() - before


def dropped_later(steps: int, optimizer: type[torch.optim.Optimizer]) -> dict[str, object]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    update = optimizer(model.parameters(), lr=0.1)
    data = torch.randn(3, 4)
    with lazyviz.lazy() as graph:
        for _ in range(steps):
            update.zero_grad()
            loss = model(data).square().mean()
            loss.backward()
            update.step()
            loss.item()
    return {"graph": graph, "model": model, "optimizer": update, "data": data, "loss": loss}


def test_a_write_is_kept_while_a_view_that_was_not_met_can_show_it(monkeypatch):
    monkeypatch.setattr(tape.pending_ops, "_looked_for", 0.0)
    model = torch.nn.Linear(4, 2)
    shown = model.weight.detach()[0]
    expected = shown - 1
    with lazyviz.lazy() as graph, torch.no_grad():
        model.weight.sub_(1)
    del graph, model
    torch.ones(2) + 1
    assert len(tape.pending) == 1
    assert torch.equal(shown, expected) and not tape.pending
    model = torch.nn.Linear(4, 2)
    shown = model.weight.detach()[0]
    with lazyviz.lazy() as graph, torch.no_grad():
        model.weight.sub_(1)
    del graph, model
    torch.ones(2) + 1
    del shown  # nobody tells
    torch.ones(2) + 1
    assert not tape.pending


def test_steps_that_were_forgotten_do_not_keep_each_other():
    """The optimizer's state, which has no value, is used by each step anew."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    graphs = []
    for _ in range(60):
        with lazyviz.lazy() as graph:
            model(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
        graphs.append(weakref.ref(graph.ir))
        lazyviz.reset()
    del graph
    gc.collect()
    assert sum(reference() is not None for reference in graphs) < 20
    state = next(iter(optimizer.state.values()))["exp_avg"]
    with pytest.raises(RuntimeError, match="forgotten|reset"):
        state.sum().item()


READS = {
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "__array__": lambda x: np.asarray(x),
    "format": lambda x: f"{x[0]:.2f}",
    "format of a number": lambda x: format(x),
    "storage": lambda x: x.untyped_storage(),
    "typed storage": lambda x: x.storage(),
    "share_memory_": lambda x: x.share_memory_(),
    "is_shared": lambda x: x.is_shared(),
    "set_": lambda x: x.set_(torch.ones(2)),
    "resize_": lambda x: x.resize_(5),
    "apply_": lambda x: x.apply_(lambda item: item),
    "map_": lambda x: x.map_(x, lambda a, b: a),
    "new_tensor": lambda x: x.new_tensor(x),
    "is_pinned": lambda x: x.is_pinned(),
    "data_ptr": lambda x: x.data_ptr(),
    "dlpack": lambda x: torch.from_dlpack(x),
    "parameter": lambda x: nn.Parameter(x).tolist(),
    "op": lambda x: x + 1,
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("cls", [torch.Tensor, nn.Parameter, nn.Buffer])
def test_a_read_of_a_forgotten_tensor_says_that_it_was_forgotten(read: str, cls: type[torch.Tensor]) -> None:
    with lazyviz.lazy():
        value = torch.ones(3) + 1
        value = value if cls is torch.Tensor else cls(value)
    lazyviz.reset()
    with pytest.raises(RuntimeError, match=r"forgotten before it ran: by %lazy reset"):
        READS[read](value)
    with lazyviz.lazy():  # those that are recorded later are read as ever
        later = torch.ones(3) + 1
        assert later.tolist() == [2, 2, 2] and (later + 1).numpy().tolist() == [3, 3, 3]
    assert (later * 2).untyped_storage().nbytes() == 12


def test_the_end_of_a_cell_drops_nothing_that_another_thread_has_chosen_to_run(state):
    chosen, dropped = threading.Event(), threading.Event()

    def run():
        with tape.runs.lock:
            chosen.set()
            dropped.wait(30)

    with lazyviz.lazy() as graph:
        torch.ones(2) + 1
    thread = threading.Thread(target=run)
    thread.start()
    chosen.wait(30)
    del graph  # now nothing refers to its ops
    lazy_graph.cell_boundary()
    assert len(tape.pending) == 2
    dropped.set()
    thread.join()
    lazy_graph.cell_boundary()
    assert not tape.pending
