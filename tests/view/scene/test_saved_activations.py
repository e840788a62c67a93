"""Tensors that are saved for the backward pass, by the modules between which they are kept."""

from __future__ import annotations

import torch
from torch import nn

import lazyviz
from lazyviz.plan.units import format_bytes
from lazyviz.view.scene.saved_activations import kept_json
from lazyviz.view.scene.scene import Scene


def kept_of(graph: lazyviz.LazyGraph, **plan: object) -> dict[tuple[str, str], int]:
    scene = Scene(graph.ir, graph.plan(**plan))
    boxes = scene.hierarchy.boxes
    return {
        (boxes[each["from"][-1]].label, boxes[each["to"][-1]].label): each["bytes"]
        for each in kept_json(scene)
    }


def recorded(samples: int = 16) -> lazyviz.LazyGraph:
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 1))
    x = torch.randn(samples, 8)
    with lazyviz.lazy("cpu:1GiB", batch=[x]) as graph:
        loss = model(x).mean()
        loss.backward()
    assert loss is not None
    return graph


def test_what_is_kept_for_backward_goes_from_module_to_module():
    # Results of Tanh and Sigmoid, which their own backward ops read last, and the loss, for its shape.
    assert kept_of(recorded()) == {
        ("model.1", "model.1"): 16 * 64 * 4,
        ("model.3", "model.3"): 16 * 32 * 4,
        ("mean", "ones_like"): 4,
    }


def test_it_follows_another_batch_and_there_is_none_between_pieces():
    graph = recorded()
    assert kept_of(graph, batch_size=64)["model.1", "model.1"] == 64 * 64 * 4
    assert kept_of(graph, split=4) == {}


def test_what_is_written_with_names_ends_in_boxes_of_the_first_picture():
    scene = Scene((graph := recorded()).ir, graph.plan())
    shown = {box.id for box in scene.opened()}
    for each in kept_json(scene):
        for chain in (each["from"], each["to"]):
            assert set(chain[:-1]) <= shown and chain[-1] not in shown
        assert each["text"].endswith("B kept")


def test_a_lane_counts_all_that_it_saves_however_many_tensors_that_are():
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()) for _ in range(700)])
    with lazyviz.lazy() as graph:
        layers(torch.randn(4, 8)).sum().backward()
    scene = Scene(graph.ir, graph.plan())
    (lane,) = [box for box in scene.hierarchy.root.children if box.phase == "forward"]
    saved = 701 * 4 * 8 * 4 + 4  # the input, the results of all layers, and the sum, for its shape
    assert f"saves {format_bytes(saved)} for backward" in scene.subtitle(lane)


def test_what_ran_at_a_sync_point_is_saved_for_the_backward_pass_as_well():
    def saves(*, read: bool) -> str:
        layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), nn.Sigmoid())
        x = torch.randn(32, 8)
        with lazyviz.lazy() as graph:
            out = layers(x)
            if read:
                out.sum().item()
            out.mean().backward()
        scene = Scene(graph.ir, graph.plan())
        (lane,) = [box for box in scene.hierarchy.root.children if box.phase == "forward"]
        return scene.subtitle(lane).partition(" · ")[2]

    assert saves(read=True) == saves(read=False) != ""
