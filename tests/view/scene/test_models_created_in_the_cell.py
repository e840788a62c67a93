"""Pictures of cells that make their model, too, as most first cells do."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz
from lazyviz.graph.modules import module_path
from lazyviz.plan.units import format_bytes
from lazyviz.view.scene.hierarchy import build_hierarchy
from lazyviz.view.scene.largest_layers import largest_layers
from lazyviz.view.scene.memory_chart import memory_json
from lazyviz.view.scene.scene import Scene


def labels(box):
    return [child.label for child in box.children]


def lanes_of(graph):
    return {lane.phase: lane for lane in build_hierarchy(graph.ir).lanes()}


def nodes_of(box):
    return (
        [box.node] if box.node is not None else [node for child in box.children for node in nodes_of(child)]
    )


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())

    def forward(self, x):
        code = self.encoder(x)
        return self.decoder(code), code


@pytest.fixture(scope="module")
def made():
    with lazyviz.lazy() as graph:
        net = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
        )
        optimizer = torch.optim.Adagrad(net.parameters())  # makes its states at once
        shadow = copy.deepcopy(net).requires_grad_(False)
        x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(shadow.parameters(), net.parameters(), strict=True):
                old.lerp_(new, 0.1)
    return graph, (net, optimizer, shadow, x, y, loss)


def test_first_values_of_weights_are_one_box_and_no_part_of_the_forward_pass(made):
    lanes = lanes_of(made[0])
    first = lanes["other"].children[0]
    assert first.label == "initial values" and first.ops > 8
    assert sum(child.label == "initial values" for child in lanes["other"].children) == 1
    ops = {child.node.name for child in lanes["forward"].children if child.node is not None}
    assert not any(name.startswith(("empty", "uniform", "zero", "fill", "clone")) for name in ops)
    # What is done to weights later is no first value.
    assert all(child.label == "initial values" for child in lanes["other"].children)
    assert any("lerp_" in node.name for node in nodes_of(lanes["optimizer"]))


def test_the_optimizer_s_lane_is_the_last_also_where_it_makes_its_states_first(made):
    assert [*lanes_of(made[0])][-1] == "optimizer"


def test_the_chart_s_axis_has_the_phases_of_the_lanes(made):
    graph, _ = made
    scene = Scene(graph.ir, graph.plan())
    phases = [phase for phase, _ in memory_json(scene)["phases"]]
    assert phases == ["other", "optimizer", "other", "forward", "backward", "optimizer"]


def test_an_op_that_makes_a_variable_is_labeled_with_its_name_and_one_of_a_module_stands_in_the_flow():
    with lazyviz.lazy() as graph:
        net = Autoencoder()
        x = torch.rand(16, 64)
        again, code = net(x)
        loss = F.mse_loss(again, x) + code.abs().mean()
        loss.backward()
    forward = lanes_of(graph)["forward"]
    found = {child.label: child for child in forward.children}
    assert found["x = rand"].kind == "op"
    assert "x" not in found
    assert found["code"].kind == found["again"].kind == "output"
    starts = {(start.label, end.label) for start, end in forward.edges}
    assert {("net", "code"), ("code", "abs"), ("net", "again"), ("again", "mse_loss")} <= starts
    assert ("net", "abs") not in starts, "what reads a variable is joined to it"
    assert found["loss"].kind == "output"
    assert ("add", "loss") in starts, "a result that nothing reads stands at the end"


def test_the_parts_that_the_forward_pass_shows_are_shown_in_the_backward_pass():
    with lazyviz.lazy() as graph:
        net = Autoencoder()
        x = torch.rand(16, 64)
        again, code = net(x)
        terms = [(code * k).pow(2).mean() for k in range(2)]
        loss = F.mse_loss(again, x) + sum(terms)
        loss.backward()
    hierarchy = build_hierarchy(graph.ir)
    _, forward, backward = hierarchy.lanes()
    model = next(child for child in forward.children if child.name == "net")
    assert model.id in hierarchy.opened
    parts = [child.name for child in model.children if child.name]
    assert len(parts) > 1 and len(backward.children) > 14
    assert sorted(child.name for child in backward.children if child.name) == sorted(parts)


def test_parts_of_two_modules_with_one_name_are_told_apart_in_both_lanes():
    with lazyviz.lazy() as graph:
        net = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
        s, t = torch.randn(2, 5, 16), torch.randn(2, 6, 16)
        net(s, t).sum().backward()
    hierarchy = build_hierarchy(graph.ir)
    drawn = [
        child
        for box in [*hierarchy.lanes(), *(hierarchy.boxes[id] for id in hierarchy.opened)]
        for child in box.children
        if child.kind == "module" and child.name and child.id not in hierarchy.opened
    ]
    assert len(drawn) == 8, "the same four in both lanes"
    for one in drawn:
        for other in drawn:
            if one.name != other.name:
                assert not other.name.endswith(f".{one.label}"), (one.name, other.name)
    of_name: dict[str, set[str]] = {}
    for box in drawn:
        of_name.setdefault(box.name, set()).add(box.label)
    both = [found for name, found in of_name.items() if sum(box.name == name for box in drawn) == 2]
    assert both and all(len(found) == 1 for found in both)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleDict({"one": nn.Linear(16, 64), "two": nn.Linear(16, 32)})
        self.down = nn.Linear(96, 16)

    def forward(self, x):
        return torch.relu(self.down(torch.cat([expert(x) for expert in self.experts.values()], -1)))


def test_layers_of_several_blocks_are_counted_and_the_models_name_is_said_once():
    with lazyviz.lazy() as graph:
        net = nn.Sequential(Expert(), Expert(), Expert())
        (net(torch.randn(8, 16)) * 2).sum().backward()
    labels = [row["label"] for row in largest_layers(Scene(graph.ir, graph.plan()))]
    assert "experts.one × 3" in labels, labels
    assert not any("one, " in label for label in labels)


def test_the_largest_layer_is_named_with_the_part_of_the_model_that_it_is_in():
    model = nn.Transformer(64, 2, 3, 3, 256, batch_first=True)
    with lazyviz.lazy() as graph:
        model(torch.ones(4, 200, 64), torch.ones(4, 20, 64)).sum().backward()
    first = largest_layers(Scene(graph.ir, graph.plan()))[0]
    assert first["label"] == first["name"] == "encoder.layers.*.self_attn × 3"


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleDict({"up": nn.Linear(16, 512), "down": nn.Linear(512, 16)})

    def forward(self, x):
        return self.encoder["down"](self.encoder["up"](x).exp()).exp()


def test_ops_of_the_model_itself_do_not_repeat_its_name_in_the_list():
    with lazyviz.lazy() as graph:
        model = Wrapped()
        model(torch.randn(64, 16)).sum().backward()
    labels = [row["label"] for row in largest_layers(Scene(graph.ir, graph.plan()))]
    assert labels == ["encoder.down", "model"]


def test_a_layer_without_an_input_gradient_shows_the_gradients_of_its_weights(made):
    graph, _ = made
    scene = Scene(graph.ir, graph.plan())
    backward = next(lane for lane in scene.hierarchy.lanes() if lane.phase == "backward")
    through = {child.name: scene.card(child).get("through") for child in backward.children if child.name}
    assert through["net.0"] == "4×8×6×6 → 8×3×3×3", "the weight's, not the bias's"
    assert through["net.1"].endswith("→ 4×8×6×6")
    with lazyviz.lazy() as deep:
        tower = nn.Sequential(*(layer for _ in range(20) for layer in (nn.Linear(4, 4), nn.Tanh())))
        head = nn.Linear(4, 2)
        head(tower(torch.randn(3, 4))).sum().backward()
    scene = Scene(deep.ir, deep.plan())
    whole = [box for box in scene.hierarchy.boxes.values() if box.name == "tower" and box.phase == "backward"]
    assert [scene.card(box)["through"] for box in whole] == ["3×4 → 40 gradients"]


def test_layers_of_other_shapes_are_rows_of_their_own_among_the_largest():
    with lazyviz.lazy() as graph:
        net = Autoencoder()
        x = torch.rand(512, 64)
        F.mse_loss(net(x)[0], x).backward()
    rows = {row["label"]: row for row in largest_layers(Scene(graph.ir, graph.plan()))}
    assert rows["decoder.3"]["through"] == "512×64 → 512×64"
    assert rows["encoder.2"]["through"] == "512×32 → 512×8"
    assert not any("×" in label or "*" in label for label in rows)
    assert not any(label.startswith("net.") for label in rows), "what all begin with is left out of all"


def test_experts_that_get_other_numbers_of_rows_are_one_row_among_the_largest():
    with lazyviz.lazy() as graph:
        net = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))
        x = torch.randn(600, 16)
        sum(expert(part).sum() for expert, part in zip(net, x.split([100, 200, 300]), strict=True)).backward()
    rows = [row for row in largest_layers(Scene(graph.ir, graph.plan())) if row["cls"] == "GELU"]
    assert [row["label"] for row in rows] == ["net.0.1, net.1.1, net.2.1"]


def test_a_sync_point_for_a_shape_is_named_by_its_op():
    with lazyviz.lazy() as graph:
        x = torch.randn(8).relu()
        rows = torch.where(x > 0)[0]
        y = x[rows] + 1
    assert graph.sync_points
    boxes = build_hierarchy(graph.ir).boxes.values()
    assert [box.label for box in boxes if box.kind == "sync"] == ["nonzero depends on data"]
    del y


def test_every_drawn_op_is_in_the_lane_of_its_module(made):
    graph, _ = made
    hierarchy = build_hierarchy(graph.ir)
    for node in graph.nodes:
        box = hierarchy.box_of[node.index]
        if box is not None and module_path(node) and node.phase == "forward":
            assert box.phase == "forward"


def test_a_module_whose_own_ops_hold_the_most_is_the_largest_though_it_has_layers():
    class Gather(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(16, 16)

        def forward(self, x, edge):
            return torch.zeros(40, 16).index_add(0, edge[1], self.lin(x)[edge[0]])

    gather, x, edge = Gather(), torch.ones(40, 16), torch.zeros(2, 4000).long()
    with lazyviz.lazy() as graph:
        y = gather(x, edge)
    plan = graph.plan()
    first, *others = largest_layers(Scene(graph.ir, plan))
    assert (first["label"], first["cls"]) == ("gather", "Gather (own ops)")
    alive = [each.nbytes for each in plan.alive_at_peak if each.node is not None and not each.node.module]
    assert first["bytes"] == format_bytes(sum(alive))
    assert all(row["share"] < first["share"] for row in others)
    del y


def test_a_layer_that_is_called_like_its_model_is_told_from_it_among_the_largest():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.Linear(64, 64), nn.Linear(64, 8)

        def forward(self, x):
            return self.out(self.rnn(x).tanh())

    rnn, x = Tagger(), torch.randn(512, 64)
    with lazyviz.lazy() as graph:
        loss = rnn(x).sum()
        loss.backward()
    labels = [row["label"] for row in largest_layers(Scene(graph.ir, graph.plan()))]
    assert sorted(labels) == ["rnn", "rnn.out", "rnn.rnn"]
    del loss
