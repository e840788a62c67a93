"""What boxes are coloured by."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.plan.planner import make_plan
from lazyviz.view.colors import HEATS, heat, largest
from lazyviz.view.scene.scene import Scene


def luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_each_class_reaches_to_four_times_the_one_before():
    assert [heat(amount, 4096) for amount in (4096, 1025, 1024, 257, 256, 2, 1, 0)] == [
        6,
        6,
        5,
        5,
        4,
        1,
        0,
        0,
    ]
    assert heat(10, 0) == 0
    assert heat(1e30, 10) == 6


@pytest.mark.parametrize(("fill", "ink"), HEATS)
def test_words_can_be_read_on_every_class(fill, ink):
    light, dark = sorted((luminance(fill), luminance(ink)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_a_box_says_its_bytes_its_share_of_the_peak_its_dtype_and_its_module(step, plan):
    scene = Scene(step, plan)
    boxes = {box["id"]: box for each in scene.opened() for box in scene.group(each)["boxes"]}
    fold = next(box for box in boxes.values() if box["label"] == "h.0–2" and box["phase"] == "forward")
    assert fold["bytes"] == scene.hierarchy.boxes[fold["id"]].nbytes > 0
    assert fold["dtype"] == "float32"
    assert fold["module"] == "h"
    opened = scene.group(scene.hierarchy.boxes[fold["id"]])["boxes"]
    assert [box["module"] for box in opened if box["kind"] == "module"] == ["h.0", "h.1", "h.2"]
    held = sum(box.get("held", 0) for box in boxes.values() if box["kind"] == "lane")
    made = sum(allocation.nbytes for allocation in plan.alive_at_peak if allocation.node is not None)
    assert held == made > 0


def test_the_scale_ends_at_the_largest_box_that_is_drawn_first(step, plan):
    scene = Scene(step, plan)
    drawn = [child for group in scene.opened() for child in group.children if child.kind != "lane"]
    assert largest(scene.opened()) == max(box.nbytes for box in drawn)


def test_a_group_of_one_floating_dtype_and_integers_is_of_that_dtype_and_of_two_is_mixed():
    net = nn.Linear(4, 4)
    with lazyviz.lazy() as graph:
        x = torch.randn(2, 4)
        chosen = net(x).argmax(1)
        half = x.half() * 2
    scene = Scene(graph.ir, make_plan(graph.ir))
    boxes = [scene.box(box) for box in scene.hierarchy.boxes.values()]
    dtypes = {box["label"]: box["dtype"] for box in boxes if box["kind"] == "op"}
    assert dtypes["argmax"] == "int64" and dtypes["mul"] == "float16" and dtypes["addmm"] == "float32"
    assert "mixed" in {box["dtype"] for box in boxes if box["kind"] == "lane"}
    del chosen, half


def test_an_update_is_coloured_as_the_module_whose_parameter_it_changes():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), foreach=False)
    x = torch.randn(2, 4)
    with lazyviz.lazy() as graph:
        net(x).sum().backward()
        optimizer.step()
    scene = Scene(graph.ir, make_plan(graph.ir))
    updates = [
        scene.box(box)["module"]
        for box in scene.hierarchy.boxes.values()
        if box.phase == "optimizer" and box.node is not None
    ]
    assert updates == ["0", "0", "1", "1"]
