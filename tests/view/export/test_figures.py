"""Figures for papers: what they show and omit; the page that a script opens."""

from __future__ import annotations

import re
import webbrowser

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz
from lazyviz.view.widget.page_messages import Answers


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


def test_invalid_figures_are_refused_with_a_message(graph, tmp_path):
    with pytest.raises(ValueError, match="unknown part 'forwards' in show; these parts can be shown"):
        graph.save(tmp_path / "a.svg", show=["forwards"])
    with pytest.raises(ValueError, match="unknown direction 'RL'; it is one of TB, LR"):
        graph.save(tmp_path / "a.svg", direction="RL")
    with pytest.raises(ValueError, match="unknown theme 'sepia'; it is one of light, dark"):
        graph.save(tmp_path / "a.svg", theme="sepia")
    with pytest.raises(ValueError, match="show is empty"):
        graph.save(tmp_path / "a.svg", show=[])
    with pytest.raises(ValueError, match="not to 'html'"):
        graph.save(tmp_path / "a.html", title="x")
    assert not list(tmp_path.iterdir())


BOX = re.compile(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>(net\.\d|Forward|Backward)')


def places(text):
    """Where the names of boxes and lanes are, in order of the file."""
    return [(float(x), float(y), name) for x, y, name in BOX.findall(text)]


def test_a_figure_goes_down_or_to_the_right(graph, tmp_path):
    down = saved(graph, tmp_path / "down.svg", show=["forward", "backward"])
    right = saved(graph, tmp_path / "right.svg", show=["forward", "backward"], direction="LR")
    assert "Forward ↓" in down and "Forward →" in right and "Backward ←" in right
    for text, along in ((down, 1), (right, 0)):
        layers = [place for place in places(text) if place[2].startswith("net.")]
        backward, forward = layers[:3], layers[3:]  # what stands in the frame of the model comes last
        for boxes, names in ((forward, ["net.0", "net.1", "net.2"]), (backward, ["net.0", "net.1", "net.2"])):
            assert [name for *_, name in sorted(boxes, key=lambda box: box[along])] == names
            assert len({box[along] for box in boxes}) == 3
    lanes = {name: (x, y) for x, y, name in places(right) if not name.startswith("net.")}
    assert lanes["Forward"][0] == lanes["Backward"][0] and lanes["Forward"][1] < lanes["Backward"][1]


def test_a_dark_figure_says_the_same_in_other_colors(graph, tmp_path):
    light, dark = (
        saved(graph, tmp_path / f"{name}.svg", title="x", theme=name) for name in ("light", "dark")
    )
    plain = re.compile("#[0-9a-f]{6}")
    assert plain.sub("#", light) == plain.sub("#", dark)
    assert not set(plain.findall(light)) & set(plain.findall(dark)), "every color is another one"
    assert saved(graph, tmp_path / "usual.svg", title="x") == light


def test_a_figure_has_no_details_of_this_machine_or_of_a_run(graph, tmp_path):
    figure = saved(graph, tmp_path / "before.svg", title="x", theme="light")
    assert "1.00 GiB" not in figure and "cpu" not in figure
    graph.evaluate()
    after = saved(graph, tmp_path / "after.svg", title="x", theme="light")
    assert after == figure


def test_pictures_are_of_the_drawing_as_a_page_shows_it(graph, tmp_path):
    sent = []
    answers = Answers(graph, sent.append, lambda: None)
    boxes = answers.scene.hierarchy.boxes.values()
    opened = {box.id for box in answers.scene.opened()}
    linear = next(box for box in boxes if box.name == "net.0" and box.phase == "forward")
    first = saved(graph, tmp_path / "first.svg", title="x", show="forward")
    assert "addmm" not in first and "at peak" in first
    answers.answer("drawing", "\n".join(["memory", *opened, linear.id, "g999999", "<script>"]))
    shown = saved(graph, tmp_path / "shown.svg", title="x", show="forward")
    assert "addmm" in shown, "the box that is open"
    assert "allocated" in shown and "at peak" not in shown, "the number that is chosen"
    graph.annotate("norm", {"net.2": 3})
    assert "3 norm" in saved(graph, tmp_path / "noted.svg", show="forward"), "newer than what the page showed"


def test_show_writes_a_page_and_opens_it_without_running_anything(graph, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    path = graph.show()
    assert opened == [path.as_uri()] and "<!doctype html>" in path.read_text(encoding="utf-8")[:40]
    assert graph.pending == len(graph.nodes)


def test_a_figure_is_as_narrow_as_its_content_and_op_rows_print_what_they_hold_at_the_peak(tmp_path):
    x = torch.randn(64, 64, requires_grad=True)
    with lazyviz.lazy() as graph:
        loss = ((x * 2).exp() @ x).mean()
        loss.backward()
    graph.save(tmp_path / "narrow.svg", show=["forward"], title="Narrow")
    text = (tmp_path / "narrow.svg").read_text(encoding="utf-8")
    width = float(text.partition(' width="')[2].partition('"')[0])
    assert width < 700, "11 pixels of type are at least 7 pt where 482 pt are the width of a page's text"
    scene_rows = [part.partition("<")[0] for part in text.split(">")]
    assert "0 B" in scene_rows, "of an op whose result is gone at the peak, as on its bar"
