"""What is highlighted for the selected box."""

from __future__ import annotations

import torch
from torch import nn

import lazyviz
from lazyviz.view.scene.details import describe
from lazyviz.view.scene.hierarchy import build_hierarchy
from lazyviz.view.scene.inputs_readers_and_gradients import relations
from lazyviz.view.scene.scene import Scene


def named(hierarchy, box):
    kinds = {}
    for relation in relations(hierarchy, box):
        kinds.setdefault(relation["kind"], []).append(relation["label"].partition(" · ")[0])
    return kinds


def op(hierarchy, name, phase="forward", nth=0):
    found = [box for box in hierarchy.box_of if box is not None and box.label == name and box.phase == phase]
    return found[nth]


def test_an_op_names_what_it_reads_what_reads_it_what_is_saved_and_its_gradient(step):
    hierarchy = build_hierarchy(step)
    found = named(hierarchy, op(hierarchy, "mm", nth=1))
    assert set(found["producer"]) == {
        "weight",
        "h.0.act: relu",
    }
    assert found["consumer"] == ["h.1.act: relu"]
    assert found["saved"] == ["h.1.act: threshold_backward"]
    assert found["gradient"] == ["h.1: mm", "h.1: mm"]


def test_a_backward_op_names_the_activations_it_needs_and_the_op_it_differentiates(step):
    hierarchy = build_hierarchy(step)
    box = op(hierarchy, "mm", phase="backward")
    found = named(hierarchy, box)
    assert found["saved"] and found["gradient"] == ["h.2: mm"]
    chain = next(each["chain"] for each in relations(hierarchy, box) if each["kind"] == "gradient")
    assert hierarchy.boxes[chain[-1]].phase == "forward"


def test_a_group_names_only_what_is_outside_of_it(step):
    hierarchy = build_hierarchy(step)
    fold = next(box for box in hierarchy.boxes.values() if box.label == "h.0–2" and box.phase == "forward")
    inside = {box.id for box in hierarchy.boxes.values() if fold.id in _chain(box)}
    ends = [each["chain"][-1] for each in relations(hierarchy, fold)]
    assert ends and not inside.intersection(ends)
    assert named(hierarchy, fold)["consumer"] == ["forward: mean"]


def _chain(box):
    ids = []
    while box is not None:
        ids.append(box.id)
        box = box.parent
    return ids


def test_a_tensor_names_its_readers_and_a_result_its_maker():
    net = nn.Linear(4, 2)
    x = torch.randn(3, 4)
    with lazyviz.lazy() as graph:
        out = net(x)
    scene = Scene(graph.ir, graph.plan())
    boxes = scene.hierarchy.boxes.values()
    given = next(box for box in boxes if box.kind == "input" and box.label == "x")
    result = next(box for box in boxes if box.kind == "output")
    assert [each["kind"] for each in describe(scene, given)["relations"]] == ["consumer"]
    assert [each["kind"] for each in describe(scene, result)["relations"]] == ["producer"]
    assert lazyviz.is_lazy(out)


def test_the_partner_of_a_layer_s_backward_pass_is_the_layer_not_the_open_model_around_it():
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    x = torch.randn(32, 8)
    with lazyviz.lazy() as graph:
        net(x).sum().backward()
    hierarchy = build_hierarchy(graph.ir)
    (backward,) = [lane for lane in hierarchy.lanes() if lane.phase == "backward"]
    layers = [box for box in backward.children if box.kind == "module"]
    assert [box.name for box in layers] == ["net.2", "net.1", "net.0"]
    for layer in layers:
        partners = [each["chain"] for each in relations(hierarchy, layer) if each["kind"] == "gradient"]
        assert [hierarchy.boxes[chain[-1]].name for chain in partners] == [layer.name]
