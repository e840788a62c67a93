"""Progress bars for runs that take longer than a second, if they are visible."""

from __future__ import annotations

import sys
import threading
import time
from typing import ClassVar

import pytest
import torch

import lazyviz
from lazyviz.session import progress_bar


class Drawn:
    """What a bar of tqdm is told."""

    made: ClassVar[list[Drawn]] = []

    def __init__(self, *, total, **options):
        self.total, self.n, self.closed = total, 0, False
        self.seen, self.texts = [], []
        Drawn.made.append(self)

    def set_description_str(self, text, refresh):
        self.texts.append(text)

    def refresh(self):
        self.seen.append(self.n)

    def close(self):
        self.closed = True


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    monkeypatch.setattr(progress_bar, "_tqdm", lambda: Drawn)
    monkeypatch.setattr(progress_bar, "AFTER", 0.05)
    monkeypatch.setattr(progress_bar, "EVERY", 0.02)
    Drawn.made = []
    with lazyviz.options(progress=True):
        yield Drawn.made


@torch.library.custom_op("lazyviz_tests::sleeps", mutates_args=())
def sleeps(x: torch.Tensor, seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return x.clone()


@sleeps.register_fake
def _(x, seconds):
    return torch.empty_like(x)


def slow(steps=6, seconds=0.05):
    with lazyviz.lazy() as graph:
        x = torch.ones(3)
        for _ in range(steps):
            x = sleeps(x, seconds)
    return graph, x


def test_a_run_that_takes_long_shows_how_far_it_is_and_leaves_nothing(drawn):
    graph, _ = slow()
    graph.evaluate()
    (bar,) = drawn
    assert bar.closed and bar.total == 7
    assert bar.seen == sorted(bar.seen) and bar.seen[-1] > bar.seen[0] >= 1
    assert set(bar.texts) == {"evaluating"}
    assert not [thread for thread in threading.enumerate() if thread.name == progress_bar._THREAD]


def test_a_read_that_takes_long_shows_a_bar_too(drawn):
    graph, x = slow()
    assert graph.pending
    assert x.sum().item() == 3.0
    assert len(drawn) == 1 and drawn[0].closed


def test_a_fast_run_shows_none(drawn):
    with lazyviz.lazy() as graph:
        torch.ones(3) + 1
    graph.evaluate()
    assert drawn == []


def test_a_run_that_fails_takes_its_bar_away(drawn):
    graph, _ = slow(2, 0.1)

    with lazyviz.lazy() as failing:
        x = sleeps(torch.ones(2), 0.1)
        torch.linalg.cholesky(-torch.eye(2) * x[0])
    with pytest.raises(torch.linalg.LinAlgError):
        failing.evaluate()
    graph.evaluate()
    assert drawn and all(bar.closed for bar in drawn)


def test_a_bar_in_a_notebook_is_taken_away_however_far_it_was_drawn(monkeypatch):
    notebook = pytest.importorskip("tqdm.notebook")
    made = []

    class InNotebook(notebook.tqdm):
        def __init__(self, **options):
            made.append(self)
            self.told = []
            super().__init__(**options)

        def display(self, *args, **options):
            self.told.append(options)

    monkeypatch.setattr(progress_bar, "_tqdm", lambda: InNotebook)
    graph, _ = slow()
    graph.evaluate()
    (bar,) = made
    assert bar.told[-1].get("close"), "removed"
    assert not any(options.get("bar_style") == "danger" for options in bar.told)


def test_who_follows_the_run_needs_no_bar(drawn):
    graph, _ = slow()
    seen = []
    graph.evaluate(progress=seen.append)
    assert len(seen) == 7 and drawn == []


def test_a_loop_of_fast_runs_starts_no_threads(monkeypatch, drawn):
    started = []
    start = threading.Thread.start

    def noted(thread):
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    for _ in range(6):
        with lazyviz.lazy() as graph:
            torch.ones(16, 16).tanh().sin().sum()
        graph.evaluate()
    assert 1 <= started.count(progress_bar._THREAD) < 6  # until the program is known


@pytest.mark.parametrize(("terminal", "chosen", "shown"), [
    (False, None, False), (True, None, True), (True, False, False), (False, True, True),
])  # fmt: skip
def test_it_is_shown_on_terminals_and_where_the_option_says_so(monkeypatch, terminal, chosen, shown):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    with lazyviz.options(progress=chosen):
        assert progress_bar.is_wanted() is shown
    monkeypatch.setattr(progress_bar, "_tqdm", lambda: None)
    with lazyviz.options(progress=chosen):
        assert not progress_bar.is_wanted()


def test_the_environment_says_whether_bars_are_shown():
    from lazyviz.session.default_options import Options

    assert Options({}).progress is None
    assert Options({"LAZYVIZ_PROGRESS": "off"}).progress is False
    assert Options({"LAZYVIZ_PROGRESS": "1"}).progress is True
    with pytest.raises(ValueError, match="LAZYVIZ_PROGRESS=maybe: progress must be True, False, or None"):
        Options({"LAZYVIZ_PROGRESS": "maybe"}).progress
    with pytest.raises(ValueError, match="progress must be True, False, or None, not 3"):
        lazyviz.options.progress = 3
