"""Listeners cannot break a run: their errors are reported; an error of ``progress`` stops it."""

from __future__ import annotations

import sys

import pytest
import torch

import lazyviz


@pytest.fixture
def reported(monkeypatch):
    """What was given to ``sys.unraisablehook``."""
    errors = []
    monkeypatch.setattr(sys, "unraisablehook", lambda given: errors.append(given.exc_value))
    return errors


class ListenerError(Exception):
    pass


def listener():
    raise ListenerError


def test_a_listener_that_raises_stops_nothing(reported):
    heard = []
    x = torch.zeros(3)
    with lazyviz.lazy() as graph:
        x.add_(1)
    graph.subscribe(listener)
    graph.subscribe(lambda: heard.append(graph.state))
    assert graph.evaluate().ops_run == 1
    assert x.tolist() == [1, 1, 1]
    assert graph.state == "done" and graph.live is None
    assert heard == ["running", "done"]
    assert [type(error) for error in reported] == [ListenerError, ListenerError]


def test_a_listener_that_raises_does_not_replace_the_kernel_s_error(reported):
    with lazyviz.lazy() as graph:
        y = torch.ones(3)[torch.tensor([5])]
    graph.subscribe(listener)
    for _ in range(2):
        with pytest.raises(IndexError, match="out of bounds"):
            graph.evaluate()
        assert graph.state == "failed" and isinstance(graph.error, IndexError) and graph.live is None
    assert len(reported) == 4
    del y


def test_a_listener_that_raises_at_a_choice_does_not_keep_the_others_from_it(reported):
    heard = []
    with lazyviz.lazy() as graph:
        torch.ones(3) + 1
    graph.subscribe(listener)
    graph.subscribe(lambda: heard.append(graph.summaries))
    graph.choose(summaries=True)
    assert heard == [True] and len(reported) == 1


@pytest.mark.parametrize("known", [False, True])
def test_what_progress_raises_stops_the_run_between_two_ops(known):
    for _ in range(1 + known):
        x = torch.zeros(3)
        with lazyviz.lazy() as graph:
            for _ in range(20):
                x.add_(1)
        if not known:
            break
        graph.evaluate()
    x = torch.zeros(3)
    with lazyviz.lazy() as graph:
        for _ in range(20):
            x.add_(1)

    def progress(now):
        if now.done == 7:
            raise ListenerError

    with pytest.raises(ListenerError):
        graph.evaluate(progress=progress)
    assert graph.pending == 13
    assert graph.state == "interrupted" and graph.error is None and graph.live is None
    assert not [node for node in graph.nodes if node.state == "failed"]
    graph.evaluate()
    assert x.tolist() == [20, 20, 20]


def test_progress_is_called_at_the_level_of_the_program():
    seen = []
    weight = torch.ones(3, requires_grad=True)
    with lazyviz.lazy() as graph:
        loss = (weight * 2).sum()
        with torch.no_grad():
            loss + 1
    graph.evaluate(progress=lambda now: seen.append((weight * 3).requires_grad and torch.is_grad_enabled()))
    assert seen and all(seen)
