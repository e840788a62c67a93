"""Reads during ``evaluate(wait=False)`` wait for the ops that they need, and the rest continues to run."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lazyviz
from lazyviz.execute.replay import node_passes
from lazyviz.record.tape import tape
from lazyviz.session.run_strategies.replay import ReplayRun

from .runs_in_flight import SIZE, products, started

pytestmark = pytest.mark.skipif(not node_passes.active, reason="a program of Python's does not run so")


def long(x: torch.Tensor, length: int = 60) -> torch.Tensor:
    """Takes hundreds of milliseconds."""
    return products(x, length)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of ops after which a part of a run was taken."""
    seen: list[int] = []
    take = ReplayRun.finish_first

    def finish_first(self: ReplayRun, count: int) -> None:
        seen.append(count)
        take(self, count)

    monkeypatch.setattr(ReplayRun, "finish_first", finish_first)
    return seen


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    lazyviz.reset()
    assert tape.runs.background is None


def test_a_read_waits_for_what_it_needs_only(parts: list[int]) -> None:
    x = torch.rand(SIZE, SIZE)

    def two() -> tuple[torch.Tensor, torch.Tensor]:
        first = (x * 2).sum()
        return first, long(x)

    (first, last), run, graph = started(two)
    assert first.item() == (x * 2).sum().item()
    assert parts == [2] and not run.done()
    assert graph.pending == len(graph.nodes) - 2
    assert [node.state for node in graph.nodes[:3]] == ["done", "done", "pending"]
    assert not lazyviz.is_lazy(first) and lazyviz.is_lazy(last)
    assert torch.equal(last, long(x))
    report = run.result()
    assert report.ops_run == len(graph.nodes) and graph.pending == 0
    assert all((node.measured_seconds or 0) > 0 for node in graph.nodes)
    assert sum(node.measured_seconds or 0 for node in graph.nodes) == pytest.approx(report.seconds, rel=0.1)


def test_a_part_can_be_taken_again_and_again(parts: list[int]) -> None:
    x = torch.rand(SIZE, SIZE)

    def several() -> list[torch.Tensor]:
        sums = []
        y = x
        for _ in range(6):
            y = long(y, 10)
            sums.append(y.sum())
        return sums

    sums, run, _ = started(several)
    assert [each.item() for each in sums] == [each.item() for each in several()]
    assert len(parts) >= 2
    assert run.result().ops_run == 126


def test_what_a_later_op_writes_is_waited_for(parts: list[int]) -> None:
    x = torch.rand(SIZE, SIZE)

    def written() -> tuple[torch.Tensor, torch.Tensor]:
        early = x * 2
        early[0] = long(x)[0]
        return early, early[:, 0]

    (early, column), run, _ = started(written)
    assert torch.equal(column, written()[1]) and torch.equal(early, written()[0])
    assert run.done() and not parts


@pytest.mark.parametrize("through", ["itself", "a view", "NumPy", "its memory", "a block"])
def test_memory_that_later_ops_read_is_not_written_before(through: str, parts: list[int]) -> None:
    """The user holds a base; the later op reads a view of it that the user does not hold."""
    x = torch.rand(SIZE, SIZE)

    def read_late() -> tuple[torch.Tensor, torch.Tensor]:
        early = x * 2
        hidden = early[3:5]
        return early, long(x) + hidden.sum()

    expected = read_late()[1]
    (early, late), run, _ = started(read_late)
    assert early[0, 0].item() == (x * 2)[0, 0].item()
    assert parts and not run.done()
    if through == "itself":
        early.zero_()
    elif through == "a view":
        early.view(-1)[3 * SIZE : 4 * SIZE] = 0
    elif through == "NumPy":
        early.numpy()[:] = 0
    elif through == "its memory":
        early.untyped_storage().fill_(0)
    else:
        with lazyviz.lazy() as graph:
            early.zero_()
        graph.evaluate()
    assert early[3].sum().item() == 0
    assert torch.equal(late, expected)


def test_an_input_can_be_written_as_soon_as_it_was_read(parts: list[int]) -> None:
    x, y = torch.rand(SIZE, SIZE), torch.rand(SIZE, SIZE)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        return x.sum(), long(y)

    expected = both()
    (first, last), run, _ = started(both)
    x.zero_()
    assert parts == [1] and not run.done()
    assert first.item() == expected[0].item() and torch.equal(last, expected[1])


def test_the_next_step_can_use_a_part(parts: list[int]) -> None:
    x = torch.rand(SIZE, SIZE)

    def two() -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, long(x)

    (first, last), run, _ = started(two)
    with lazyviz.lazy() as graph:
        total, scaled = first.sum(), first * 3
        both = first + last
    assert total.item() == (x * 2).sum().item()
    assert parts and not run.done()
    del first  # which `scaled` and `both` still need
    assert torch.equal(scaled, x * 2 * 3)
    assert not run.done()
    assert graph.evaluate().ops_run == 1
    assert torch.equal(both, x * 2 + long(x))


def test_draws_of_a_part_and_later_ones_are_those_of_eager_pytorch(parts: list[int]) -> None:
    x = torch.rand(SIZE, SIZE)

    def first() -> tuple[torch.Tensor, torch.Tensor]:
        return F.dropout(x, 0.5).sum(), long(x)

    def split() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(3), long(x) + torch.rand(())

    def draw(lazily: bool, of: Callable[[], Any]) -> list[Any]:
        early, late = started(of)[0] if lazily else [of() for _ in range(3)][-1]
        seen = [early.tolist()]
        with lazyviz.lazy() if lazily else torch.enable_grad():
            following = torch.rand(2)
        seen += [following.tolist(), torch.rand(2).tolist(), late.tolist()]
        torch.manual_seed(3)
        return [*seen, torch.rand(2).tolist(), torch.initial_seed()]

    for of in (first, split):
        torch.manual_seed(1)
        eager = draw(False, of)
        torch.manual_seed(1)
        assert draw(True, of) == eager
    assert len(parts) >= 2


def test_an_error_comes_where_its_result_is_read(parts: list[int]) -> None:
    table, at, x = torch.rand(5, 3), torch.tensor([1, 4]), torch.rand(SIZE, SIZE)

    def look_up() -> tuple[torch.Tensor, torch.Tensor]:
        early = (x * 2).sum()
        return early, long(x).sum() + table[at].sum()

    started(look_up)[1].result()
    at[1] = 7
    for waits in (False, True):
        with lazyviz.lazy() as graph:
            early, late = look_up()
        run = graph.evaluate(wait=False)
        assert run.waited is None
        while waits and not run.done():
            pass
        assert early.item() == (x * 2).sum().item()  # whether the kernel has failed already or not
        with pytest.raises(IndexError, match="out of bounds") as raised:
            late.item()
        assert "table[at]" in str(raised.value) or any(
            "table[at]" in note for note in getattr(raised.value, "__notes__", ())
        )
        assert isinstance(run.exception(), IndexError)
        assert [node.name.partition("_")[0] for node in graph.nodes if node.state == "failed"] == ["index"]
        assert early.item() == (x * 2).sum().item()
        lazyviz.reset()


def test_a_part_of_a_run_that_is_cancelled_and_gone_on_with(parts: list[int]) -> None:
    x = torch.rand(SIZE, SIZE)

    def two() -> tuple[torch.Tensor, torch.Tensor]:
        early = x * 2
        hidden = early.clone()
        return early.sum(), long(x) + hidden

    (early, late), run, graph = started(two)
    assert early.item() == (x * 2).sum().item()
    run.cancel()
    with pytest.raises(lazyviz.Interrupted):
        run.result()
    assert 0 < graph.pending < len(graph.nodes)
    assert torch.equal(late, two()[1])
    assert graph.pending == 0


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals")
@pytest.mark.parametrize("raises", [True, False])
def test_an_interrupt_while_a_part_is_waited_for(raises: bool, parts: list[int]) -> None:
    x = torch.rand(SIZE, SIZE)

    def two() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x * 2, long(x, 100).sum(), long(x, 100) + 1

    (early, middle, last), _, _ = started(two)
    seen: list[float] = []

    def handler(number: int, frame: object) -> None:
        seen.append(early[0, 0].item())  # takes a part in the middle of the wait
        if raises:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        if raises:
            with pytest.raises(KeyboardInterrupt):
                middle.item()
            assert tape.pending and tape.runs.background is None
        expected = two()
        assert middle.item() == expected[1].item()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen == [expected[0][0, 0].item()]
    assert torch.equal(last, expected[2])


def test_other_threads_take_parts(parts: list[int]) -> None:
    x = torch.rand(SIZE, SIZE)

    def several() -> list[torch.Tensor]:
        y, sums = x, []
        for _ in range(4):
            y = long(y, 15)
            sums.append(y.sum())
        return sums

    sums, _, _ = started(several)
    read: dict[int, float] = {}

    def look(at: int) -> None:
        read[at] = sums[at].item()

    threads = [threading.Thread(target=look, args=(at,)) for at in (2, 0, 3, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [read[at] for at in range(4)] == [each.item() for each in several()]


def test_a_finalizer_takes_a_part(parts: list[int]) -> None:
    x = torch.rand(SIZE, SIZE)
    seen: list[float] = []

    class Reader:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __del__(self) -> None:
            seen.append(self.tensor.item())

    (early, late), run, _ = started(lambda: ((x * 2).sum(), long(x)))
    Reader(early)  # dropped at once
    assert seen == [(x * 2).sum().item()] and parts and not run.done()
    assert torch.equal(late, long(x))


def test_results_that_change_their_shape_are_waited_for(parts: list[int]) -> None:
    x = torch.rand(SIZE, SIZE)

    def turned() -> tuple[torch.Tensor, torch.Tensor]:
        early, rest = x * 2, long(x, 20)
        rest.transpose_(0, 1)
        return early, rest

    (early, late), run, _ = started(turned)
    assert torch.equal(early, x * 2) and torch.equal(late, turned()[1])
    assert late.stride() == (1, SIZE)
    assert run.result().ops_run == 42


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
def test_a_child_reads_a_part_that_was_taken(parts: list[int]) -> None:
    x = torch.rand(SIZE, SIZE)
    (early, late), run, _ = started(lambda: ((x * 2).sum(), long(x)))
    value = early.item()
    child = os.fork()
    if child == 0:
        os._exit(0 if early.item() == value else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(late, long(x))
    assert run.result().ops_run == 122


def test_the_loss_of_the_step_before_is_read_before_its_step_has_ended(parts: list[int]) -> None:
    """A common loop: record, start, and print the loss of the last step."""

    def train(lazily: bool) -> list[Any]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4096, 10))
        optimizer = torch.optim.AdamW(net.parameters())
        losses: list[float] = []
        before = None
        for _ in range(12):
            x, y = torch.randn(64, 64), torch.randint(10, (64,))
            with lazyviz.lazy() if lazily else torch.enable_grad() as graph:
                optimizer.zero_grad()
                loss = F.cross_entropy(net(x), y)
                loss.backward()
                optimizer.step()
            if lazily:
                graph.evaluate(wait=False)
            losses.append(loss.item())
            before = loss
        assert before is not None
        return [losses, *[tensor.tolist() for tensor in net.state_dict().values()]]

    assert train(True) == train(False)
    assert parts


ACCESSES = ("read", "write", "numpy", "draw", "seed", "drop", "record", "clone")


def random_program(choose: random.Random, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Ops, views, in-place writes and draws."""
    tensors = list(given)
    size = given[0].shape[0]
    ops: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: (t @ t) / size if t.dim() == 2 and t.shape[0] == t.shape[1] else t + 1,
        lambda t: t * 0.5 + 0.25,
        lambda t: t[-1] if t.dim() else t,
        lambda t: t[: size // 2 + 1] if t.dim() else t.clone(),
        lambda t: t.add_(0.5),
        lambda t: t.copy_(torch.tanh(t)),
        lambda t: F.dropout(t, 0.3),
        lambda t: t.sum(),
    ]
    for _ in range(choose.randrange(15, 40)):
        tensors.append(choose.choice(ops)(choose.choice(tensors)))
    return tensors


def accessed(choose: random.Random, tensors: list[torch.Tensor], lazily: bool) -> list[Any]:
    """What a program reads that accesses ``tensors`` in some way."""
    seen: list[Any] = []
    for _ in range(choose.randrange(3, 10)):
        at, how = choose.randrange(len(tensors)), choose.choice(ACCESSES)
        tensor = tensors[at]
        if how == "read":
            seen.append(tensor.sum().item())
        elif how == "write":
            tensor.add_(1.0)
        elif how == "numpy":
            tensor.numpy()[...] = 0.5
        elif how == "draw":
            seen.append(torch.rand(2).tolist())
        elif how == "seed":
            torch.manual_seed(5)
        elif how == "drop" and len(tensors) > 1:
            del tensors[at]
        elif how == "record":
            with lazyviz.lazy() if lazily else torch.enable_grad():
                tensors.append(tensor * 2 + torch.rand(()))
                tensor.mul_(0.5)
        elif how == "clone":
            seen.append(tensor.clone().tolist())
    return [*seen, *[tensor.tolist() for tensor in tensors], torch.rand(3).tolist()]


@pytest.mark.parametrize("seed", range(24))
def test_random_programs_read_what_eager_pytorch_would(seed: int) -> None:
    def rounds(lazily: bool) -> list[Any]:
        choose = random.Random(seed)
        torch.manual_seed(seed)
        seen, state = [], choose.getstate()
        for number in range(4):
            choose.setstate(state)
            given = [torch.rand(120, 120) for _ in range(3)]
            if lazily:
                with lazyviz.lazy() as graph:
                    tensors = random_program(choose, given)
                run = graph.evaluate(wait=False)
            else:
                tensors = random_program(choose, given)
            if number >= 2:
                seen.append(accessed(random.Random(seed + number), tensors, lazily))
            if lazily:
                run.result()
        return seen

    assert rounds(True) == rounds(False)
