"""Values that follow from constants are read without running anything, and are never stale."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import lazyviz

from ..lazy_equals_eager import both

DATA = torch.randn(4, 3)

# Each reads values that are known; none of it is a sync point.
KNOWN = {
    "an item": lambda: torch.tensor(3).item(),
    "a float": lambda: float(torch.tensor(1e-3)),
    "a comparison": lambda: "yes" if torch.tensor(3) > 2 else "no",
    "a list": lambda: torch.arange(4).tolist(),
    "a list of a view": lambda: torch.arange(6).view(2, 3).t()[1:].tolist(),
    "a size": lambda: int(DATA.shape[0]) + DATA.size(1),
    "a size as a tensor": lambda: int(torch.tensor(DATA.shape).prod()),
    "a mask": lambda: bool(torch.tensor([True, False]).any()) and not torch.tensor([True, False]).all(),
    "an index of a list": lambda: ["a", "b", "c"][torch.tensor(2)],
    "a range": lambda: list(range(torch.tensor(3))),
    "a slice": lambda: DATA[: torch.tensor(2)],
    "a format": lambda: f"{torch.tensor(0.5).item():.2f}",
    "len and iteration": lambda: [int(at) for at in torch.arange(3) * 2],
    "arithmetic": lambda: ((torch.tensor(2.0) ** 3 - 1) / 7).item(),
    "where": lambda: torch.where(torch.arange(4) > 1, torch.arange(4), torch.zeros(4)).tolist(),
    "indexing": lambda: torch.arange(10)[torch.tensor([3, 1])].tolist(),
    "writing": lambda: _written().tolist(),
    "writing through a view": lambda: _written_through_a_view().tolist(),
    "zeros": lambda: torch.zeros(3).sum().item(),
    "a copy": lambda: torch.tensor([1, 2]).clone().to(torch.float64).tolist(),
    "equality": lambda: torch.equal(torch.arange(3), torch.tensor([0, 1, 2])),
    "a sort": lambda: torch.tensor([3, 1, 2]).sort()[1].tolist(),
    "cumulation": lambda: torch.tensor([3, 1, 2]).cumsum(0)[-1].item(),
    "lengths to a mask": lambda: (torch.arange(4) < torch.tensor([[2], [3]])).sum().item(),
    "concatenation": lambda: torch.cat([torch.arange(2), torch.tensor([7])]).max().item(),
    "a step count": lambda: _counted(),
    "a schedule": lambda: 0.1 * (1 - torch.tensor(3.0) / 10).item(),
    "a split by known sizes": lambda: [part * 1 for part in DATA.split(torch.tensor([1, 3]).tolist())],
    "repetition": lambda: DATA.repeat_interleave(torch.tensor([1, 0, 2, 1]), 0),
}


def _written():
    x = torch.zeros(4, dtype=torch.int64)
    x[1] = 5
    x[2:] += 1
    x.mul_(2)
    x[torch.tensor([0])] = 9
    return x


def _written_through_a_view():
    x = torch.arange(6)
    x.view(2, 3)[:, 1].fill_(-1)
    x[x < 0] = 7
    return x


def _counted():
    step = torch.tensor(0.0)
    corrections = []
    for _ in range(3):
        step += 1
        corrections.append(1 - 0.9 ** step.item())
    return corrections


@pytest.mark.parametrize("name", KNOWN)
def test_known_values_are_no_sync_point(name):
    both(KNOWN[name])


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "ASGD", "Adagrad"])
def test_optimizers_that_read_their_step(kind):
    def program(model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model(DATA).square().sum().backward()
            optimizer.step()
        return [state["step"] for state in optimizer.state.values()], [
            state["step"].item() for state in optimizer.state.values()
        ]

    def make():
        model = nn.Linear(3, 2)
        return model, getattr(torch.optim, kind)(model.parameters(), lr=0.1, foreach=False)

    both(program, make, versions=False)


def test_a_step_from_outside_is_known_in_every_block():
    step = torch.tensor(3)
    for expected in (4, 5, 6):
        with lazyviz.lazy() as graph:
            step += 1
            assert step.item() == expected
        assert not graph.sync_points and graph.pending
    assert step.item() == 6


# Never stale: each ends in a read that eager answers otherwise than the first one.
CHANGES = {
    "by data": lambda x, data: x.copy_(data),
    "in part by data": lambda x, data: x[1:].add_(data[1:]),
    "through a view": lambda x, data: x.view(2, 2)[0].mul_(data[:2]),
    "by an index": lambda x, data: x.index_put_((data % 4,), data),
    "by a mask": lambda x, data: x.masked_fill_(data > 2, 9),
    "by out=": lambda x, data: torch.add(data, 1, out=x),
    "in a list": lambda x, data: torch._foreach_add_([x], [data]),
    "by a product in a list": lambda x, data: torch._foreach_mul_([x], [data.sum()]),
    "by random numbers": lambda x, data: x.random_(5, 9),
    "by known values": lambda x, data: x.add_(1),
    "by known values through a view": lambda x, data: x[2:].fill_(8),
    "by known values in a list": lambda x, data: torch._foreach_mul_([x.view(4)], [torch.tensor(2)]),
    "by its own elements": lambda x, data: x.copy_(x.flip(0)),
    "of memory": lambda x, data: x.set_(data.clone()),
    "of data": lambda x, data: setattr(x, "data", data * 2),
    "in NumPy": lambda x, data: x.numpy().__setitem__(0, 77),
    "at once": lambda x, data: x.put_(torch.tensor([0]), data[:1]),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("kept", ["nothing", "a view", "an alias that was read"])
def test_a_known_value_is_never_stale(name, outside, kept):
    def program(x, data):
        if not outside:
            x = torch.arange(4)
        views = [] if kept == "nothing" else [x[1:]]
        seen = [x.tolist(), x[3].item(), *[view.tolist() for view in views if "read" in kept]]
        CHANGES[name](x, data * 1)
        return x, seen, x.tolist(), bool((x > 6).any()), [view.tolist() for view in views]

    both(program, lambda: (torch.arange(4), torch.tensor([1, 2, 3, 4])), syncs=None, versions=False)


@pytest.mark.parametrize("name", CHANGES)
def test_a_known_value_changed_between_blocks(name):
    def program(block):
        torch.manual_seed(0)
        x, data = torch.arange(4), torch.tensor([1, 2, 3, 4])
        with block():
            y = x * 2
            first = x.tolist(), x.sum().item()
        CHANGES[name](x, data)
        with block():
            z = x * 2
            return first, x.tolist(), x.sum().item(), y.tolist(), z.tolist()

    from contextlib import nullcontext

    assert program(lazyviz.lazy) == program(nullcontext)


def test_aliases_of_one_memory_are_known_together():
    def program(x):
        view, other = x[1:], x.view(2, 2)
        seen = [view.tolist(), other.tolist(), x.tolist()]
        view += 1
        seen += [other.tolist(), x.tolist()]
        other[0, 0] = 9
        x[3:] = 7
        return [*seen, view.tolist(), other.tolist(), x.tolist(), x.as_strided((2,), (2,), 1).tolist()]

    both(program, lambda: torch.arange(4))


def test_a_view_of_a_larger_memory_keeps_its_place():
    def program(x):
        part = x[3:7]
        part += 1
        return part.tolist(), part.as_strided((2,), (1,), 0).tolist(), x.tolist()

    both(program, lambda: torch.arange(10))


def test_data_is_not_known():
    with lazyviz.lazy() as graph:
        assert (DATA * 2).sum().item() == (DATA * 2).sum().item()
    assert [point.cause for point in graph.sync_points] == ["item", "item"]


def test_known_values_are_still_written_when_the_graph_runs():
    x = torch.zeros(3, dtype=torch.int64)
    with lazyviz.lazy() as graph:
        x += 2
        assert x.tolist() == [2, 2, 2]
        assert graph.pending and not graph.sync_points
    assert "pending write" in repr(x)
    graph.evaluate()
    assert x.tolist() == [2, 2, 2]


def test_whether_two_tensors_are_one_memory_is_not_asked_of_copies():
    def program():
        known, buffer = torch.tensor([1, 2]), torch.from_numpy(np.arange(3))
        return [each.detach().is_set_to(each) for each in (known, buffer)] + [known.is_set_to(known.clone())]

    both(program, syncs=None)
