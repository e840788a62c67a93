"""Code that is called during a run and evaluates something leaves that run intact."""

from __future__ import annotations

import gc
import signal
import sys
import threading

import pytest
import torch

import lazyviz

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
