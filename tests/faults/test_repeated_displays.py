"""Repeated displays of graphs: the memory of their outputs is bounded."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import ipywidgets
import psutil
import pytest
import torch
from IPython.display import display
from ipywidgets.widgets import widget as registry
from torch import nn

import lazyviz
from lazyviz.view.widget import widget as widgets

pytestmark = pytest.mark.slow

MIB = 2**20


def resident():
    gc.collect()
    return psutil.Process().memory_info().rss


def shown(model, x):
    with lazyviz.lazy() as graph:
        model(x).sum().backward()
    graph.evaluate()
    model.zero_grad()
    graph._repr_mimebundle_()
    return graph


@pytest.fixture
def program():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(4, 8)


def test_displays_of_new_graphs_keep_only_the_last(program, request):
    before_it, count, most = (400, 2000, 4) if request.config.getoption("--all") else (160, 100, 120)
    for _ in range(before_it):  # until what is open, and what the allocator holds back, is as much as it gets
        shown(*program)
    before = resident()
    graphs = [weakref.ref(shown(*program)) for _ in range(count)]
    grown = resident() - before
    alive = sum(graph() is not None for graph in graphs)
    assert alive <= widgets.MOST_OPEN + 2
    assert len(widgets._open) <= widgets.MOST_OPEN
    own = [each for each in registry._instances.values() if isinstance(each, widgets.LazyWidget)]
    assert len(own) <= widgets.MOST_OPEN
    layouts = [each for each in registry._instances.values() if isinstance(each, ipywidgets.Layout)]
    assert len(layouts) <= 2 * widgets.MOST_OPEN
    assert grown < most * 1024 * count, f"{grown / count / 1024:.1f} KiB a display"


def test_displays_of_one_graph_keep_nothing(program, request):
    count = 2000 if request.config.getoption("--all") else 200
    graph = shown(*program)
    for _ in range(20):
        display(graph)
    before = resident()
    for _ in range(count):
        graph._repr_mimebundle_()
        graph.static_bundle()
    assert resident() - before < 6 * MIB


def test_a_widget_that_was_closed_for_others_comes_again_with_its_graph(program):
    graph = shown(*program)
    old = graph.widget()
    for _ in range(widgets.MOST_OPEN + 1):
        shown(*program)
    assert old.comm is None
    new = graph.widget()
    assert new is not old
    assert new.comm is not None


def test_a_widget_that_is_used_or_runs_stays(program):
    used, running = shown(*program).widget(), shown(*program).widget()
    running.state = "running"
    for _ in range(widgets.MOST_OPEN + 1):
        shown(*program)
        used._hear(None, {"action": "open-all", "id": ""}, None)
    assert used.comm is not None
    assert running.comm is not None
    running.state = "done"
    running.close()


def test_a_widget_that_the_collector_closes_while_another_is_opened_holds_up_nothing(program):
    widget = shown(*program).widget()
    widget.close()
    done = threading.Event()

    def collected_meanwhile() -> None:
        with widgets._lock:  # as in `_used`, where a collection may come
            widget.close()
        done.set()

    threading.Thread(target=collected_meanwhile, daemon=True).start()
    assert done.wait(60)


def test_an_interrupt_while_a_widget_is_made_leaves_none_and_says_nothing_else(program, monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    model, x = program
    with lazyviz.lazy() as graph:
        model(x)
    before = len(registry._instances)

    def stop(*_):
        raise KeyboardInterrupt

    for step in ("running_of", "new_token", "bundle", "first_traits"):
        with monkeypatch.context() as patched:
            patched.setattr(widgets, step, stop)
            with pytest.raises(KeyboardInterrupt):
                graph.widget()
        gc.collect()
    assert not reported and len(registry._instances) == before
    graph.widget().close()
