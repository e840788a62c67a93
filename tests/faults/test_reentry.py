"""Code that is called during a run and evaluates something leaves that run intact."""

from __future__ import annotations

import contextlib
import copy
import gc
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lazyviz
from lazyviz.record import intercept_ops_outside_blocks, native_recorder, random_draw_order, recorder
from lazyviz.record.interception import register_optimizer_step_hooks

from ..bit_equality import difference
from .support.inject_faults import call_at, is_plain, points, sampled
from .support.interrupted_training_steps import Step

UNDER_WAY = "an evaluation is in progress"


def recorded():
    x = torch.zeros(3)
    with lazyviz.lazy() as graph:
        for _ in range(20):
            x.add_(1)
        y = x * 2
    return x, y, graph


def asks(x, y, graph):
    """All the ways to ask for something that is pending."""
    return {
        "the graph": graph.evaluate,
        "everything": lazyviz.evaluate,
        "one tensor": lambda: lazyviz.evaluate(y),
        "to_eager": lambda: lazyviz.to_eager(y),
        "item": lambda: y[0].item(),
        "tolist": x.tolist,
        "format": lambda: f"{y[0]:.2f}",
        "an op": lambda: torch.add(y, 1).sum().item(),
        "a pending write": lambda: x.add_(1),
        "reset": lazyviz.reset,
        "a block": lambda: lazyviz.lazy().__enter__(),
    }


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    "ask",
    [
        *("the graph", "everything", "one tensor", "to_eager", "item", "tolist", "format", "an op"),
        *("a pending write", "reset", "a block"),
    ],
)
def test_a_progress_callback_that_asks_gets_one_error_and_the_run_goes_on(ask, known):
    for round in range(1 + known):
        x, y, graph = recorded()
        if round < known:
            graph.evaluate()
    errors = []

    def progress(now):
        if now.done == 5:
            try:
                asks(x, y, graph)[ask]()
            except RuntimeError as error:
                errors.append(str(error))

    report = graph.evaluate(progress=progress)
    assert report.ops_run == 21 and graph.state == "done"
    assert len(errors) == 1 and UNDER_WAY in errors[0]
    assert x.tolist() == [20, 20, 20] and y.tolist() == [40, 40, 40]


def test_what_has_run_can_be_read_in_a_callback():
    x = torch.arange(4.0)
    with lazyviz.lazy() as graph:
        y = x + 1
        z = (y * 2).sum()
    read = []
    graph.evaluate(progress=lambda now: read.append(y.tolist()) if now.done == 1 else None)
    assert read == [[1, 2, 3, 4]]
    assert z.item() == 20


def test_a_callback_that_does_not_catch_the_error_stops_the_run_which_can_be_resumed():
    x, y, graph = recorded()
    with pytest.raises(RuntimeError, match=UNDER_WAY):
        graph.evaluate(progress=lambda now: y.tolist() if now.done == 5 else None)
    assert graph.pending == 16 and graph.state == "interrupted"
    assert x.tolist() == [20, 20, 20] and y.tolist() == [40, 40, 40]


def test_a_signal_handler_that_asks():
    x, y, graph = recorded()
    errors = []

    def handler(number, frame):
        try:
            y.tolist()
        except RuntimeError as error:
            errors.append(str(error))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        graph.evaluate(
            progress=lambda now: signal.raise_signal(signal.SIGUSR1) if now.done in (3, 21) else None
        )
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(errors) == 1 and UNDER_WAY in errors[0]  # the second came when all had run
    assert x.tolist() == [20, 20, 20] and y.tolist() == [40, 40, 40]


def test_a_finalizer_that_asks(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda given: reported.append(str(given.exc_value)))
    x, y, graph = recorded()

    class Held:
        def __del__(self):
            y.tolist()

    def progress(now):
        if now.done == 5:
            held = Held()
            held.itself = held
            del held
            gc.collect()

    graph.evaluate(progress=progress)
    assert len(reported) == 1 and UNDER_WAY in reported[0]
    assert x.tolist() == [20, 20, 20] and y.tolist() == [40, 40, 40]


def test_a_listener_may_go_on_once_the_run_has_ended_and_not_before(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda given: reported.append(str(given.exc_value)))
    x, y, graph = recorded()
    with lazyviz.lazy() as other:
        z = x + 1
    seen = []
    graph.subscribe(lambda: seen.append((graph.state, z.tolist())))
    graph.evaluate()
    assert seen == [("done", [21, 21, 21])]
    assert len(reported) == 1 and UNDER_WAY in reported[0]
    assert other.pending == 0 and y.tolist() == [40, 40, 40]


def test_another_thread_that_asks_waits_for_the_run():
    x, y, graph = recorded()
    got, threads = [], []

    def progress(now):
        if now.done == 5:
            threads.append(threading.Thread(target=lambda: got.append((y.tolist(), x.sum().item()))))
            threads[0].start()
            threads[0].join(0.05)
            assert not got

    graph.evaluate(progress=progress)
    threads[0].join(30)
    assert got == [([40, 40, 40], 60)]


@contextlib.contextmanager
def recorded_natively(natively: bool) -> Iterator[None]:
    used = native_recorder.use(natively)
    try:
        if used != natively:
            pytest.skip("the native modules are not built")
        yield
    finally:
        native_recorder.use(True)


class InBlock:
    """A training step in a block, for a handler of a signal that arrives in its midst."""

    def __init__(self) -> None:
        self.step = Step("perceptron, one layer")
        begun = self.step.begin()
        self.expected = self.step.left(*begun, self.step.take(*begun))
        self.ask = "nothing"

    def handle(self) -> None:
        model, parameter = self.model, next(self.model.parameters())
        {
            "nothing": lambda: None,
            "everything": lazyviz.sync,
            "the graph": self.graph.evaluate,
            "one tensor": lambda: lazyviz.evaluate(parameter),
            "buffers": lambda: [buffer.tolist() for buffer in model.buffers()],
            "item": lambda: self.earlier.sum().item(),
            "print": lambda: repr(parameter),
            "numpy": lambda: parameter.detach().numpy(),
            "deepcopy": lambda: copy.deepcopy(model),
            "a block": self.inner_block,
        }[self.ask]()

    def inner_block(self) -> None:
        with lazyviz.lazy():
            self.earlier = self.earlier * 2

    def run(self) -> Any:
        self.model, optimizer = self.step.begin()
        with lazyviz.lazy() as self.graph:
            self.earlier = torch.ones(2) + 1
            loss = call_at(lambda: self.step.take(self.model, optimizer), self.at, self.handle)
        return self.step.left(self.model, optimizer, loss)

    def check(self, at: int) -> None:
        self.at = at
        left = self.run()
        found = {name: difference(value, left[name]) for name, value in self.expected.items()}
        assert not any(found.values()), found


@pytest.mark.parametrize("natively", [True, False])
@pytest.mark.parametrize(
    "ask",
    [
        *("everything", "the graph", "one tensor", "buffers", "item", "print", "numpy", "deepcopy"),
        "a block",
    ],
)
@pytest.mark.slow
def test_a_handler_asks_while_an_op_is_recorded(ask, natively):
    with recorded_natively(natively):
        program = InBlock()
        program.at = -1
        count = points(program.run)
        program.ask = ask
        for at in sampled(count, 40, seed=len(ask)):
            program.check(at)


@contextlib.contextmanager
def handler_of_a_signal(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda number, frame: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def draws(generator):
    """Random numbers, and then ops that draw none."""
    x = torch.zeros(3)
    made = [x.add_(torch.rand(3, generator=generator)) * 2 for _ in range(5)]
    for _ in range(5):
        x.add_(1)
    return x, *made


@pytest.mark.parametrize("way", ["op by op", "replay", "recompute", "split"])
@pytest.mark.parametrize("by_signal", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_random_numbers_of_a_callback_are_those_after_the_run_or_an_error(way, by_signal, own):
    generator = torch.Generator() if own else torch.default_generator
    options = {"recompute": {"recompute": "1 GiB"}, "split": {"split": 2}}.get(way, {})
    batch = torch.zeros(4)

    def program():
        (batch * 2).sum()
        return draws(generator)

    def evaluated(at, act):
        got = []

        def ask():
            try:
                got.append(act())
            except RuntimeError as error:
                got.append(str(error))

        def progress(now):
            if now.done == at:
                signal.raise_signal(signal.SIGUSR1) if by_signal else ask()

        for turn in range(2 if way == "replay" else 1):
            generator.manual_seed(0)
            with lazyviz.lazy(batch=batch if way == "split" else None) as graph:
                left = program()
            if turn or way != "replay":
                with handler_of_a_signal(ask):
                    graph.evaluate(progress=progress, **options)
            else:
                graph.evaluate()
        return [*left, torch.rand(3, generator=generator)], got

    generator.manual_seed(0)
    expected = [*program(), torch.rand(3, generator=generator)]
    for act in (
        lambda: torch.rand(3, generator=generator),
        lambda: torch.zeros(3).normal_(generator=generator),
        lambda: generator.get_state(),  # patched while ops are pending
    ):
        left, got = evaluated(6, act)
        assert len(got) == 1 and UNDER_WAY in got[0]
        assert all(map(torch.equal, left, expected))

    def seeds():
        generator.manual_seed(7)
        return torch.rand(3, generator=generator)

    other = torch.Generator().manual_seed(7)
    expected[-1:] = [torch.rand(3, generator=other), torch.rand(3, generator=other)]
    left, got = evaluated(6, seeds)
    assert all(map(torch.equal, [*left[:-1], got[0], left[-1]], expected))


@pytest.mark.parametrize("by_signal", [False, True])
def test_a_callback_draws_once_all_draws_have_run(by_signal):
    torch.manual_seed(0)
    expected = [*draws(None), torch.rand(3), torch.rand(3)]
    torch.manual_seed(0)
    with lazyviz.lazy() as graph:
        left = draws(None)
    got = []
    last = len(graph.nodes) - 1
    with handler_of_a_signal(lambda: got.append(torch.rand(3))):
        graph.evaluate(
            progress=lambda now: (
                (signal.raise_signal(signal.SIGUSR1) if by_signal else got.append(torch.rand(3)))
                if now.done == last - 1
                else None
            )
        )
    assert all(map(torch.equal, [*left, *got, torch.rand(3)], expected))


@pytest.mark.parametrize("natively", [True, False])
def test_ops_of_a_handler_see_pending_writes_while_an_op_is_recorded(monkeypatch, natively):
    w, weight = torch.zeros(3), torch.ones(3, requires_grad=True)
    original, calls, got = random_draw_order.Generators.continued, [], []

    def continued(*given):
        if not calls:
            calls.append(signal.raise_signal(signal.SIGUSR1))
        return original(*given)

    def handle():
        got.append(((w * weight).sum(), torch.rand(2)))

    state = torch.manual_seed(0).get_state()
    expected = torch.nn.functional.dropout(torch.ones(4)), torch.rand(2)
    torch.default_generator.set_state(state)
    with recorded_natively(natively), handler_of_a_signal(handle), lazyviz.lazy():
        w.add_(1)
        monkeypatch.setattr(random_draw_order.Generators, "continued", continued)
        y = torch.nn.functional.dropout(torch.ones(4))
        [(total, drawn)] = got
        total.backward()
        w.add_(1)
    assert total.tolist() == 3 and weight.grad.tolist() == [1, 1, 1] and w.tolist() == [2, 2, 2]
    assert y.equal(expected[0]) and drawn.equal(expected[1])


class InACycle:
    """An object that only the garbage collector frees; ``finalize`` is called then."""

    def __init__(self, finalize: Callable[[], None]) -> None:
        self.finalize, self.itself = finalize, self

    def __del__(self) -> None:
        self.finalize()


@pytest.mark.parametrize("natively", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_waits_while_an_op_is_recorded_so_that_finalizers_see_its_writes(
    monkeypatch, natively, enabled
):
    w, weight = torch.zeros(3), torch.ones(3, requires_grad=True)
    original, made, got = random_draw_order.Generators.continued, [], []

    def continued(*given):
        if not made:  # more containers than any threshold here
            InACycle(lambda: got.append((w * weight).sum()))
            made.extend([] for _ in range(2000))
            assert not got
        return original(*given)

    thresholds, gc_was_enabled = gc.get_threshold(), gc.isenabled()
    with recorded_natively(natively), lazyviz.lazy():
        w.add_(1)
        monkeypatch.setattr(random_draw_order.Generators, "continued", continued)
        (gc.enable if enabled else gc.disable)()
        gc.set_threshold(500)
        try:
            torch.nn.functional.dropout(torch.ones(4))
            assert gc.isenabled() == enabled
            made.extend([] for _ in range(2000))
            assert len(got) == enabled
        finally:
            gc.set_threshold(*thresholds)
            (gc.enable if gc_was_enabled else gc.disable)()
        gc.collect()
        [total] = got
        if natively:  # in Python alone, it may begin where PyTorch takes the op's result (docs/limits.md)
            total.backward()
        w.add_(1)
    assert w.tolist() == [2, 2, 2]
    if natively:
        assert total.tolist() == 3 and weight.grad.tolist() == [1, 1, 1]


@pytest.mark.parametrize("natively", [True, False])
def test_an_error_of_an_op_leaves_the_collector_as_it_was(natively):
    assert gc.isenabled()
    with recorded_natively(natively), lazyviz.lazy():
        for wrong in (lambda: torch.ones(3) @ torch.ones(4), lambda: torch.ones(3).view(5)):
            with pytest.raises(RuntimeError):
                wrong()
            assert gc.isenabled()


def through_sparse(values: torch.Tensor) -> list[float]:
    made = torch.sparse_coo_tensor([[0, 1]], values, (2,), check_invariants=False)
    return made.coalesce().to_dense().tolist()  # how many elements are left depends on data


@pytest.mark.parametrize("natively", [True, False])
@pytest.mark.parametrize("run", [through_sparse, lambda x: x[x > -1].tolist()])
def test_ops_of_a_handler_see_pending_writes_while_an_op_runs_at_a_sync_point(monkeypatch, run, natively):
    w, x, got = torch.zeros(3), torch.arange(2.0), []
    original = intercept_ops_outside_blocks.call_measured

    def call_measured(*given):
        signal.raise_signal(signal.SIGUSR1)
        return original(*given)

    with recorded_natively(natively), handler_of_a_signal(lambda: got.append(w.clone())), lazyviz.lazy():
        w.add_(1)
        monkeypatch.setattr(intercept_ops_outside_blocks, "call_measured", call_measured)
        y = run(x)
        monkeypatch.undo()
        w.add_(1)
    assert len(got) >= 1 and all(value.tolist() == [1, 1, 1] for value in got)
    assert y == [0, 1] and w.tolist() == [2, 2, 2]


@pytest.mark.parametrize("natively", [True, False])
def test_an_op_runs_at_a_sync_point_of_a_thread_while_signals_have_handlers(natively):
    got = []

    def record():
        with lazyviz.lazy():
            got.append(through_sparse(torch.arange(2.0)))

    with recorded_natively(natively), handler_of_a_signal(lambda: None):
        record()  # on the main thread, which finds the handlers
        thread = threading.Thread(target=record)
        thread.start()
        thread.join(30)
        assert got == [[0, 1], [0, 1]]


@pytest.mark.parametrize("natively", [True, False])
@pytest.mark.parametrize("read", ["item", "__float__", "__int__", "tolist"])
def test_ops_of_a_handler_see_pending_writes_or_get_one_error_while_a_read_is_evaluated(read, natively):
    with torch.library._scoped_library("lazyviz_tests", "FRAGMENT") as library:
        library.define("signals(Tensor x) -> Tensor")
        library.impl("signals", lambda x: signal.raise_signal(signal.SIGUSR1) or x.clone(), "CPU")
        library.impl("signals", lambda x: torch.empty_like(x), "Meta")
        needed, other, got = torch.zeros(()), torch.zeros(()), []

        def handle():
            for written in (needed, other):
                try:
                    got.append(written.clone().tolist())
                except RuntimeError as error:
                    got.append(str(error))

        with recorded_natively(natively), handler_of_a_signal(handle), lazyviz.lazy():
            needed.add_(1)
            other.add_(1)
            x = torch.ops.lazyviz_tests.signals(needed)
            needed.add_(1)
            assert getattr(x + needed, read)() == 3
        assert len(got) == 2
        assert got[0] == 2 or UNDER_WAY in got[0]
        assert got[1] == 1 or UNDER_WAY in got[1]
        assert needed.item() == 2 and other.item() == 1


def test_a_reset_in_a_handler_while_an_op_is_recorded():
    program = InBlock()
    program.at = -1
    count = points(program.run)
    for at in sampled(count, 60, seed=3):
        program.at = at
        with contextlib.suppress(RuntimeError):
            program.model, optimizer = program.step.begin()
            with lazyviz.lazy():
                call_at(lambda: program.step.take(program.model, optimizer), at, lazyviz.reset)  # noqa: B023
        lazyviz.reset()
        assert is_plain()


@pytest.mark.parametrize("natively", [True, False])
def test_a_reset_in_a_handler_at_any_line_of_the_hooks_of_an_optimizer(natively):
    def hooks(frame):
        return frame.f_code.co_filename == register_optimizer_step_hooks.__file__

    step = Step("perceptron, one layer")

    def take():
        with lazyviz.lazy():
            step.take(*step.begin())

    with recorded_natively(natively):
        for at in range(points(take, where=hooks)):
            with contextlib.suppress(RuntimeError):
                call_at(take, at, lazyviz.reset, where=hooks)
            lazyviz.reset()
            assert is_plain()


def test_a_finalizer_that_asks_while_a_node_is_made_gets_one_error(monkeypatch):
    x = torch.zeros(3)
    errors = []
    original = recorder.order

    def order(*given):
        for ask in (lazyviz.sync, x.tolist, lazyviz.lazy().__enter__):
            try:
                ask()
            except RuntimeError as error:
                errors.append(str(error))
        original(*given)

    with recorded_natively(False), lazyviz.lazy() as graph:
        x.add_(1)
        monkeypatch.setattr(recorder, "order", order)
        y = x * 2
        monkeypatch.undo()
    assert len(errors) == 3
    assert all("an operator is being recorded" in error for error in errors)
    assert len(graph.nodes) == 2
    assert y.tolist() == [2, 2, 2]


def test_evaluating_while_a_library_is_being_imported(monkeypatch):
    """By a handler of a signal that arrives in the import."""
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    x, y, graph = recorded()
    graph.evaluate()
    assert x.tolist() == [20, 20, 20] and y.tolist() == [40, 40, 40]


IN_AN_IMPORT = """
import signal, sys
import lazyviz

asked = []
signal.signal(signal.SIGUSR1, lambda number, frame: asked.append(lazyviz.doctor().ok))

def trace(frame, event, argument):
    if frame.f_globals.get("__name__") == "lazyviz.session.doctor" and frame.f_code.co_name == "<module>":
        sys.settrace(None)
        signal.raise_signal(signal.SIGUSR1)

sys.settrace(trace)
assert lazyviz.doctor().ok and asked == [True], asked
"""


@pytest.mark.slow
def test_a_handler_asks_for_a_name_of_lazyviz_while_that_is_being_imported():
    ended = subprocess.run([sys.executable, "-c", IN_AN_IMPORT], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
