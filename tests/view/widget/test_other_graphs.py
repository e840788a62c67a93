"""Comparison of two graphs: the memory of each box at both peaks."""

from __future__ import annotations

import base64
import re

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.view.comparison.side_by_side_pictures import _picture, differences
from lazyviz.view.render.box_bars import ALONE, GREW, SHRANK
from lazyviz.view.scene.scene import BARRED, Scene
from lazyviz.view.widget.other_graphs import comparison_json, named


def step(width=32, layers=2):
    net = nn.Sequential(*[each for _ in range(layers) for each in (nn.Linear(width, width), nn.ReLU())])
    x = torch.randn(64, width)
    with lazyviz.lazy("cpu:1GiB", batch=[x]) as graph:
        net(x).square().mean().backward()
    return graph, (net, x)


def test_another_batch_of_one_graph_changes_what_grows_with_it_alone():
    graph, _keep = step()
    here = Scene(graph.ir, graph.plan())
    there = Scene(graph.ir, graph.plan(batch_size=640), drawn=here.hierarchy)
    found = differences(here, there)
    assert not any(alone for _, _, alone in found.values())
    boxes = here.hierarchy.boxes
    for id, (one, other, _) in found.items():
        assert dict(one) == here.held().get(boxes[id], {}) and dict(other) == there.held().get(boxes[id], {})
    grown = [sum(dict(other).values()) - sum(dict(one).values()) for one, other, _ in found.values()]
    assert max(grown) > 0


def test_a_graph_compared_with_itself_has_no_differences():
    graph, _keep = step()
    scene = Scene(graph.ir, graph.plan())
    assert all(one == other and not alone for one, other, alone in differences(scene, scene).values())


def test_layers_are_matched_by_name_whatever_the_model_is_called():
    (small, _one), (wide, _other) = step(32), step(64)
    here, there = (Scene(graph.ir, graph.plan()) for graph in (small, wide))
    found = differences(here, there)
    assert not any(alone for _, _, alone in found.values())


def test_what_is_in_one_graph_alone_says_so():
    (deep, _one), (shallow, _other) = step(layers=3), step(layers=1)
    here, there = (Scene(graph.ir, graph.plan()) for graph in (deep, shallow))
    found = differences(here, there)
    alone = {here.hierarchy.boxes[id].label for id, (_, after, alone) in found.items() if alone and not after}
    assert alone and all(here.hierarchy.boxes[id].kind in BARRED for id in found)
    assert not any(label.endswith("net.0") for label in alone)


def test_a_graph_is_called_by_its_place_although_earlier_ops_are_pending():
    net, x = nn.Linear(8, 8), torch.randn(4, 8)
    with lazyviz.lazy() as first:
        y = net(x)
    with lazyviz.lazy() as second:
        z = y * 2
    assert "pending ops of earlier cells" in second.title
    assert named(second.widget()) == second.ir.where and named(first.widget()) == first.ir.where
    assert "pending" not in named(second.widget())
    del z


@pytest.mark.parametrize("name", ["small", "a < b & c"])
def test_the_picture_of_a_graph_is_an_image_with_its_name_and_peak(name):
    graph, _keep = step()
    head, _, data = _picture(Scene(graph.ir, graph.plan()), name).partition(",")
    assert head == "data:image/svg+xml;base64"
    text = base64.b64decode(data).decode()
    assert lazyviz.plan.units.format_bytes(graph.plan().peak_bytes) in text and ">" in text


def pictures(before, after) -> list[str]:
    """The pictures of a comparison as SVG text."""
    one, other = before.widget(), after.widget()
    told = comparison_json(one, other.token, [one, other])
    return [base64.b64decode(each.partition(",")[2]).decode() for each in told["pictures"]]


def test_side_by_side_what_grew_and_what_is_in_one_alone_is_outlined_in_both():
    (narrow, _one), (wide, _other) = step(32), step(64)
    for text in pictures(narrow, wide):
        assert f'stroke="{GREW}"' in text and f'stroke="{SHRANK}"' not in text
        assert re.search(r"[0-9.]+ KiB → [0-9.]+ KiB at peak", text)
    for text in pictures(wide, narrow):
        assert f'stroke="{SHRANK}"' in text and f'stroke="{GREW}"' not in text
    (deep, _one), (shallow, _other) = step(layers=3), step(layers=1)
    first, second = pictures(deep, shallow)
    assert f'stroke="{ALONE}" stroke-dasharray' in first
    assert f'stroke="{ALONE}" stroke-dasharray' not in second


def test_in_a_dark_host_the_pictures_are_dark():
    graph, _keep = step()
    one, other = graph.widget(), step(64)[0].widget()
    for asked, white in ((other.token, True), (f"{other.token} dark", False), ("own dark", False)):
        told = comparison_json(one, asked, [one, other])
        for each in told["pictures"]:
            text = base64.b64decode(each.partition(",")[2]).decode()
            assert ('fill="#ffffff"' in text) == white


def test_side_by_side_with_itself_nothing_is_outlined():
    graph, _keep = step()
    for text in pictures(graph, graph):
        assert not any(f'stroke="{color}"' in text for color in (GREW, SHRANK, ALONE))
        assert not re.search("[0-9] (B|KiB) → ", text)
