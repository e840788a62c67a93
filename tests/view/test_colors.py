"""What boxes are colored by."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.plan.make_plan import make_plan
from lazyviz.view.colors import DARK, LAYER_ICONS, LAYER_INKS, LAYER_TINTS
from lazyviz.view.render.svg import CATEGORY_COLORS
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


# Colors as people see them who lack one kind of cone (Machado, Oliveira and Fernandes 2009), in linear RGB.
SIGHT = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deutan": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritan": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def lab(color: str, sight: str) -> tuple[float, float, float]:
    """CIELAB of a color as it is seen."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    red, green, blue = (
        min(max(sum(a * b for a, b in zip(row, linear, strict=True)), 0), 1) for row in SIGHT[sight]
    )
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_categories_differ_for_everyone_and_stand_out_from_the_page(sight, dark):
    colors = {name: DARK[color] if dark else color for name, color in CATEGORY_COLORS.items()}
    for (one, first), (other, second) in itertools.combinations(colors.items(), 2):
        assert math.dist(lab(first, sight), lab(second, sight)) >= 18, (one, other)
    page = 0.05 + luminance("#15191f" if dark else "#ffffff")
    for name, color in colors.items():
        own = 0.05 + luminance(color)
        assert max(own, page) / min(own, page) >= 3, name


def test_categories_have_the_colors_of_the_widget():
    styles = Path(__file__).parents[2] / "js" / "src" / "styles" / "base.css"
    text = styles.read_text(encoding="utf-8")
    for name, color in CATEGORY_COLORS.items():
        variable = "optimizer-state" if name == "optimizer" else name.replace("_", "-")
        assert f"--lz-{variable}: {color};" in text and f"--lz-{variable}: {DARK[color]};" in text


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


def test_a_group_with_one_floating_dtype_has_that_dtype_and_with_two_is_mixed():
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


def test_an_update_is_colored_as_the_module_whose_parameter_it_changes():
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
