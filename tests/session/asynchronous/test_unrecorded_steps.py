"""Iterations of ``lazyviz.steps`` whose program is known run in eager mode, and are compared with it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.execute import backend_registry
from lazyviz.execute.replay import node_passes
from lazyviz.plan.plan import Plan
from lazyviz.record.tape import tape
from lazyviz.session import evaluation
from lazyviz.session.asynchronous.unrecorded_steps import IN_A_ROW, RECORDED, SHAPES_EVERY, programs
from lazyviz.torch_internals import op_stream

from .test_steps import train

pytestmark = pytest.mark.skipif(not node_passes.active, reason="Python alone records each iteration")


@pytest.fixture(autouse=True)
def plain_afterwards() -> Iterator[None]:
    programs.clear()
    yield
    assert not tape.pending and tape.recording.graph is None and not op_stream.observed_thread()
    assert lazyviz.doctor().ok


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("batch", [6, 5])  # 5: the last batch of an epoch is smaller
@pytest.mark.parametrize("read", [False, True])
def test_a_loop_trains_as_eager_pytorch_does(read: bool, batch: int, wait: bool) -> None:
    options: dict[str, Any] = {"read": read, "dropout": 0.2, "batch": batch, "epochs": 4}
    eager = train(lambda loader: loader, **options)
    loops: list[lazyviz.steps[Any]] = []

    def steps(loader: Iterable[Any]) -> lazyviz.steps[Any]:
        loops.append(lazyviz.steps(loader, wait=wait))
        return loops[-1]

    assert train(steps, **options) == eager
    assert [loop.rounds for loop in loops] == [-(-48 // batch)] * 4
    assert loops[1].unrecorded >= 8 - IN_A_ROW - 1
    assert loops[3].unrecorded == loops[3].rounds - 1


def doubled(loop: lazyviz.steps[int], change: Callable[[int, torch.Tensor], torch.Tensor]) -> list[float]:
    """A loop with the same ops in each iteration, but for what ``change`` does."""
    x, seen = torch.arange(6.0), []
    for number in loop:
        y = change(number, x) * 2
        seen.append((y + 1).sum())
    return [value.item() for value in seen]


def test_the_iteration_after_one_with_other_ops_is_recorded() -> None:
    def change(number: int, x: torch.Tensor) -> torch.Tensor:
        return x.exp() if number == 20 else x

    loop = lazyviz.steps(range(40))
    seen = doubled(loop, change)
    assert seen == doubled(range(40), change)  # type: ignore[arg-type]
    # 8 are recorded at first, then 21 and 22
    assert loop.unrecorded == 40 - RECORDED - IN_A_ROW
    assert loop.graph is not None and len(loop.graph.nodes) == 3


def test_only_iterations_beside_a_recorded_one_run_on_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    evaluate = lazyviz.LazyGraph.evaluate

    def noted(graph: lazyviz.LazyGraph, *args: Any, wait: bool = True, **options: Any) -> Any:
        waits.append(wait)
        return evaluate(graph, *args, wait=wait, **options)

    monkeypatch.setattr(lazyviz.LazyGraph, "evaluate", noted)
    loop = lazyviz.steps(range(RECORDED + 4))
    doubled(loop, lambda _, x: x)
    assert waits == [False] * (RECORDED - 1) + [True]
    assert loop.unrecorded == 4 and loop.waited is None


def test_a_read_now_and_then_is_no_other_program() -> None:
    loop, x, seen = lazyviz.steps(range(40)), torch.ones(3), []
    for number in loop:
        x = x * 1.5 - 0.5
        total, positive = x.sum(), x[1] > 0
        if number % 3 == 0:
            seen.append((total.item(), bool(positive)))
    assert seen == [(3.0, True)] * 14
    assert loop.unrecorded == 40 - RECORDED


def test_other_shapes_are_noticed() -> None:
    def change(number: int, x: torch.Tensor) -> torch.Tensor:
        return x[:3] if number >= 20 else x[:6]

    loop = lazyviz.steps(range(60))
    assert doubled(loop, change) == doubled(range(60), change)  # type: ignore[arg-type]
    assert loop.graph is not None and loop.graph.nodes[-2].outputs[0].shape == (3,)
    assert 60 - 2 * RECORDED - SHAPES_EVERY <= loop.unrecorded <= 60 - 2 * RECORDED


def test_another_dtype_is_noticed() -> None:
    def change(number: int, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float64 if number >= 20 else torch.float16)

    loop = lazyviz.steps(range(60))
    assert doubled(loop, change) == doubled(range(60), change)  # type: ignore[arg-type]
    assert loop.graph is not None and loop.graph.nodes[-1].outputs[0].dtype == torch.float64


def test_the_graph_is_the_last_recorded_one_with_names() -> None:
    weight = nn.Parameter(torch.ones(3))
    loop = lazyviz.steps(range(20))
    for factor in loop:
        total = (weight * factor).sum()
        if loop.unrecorded:
            assert not lazyviz.is_lazy(total)
            assert evaluation.latest is not None and evaluation.latest() is loop.graph
            assert lazyviz.doctor().ok
    assert loop.unrecorded == 20 - RECORDED
    assert loop.graph is not None and loop.graph.nodes[1].outputs[0].name == "total"
    assert loop.graph.report is not None and "1 ops" not in repr(loop)
    assert f"({loop.unrecorded} of them in eager mode)" in repr(loop)


MASK = nn.Transformer.generate_square_subsequent_mask(5)
LOOPS: dict[str, tuple[Callable[[], Any], Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    "gru": (lambda: nn.GRU(8, 6, 2, batch_first=True, dropout=0.1), lambda net, x: net(x)[0]),
    "index": (lambda: nn.Linear(8, 8), lambda net, x: net(x)[:, torch.tensor([1, 0, 1])]),
    "attention": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        lambda net, x: net(x, src_mask=MASK),
    ),
}


@pytest.mark.parametrize("model", LOOPS)
def test_programs_whose_calls_differ_a_little_without_a_mode_are_known(model: str) -> None:
    def losses(around: Callable[[Iterable[int]], Iterable[int]]) -> list[float]:
        torch.manual_seed(0)
        make, output = LOOPS[model]
        net = make()
        x, seen = torch.randn(2, 5, 8), []
        updates = torch.optim.SGD(net.parameters(), 0.1)
        for _ in around(range(20)):
            updates.zero_grad()
            loss = output(net, x).square().mean()
            loss.backward()
            updates.step()
            seen.append(loss.detach())
        return [loss.item() for loss in seen]

    loop = lazyviz.steps(range(20))
    assert losses(lambda _: loop) == losses(lambda rounds: rounds)
    assert loop.unrecorded >= 20 - RECORDED - 1


def test_each_iteration_is_recorded_if_asked_for() -> None:
    loop = lazyviz.steps(range(20), always_record=True)
    doubled(loop, lambda number, x: x)
    assert loop.unrecorded == 0


def test_other_backends_record_each_iteration() -> None:
    class Backend:
        def compile(self, segment: Any, inputs: Any) -> Any:
            return lambda x: [y := x * 2, (y + 1).sum()]

    lazyviz.register_backend("one program", Backend())
    try:
        loop = lazyviz.steps(range(16), backend="one program")
        doubled(loop, lambda number, x: x)
    finally:
        del backend_registry._backends["one program"]
    assert loop.unrecorded == 0


def test_what_eager_pytorch_has_no_memory_for_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "eager_fits", property(lambda plan: False))
    loop = lazyviz.steps(range(16))
    doubled(loop, lambda number, x: x)
    assert loop.unrecorded == 0


def test_forbidden_reads_stay_forbidden() -> None:
    x = torch.ones(3)
    with pytest.raises(lazyviz.SyncError, match="item"):
        for number in lazyviz.steps(range(30)):
            with lazyviz.forbid_sync():
                total = (x * 2).sum()
                if number == 20:
                    total.item()
    assert number == 20
    lazyviz.sync()
    assert total.item() == 6


def test_a_loop_left_early_leaves_nothing_pending() -> None:
    x = torch.zeros(3)
    for number in lazyviz.steps(range(30)):
        x = x + 1
        if number == 20:
            break
    assert not lazyviz.is_lazy(x) and not op_stream.observed_thread()
    assert x.tolist() == [21] * 3


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, GeneratorExit])
def test_an_exception_ends_the_observation(error: type[BaseException]) -> None:
    x = torch.zeros(3)
    with pytest.raises(error):
        for number in lazyviz.steps(range(30)):
            x = x + 1
            if number == 20:
                raise error
    assert x.tolist() == [21] * 3


def test_errors_of_kernels_come_at_their_line() -> None:
    table, rounds = torch.rand(5, 3), 0
    with pytest.raises(IndexError, match="out of bounds"):
        for number in lazyviz.steps(range(30)):
            rounds += 1
            total = (table[torch.tensor([1, 9 if number == 20 else 4])] * 2).sum()
    assert rounds == 21 and not lazyviz.is_lazy(total)


def test_the_loaders_ops_are_not_compared() -> None:
    def items() -> Iterator[torch.Tensor]:
        for number in range(30):
            item = torch.zeros(3)
            for _ in range(number % 4):
                item = item.exp().log()
            yield item

    loop = lazyviz.steps(items())
    total = torch.zeros(3)
    for item in loop:
        total = total + item
    assert loop.unrecorded == 30 - RECORDED


def test_a_loop_in_an_iteration_belongs_to_it() -> None:
    x, loop = torch.zeros(2), lazyviz.steps(range(20))
    for _ in loop:
        for number in lazyviz.steps(range(3)):
            x = x + number
    assert loop.graph is not None and len(loop.graph.nodes) == 3
    assert loop.unrecorded == 20 - RECORDED
    assert x.tolist() == [60, 60]


def test_a_block_in_an_iteration_is_recorded() -> None:
    x, lengths = torch.ones(2), set()
    for _ in lazyviz.steps(range(20)):
        x = x * 1
        with lazyviz.lazy() as graph:
            y = x + 1
            assert lazyviz.is_lazy(y)
        lengths.add(len(graph.nodes))
        assert y.tolist() == [2, 2]
    assert lengths == {1}


def test_another_thread_cannot_record_meanwhile() -> None:
    found: list[BaseException] = []

    def record() -> None:
        try:
            with lazyviz.lazy():
                torch.ones(2)
        except RuntimeError as error:
            found.append(error)

    loop, x = lazyviz.steps(range(20)), torch.ones(2)
    for number in loop:
        x = x * 1
        if number == 15:
            assert loop.unrecorded
            thread = threading.Thread(target=record)
            thread.start()
            thread.join()
    assert ["another thread is recording" in str(error) for error in found] == [True]


def test_a_reset_in_an_iteration_ends_the_recording() -> None:
    x, loop = torch.zeros(2), lazyviz.steps(range(30))
    for number in loop:
        x = x + 1
        if number == 20:
            lazyviz.reset()
            assert lazyviz.doctor().ok
        if number > 20:
            x = x + 0
            assert not lazyviz.is_lazy(x)
    assert x.tolist() == [30, 30]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_is_plain() -> None:
    x, loop = torch.zeros(2), lazyviz.steps(range(20))
    for number in loop:
        x = x + 1
        if number == 15:
            child = os.fork()
            if not child:
                status = 1
                with contextlib.suppress(BaseException):
                    status = int(op_stream.observed_thread() or (x + 1).tolist() != [17, 17])
                os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
    assert loop.unrecorded == 20 - RECORDED


def test_pending_ops_of_earlier_cells_let_each_iteration_be_recorded() -> None:
    with lazyviz.lazy():
        earlier = torch.ones(2) * 3
    loop = lazyviz.steps(range(20))
    doubled(loop, lambda number, x: x)
    assert loop.unrecorded == 0
    assert lazyviz.is_lazy(earlier) and earlier.tolist() == [3, 3]


def test_an_iteration_that_cannot_be_observed_is_followed_by_a_recorded_one() -> None:
    loop, x, lazy = lazyviz.steps(range(20)), torch.ones(2), []
    for number in loop:
        if number == 14:
            assert op_stream.end() is not None
            assert op_stream.observe()  # as another thread might
        x = x * 1
        lazy.append(lazyviz.is_lazy(x))
        if number == 15:
            assert op_stream.end() is not None
    assert lazy[:RECORDED] == [True] * RECORDED and not any(lazy[RECORDED:15])
    assert loop.unrecorded < 20 - RECORDED


# --- streams of calls ---------------------------------------------------------------------


def observed(program: Callable[[], Any], expected: op_stream.Stream | None = None) -> Any:
    op_stream.observe(expected)
    try:
        program()
    finally:
        seen = op_stream.end()
    return seen


def test_a_stream_has_the_calls_of_backward_passes_and_of_ops_in_ops() -> None:
    x = torch.ones(3, requires_grad=True)
    layer = nn.Linear(3, 2)
    names = op_stream.names(observed(lambda: layer(x).relu().sum().backward()))
    assert [name for name in names if name in ("aten::linear", "aten::t", "aten::relu", "aten::sum")]
    assert "aten::threshold_backward" in names and names.index("aten::linear") < names.index("aten::relu")


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        (lambda: torch.ones(3) + 1, lambda: torch.zeros(3) + 1, False),
        (lambda: torch.ones(3) + 1, lambda: torch.ones(3) + 2, True),
        (lambda: torch.ones(3) + 1, lambda: torch.ones(4) + 1, False),
        (lambda: torch.ones(3) + 1, lambda: torch.ones(3, 1) + 1, False),
        (lambda: torch.ones(3) + 1, lambda: torch.ones(3, dtype=torch.half) + 1, False),
        (lambda: torch.ones(3) + 1, lambda: torch.ones(3), False),
        (lambda: torch.ones(1) + 1, lambda: (torch.ones(1) + 1).item(), True),
        (lambda: torch.ones(3), lambda: torch.ones(3) + 1, False),
        (
            lambda: torch.cat([torch.ones(2), torch.ones(3)]),
            lambda: torch.cat([torch.ones(3), torch.ones(2)]),
            False,
        ),
        (
            lambda: torch.eye(3).to_sparse() @ torch.ones(3, 1),
            lambda: torch.eye(3).to_sparse() @ torch.ones(3, 1),
            True,
        ),
        (lambda: torch.ones(3).to("meta") * 2, lambda: torch.ones(3).to("meta") * 2, True),
    ],
)
def test_streams_differ_by_names_shapes_and_dtypes(
    first: Callable[[], Any], second: Callable[[], Any], equal: bool
) -> None:
    first()  # what PyTorch calls only once
    stream = observed(first)
    assert observed(first, stream) is True
    assert observed(second, stream) is equal


def test_nothing_is_observed_twice_or_after_the_end() -> None:
    assert op_stream.observe()
    try:
        assert not op_stream.observe()
    finally:
        assert op_stream.end() is not None
    assert op_stream.end() is None
    with pytest.raises(ValueError, match="PyCapsule"):
        op_stream.observe(object())  # type: ignore[arg-type]
    op_stream.end()


class Sized(torch.Tensor):
    """A subclass whose sizes are computed by Python code, which calls operators itself."""

    asked = 0

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Sized:
        made: Sized = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, dispatch_sizes_strides_policy="sizes"
        )
        return made

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.sym_size, torch.ops.aten.sym_stride, torch.ops.aten.dim):
            cls.asked += 1
            torch.ones(2) + 1
        given = [value.inner if isinstance(value, Sized) else value for value in args]
        return func(*given, **(kwargs or {}))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_code_of_a_subclass_is_not_called_by_the_observation() -> None:
    given = Sized(torch.ones(3))

    def asked() -> int:
        Sized.asked = 0
        torch.mul(given, 2)
        return Sized.asked

    def waits_for_itself() -> None:
        expected = asked()
        stream = observed(asked)
        assert observed(asked, stream) is True and Sized.asked == expected

    assert exits_of(waits_for_itself) == 0


def exits_of(program: Callable[[], None], seconds: int = 120) -> int:
    """How a child process ends that calls ``program``: 0, or else by an error or because it hangs."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        status = 1
        with contextlib.suppress(BaseException):
            program()
            status = 0
        os._exit(status)
    return os.waitpid(child, 0)[1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.slow
def test_another_thread_can_fork_during_any_call() -> None:
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.extend(exits_of(lambda: None) for _ in range(60)))
    model, x, loop = (
        nn.Sequential(*[nn.Linear(4, 4) for _ in range(30)]),
        torch.ones(2, 4),
        lazyviz.steps([0] * 10**6),
    )
    for _ in loop:
        model(x).sum().backward()
        if loop.unrecorded == 1:
            thread.start()
        if loop.unrecorded > 1 and not thread.is_alive():
            break
    assert statuses == [0] * 60


def test_an_observation_that_ends_on_another_thread_is_over(capfd: pytest.CaptureFixture[str]) -> None:
    stream = observed(lambda: torch.ones(2) + 1)
    assert op_stream.observe() and op_stream.observed_thread() == threading.get_ident()
    thread = threading.Thread(target=op_stream.end)
    thread.start()
    thread.join()
    assert not op_stream.observed_thread()
    assert observed(lambda: torch.ones(2) + 1, stream) is True  # each call is seen once
    assert capfd.readouterr().err == ""  # PyTorch warns of a callback that is not there
