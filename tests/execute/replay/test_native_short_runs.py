"""Short cached subgraphs run in one call at reads of values: exactly once, whatever interrupts."""

from __future__ import annotations

import sys
import threading
import warnings

import pytest
import torch

import lazyviz
from lazyviz.execute.replay import native_codegen, native_short_runs, node_passes
from lazyviz.execute.replay.program_cache import replays
from lazyviz.record.tape import tape
from lazyviz.session import evaluate_at_sync_point

from ...faults.support.inject_faults import Fault, in_lazyviz, inject

pytestmark = pytest.mark.skipif(
    not (node_passes.active and native_codegen.active and native_short_runs.module),
    reason="it needs the C++ modules",
)

ROUNDS = 6


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """For each read that had to run something: whether it ran in one go."""
    found, run = [], evaluate_at_sync_point.run_in_one_go

    def counting(*args):
        ran = run(*args)
        found.append(ran)
        return ran

    monkeypatch.setattr(evaluate_at_sync_point, "run_in_one_go", counting)
    monkeypatch.setattr(tape.runs, "evaluator", evaluate_at_sync_point.run_for_sync)
    replays.clear()
    return found


class Program:
    """A read in each round, of what was written in place, and of more that stays pending."""

    def __init__(self):
        torch.manual_seed(0)
        self.count, self.x = torch.zeros(4), torch.arange(4.0)
        self.seen, self.kept = [], []

    def begin(self):
        self.count.add_(1).mul_(1.25)
        self.kept.append(self.x + self.count)

    def round(self, number):
        self.begin()
        self.seen.append((self.kept[-1] * number).sum().item())

    def values(self):
        return self.seen, self.count.tolist(), [each.tolist() for each in self.kept]


class Drawing(Program):
    """The same with random numbers, among them those of a generator of its own."""

    def __init__(self):
        super().__init__()
        self.own = torch.Generator().manual_seed(7)

    def begin(self):
        self.count.add_(torch.rand(4)).mul_(1.25)
        noise = torch.randn(4, generator=self.own)
        self.kept.append(torch.nn.functional.dropout(self.x + self.count, 0.5) + noise)

    def values(self):
        after = torch.rand(2).tolist(), torch.rand(2, generator=self.own).tolist()
        return (*super().values(), *after)


PROGRAMS = pytest.mark.parametrize("kind", [Program, Drawing])


def eager(kind=Program, rounds=ROUNDS):
    program = kind()
    for number in range(rounds):
        program.round(number)
    return program.values()


def test_a_read_that_is_known_runs_in_one_go(counted):
    program = Program()
    with lazyviz.lazy() as graph:
        for number in range(ROUNDS):
            program.round(number)
    assert counted[3:] == [True] * (len(counted) - 3) and len(counted) >= ROUNDS
    assert program.values() == eager()
    report = graph.report
    assert report is not None and report.cache_hit and report.seconds > 0
    assert [point.ops for point in graph.sync_points[3:ROUNDS]] == [5] * (ROUNDS - 3)


@PROGRAMS
def test_draws_advance_the_generators_of_the_user(kind, counted):
    expected = eager(kind)
    program = kind()
    with lazyviz.lazy():
        for number in range(ROUNDS):
            program.round(number)
        found = program.values()
    assert len(counted) >= ROUNDS and all(counted[3:ROUNDS])
    assert found == expected


def test_a_generator_with_later_draws_keeps_them(counted):
    def values():
        torch.manual_seed(0)
        found, later = [], []
        for _ in range(ROUNDS):
            first = torch.rand(2)
            later.append(torch.rand(2))
            found.append(first.sum().item())
            torch.rand(1)
        torch.manual_seed(3)
        found += [torch.rand(2).sum().item() for _ in range(ROUNDS)]
        return found, [each.tolist() for each in later], torch.get_rng_state().tolist()

    expected = values()
    with lazyviz.lazy():
        assert values() == expected
    assert set(counted) == {True, False}


def from_a_state_that_is_pending():
    torch.rand(2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
    return torch.rand(3).sum().item()


def in_inference_mode():
    with torch.inference_mode():
        return (torch.arange(3.0) * 2).sum().item()


def slow():
    x = torch.ones(400, 400)
    for _ in range(20):
        x = x @ x.T / 400
    return x.sum().item()


@pytest.mark.parametrize("program", [from_a_state_that_is_pending, in_inference_mode, slow])
def test_others_do_not(program, counted):
    torch.manual_seed(0)
    expected = [program() for _ in range(ROUNDS)]
    torch.manual_seed(0)
    with lazyviz.lazy():
        assert [program() for _ in range(ROUNDS)] == expected
    assert not any(counted)


def test_no_native_run_of_a_graph_with_subscribers(counted):
    told = []
    program = Program()
    with lazyviz.lazy() as graph:
        graph.subscribe(lambda: told.append(graph.state))
        for number in range(ROUNDS):
            program.round(number)
    assert not any(counted) and told
    assert program.values() == eager()


def test_no_read_on_another_thread(counted):
    seen = []

    def work():
        program = Program()
        with lazyviz.lazy():
            for number in range(ROUNDS):
                program.round(number)
        seen.append(program.values())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [eager()] and not any(counted)


def picked(x, count, at):
    count.add_(1)
    return (x[at] * count).sum().item()


def test_a_kernel_that_fails(counted):
    x, here, beyond = torch.arange(5.0), torch.tensor([1, 3]), torch.tensor([1, 7])
    count = torch.zeros(2)
    with lazyviz.lazy() as graph:
        for _ in range(5):
            seen = picked(x, count, here)
        ran = counted.count(True)
        with pytest.raises(IndexError, match=r"out of range|out of bounds") as failed:
            picked(x, count, beyond)
    assert ran >= 2
    assert any("recorded at" in note for note in (*getattr(failed.value, "__notes__", ()), str(failed.value)))
    assert seen == 20.0 and count.tolist() == [6.0, 6.0]
    assert graph.state == "failed" and isinstance(graph.error, IndexError)
    lazyviz.reset()
    assert (torch.ones(2) + 1).tolist() == [2.0, 2.0]


def drawn(x, at):
    noise = torch.rand(2)
    return torch.nn.functional.dropout(x[at] * noise).sum().item()


def test_a_kernel_that_fails_after_a_draw(counted):
    x, here, beyond = torch.arange(5.0), torch.tensor([1, 3]), torch.tensor([1, 7])

    def values():
        torch.manual_seed(0)
        seen = [drawn(x, here) for _ in range(5)]
        with pytest.raises(IndexError, match=r"out of range|out of bounds"):
            drawn(x, beyond)
        return seen

    expected = values(), torch.rand(2).tolist()
    with lazyviz.lazy():
        found = values()
    assert counted.count(True) >= 2
    lazyviz.reset()  # the dropout has not been drawn, as in eager PyTorch
    assert (found, torch.rand(2).tolist()) == expected


def test_a_warning_that_is_an_error_comes_after_all_has_run(counted):
    count = torch.zeros(2)

    def warns():
        count.add_(1)
        return (count[:1].std() + count.sum()).item()

    with lazyviz.lazy():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(4):
                warns()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="degrees of freedom"):
                warns()
        assert counted[-1] is True
        assert count.tolist() == [5.0, 5.0]
    assert count.tolist() == [5.0, 5.0]


def taken_after(fault, kind=Program):
    """What a program comes to in which ``fault`` happens in a read of a known subgraph, then read again."""
    program = kind()
    with lazyviz.lazy():
        for number in range(ROUNDS - 1):
            program.round(number)
        program.begin()
        number = (program.kept[-1] * (ROUNDS - 1)).sum()
        fault(number)
        program.seen.append(number.item())
    return program.values()


@PROGRAMS
@pytest.mark.slow
def test_an_exception_from_elsewhere_at_any_point(kind, counted):
    expected = eager(kind)
    assert taken_after(lambda number: None, kind) == expected
    total = []
    taken_after(lambda number: total.append(_points_of(number.item)), kind)
    for at in range(total[0]):
        raised = []
        found = taken_after(
            lambda number, at=at, raised=raised: raised.append(inject(number.item, at, Fault)), kind
        )
        assert found == expected, at
        assert raised[0] is None or isinstance(raised[0], Fault), at
    assert total[0] > 50


def _points_of(action):
    """How many points the one call of ``action`` has."""
    tracer = Caller(None)
    tracer.trace(action)
    return tracer.count


class Caller:
    """Calls a function at the point of a call that has the number ``at``, as a signal handler does."""

    def __init__(self, function, at=-1):
        self.function, self.at, self.count, self.outcome = function, at, 0, None

    def __call__(self, frame, event, argument):
        if event == "call" and not in_lazyviz(frame):
            return None
        if event != "exception":
            if self.count == self.at:
                sys.settrace(None)
                try:
                    self.outcome = self.function()
                except RuntimeError as error:
                    self.outcome = error
            self.count += 1
        return self

    def trace(self, action):
        before = sys.gettrace()
        sys.settrace(self)
        try:
            return action()
        finally:
            sys.settrace(before)


@PROGRAMS
@pytest.mark.parametrize("handler", ["reads the same", "evaluates all", "computes"])
@pytest.mark.slow
def test_a_handler_that_reads_or_computes_at_any_point(handler, kind, counted):
    expected = eager(kind)
    total = []
    taken_after(lambda number: total.append(_points_of(number.item)), kind)

    def plain():
        return (torch.ones(2) * 3).tolist()

    for at in range(total[0]):
        outcomes = []

        def fault(number, at=at, outcomes=outcomes):
            handlers = {"reads the same": number.item, "evaluates all": lazyviz.evaluate, "computes": plain}
            caller = Caller(handlers[handler], at)
            outcomes.append((caller.trace(number.item), caller.outcome))

        assert taken_after(fault, kind) == expected, at
        (value, outcome), last = outcomes[0], expected[0][-1]
        assert value == last, at
        if isinstance(outcome, RuntimeError):
            assert handler != "computes" and "an evaluation is in progress" in str(outcome), (at, outcome)
        elif handler != "evaluates all":
            assert outcome in (None, last if handler == "reads the same" else [3.0, 3.0]), at
