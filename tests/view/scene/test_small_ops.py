"""Small ops are merged into one box next to larger ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import lazyviz
from lazyviz.plan.make_plan import make_plan
from lazyviz.view.render.svg import render_svg
from lazyviz.view.scene.scene import Scene
from lazyviz.view.scene.small_ops import is_dropout, is_small_ops


def recorded(program):
    torch.manual_seed(0)
    with lazyviz.lazy() as graph:
        keep = program()
    return graph.graph, keep


def step_with_small_ops():
    net = nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(net.parameters())
    x = torch.randn(256, 256)
    y = net(x).square().mean()
    scale = ((y * 2 + 1).exp() / 3).sqrt()
    loss = F.mse_loss(net(x), x) * scale
    loss.backward()
    optimizer.step()
    return net, optimizer, y, loss


def test_runs_of_small_ops_are_one_box_that_opens_and_large_ones_stay():
    graph, keep = recorded(step_with_small_ops)
    boxes = Scene(graph, make_plan(graph)).hierarchy.boxes.values()
    small = [box for box in boxes if is_small_ops(box) and box.phase == "forward"]
    assert small and all(box.label == f"{len(box.children)} small ops" for box in small)
    largest = max(storage.nbytes for storage in graph.storages if not storage.external)
    for box in small:
        assert all(sum(each.nbytes for each in child.node.made) * 500 <= largest for child in box.children)
        assert not any("loss" in child.label for child in box.children)
    assert {box.node for box in boxes if box.node is not None} >= {
        node for node in graph.nodes if sum(each.nbytes for each in node.made) > largest / 500
    }
    del keep


def optimizer_lane(graph):
    return next(
        each for each in Scene(graph, make_plan(graph)).hierarchy.lanes() if each.phase == "optimizer"
    )


def test_an_optimizers_counters_are_out_of_sight_among_its_updates():
    graph, keep = recorded(step_with_small_ops)
    lane = optimizer_lane(graph)
    assert [box.label for box in lane.children] == ["optimizer.step()"]
    (step,) = lane.children
    assert (step.repeats, step.children[-1].label) == (2, "step counters")
    assert step.ops == lane.ops == sum(node.phase == "optimizer" for node in graph.nodes)
    del keep


def test_the_counters_of_two_optimizers_are_each_among_their_own_updates():
    def step_of_two():
        nets = nn.Linear(64, 64), nn.Linear(64, 64)
        opt_a, opt_b = (torch.optim.Adam(net.parameters()) for net in nets)
        nets[1](nets[0](torch.randn(8, 64))).square().mean().backward()
        opt_a.step()
        opt_b.step()
        return nets, opt_a, opt_b

    graph, keep = recorded(step_of_two)
    lane = optimizer_lane(graph)
    assert [box.label for box in lane.children] == ["opt_a.step()", "opt_b.step()"]
    assert [box.children[-1].label for box in lane.children] == ["step counters"] * 2
    del keep


def test_a_graph_of_small_ops_alone_is_drawn_op_by_op():
    x = torch.randn(4)
    graph, keep = recorded(lambda: ((x + 1) * 2).exp().sin().cos())
    assert not [box for box in Scene(graph, make_plan(graph)).hierarchy.boxes.values() if is_small_ops(box)]
    del keep


def test_the_static_picture_draws_them():
    graph, keep = recorded(step_with_small_ops)
    assert "small ops" in render_svg(graph, make_plan(graph))
    del keep


def test_the_ops_of_a_dropout_outside_of_modules_are_one_box_that_opens():
    net = nn.Conv2d(3, 8, 3)

    def program():
        x = F.dropout(F.relu(net(torch.randn(4, 3, 16, 16))), 0.3)
        noise = torch.empty_like(x).bernoulli_(0.5).div_(2)
        return F.dropout2d(x, 0.2).sum() + (x * x).sum() + noise.sum()

    graph, keep = recorded(program)
    scene = Scene(graph, make_plan(graph))
    forward = next(lane for lane in scene.hierarchy.lanes() if lane.phase == "forward")
    found = [box for box in forward.children if is_dropout(box)]
    assert [(box.label, [child.label for child in box.children]) for box in found] == [
        ("dropout", ["empty_like", "bernoulli_", "div_", "mul"]),
        ("dropout", ["new_empty", "bernoulli_", "div_", "mul"]),
    ]
    told = scene.box(found[0])
    assert told["layer"] == "dropout" and told["through"] == "4×8×14×14 → 4×8×14×14"
    assert "bernoulli_" in [box.label for box in forward.children], "of the noise, which masks nothing"
    del keep
