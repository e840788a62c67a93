"""Annotations: the user's own numbers color and label boxes, in every picture and file."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz
from lazyviz.view.export.saved_html_page import interactive_page
from lazyviz.view.scene.box_numbers import span_text
from lazyviz.view.widget.page_messages import Answers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(3)
        )
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@pytest.fixture
def step():
    torch.manual_seed(0)
    net = Net()
    x = torch.randn(4, 8)
    with lazyviz.lazy("cpu:1GiB") as graph:
        loss = F.cross_entropy(net(x), torch.zeros(4, dtype=torch.long))
        loss.backward()
    graph.keep = x, loss
    return graph, net


def told(graph, name):
    """What boxes say under an annotation, by lane and the box's name or its op's."""
    scene = graph.scene()
    found = {}
    for box, span in scene.numbers.spans(name).items():
        if box.kind in ("module", "op"):
            found.setdefault(box.phase, {})[box.name or box.label] = span_text(span)
    return found


def test_modules_are_found_by_object_by_full_name_and_by_their_path(step):
    graph, net = step
    graph.annotate("a", {net.head: 1, "net.layers.0": 2, "layers.1.2": 3.5})
    forward = told(graph, "a")["forward"]
    assert [forward[f"net.{name}"] for name in ("head", "layers.0", "layers.1.2")] == ["1", "2", "3.5"]
    assert told(graph, "a")["backward"]["net.head"] == "1", "its backward part, too"
    assert graph.pending == len(graph.nodes), "nothing has run"


def test_a_node_has_its_own_number_and_groups_tell_the_least_and_the_most(step):
    graph, net = step
    forward = [node for node in graph.nodes if node.phase == "forward" and node.module == "layers.1.0"]
    node = next(node for node in forward if "addmm" in str(node.op))
    graph.annotate("t", {node: 0.25, net.head: 4})
    scene = graph.scene()
    box = scene.hierarchy.box_of[node.index]
    spans = scene.numbers.spans("t")
    assert spans[box] == (0.25, 0.25)
    lane = next(lane for lane in scene.hierarchy.lanes() if lane.phase == "forward")
    assert spans[lane] == (0.25, 4.0)


def test_the_index_of_a_hidden_view_is_shown_at_its_reader(step):
    graph, _ = step
    scene = graph.scene()
    reader, views = next(iter(scene.hierarchy.behind.items()))
    graph.annotate("v", {views[0]: 7})
    assert graph.scene().numbers.spans("v")[scene.hierarchy.box_of[reader]] == (7.0, 7.0)


def test_two_models_of_one_class_are_distinguished(step):
    G, D = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with lazyviz.lazy("cpu:1GiB") as graph:
        y = D(G(torch.ones(2, 4)))
    graph.annotate("a", {G[0]: 1, D[0]: 2})
    assert told(graph, "a")["forward"] == {"G": "1", "G.0": "1", "D": "2", "D.0": "2"}
    with pytest.raises(ValueError, match=r"several modules are called '0': G\.0, D\.0"):
        graph.annotate("a", {"0": 1})
    del y


def test_a_module_around_the_one_that_was_called_is_found(step):
    _, net = step
    with lazyviz.lazy("cpu:1GiB") as graph:
        y = net.layers[1](torch.ones(2, 8))
    graph.annotate("a", {net: 5})
    assert "5" in told(graph, "a")["forward"].values()
    del y


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"net.layers.9": 1}, ValueError, "no module called 'net.layers.9' ran an op .* did you mean"),
        ({"net.head": math.nan}, ValueError, "the value of 'net.head' is NaN"),
        ({"net.head": math.inf}, ValueError, "the value of 'net.head' is infinite"),
        ({"net.head": 10**400}, ValueError, "the value of 'net.head' is infinite"),
        ({"net.head": "much"}, TypeError, "is 'much' of type str, not a number"),
        ({"net.head": True}, TypeError, "is True of type bool, not a number"),
        ({"net.head": 1j}, TypeError, "not a number"),
        ({"net.head": torch.ones(2)}, TypeError, "is a tensor of 2 torch.float32, not a number"),
        ({7: 1}, TypeError, "7 of type int cannot be annotated: use nodes of the graph"),
        ({}, ValueError, "no values for 'a'; pass None to remove an annotation"),
        ([1, 2], TypeError, "values must be a mapping"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_sentence(step, values, error, words):
    graph, _ = step
    with pytest.raises(error, match=words):
        graph.annotate("a", values)
    assert not graph.ir.annotations


def test_other_objects_are_refused_too(step):
    graph, net = step
    with lazyviz.lazy("cpu:1GiB") as other:
        y = net.head(torch.ones(1, 8)).sum()
        with pytest.raises(RuntimeError, match="after its block has ended"):
            other.annotate("a", {net.head: 1})
    with pytest.raises(ValueError, match="is not a node of this graph"):
        graph.annotate("a", {other.nodes[0]: 1})
    with pytest.raises(ValueError, match="this Linear ran no op in this graph"):
        graph.annotate("a", {nn.Linear(1, 1): 1})
    with pytest.raises(TypeError, match="a pending tensor; evaluate it first"):
        graph.annotate("a", {net.head: y})
    for name, error in (("", ValueError), ("x" * 61, ValueError), (3, TypeError)):
        with pytest.raises(error, match="name"):
            graph.annotate(name, {net.head: 1})
    assert other.pending == len(other.nodes)


def test_numbers_of_numpy_and_tensors_are_numbers(step):
    graph, net = step
    graph.annotate("a", {net.head: np.float32(0.5), "net.layers.0": torch.tensor([2], dtype=torch.int64)})
    assert told(graph, "a")["forward"]["net.head"] == "0.5"
    assert told(graph, "a")["forward"]["net.layers.0"] == "2"


def test_an_annotation_is_replaced_and_taken_away(step):
    graph, net = step
    graph.annotate("a", {net.head: 1})
    graph.annotate("b", {net.head: 2})
    graph.annotate("a", {net.head: 3})
    assert list(graph.ir.annotations) == ["b", "a"], "the newest is the last"
    graph.annotate("a", None)
    graph.annotate("a", None)
    assert list(graph.ir.annotations) == ["b"]


def test_the_page_is_notified_at_once_and_a_second_display_has_the_state(step):
    graph, net = step
    sent: list = []
    widget = graph.widget()
    widget.send = lambda message, buffers=None: sent.append(message)
    graph.annotate("norm <b>", {net.head: -1.5, "net.layers.0": 3})
    message = next(each for each in sent if each["kind"] == "numbers")
    assert message["notes"] == [["norm <b>", -1.5, 3.0, "-1.5", "3"]]
    drawn = [box for group in widget.scene["groups"] for box in group["boxes"]]
    head = [box for box in drawn if box.get("name") == "net.head"]
    assert head and all(box["numbers"] == {"note:norm <b>": [-1.5, -1.5, "-1.5"]} for box in head)
    assert message["boxes"][head[0]["id"]] == head[0]["numbers"]
    sent.clear()
    graph.annotate("norm <b>", None)
    assert [each["notes"] for each in sent if each["kind"] == "numbers"] == [[]]
    assert not any("numbers" in box for group in widget.scene["groups"] for box in group["boxes"])
    widget.close()


def test_details_name_it(step):
    graph, net = step
    graph.annotate("norm", {net.head: 0.125})
    sent: list = []
    answers = Answers(graph, sent.append, lambda: None)
    boxes = answers.scene.hierarchy.boxes.values()
    answers.answer("select", next(box.id for box in boxes if box.name == "net.head"))
    assert ["norm", "0.125"] in sent[-1]["details"]["facts"]


def test_flops_and_projected_time_are_sent_on_request(step):
    graph, _ = step
    sent: list = []
    answers = Answers(graph, sent.append, lambda: None)
    first = answers.first_picture()
    assert not any("numbers" in box for group in first["groups"] for box in group["boxes"])
    answers.answer("numbers", "flops")
    answers.answer("numbers", "nonsense")
    (message,) = sent
    scene = answers.scene
    for id, numbers in message["boxes"].items():
        expected = sum(node.flops for node in scene.hierarchy.nodes_in(scene.hierarchy.boxes[id]))
        assert numbers["flops"][0] == expected
    assert sum(each["flops"][0] for each in message["boxes"].values())


def test_saved_pictures_show_the_newest_annotation(step, tmp_path):
    graph, net = step
    before = save(graph, tmp_path / "before.svg")
    assert "at peak" in before and "bytes held at the peak" in before
    graph.annotate("older", {net.head: 9})
    graph.annotate("norm <&>", {net.head: -0.5, "net.layers.0.0": 2})
    for name in ("a.svg", "figure.svg"):
        text = save(graph, tmp_path / name, **({"title": "x"} if name == "figure.svg" else {}))
        boxes = text.partition("Bars:")[0]
        assert "-0.5 norm &lt;&amp;&gt;" in boxes and " B at peak" not in boxes
        assert "Bars: norm &lt;&amp;&gt;; the full length is 2, linear; orange is below zero" in text
        assert 'fill="#c2571a" stroke="none" fill-opacity="0.20"' in text, (
            "a quarter of the scale, below zero"
        )
    graph.annotate("norm <&>", None)
    assert "9 older" in save(graph, tmp_path / "b.svg")
    graph.annotate("older", None)
    assert save(graph, tmp_path / "c.svg") == before


def test_the_saved_page_has_it(step):
    graph, net = step
    graph.annotate("norm", {net.head: 0.5})
    page = interactive_page(graph, graph.scene())
    part = re.search(r'data-part="start">([^<]+)<', page)
    start = json.loads(gzip.decompress(base64.b64decode(part[1])))
    scene = start["traits"]["scene"]
    assert scene["notes"] == [["norm", 0.5, 0.5, "0.5", "0.5"]]
    numbers = [box["numbers"] for group in scene["groups"] for box in group["boxes"] if "numbers" in box]
    assert any("note:norm" in each for each in numbers) and any("flops" in each for each in numbers)


def save(graph, path, **options):
    graph.save(path, **options)
    return path.read_text(encoding="utf-8")


def test_a_picture_of_an_annotation_has_no_bytes_where_nothing_is_annotated(tmp_path):
    net, x = nn.Linear(8, 4), torch.randn(16, 8)
    with lazyviz.lazy() as graph:
        y = net(x).square().exp()
    graph.save(tmp_path / "before.svg", show=["forward"])
    graph.annotate("norm", {net: 2.5})
    graph.save(tmp_path / "after.svg", show=["forward"])
    before, after = ((tmp_path / f"{name}.svg").read_text() for name in ("before", "after"))
    assert ">256 B<" in before and ">256 B<" not in after
    assert "2.5 norm" in after
    del y
