"""A picture of a plan for another batch size shows the sizes of that batch."""

from __future__ import annotations

import torch
from torch import nn

import lazyviz
from lazyviz.view.scene.scene import Scene
from lazyviz.view.widget.source_view import Code


def recorded(samples: int) -> lazyviz.LazyGraph:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    x = torch.randn(samples, 8)
    with lazyviz.lazy("cpu:1GiB", batch=[x]) as graph:
        loss = model(x).mean()
        loss.backward()
    assert loss is not None
    return graph


def told(scene: Scene) -> list[tuple[str, str, int, list[str]]]:
    """What every box and edge of a picture says of bytes."""
    return [
        (
            box.label,
            scene.subtitle(box).rpartition(" · ")[2],
            scene.made(box),
            [scene.edge_text(each).rpartition(" · ")[2] for each in box.edges.values()],
        )
        for box in scene.hierarchy.boxes.values()
    ]


def test_another_batch_is_described_as_if_it_had_been_recorded():
    small, large = recorded(16), recorded(64)
    asked = Scene(small.ir, small.plan(batch_size=64))
    assert told(asked) == told(Scene(large.ir, large.plan()))
    assert told(asked) != told(Scene(small.ir, small.plan()))


def test_so_is_the_work_of_boxes():
    small, large = recorded(16), recorded(64)
    work = []
    for graph, size in ((small, 64), (large, None)):
        scene = Scene(graph.ir, graph.plan(batch_size=size))
        sums = scene.numbers.sums("flops", scene.plan)
        work.append([sums.get(box, 0) for box in scene.hierarchy.boxes.values()])
    assert work[0] == work[1] and max(work[0]) > 0
    scene = Scene(small.ir, small.plan())
    assert scene.numbers.sums("flops", scene.plan)[scene.hierarchy.root] < max(work[0])


def test_and_what_lines_of_code_allocate():
    small, large = recorded(16), recorded(64)
    facts = [
        Code(graph.ir).facts_json(graph.plan(batch_size=size))["lines"]
        for graph, size in ((small, 64), (large, None))
    ]
    assert [fact.get("bytes") for fact in facts[0].values()] == [
        fact.get("bytes") for fact in facts[1].values()
    ]
