"""In static pictures, too, a module and its backward part are at one height, with a band for what is kept."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz
from lazyviz.view.layout.coordinates import arrange
from lazyviz.view.render.saved_activation_bands import saved_activation_bands
from lazyviz.view.render.svg import MIN_SCALE, WIDTH, render_svg
from lazyviz.view.scene.saved_activations import kept_json
from lazyviz.view.scene.scene import Scene


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()) for _ in range(3))
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.blocks(F.silu(self.first(x))).mean((2, 3)))


@pytest.fixture(scope="module")
def scene():
    net = Net()
    x, y = torch.randn(16, 3, 32, 32), torch.randint(0, 4, (16,))
    with lazyviz.lazy("cpu:1GiB") as graph:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
    assert loss is not None
    return Scene(graph.ir, graph.plan())


def arranged(scene, **options):
    return arrange(scene, {box.id for box in scene.opened()}, room=WIDTH / MIN_SCALE, **options)


def heights(picture):
    """The middle of each closed module, by its name without numbers and by its lane."""
    found = {}
    for frame in picture.frames:
        if frame.box.name and not frame.open and frame.box.phase in ("forward", "backward"):
            name = frame.box.name.translate(str.maketrans("", "", "0123456789–"))
            found.setdefault(name, {})[frame.box.phase] = frame.y + frame.height / 2
    return {name: pair for name, pair in found.items() if len(pair) == 2}


def test_modules_and_their_backward_parts_stand_side_by_side(scene):
    before, after = heights(arranged(scene)), heights(arranged(scene, matching=True))
    assert set(after) == {"net.first", "net.blocks.", "net.head"}
    assert any(abs(pair["forward"] - pair["backward"]) > 1 for pair in before.values())
    assert all(abs(pair["forward"] - pair["backward"]) < 0.01 for pair in after.values())


def test_rows_that_are_moved_stay_apart_and_in_their_frames(scene):
    picture = arranged(scene, matching=True)
    at = {frame.box: frame for frame in picture.frames}
    for frame in picture.frames:
        around = at.get(frame.box.parent)
        if around is not None:
            assert around.y <= frame.y
            assert frame.y + frame.height <= around.y + around.height + 0.01
        for other in picture.frames:
            if other is frame or other.box.parent is not frame.box.parent:
                continue
            beside = frame.x + frame.width <= other.x or other.x + other.width <= frame.x
            above = frame.y + frame.height <= other.y or other.y + other.height <= frame.y
            assert beside or above, (frame.box, other.box)
    lanes = [frame for frame in picture.frames if frame.box.kind == "lane"]
    assert len({(lane.y, lane.height) for lane in lanes}) == 1
    assert picture.height >= max(lane.y + lane.height for lane in lanes)


def test_the_largest_bands_are_level_and_tell_what_is_kept(scene):
    picture = arranged(scene, matching=True)
    bands = saved_activation_bands(scene, picture)
    assert 1 <= len(bands) <= 3
    assert bands[0].text == kept_json(scene)[0]["text"]
    assert bands[0].start[1] == pytest.approx(bands[0].end[1])
    assert [band.width for band in bands] == sorted((band.width for band in bands), reverse=True)
    closed = [frame for frame in picture.frames if not frame.open]
    for band in bands:
        assert band.start[0] < band.end[0]
        if band.pill is not None:
            left, top, wide = band.pill
            for frame in closed:
                apart = frame.x >= left + wide or frame.x + frame.width <= left
                assert apart or frame.y >= top + 20 or frame.y + frame.height <= top


def test_the_svg_has_the_bands_with_their_words_and_the_same_picture_in_the_dark(scene):
    for theme in ("light", "dark"):
        svg = render_svg(scene.graph, scene.plan, scene=scene, theme=theme)
        words = [each.text for each in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
        assert kept_json(scene)[0]["text"] in words
        assert svg.count('stroke-opacity="0.2"') == len(
            saved_activation_bands(scene, arranged(scene, matching=True))
        )


def test_lanes_that_match_stay_beside_one_another_where_not_all_have_room():
    with lazyviz.lazy("cpu:1GiB") as graph:
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters())
        loss = F.cross_entropy(net(torch.randn(16, 3, 32, 32)), torch.randint(0, 4, (16,)))
        loss.backward()
        optimizer.step()
    scene = Scene(graph.ir, graph.plan())
    lanes = {f.box.phase: f for f in arranged(scene, matching=True).frames if f.box.kind == "lane"}
    assert set(lanes) == {"other", "forward", "backward", "optimizer"}
    assert lanes["forward"].y == lanes["backward"].y == 0
    assert lanes["optimizer"].y > 0


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(16, 64), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        return (self.left(x) * self.right(x)).sum()


def test_no_band_runs_behind_a_box(scene):
    net = Towers()
    x = torch.randn(64, 16)
    with lazyviz.lazy("cpu:1GiB") as graph:
        loss = net(x)
        loss.backward()
    assert loss is not None
    beside = Scene(graph.ir, graph.plan())
    assert len(kept_json(beside)) > 1
    for drawn in (scene, beside):
        picture = arranged(drawn, matching=True)
        for band in saved_activation_bands(drawn, picture):
            low, high = sorted((band.start[1], band.end[1]))
            for frame in picture.frames:
                apart = frame.x >= band.end[0] or frame.x + frame.width <= band.start[0]
                assert frame.open or apart or frame.y >= high or frame.y + frame.height <= low


def test_where_data_flows_to_the_right_there_are_no_bands(scene):
    assert saved_activation_bands(scene, arranged(scene, across=True, matching=True)) == []


def test_edges_in_an_open_group_pass_beside_the_boxes_in_between():
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(32, 32) for _ in range(4))

        def forward(self, x):
            first, second = self.a(x), self.b(x)
            return first, self.d(self.c(first + second))

    net, x = Skip(), torch.randn(4, 32)
    with lazyviz.lazy("cpu:1GiB") as graph:
        first, last = net(x)
        total = first * 2 + last
    scene = Scene(graph.ir, graph.plan())
    picture = arranged(scene)
    frames = {frame.box.label: frame for frame in picture.frames if frame.box.name}
    inner = [frames[name] for name in "cd"]
    out = [line for line in picture.lines if line.points[-1][1] > frames["net"].y + frames["net"].height]
    assert len(out) > 1
    for line in out:  # sampled along its curve
        for (x0, y0), (x1, y1) in itertools.pairwise(line.points):
            for part in (n / 20 for n in range(1, 20)):
                x_at, y_at = x0 + (x1 - x0) * (3 * part**2 - 2 * part**3), y0 + (y1 - y0) * part
                covered = [f for f in inner if f.x < x_at < f.x + f.width and f.y < y_at < f.y + f.height]
                assert not covered, (line.label, covered)
    del total
