"""Figures whose data flows to the right are continued in rows, so that they fit on a page."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.view.layout.coordinates import arrange
from lazyviz.view.layout.wrapped_rows import folded
from lazyviz.view.scene.scene import Scene

RATIO = 1.9


class Wide(nn.Module):
    """Layers of different shapes, so that none are folded, with a skip over all of them."""

    def __init__(self):
        super().__init__()
        sizes = [8 * n for n in range(1, 13)]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.last = nn.Linear(sizes[-1], 8)

    def forward(self, x):
        first = x
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x) + first


def chain(steps=1):
    net = Wide()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x = torch.randn(4, 8)
    with lazyviz.lazy() as graph:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            if steps > 1:
                loss.item()
    return graph, (net, optimizer, x, loss)


@pytest.fixture(params=[1, 4], ids=["one step", "a loop"])
def pictures(request):
    graph, keep = chain(request.param)
    scene = Scene(graph.ir, graph.plan())
    opened = {box.id for box in scene.opened()}
    long = arrange(scene, opened, across=True, matching=True)
    yield long, folded(long, RATIO, 0.0)
    del keep


def test_a_long_chain_is_continued_below_until_it_fits_a_page(pictures):
    long, rows = pictures
    assert long.width > 4 * long.height
    assert rows.width <= RATIO * rows.height
    assert all(frame.x >= 0 and frame.x + frame.width <= rows.width + 1 for frame in rows.frames)
    assert all(frame.y >= 0 and frame.y + frame.height <= rows.height + 1 for frame in rows.frames)


def test_each_box_is_in_one_row_and_covers_no_other(pictures):
    long, rows = pictures
    closed = [frame for frame in rows.frames if not frame.open]
    assert Counter(frame.box for frame in closed) == {frame.box: 1 for frame in long.frames if not frame.open}
    for at, one in enumerate(closed):
        for other in closed[:at]:
            apart_x = one.x + one.width <= other.x or other.x + other.width <= one.x
            apart_y = one.y + one.height <= other.y or other.y + other.height <= one.y
            assert apart_x or apart_y, (one.box, other.box)
    lanes = [frame for frame in rows.frames if frame.box.kind == "lane"]
    for frame in closed:
        if any(frame.box.parent is lane.box for lane in lanes):
            assert any(
                lane.box is frame.box.parent
                and lane.x <= frame.x <= lane.x + lane.width - frame.width
                and lane.y <= frame.y <= lane.y + lane.height - frame.height
                for lane in lanes
            ), "it is inside of its lane"


def test_edges_arrive_at_boxes_and_leave_a_row_where_the_next_one_continues(pictures):
    long, rows = pictures
    assert sum(line.tip for line in rows.lines) == sum(line.tip for line in long.lines)
    words = [Counter(line.at[2] for line in each.lines if line.at) for each in (rows, long)]
    assert words[0] == words[1]
    lanes = [frame for frame in rows.frames if frame.box.kind == "lane"]
    for line, following in zip(rows.lines, [*rows.lines[1:], None], strict=True):
        assert len(line.points) > 1
        if line.tip:
            continue
        (x, y), (start, height) = line.points[-1], following.points[0]
        one = next(lane for lane in lanes if lane.y <= y <= lane.y + lane.height and lane.x <= x)
        other = next(lane for lane in lanes if lane.y <= height <= lane.y + lane.height and lane.x <= start)
        assert one.box is other.box and one is not other
        assert y - one.y == pytest.approx(height - other.y), "at the same height"
        assert {round(x - one.x), round(start - other.x)} == {0, round(one.width)}, "from side to side"


def test_a_short_chain_stays_in_one_row():
    graph, keep = chain()
    scene = Scene(graph.ir, graph.plan())
    picture = arrange(scene, {box.id for box in scene.opened()}, across=True, matching=True)
    assert folded(picture, 100.0, 0.0) is picture
    down = arrange(scene, {box.id for box in scene.opened()})
    assert folded(down, 0.1, 0.0) is down, "only what goes to the right is folded"
    del keep


def test_a_saved_figure_to_the_right_fits_a_page_and_its_syncs_are_upright(tmp_path):
    graph, keep = chain(4)
    graph.save(tmp_path / "a.svg", direction="LR", show=["forward", "backward", "optimizer"])
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text).groups())
    assert width <= 2 * height
    barriers = re.findall(r'<path d="M[\d.]+,[\d.]+([hv])[\d.]+" stroke="#c0352b"', text)
    assert barriers and set(barriers) == {"v"}
    del keep
