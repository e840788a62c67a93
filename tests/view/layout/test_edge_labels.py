"""Placement of edge labels."""

from __future__ import annotations

import itertools

import pytest

from lazyviz.view.layout.edge_labels import place_labels
from lazyviz.view.layout.layered_layout import layers_of, place

from .test_layout import random_group

BOXES = [(0.0, 0.0, 200.0, 40.0), (0.0, 80.0, 200.0, 120.0), (0.0, 160.0, 200.0, 200.0)]
LINES = [
    [(100.0, 40.0), (100.0, 80.0)],
    [(100.0, 40.0), (208.0, 80.0), (208.0, 120.0), (100.0, 160.0)],
    [(100.0, 120.0), (100.0, 160.0)],
]


def labeled(texts, groups, bounds=(-300.0, 500.0)):
    paths = [[0, 1], [0, 2], [1, 2]]
    return place_labels(LINES, texts, groups, paths, BOXES, [0.0] * 3, bounds, flip=False)


def test_a_group_whose_edges_all_carry_the_same_is_labeled_once_below():
    found = labeled(["a", "a", "b"], [True, True, True])
    assert [at is not None for at in found] == [True, False, True]
    assert found[0][1] == 40.0 + 13.0


def test_edges_that_carry_different_tensors_are_labeled_where_they_alone_arrive():
    found = labeled(["a", "c", "b"], [True, True, True])
    assert found[0][1] == 80.0 - 12.0
    assert found[1] is None


def test_an_ops_results_are_described_by_the_op():
    assert [at is not None for at in labeled(["a", "a", "b"], [False, True, True])] == [False, False, True]


def test_edge_labels_are_on_the_side_where_no_line_passes():
    found = labeled(["8×128 · 4.00 KiB", "8×128 · 4.00 KiB", ""], [True, True, True])
    assert found[0][0] < 100.0, "another edge leaves to the right"


def test_where_there_is_no_room_for_the_bytes_the_shape_alone_is_written():
    found = labeled(["8×128 · 4.00 KiB", "", ""], [True, True, True], bounds=(50.0, 260.0))
    assert found[0][2] == "8×128"
    assert labeled(["", "", "8×128 · 4.00 KiB"], [True, True, True], bounds=(50.0, 260.0))[2][2] == "8×128"


def test_edge_labels_that_would_extend_beyond_the_group_are_omitted():
    assert labeled(["x" * 80, "", ""], [True, True, True], bounds=(0.0, 200.0))[0] is None


@pytest.mark.parametrize("seed", range(25))
def test_edge_labels_touch_no_line_no_box_and_no_other_label(seed):
    count, edges, sizes = random_group(seed)
    flip = seed % 2 == 1
    layers = layers_of(count, edges)
    placed = place(layers, sizes, flip=flip)
    rects = [
        (placed.x[i], placed.y[i], placed.x[i] + sizes[i][0], placed.y[i] + sizes[i][1]) for i in range(count)
    ]
    lines = []
    for path in layers.paths:
        (left, top, right, bottom), (left2, top2, right2, bottom2) = rects[path[0]], rects[path[-1]]
        ends = (top, bottom2) if flip else (bottom, top2)
        bends = [(placed.x[i] + 4.0, placed.y[i]) for i in path[1:-1]]
        lines.append([((left + right) / 2, ends[0]), *bends, ((left2 + right2) / 2, ends[1])])
    texts = [f"{number}×{number} · 4.00 KiB" for number in range(len(edges))]
    bounds = (-10.0, placed.width + 10.0)
    groups = [True] * count
    found = place_labels(lines, texts, groups, layers.paths, rects, [0.0] * count, bounds, flip=flip)
    words = [
        (at[0] - len(at[2]) * 3.63, at[1] - 9.0, at[0] + len(at[2]) * 3.63, at[1] + 2.0)
        for at in found
        if at is not None
    ]
    points = [
        (x + (nx - x) * t * t * (3 - 2 * t), y + (ny - y) * (1.5 * t * (1 - t) + t**3))
        for line in lines
        for (x, y), (nx, ny) in itertools.pairwise(line)
        for t in (step / 40 for step in range(41))
    ]
    for n, (left, top, right, bottom) in enumerate(words):
        assert not [1 for x, y in points if left < x < right and top < y < bottom]
        for left2, top2, right2, bottom2 in (*rects, *words[:n]):
            assert left >= right2 or right <= left2 or top >= bottom2 or bottom <= top2
