"""Layout, compared with golden files that ``js/test/coordinates.test.ts`` also reads.

``LAZYVIZ_ACCEPT_GOLDEN=1`` writes them anew; review the diff.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from lazyviz.plan.make_plan import make_plan
from lazyviz.view.layout.coordinates import arrange
from lazyviz.view.layout.layered_layout import BOX_GAP, layers_of, place
from lazyviz.view.scene.scene import Scene

GOLDEN = Path(__file__).parent / "golden"


def random_group(seed: int):
    pick = random.Random(seed)
    count = pick.randint(2, 40)
    edges = sorted(
        {(a, b) for b in range(1, count) for a in pick.sample(range(b), min(b, pick.randint(0, 2)))}
    )
    sizes = [
        (float(pick.choice([164, 184, 200, 340])), float(pick.choice([40, 42, 46, 210])))
        for _ in range(count)
    ]
    return count, edges, sizes


def golden_cases():
    cases = {
        "chain": (4, [(0, 1), (1, 2), (2, 3)], [(200.0, 46.0)] * 4, False),
        "residual": (4, [(0, 1), (1, 2), (0, 3), (2, 3)], [(184.0, 42.0)] * 4, False),
        "backward": (
            5,
            [(0, 1), (0, 2), (1, 3), (2, 3), (0, 4)],
            [(200.0, 46.0)] * 4 + [(500.0, 300.0)],
            True,
        ),
        "unconnected": (13, [], [(200.0, 46.0)] * 13, False),
        "empty": (0, [], [], False),
    }
    for seed in range(6):
        cases[f"random-{seed}"] = (*random_group(seed), seed % 2 == 1)
    return cases


def rounded(numbers):
    return [round(number, 6) + 0.0 for number in numbers]


def compare(name: str, found) -> None:
    path = GOLDEN / f"{name}.json"
    text = json.dumps(found, indent=1) + "\n"
    if os.environ.get("LAZYVIZ_ACCEPT_GOLDEN"):
        path.write_text(text)
    assert json.loads(path.read_text()) == json.loads(text)


def test_the_golden_layouts_are_reproduced():
    found = {}
    for name, (count, edges, sizes, flip) in golden_cases().items():
        layers = layers_of(count, edges)
        placed = place(layers, sizes, flip=flip)
        found[name] = {
            "sizes": sizes,
            "flip": flip,
            "layers": layers.layers,
            "paths": layers.paths,
            "rails": layers.rails,
            "placed": {
                "x": rounded(placed.x),
                "y": rounded(placed.y),
                "width": round(placed.width, 6),
                "height": round(placed.height, 6),
                "tops": rounded(placed.tops),
                "bottoms": rounded(placed.bottoms),
            },
        }
    compare("layout", found)


@pytest.mark.parametrize("room", [560.0, 1e9])
def test_the_golden_picture_is_reproduced(step, room):
    scene = Scene(step, make_plan(step))
    opened = {box.id for box in scene.opened()} | {
        box.id for box in scene.hierarchy.boxes.values() if box.label in ("h.0–2", "h.1", "h.2–0")
    }
    picture = arrange(scene, opened, room=room)
    found = {
        "root": scene.hierarchy.root.id,
        "room": room,
        "groups": [scene.group(box) for box in scene.hierarchy.boxes.values() if box.is_group],
        "opened": sorted(opened),
        "frames": [
            [frame.box.id, *rounded([frame.x, frame.y, frame.width, frame.height])]
            for frame in picture.frames
        ],
        "lines": [
            [line.label, [*rounded(line.at[:2]), line.at[2]] if line.at else None] for line in picture.lines
        ],
        "size": rounded([picture.width, picture.height]),
    }
    compare("picture-wrapped" if room < 1000 else "picture", found)


@pytest.mark.parametrize("seed", range(40))
def test_boxes_never_overlap_and_data_flows_one_way(seed):
    count, edges, sizes = random_group(seed)
    layers = layers_of(count, edges, widest=4, close=[0])
    assert sorted(i for layer in layers.layers for i in layer if i < count) == list(range(count))
    placed = place(layers, sizes)
    rects = [(placed.x[i], placed.y[i], *sizes[i]) for i in range(count)]
    for i, (x, y, w, h) in enumerate(rects):
        assert x >= -1e-6
        assert x + w <= placed.width + 1e-6
        for x2, y2, w2, h2 in rects[:i]:
            apart = x + w + BOX_GAP <= x2 + 1e-6 or x2 + w2 + BOX_GAP <= x + 1e-6
            assert apart or y + h <= y2 + 1e-6 or y2 + h2 <= y + 1e-6
    for start, end in edges:
        assert rects[start][1] + rects[start][3] <= rects[end][1]
    for layer in layers.layers:
        assert sum(i < count for i in layer) <= 4


def test_a_flipped_group_is_the_same_group_upside_down():
    layers = layers_of(3, [(0, 1), (1, 2)])
    sizes = [(100.0, 10.0), (100.0, 30.0), (100.0, 20.0)]
    down, up = place(layers, sizes), place(layers, sizes, flip=True)
    assert down.x == up.x
    assert [up.height - y - h for y, (_, h) in zip(up.y, sizes, strict=True)] == down.y


def test_an_edge_that_goes_backward_is_refused():
    with pytest.raises(ValueError, match="forward"):
        layers_of(2, [(1, 0)])


def test_a_tensor_from_outside_stands_just_above_its_reader():
    assert layers_of(3, [(0, 1), (1, 2)], close=[0]).layers == [[0], [1], [2]]
    late = layers_of(4, [(1, 2), (2, 3), (0, 3)], close=[0])
    assert 0 in late.layers[1]


def test_a_few_boxes_of_the_optimizer_stand_below_one_another_so_that_three_lanes_have_room(step):
    scene = Scene(step, make_plan(step))
    (optimizer,) = (lane for lane in scene.hierarchy.lanes() if lane.phase == "optimizer")
    assert 1 <= len(optimizer.children) <= 6
    assert all(len(layer) == 1 for layer in scene.layers(optimizer).layers)


def middles(placed, sizes):
    return [placed.x[i] + width / 2 for i, (width, _) in enumerate(sizes)]


def test_the_skips_of_a_unet_run_next_to_a_straight_chain_the_inner_nearer():
    chain = [(i, i + 1) for i in range(6)]
    skips = [(0, 6), (1, 5)]
    sizes = [(float(120 + 20 * (i % 3)), 40.0) for i in range(7)]
    layers = layers_of(7, sorted(chain + skips))
    placed = place(layers, sizes)
    assert len(set(rounded(middles(placed, sizes)))) == 1
    inner, outer = layers.rails
    rightmost = max(x + width for x, (width, _) in zip(placed.x, sizes))
    assert len({placed.x[bend] for bend in inner}) == len({placed.x[bend] for bend in outer}) == 1
    assert rightmost <= placed.x[inner[0]] < placed.x[outer[0]] <= placed.width
    assert {tuple(path) for path in layers.paths} >= {(1, *inner, 5), (0, *outer, 6)}


def test_edges_that_skip_from_one_box_share_a_rail():
    edges = [(0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (2, 3), (3, 4)]
    layers = layers_of(5, edges)
    (rail,) = layers.rails
    paths = dict(zip(edges, layers.paths, strict=True))
    assert [len(paths[0, end]) for end in (1, 2, 3, 4)] == [2, 3, 4, 5]
    assert paths[0, 4] == [0, *rail, 4] and paths[0, 3] == [0, *rail[:2], 3]


def test_a_long_edge_that_alone_leads_somewhere_moves_its_boxes():
    edges = [(0, 1), (1, 2), (2, 3), (0, 4), (4, 5)]
    assert layers_of(6, edges).rails == []
    assert layers_of(5, [(0, 1), (1, 2), (2, 4), (3, 4)], close=[3]).rails == []


def test_where_very_many_boxes_skip_there_are_no_rails():
    dense = [(a, b) for b in range(1, 30) for a in range(b)]
    assert layers_of(30, dense).rails == []


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_to_the_right_each_group_tells_its_shape_between_it_and_the_next_box(step, phase):
    scene = Scene(step, make_plan(step))
    picture = arrange(scene, {box.id for box in scene.opened()}, lanes={phase}, across=True)
    told = [line.at for line in picture.lines if line.at is not None]
    assert bool(told) == (phase == "forward"), "no group of the backward pass is read by another here"
    assert all(" · " not in words for _, _, words in told)
    for x, y, words in told:
        wide = len(words) * 11 * 0.66
        for frame in picture.frames:
            beside = x + wide / 2 <= frame.x or x - wide / 2 >= frame.x + frame.width
            above = y <= frame.y or y - 9 >= frame.y + frame.height
            assert frame.open or beside or above, (words, frame.box.label)
