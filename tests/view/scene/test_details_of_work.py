"""Details of layers and ops: arguments by name, class and settings, parameters and work."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import lazyviz
from lazyviz.plan.make_plan import make_plan
from lazyviz.plan.units import format_flops
from lazyviz.view.scene.details import describe
from lazyviz.view.scene.scene import Scene


def facts_of(graph, wanted):
    scene = Scene(graph.graph, make_plan(graph.graph))
    box = next(each for each in scene.hierarchy.boxes.values() if wanted(each))
    return dict(describe(scene, box)["facts"])


def test_work_is_what_pytorchs_counter_counts():
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    x = torch.randn(4, 3, 6, 6)
    with FlopCounterMode(display=False) as counter:
        net(x).sum().backward()
    net.zero_grad()
    with lazyviz.lazy() as graph:
        net(x).sum().backward()
    assert sum(node.flops for node in graph.nodes) == counter.get_total_flops() > 0
    assert format_flops(537_000_000) == "537 MFLOP" and format_flops(12) == "12 FLOP"


def test_arguments_are_listed_by_name_without_defaults():
    conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
    x = torch.randn(1, 3, 8, 8)
    with lazyviz.lazy() as graph:
        y = conv(x)
        z = y.add(1, alpha=2).sum(dim=1, keepdim=True)
    told = facts_of(graph, lambda box: box.label == "convolution")["arguments"]
    assert told == "stride=2, padding=1, dilation=1, transposed=False, output_padding=0, groups=1"
    assert facts_of(graph, lambda box: box.label == "sum")["arguments"] == "dim=[1], keepdim=True"
    assert z.shape == (1, 1, 4, 4)


def test_a_module_has_its_class_settings_parameters_dtype_and_work():
    net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU())
    x = torch.randn(4, 8)
    with lazyviz.lazy() as graph:
        y = net(x)
    facts = facts_of(graph, lambda box: box.name.endswith(".0"))
    assert facts["class"].startswith("Linear(") and "bias=False" in facts["class"]
    assert facts["parameters"] == "128" and facts["dtype"] == "float32"
    assert facts["work"] == "1.02 kFLOP"
    assert y.shape == (4, 16)
