"""``lazyviz.steps``: each iteration of a loop is one graph, which runs while the next is recorded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lazyviz
from lazyviz.execute.replay import node_passes
from lazyviz.record.tape import tape

from ...plan.profiler import allocated_by

compiled = pytest.mark.skipif(not node_passes.active, reason="a program of Python's runs at once")


@pytest.fixture(autouse=True)
def plain_afterwards() -> Iterator[None]:
    yield
    assert not tape.pending and tape.runs.background is None and tape.recording.graph is None
    assert lazyviz.doctor().ok


def train(
    around: Callable[[Iterable[Any]], Iterable[Any]],
    *,
    read: bool,
    dropout: float = 0.0,
    batch: int = 6,
    epochs: int = 2,
) -> list[Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropout), nn.BatchNorm1d(16), nn.Linear(16, 4))
    updates = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(updates, 3)
    data = TensorDataset(torch.randn(48, 8), torch.randint(4, (48,)))
    losses: list[Any] = []
    for _ in range(epochs):
        for x, y in around(DataLoader(data, batch, shuffle=True)):
            updates.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            updates.step()
            losses.append(loss.item() if read else loss.detach())
        schedule.step()
    values = [loss if read else loss.tolist() for loss in losses]
    return values + [tensor.tolist() for tensor in net.state_dict().values()] + [torch.rand(2).tolist()]


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("read", [False, True])
def test_a_loop_trains_as_eager_pytorch_does(read: bool, dropout: float, wait: bool) -> None:
    eager = train(lambda loader: loader, read=read, dropout=dropout)
    assert train(lambda loader: lazyviz.steps(loader, wait=wait), read=read, dropout=dropout) == eager


@compiled
def test_rounds_run_while_the_next_is_recorded() -> None:
    x, waited = torch.rand(4, 4), []
    loop = lazyviz.steps(range(8))
    for _ in loop:
        x = (x @ x).sum(0, keepdim=True).expand(4, 4).relu() / 4
        waited.append(loop.waited)
        if len(waited) > 5:
            assert tape.runs.background is not None
    assert waited[-3:] == [None] * 3
    assert loop.rounds == 8 and len(loop) == 8
    assert not lazyviz.is_lazy(x)
    assert repr(loop).startswith("<lazyviz.steps: 8 iterations")


def test_one_graph_is_kept_with_its_names() -> None:
    seen: list[weakref.ref[Any]] = []
    weight = nn.Parameter(torch.ones(3))
    loop = lazyviz.steps([1, 2, 3, 4])
    for factor in loop:
        total = (weight * factor).sum()
        if loop.graph is not None:
            seen.append(weakref.ref(loop.graph))
    gc.collect()
    assert [reference() for reference in seen] == [None] * 3
    assert loop.graph is not None
    assert [node.name.partition("_")[0] for node in loop.graph.nodes] == ["mul", "sum"]
    assert loop.graph.nodes[1].outputs[0].name == "total"
    assert loop.graph.plan().peak_bytes > 0
    assert total.item() == 12


def test_what_is_left_by_break_stays_pending() -> None:
    x = torch.zeros(3)
    for number in lazyviz.steps(range(9)):
        x = x + number
        if number == 4:
            break
    assert tape.recording.graph is None
    assert (torch.ones(2) + 1).tolist() == [2, 2]
    assert x.tolist() == [10, 10, 10]


def test_an_exception_ends_the_recording() -> None:
    x = torch.zeros(3)
    with pytest.raises(KeyError):
        for number in lazyviz.steps(range(9)):
            x = x + number
            if number == 4:
                raise KeyError
    assert tape.recording.graph is None
    assert x.tolist() == [10, 10, 10]


def test_a_loop_held_in_a_variable_ends_too() -> None:
    loop = lazyviz.steps(range(9))
    for number in loop:
        if number == 2:
            break
    assert tape.recording.graph is None
    assert loop.rounds == 2
    assert list(loop) == list(range(9))


def test_an_iterator_that_is_left_ends_without_the_garbage_collector() -> None:
    def one() -> torch.Tensor:
        iterator = iter(lazyviz.steps(range(9)))
        return torch.ones(2) + next(iterator)

    gc.collect()
    gc.disable()
    try:
        x = one()
        assert tape.recording.graph is None
    finally:
        gc.enable()
    assert x.tolist() == [1, 1]


def test_errors_of_kernels_come_where_the_next_item_is_asked_for() -> None:
    table, at, rounds = torch.rand(5, 3), torch.tensor([1, 4]), 0
    with pytest.raises(IndexError, match="out of bounds"):
        for number in lazyviz.steps(range(9)):
            at = at + (number == 6) * 9
            rounds += 1
            total = (table[at] * 2 + 1).sum()
    assert rounds in (7, 8)
    assert lazyviz.is_lazy(total)
    lazyviz.reset()


def test_errors_of_the_iterable_are_its_own() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("no more")

    x = torch.zeros(2)
    with pytest.raises(OSError, match="no more"):
        for number in lazyviz.steps(items()):
            x = x + number
    assert x.tolist() == [1, 1]


def test_the_iterables_own_work_is_not_recorded() -> None:
    def items() -> Iterator[torch.Tensor]:
        for number in range(3):
            item = torch.full((2,), float(number)) * 2
            assert not lazyviz.is_lazy(item)
            yield item

    loop, seen = lazyviz.steps(items()), []
    for item in loop:
        assert not lazyviz.is_lazy(item)
        seen.append(item + 1)
        assert lazyviz.is_lazy(seen[-1])
    assert [each.tolist() for each in seen] == [[1, 1], [3, 3], [5, 5]]
    with pytest.raises(TypeError, match="len"):
        len(loop)


def test_within_a_block_the_rounds_are_its_own() -> None:
    with lazyviz.lazy() as graph:
        x = torch.zeros(2)
        for number in lazyviz.steps(range(3)):
            x = x + number
    assert len(graph.nodes) == 4
    assert x.tolist() == [3, 3]


def test_a_loop_in_a_loop_belongs_to_its_round() -> None:
    x, outer = torch.zeros(2), lazyviz.steps(range(3))
    for _ in outer:
        for number in lazyviz.steps(range(3)):
            x = x + number
    assert outer.graph is not None and len(outer.graph.nodes) == 3
    assert x.tolist() == [9, 9]


def test_rounds_without_ops_are_none() -> None:
    assert list(lazyviz.steps(range(3))) == [0, 1, 2]
    loop = lazyviz.steps([])
    assert list(loop) == [] and loop.graph is None


def test_a_planned_gpu_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(ValueError, match="not on this machine"):
        for _ in lazyviz.steps(range(3), device="H100-80GB"):
            pass


@compiled
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_records_of_rounds_are_freed_without_the_garbage_collector(dropout: float) -> None:
    layer, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout)), torch.rand(4, 8)
    updates = torch.optim.AdamW(layer.parameters())
    seen: list[weakref.ref[Any]] = []
    gc.collect()
    gc.disable()
    try:
        loop = lazyviz.steps(range(20), always_record=True)
        for _ in loop:
            updates.zero_grad()
            layer(x).sum().backward()
            updates.step()
            if loop.graph is not None:
                seen.append(weakref.ref(loop.graph.ir))
        alive = [number for number, reference in enumerate(seen) if reference() is not None]
    finally:
        gc.enable()
    assert loop.waited is None
    assert len([number for number in alive if number > 5]) <= 4, alive


def test_a_batch_is_made_after_the_iteration_before_it_has_begun_to_run() -> None:
    """The loader's work overlaps with the run, and a synchronous run has no other batch in memory."""
    weight = nn.Parameter(torch.randn(4, 4))
    at_requests: list[int | None] = []

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(3):
            graph = loop.graph
            at_requests.append(None if graph is None else graph.pending)
            yield torch.randn(2, 4)
        at_requests.append(loop.graph.pending)

    loop = lazyviz.steps(batches(), wait=True, always_record=True)
    for x in loop:
        (x @ weight).sum().backward()
    assert at_requests == [None, 0, 0, 0]


def test_a_synchronous_loop_takes_the_memory_of_an_eager_one() -> None:
    layer = nn.Linear(256, 256)
    rows = 4096
    batch = rows * 256 * 4  # bytes

    def train_on_large_batches(around: Callable[[Iterable[Any]], Iterable[Any]]) -> None:
        for x in around(torch.ones(rows, 256) for _ in range(3)):
            layer(x).relu().sum().backward()

    def synchronous(items: Iterable[Any]) -> Iterable[Any]:
        return lazyviz.steps(items, wait=True, always_record=True)

    peaks = []
    for around in (iter, synchronous):
        train_on_large_batches(around)
        peaks.append(allocated_by(partial(train_on_large_batches, around))[0])
    eager, ours = peaks
    assert eager >= 2 * batch
    assert ours - eager < batch // 16
