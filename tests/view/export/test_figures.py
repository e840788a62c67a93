"""Figures for papers: what they show and leave out; the page that a script opens."""

from __future__ import annotations

import re
import webbrowser

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz


@pytest.fixture
def graph():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(4, 8)
    with lazyviz.lazy("cpu:1GiB") as graph:
        loss = F.mse_loss(net(x), x)
        loss.backward()
        optimizer.step()
    graph.keep = net, optimizer, x, loss
    return graph


def saved(graph, path, **options):
    graph.save(path, **options)
    return path.read_text(encoding="utf-8")


def test_a_figure_has_its_title_and_neither_state_nor_verdict(graph, tmp_path):
    whole = saved(graph, tmp_path / "whole.svg")
    assert "not run yet" in whole and "Fits" in whole
    figure = saved(graph, tmp_path / "figure.svg", title="One step <&>")
    assert "One step &lt;&amp;&gt;" in figure
    assert "not run yet" not in figure and "Fits" not in figure
    assert all(f">{lane}" in figure for lane in ("Forward", "Backward", "Optimizer"))


def test_a_figure_shows_the_parts_that_are_asked_for(graph, tmp_path):
    text = saved(graph, tmp_path / "a.svg", show=["forward", "memory"])
    assert ">Forward" in text and ">Backward" not in text and ">Optimizer" not in text
    assert "Projected memory" in text
    text = saved(graph, tmp_path / "b.svg", show="backward")
    assert ">Backward" in text and ">Forward" not in text and "Projected memory" not in text
    high = [float(re.search(r'height="(\d+)"', each)[1]) for each in (saved(graph, tmp_path / "w.svg"), text)]
    assert high[1] < high[0]


def test_without_a_legend_the_bars_have_no_scale(graph, tmp_path):
    with_it, without = (saved(graph, tmp_path / "l.svg", show="forward", legend=on) for on in (True, False))
    assert len(without) < len(with_it)


def test_what_cannot_be_a_figure_is_refused_in_words(graph, tmp_path):
    with pytest.raises(ValueError, match="unknown part 'forwards' in show; these parts can be shown"):
        graph.save(tmp_path / "a.svg", show=["forwards"])
    with pytest.raises(ValueError, match="show is empty"):
        graph.save(tmp_path / "a.svg", show=[])
    with pytest.raises(ValueError, match="not of 'html'"):
        graph.save(tmp_path / "a.html", title="x")
    assert not list(tmp_path.iterdir())


def test_show_writes_a_page_and_opens_it_without_running_anything(graph, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    path = graph.show()
    assert opened == [path.as_uri()] and "<!doctype html>" in path.read_text(encoding="utf-8")[:40]
    assert graph.pending == len(graph.nodes)
