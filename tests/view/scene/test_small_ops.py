"""Small ops are merged into one box next to larger ones."""

from __future__ import annotations

import pytest
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


@pytest.mark.parametrize("options", [{}, {"foreach": True}])
def test_the_parameter_groups_of_one_step_are_one_box(options):
    def step_of_two_groups():
        body, head = nn.Linear(64, 64), nn.Linear(64, 8)
        groups = [{"params": body.parameters()}, {"params": head.parameters(), "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, **options)
        head(body(torch.randn(8, 64))).square().mean().backward()
        optimizer.step()
        return body, head, optimizer

    graph, keep = recorded(step_of_two_groups)
    lane = optimizer_lane(graph)
    assert [box.label for box in lane.children] == ["optimizer.step()"]
    assert "optimizer.step()" not in [box.label for box in lane.children[0].children], "its parts have others"
    assert lane.children[0].ops == sum(node.phase == "optimizer" for node in graph.nodes)
    del keep


def forward_lane(graph):
    return next(each for each in Scene(graph, make_plan(graph)).hierarchy.lanes() if each.phase == "forward")


@pytest.mark.parametrize("long", [False, True])
def test_the_noise_schedule_of_a_diffusion_model_is_one_box(long):
    net, x = nn.Conv2d(1, 32, 3, padding=1), torch.randn(16, 1, 32, 32)
    with lazyviz.lazy() as graph:
        betas = torch.linspace(1e-4, 0.02, 1000)
        alphas = 1 - betas
        bars = alphas.cumprod(0)
        before = F.pad(bars[:-1], (1, 0), value=1.0)
        root, rest = bars.sqrt(), (1 - bars).sqrt()
        more = [betas * (1 - before) / (1 - bars) for _ in range(8 if long else 1)]
        t = torch.randint(0, 1000, (16,))
        noise = torch.randn_like(x)
        noisy = root[t].view(-1, 1, 1, 1) * x + rest[t].view(-1, 1, 1, 1) * noise
        loss = F.mse_loss(net(noisy).mean(1, keepdim=True), noise)
        loss.backward()
    lane = forward_lane(graph.graph)
    (fold,) = [box for box in lane.children if is_small_ops(box)]
    assert fold.label == f"{8 + 4 * len(more)} small ops", "of a crowded lane, too, whose boxes are lines"
    names = [box.label for box in lane.children]
    assert not any("alphas" in name or "bars" in name for name in names), "neither as ops nor as variables"
    assert any("noisy" in name for name in names) and "loss" in names
    assert any("alphas = " in box.label for box in fold.children), "when opened, each has its name"
    assert "small ops" in render_svg(graph.graph, graph.plan())


def test_few_named_results_before_a_model_stay_and_so_does_what_has_gradients():
    net, scale = nn.Linear(64, 64), torch.ones(4, requires_grad=True)
    x, y = torch.randn(64, 64), torch.randn(64, 64)
    with lazyviz.lazy() as graph:
        a = scale * 2
        b = a + 1
        c = b.exp()
        d = c.mean()
        F.mse_loss(net(x) * d, y).backward()
    names = [box.label for box in forward_lane(graph.graph).children]
    assert all(any(name.startswith(f"{letter} = ") for name in names) for letter in "abcd"), names
    with lazyviz.lazy() as graph:
        e = torch.ones(4)
        f = (e.exp() + 1).sin().cos()
        F.mse_loss(net(x) * f.mean(), y).backward()
    names = [box.label for box in forward_lane(graph.graph).children]
    assert any(name.startswith("f = ") for name in names), names
    del a, b, c, d, e, f


def test_a_variable_in_a_crowded_lane_is_not_drawn_beside_its_line():
    x, net = torch.randn(64, 64), nn.Linear(64, 64)
    with lazyviz.lazy() as graph:
        y = x * 2
        z = net(y)
        for _ in range(30):
            z = z + y
    lane = forward_lane(graph.graph)
    assert "y = x * 2" in [box.label for box in lane.children]
    assert [box.label for box in lane.children if box.kind == "output"] == ["z"]
