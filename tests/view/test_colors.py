"""What boxes are coloured by."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.plan.planner import make_plan
from lazyviz.view.colors import DARK, LAYER_ICONS, LAYER_INKS, LAYER_TINTS
from lazyviz.view.scene.scene import Scene


def luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("tint", LAYER_TINTS.values())
def test_tints_are_quiet_and_those_of_the_style_sheet(tint):
    styles = Path(__file__).parents[2] / "js" / "src" / "styles" / "layers.css"
    assert f"--lz-kind-tint: {tint};" in styles.read_text(encoding="utf-8")
    assert luminance(tint) > 0.8


def test_icons_and_inks_are_those_of_the_widget():
    sources = Path(__file__).parents[2] / "js" / "src"
    icons = (sources / "page" / "icons.ts").read_text(encoding="utf-8")
    styles = (sources / "styles" / "layers.css").read_text(encoding="utf-8")
    for kind, tint in LAYER_TINTS.items():
        assert f'{kind}: "{LAYER_ICONS[kind]}",' in icons
        for name, color in (("ink", LAYER_INKS[kind]), ("tint", tint)):
            assert f"--lz-kind-{name}: {color};" in styles and f"--lz-kind-{name}: {DARK[color]};" in styles


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
    assert held == sum(allocation.nbytes for allocation in plan.alive_at_peak) > 0
    assert sum(size for _, size in fold["by"]) == fold["held"]


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
