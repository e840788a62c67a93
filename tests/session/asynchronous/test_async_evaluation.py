"""``evaluate(wait=False)``: kernels run on another thread, and all reads see eager PyTorch's values."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lazyviz
from lazyviz.execute.replay import node_passes
from lazyviz.record.tape import tape

from . import runs_in_flight
from .runs_in_flight import SIZE, products

pytestmark = pytest.mark.skipif(not node_passes.active, reason="a program of Python's does not run so")


def chain(x: torch.Tensor, length: int = 12) -> torch.Tensor:
    """Takes tens of milliseconds."""
    return products(x, length)


def started(function: Callable[[], Any]) -> tuple[Any, lazyviz.Run]:
    """What ``function`` returns, recorded, and its evaluation, which is not waited for."""
    return runs_in_flight.started(function)[:2]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
    "batch norm": lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(9, 4)
    ),
    "dropout": lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 4)),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)),
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True),
        nn.Flatten(),
    ),
    "layer norm": lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def train(model: str, optimizer: str, around: Callable[[Callable[[], Any]], Any]) -> list[Any]:
    torch.manual_seed(0)
    net = MODELS[model]()
    updates = OPTIMIZERS[optimizer](net.parameters())
    batches = [(torch.randn(6, 8), torch.randint(4, (6,))) for _ in range(12)]
    seen: list[Any] = []

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        updates.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        updates.step()
        return loss

    losses = []
    for number, (x, y) in enumerate(batches):
        losses.append(around(lambda x=x, y=y: step(x, y)))
        if number % 5 == 4:
            seen.append(losses[-1].item())
    seen += [loss.tolist() for loss in losses]
    return seen + [tensor.tolist() for tensor in net.state_dict().values()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_steps_are_those_of_eager_pytorch(model: str, optimizer: str) -> None:
    waited: list[str | None] = []

    def lazily(step: Callable[[], Any]) -> Any:
        with lazyviz.lazy() as graph:
            result = step()
        waited.append(graph.evaluate(wait=False).waited)
        return result

    assert train(model, optimizer, lazily) == train(model, optimizer, lambda step: step())
    assert waited[0] is not None and waited[-4:] == [None] * 4
    assert not tape.pending and tape.runs.background is None


def test_a_read_waits_for_it_and_others_do_not() -> None:
    x = torch.rand(SIZE, SIZE)
    y, run = started(lambda: chain(x))
    assert not run.done()
    with lazyviz.lazy():
        other = torch.ones(3) + 1
    assert other.tolist() == [2, 2, 2]
    assert lazyviz.is_lazy(y)  # nobody has asked for it
    assert torch.equal(y, chain(x))
    assert run.done() and run.result().ops_run == 24
    assert run.result().seconds > 0


def test_what_it_reads_can_be_written_at_once() -> None:
    x = torch.rand(SIZE, SIZE)
    expected = chain(x.clone())
    y, _ = started(lambda: chain(x))
    x.zero_()
    assert torch.equal(y, expected)


def test_memory_that_others_share_with_it_is_waited_for() -> None:
    x = torch.rand(SIZE, SIZE)
    expected = chain(x.clone())
    y, _ = started(lambda: chain(x))
    x.numpy()[:] = 0
    assert torch.equal(y, expected)


def test_the_next_step_is_recorded_on_results_that_are_not_there_yet() -> None:
    x = torch.rand(SIZE, SIZE)

    def two() -> tuple[torch.Tensor, torch.Tensor]:
        y = chain(x)
        return y, y.sum()

    (y, total), run = started(two)
    with lazyviz.lazy() as graph:
        z = y + total
        w = y * 2
    del y, total  # which the next step needs alone now
    graph.evaluate(w)
    assert run.done()
    eager = two()
    assert torch.equal(z, eager[0] + eager[1])
    assert torch.equal(w, eager[0] * 2)


def test_a_rebound_parameter_gets_its_result() -> None:
    x, p = torch.rand(SIZE, SIZE), nn.Parameter(torch.zeros(SIZE, SIZE))
    y, _ = started(lambda: chain(x))
    with lazyviz.lazy():
        p.data = y
    assert torch.equal(p, chain(x))


def test_what_a_kernel_raises_comes_where_its_result_is_read() -> None:
    table, at, x = torch.rand(5, 3), torch.tensor([1, 4]), torch.rand(SIZE, SIZE)

    def look_up() -> torch.Tensor:
        return chain(x).sum() + table[at].sum()

    y, run = started(look_up)
    assert y.item() == look_up().item()
    at[1] = 7
    with lazyviz.lazy() as graph:
        y = look_up()
    run = graph.evaluate(wait=False)
    assert run.waited is None
    with pytest.raises(IndexError, match="out of bounds"):
        y.item()
    with pytest.raises(IndexError, match="out of bounds"):
        run.result()
    assert isinstance(run.exception(), IndexError)
    assert [node.name.partition("_")[0] for node in graph.nodes if node.state == "failed"] == ["index"]
    lazyviz.reset()
    assert at.tolist() == [1, 7]


def test_the_next_evaluation_raises_what_has_stopped_it() -> None:
    table, at, x = torch.rand(5, 3), torch.tensor([1, 4]), torch.rand(2)
    started(lambda: table[at].sum())
    at[1] = 7
    with lazyviz.lazy() as graph:
        first = table[at].sum()
    run = graph.evaluate(wait=False)
    with lazyviz.lazy() as graph:
        second = x + 1
    with pytest.raises(IndexError):
        graph.evaluate(wait=False)
    assert isinstance(run.exception(), IndexError)
    assert second.tolist() == (x + 1).tolist()
    assert lazyviz.is_lazy(first)
    lazyviz.reset()


def test_it_can_be_cancelled_and_gone_on_with() -> None:
    x = torch.rand(SIZE, SIZE)
    y, run = started(lambda: chain(x, 60))
    with pytest.raises(TimeoutError):
        run.result(timeout=0.001)
    run.cancel()
    with pytest.raises(lazyviz.Interrupted):
        run.result()
    left = len(tape.pending)
    assert 0 < left <= 120  # none has ended yet, on a busy machine
    assert torch.equal(y, chain(x, 60))


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals")
def test_an_interrupt_ends_the_wait_between_two_ops() -> None:
    x = torch.rand(SIZE, SIZE)
    y, run = started(lambda: chain(x, 200))
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        run.result()
    assert tape.pending
    assert torch.equal(y, chain(x, 200))


def test_reset_waits_for_what_has_begun() -> None:
    x, y = torch.rand(SIZE, SIZE), torch.zeros(SIZE, SIZE)
    _, _ = started(lambda: y.copy_(chain(x)))
    lazyviz.reset()
    assert tape.runs.background is None
    assert torch.equal(y, chain(x))


def test_another_thread_may_read_it() -> None:
    x = torch.rand(SIZE, SIZE)
    y, _ = started(lambda: chain(x))
    read: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: read.append(y + 0)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(read) == 4 and all(torch.equal(each, chain(x)) for each in read)


def test_warnings_of_kernels_come_when_it_is_waited_for() -> None:
    x, out = torch.rand(SIZE, SIZE), torch.empty(0)

    def resized() -> torch.Tensor:
        return torch.add(chain(x, 2), 1, out=out.new_empty(3))

    eager = _warnings_of(resized)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y, run = started(resized)
    assert _warnings_of(run.result) == eager != []
    assert torch.equal(y, torch.add(chain(x, 2), 1))


def _warnings_of(function: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        function()
    return [str(each.message).partition("(")[0] for each in seen]


def test_nothing_is_kept_once_it_was_waited_for() -> None:
    inputs = [torch.rand(SIZE, SIZE)]
    y, run = started(lambda: chain(inputs[0]))
    reference = weakref.ref(inputs[0])
    run.result()
    inputs.clear()
    gc.collect()
    assert reference() is None
    assert y.shape == (SIZE, SIZE)


def test_a_graph_that_is_dropped_meanwhile_is_finished() -> None:
    x = torch.rand(SIZE, SIZE)
    y, run = started(lambda: chain(x))
    del run
    gc.collect()
    assert torch.equal(y, chain(x))


def test_threads_and_denormals_are_the_callers() -> None:
    tiny, x = torch.full((3,), 1e-40), torch.rand(SIZE, SIZE)
    y, run = started(lambda: (chain(x), tiny * 1))
    run.result()
    assert y[1].tolist() == (tiny * 1).tolist() != [0, 0, 0]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormal numbers")
    try:
        y, run = started(lambda: (chain(x), tiny * 1))
        run.result()
        assert y[1].tolist() == [0, 0, 0]
    finally:
        torch.set_flush_denormal(False)


def test_what_cannot_run_so_says_why() -> None:
    with lazyviz.lazy() as graph:
        x = torch.rand(3, 29) + 1  # a program that no other test has run
    run = graph.evaluate(wait=False)
    assert run.waited is not None and run.done() and run.result().ops_run == 2
    for _ in range(4):  # so few ops are recognized when they come again
        with lazyviz.lazy() as graph:
            y = torch.ops.aten.native_dropout(x, 0.5, True)[0]  # takes no generator
        run = graph.evaluate(wait=False)
    assert "user's generator" in str(run.waited)
    assert not lazyviz.is_lazy(y)
    assert graph.evaluate(wait=False).waited == "nothing was pending"
    for options, why in (
        ({"summaries": True}, "summarized"),
        ({"split": 2}, "pieces"),
        ({"backend": "inductor"}, "inductor"),
    ):
        x = torch.rand(4, 3)
        with lazyviz.lazy(batch=[x]) as graph:
            y = x * 2 + 1
        assert why in str(graph.evaluate(wait=False, **options).waited)
        assert torch.equal(y, x * 2 + 1)


DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(3),
    "randn": lambda: torch.randn(3, dtype=torch.double),
    "randint": lambda: torch.randint(9, (3,)),
    "randint from": lambda: torch.randint(4, 9, (3,)),
    "randperm": lambda: torch.randperm(9),
    "rand_like": lambda: torch.rand_like(torch.ones(3)),
    "randint_like": lambda: torch.randint_like(torch.ones(3), 2, 9),
    "normal": lambda: torch.normal(torch.zeros(3), 2.0),
    "bernoulli": lambda: torch.bernoulli(torch.full((9,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(9), 3),
    "a generator of the user's": lambda: torch.rand(3, generator=GENERATOR),
}
GENERATOR = torch.Generator()


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_those_of_eager_pytorch(name: str) -> None:
    def draw(lazily: bool) -> list[Any]:
        torch.manual_seed(1)
        GENERATOR.manual_seed(2)
        seen, waited = [], []
        for _ in range(6):
            if not lazily:
                seen.append(DRAWS[name]() * 2 + DRAWS[name]())
                continue
            with lazyviz.lazy() as graph:
                seen.append(DRAWS[name]() * 2 + DRAWS[name]())
            waited.append(graph.evaluate(wait=False).waited)
        assert not lazily or waited[-1] is None
        after = [torch.rand(2), torch.rand(2, generator=GENERATOR)]
        return [tensor.tolist() for tensor in (*seen, *after)]

    assert draw(True) == draw(False)


ENDS = {
    "exits": "",
    "exits by an error": "raise SystemExit(3)",
    "forks": "import os\nif os.fork() == 0:\n    torch.ones(2).sum().item()\n    os._exit(0)\nos.wait()",
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.slow
def test_the_process_ends_while_it_runs(end: str) -> None:
    code = """
        import torch, lazyviz
        x = torch.rand(700, 700)
        for _ in range(3):
            with lazyviz.lazy() as graph:
                y = x
                for _ in range(20):
                    y = (y @ x) / 700
            run = graph.evaluate(wait=False)
        assert run.waited is None and not run.done()
    """
    program = textwrap.dedent(code) + ENDS[end]
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ran.returncode == (3 if "SystemExit" in ENDS[end] else 0), ran.stderr
    assert ran.stderr == ""
