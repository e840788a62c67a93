"""The hierarchy of boxes: steps, phases, modules, and folds."""

from __future__ import annotations

import copy
import re
import time

import numpy
import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.view.scene import dataflow
from lazyviz.view.scene.hierarchy import MAX_CHILDREN, build_hierarchy


def lanes_of(graph, **options):
    return {lane.phase: lane for lane in build_hierarchy(graph, **options).lanes()}


def labels(box):
    return [child.label for child in box.children]


def test_phases_are_lanes_and_equal_layers_are_one_box(step):
    lanes = lanes_of(step)
    assert list(lanes) == ["forward", "backward", "optimizer"]
    assert labels(lanes["forward"]) == ["x", "Net", "mean"]
    (fold,) = lanes["forward"].children[1].children
    assert fold.label == "h.0–2", "in the frame of the model that it is all of"
    assert (fold.kind, fold.repeats, fold.ops) == ("module", 3, 6)
    assert labels(fold) == ["h.0", "h.1", "h.2"]


def test_a_backward_op_sits_in_the_module_of_its_forward_op(step):
    backward = lanes_of(step)["backward"]
    assert labels(backward) == ["ones_like", "h.2–0"]
    assert labels(backward.children[1].children[0]) == ["act", "mm", "mm"]


def test_the_optimizer_is_one_box_per_parameter_until_opened(step):
    (fold,) = lanes_of(step)["optimizer"].children
    assert (fold.label, fold.repeats) == ("opt.step()", 3), "called by its line"
    assert labels(fold) == ["update h.0.weight", "update h.1.weight", "update h.2.weight"]


def test_the_steps_of_two_optimizers_are_told_apart():
    G = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    D = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    opts = {"D": torch.optim.Adam(D.parameters(), foreach=False)}
    optG = torch.optim.Adam(G.parameters(), foreach=False)
    with lazyviz.lazy() as graph:
        D(G(torch.randn(4, 8))).mean().backward()
        optG.step()
        opts["D"].step()  # the discriminator's
    boxes = lanes_of(graph.ir)["optimizer"].children
    assert [box.label for box in boxes if box.repeats > 1] == ["optG.step()", 'opts["D"].step()']


class LanguageModel(nn.Module):
    """A language model as libraries write it: nearly all of it is in one module, with ops beside it."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.Sequential(
            *[layer for width in range(8, 18) for layer in (nn.Linear(width, width + 1), nn.Tanh())]
        )
        self.head = nn.Linear(18, 4)

    def forward(self, x):
        return self.head(self.transformer(x)).log_softmax(-1)


def test_the_only_big_module_in_a_model_is_opened_too():
    with lazyviz.lazy() as graph:
        big, x = LanguageModel(), torch.randn(4, 8)
        big(x).sum().backward()
    hierarchy = build_hierarchy(graph.ir)
    drawn = {lane.phase: set() for lane in hierarchy.lanes()}
    for box in hierarchy.boxes.values():
        if box.parent is not None and (box.parent.kind == "lane" or box.parent.id in hierarchy.opened):
            drawn.get(box.phase, set()).add(box.name)
    for number in (0, 19):
        assert all(f"big.transformer.{number}" in drawn[phase] for phase in ("forward", "backward"))


def test_views_hide_behind_their_consumer_until_asked_for(step):
    hierarchy = build_hierarchy(step)
    assert hierarchy.box_of[0] is None  # t()
    assert [node.name for node in hierarchy.behind[1]] == ["t_0"]
    assert hierarchy.reads[1][1][1].name == "h.0.weight"  # mm reads the weight, seen through t()
    with_views = build_hierarchy(step, views=True)
    assert with_views.box_of[0] is not None
    assert len(with_views.boxes) > len(hierarchy.boxes)


def test_a_graph_of_nothing_but_views_is_drawn(write):
    program = write.Program()
    program(write.aten.t.default, [program.outside()], (8, 4))
    assert build_hierarchy(program.graph).box_of[0] is not None


def test_inputs_and_parameters_are_boxes_of_their_own_where_they_are_first_read(step):
    hierarchy = build_hierarchy(step)
    inputs = [box for box in hierarchy.boxes.values() if box.kind == "input"]
    assert sorted(box.label for box in inputs) == ["weight", "weight", "weight", "x"]
    (x,) = [box for box in inputs if box.label == "x"]
    assert x.parent.kind == "lane"
    assert [box.parent.label for box in inputs if box is not x] == ["h.0", "h.1", "h.2"]


def test_every_edge_goes_forward_among_the_children_of_one_group(step):
    hierarchy = build_hierarchy(step)
    for group in hierarchy.boxes.values():
        for start, end in [*group.edges, *group.order]:
            assert start.parent is group
            assert end.parent is group
            assert start.position < end.position or start.kind == "lane"


def test_interleaved_backward_ops_join_their_module_without_a_cycle(write):
    program, aten = write.Program(), write.aten
    x = program.outside()
    a = program(aten.mul.Tensor, [x], module="a", phase="backward")
    b = program(aten.mul.Tensor, [x], module="b", phase="backward")
    program(aten.relu.default, [a], module="a", phase="backward")  # needs only a: joins a
    program(aten.add.Tensor, [a, b], module="a", phase="backward")  # needs b too: a again, after b
    hierarchy = build_hierarchy(program.graph)
    first, other, joined, again = hierarchy.box_of
    assert joined.parent is first.parent
    assert again.parent is not first.parent
    assert other.parent is not first.parent


def test_a_module_that_is_called_twice_is_drawn_twice(write):
    program, aten = write.Program(), write.aten
    y = program.outside()
    for name in ("conv1", "act", "conv2", "act"):
        y = program(aten.relu.default if name == "act" else aten.sin.default, [y], module=name)
    lane = lanes_of(program.graph)["forward"]
    everything = [box for box in lane.children if box.kind != "input"]
    assert sum(box.ops for box in everything) == 4
    hierarchy = build_hierarchy(program.graph)
    assert hierarchy.box_of[1].parent is not hierarchy.box_of[3].parent


def test_a_sync_point_is_a_barrier_between_what_was_recorded_before_and_after(write):
    program, aten = write.Program(), write.aten
    x = program.outside()
    program(aten.sin.default, [x], module="a")
    program.sync()
    program(aten.cos.default, [x], module="a")
    lane = lanes_of(program.graph)["forward"]
    kinds = [box.kind for box in lane.children if box.kind != "input"]
    assert kinds == ["module", "sync", "module"]
    sync = next(box for box in lane.children if box.kind == "sync")
    assert {start.label for start, end in lane.order if end is sync} >= {"Net.a"} or len(lane.order) >= 2


def test_a_loop_of_steps_folds_into_one_box_and_shows_one_step(write):
    program = write.Program()
    x = program.outside((4, 8), name="x")
    for _ in range(5):
        write.training_step(program, x=x)
    hierarchy = build_hierarchy(program.graph)
    folds = [box for box in hierarchy.boxes.values() if box.kind == "step" and box.repeats > 1]
    assert [(fold.label, fold.repeats) for fold in folds] == [("step 1–5", 5), ("step 2–5", 4)]
    loop, others = folds
    assert [child.label for child in loop.children] == ["step 1", "step 2–5"]  # one is seen whole
    assert [child.label for child in others.children] == ["step 2", "step 3", "step 4", "step 5"]
    opened = [hierarchy.boxes[id].label for id in hierarchy.opened]
    assert sorted(set(opened)) == ["Net", "step 1", "step 1–5"]


def test_a_repeated_sequence_of_ops_folds_into_steps(write):
    program, aten = write.Program(), write.aten
    y = program.outside(name="h")
    for _ in range(20):
        y = program(aten.tanh.default, [program(aten.sin.default, [y], module="rnn")], module="rnn")
    boxes = build_hierarchy(program.graph).boxes.values()
    assert [(box.kind, box.repeats, box.ops) for box in boxes if box.repeats > 1] == [("module", 20, 40)]


def test_an_in_place_write_is_what_a_later_reader_reads(write):
    program, aten = write.Program(), write.aten
    made = program(aten.sin.default, [program.outside()])
    program(aten.mul_.Tensor, [made], writes=made)
    program(aten.cos.default, [made])
    assert build_hierarchy(program.graph).reads[2][0][0] == 1


@pytest.mark.slow
def test_a_hundred_thousand_ops_are_sorted_in_seconds_and_no_group_is_too_long(write):
    program, aten = write.Program(), write.aten
    y = program.outside((2,))
    ops = [aten.sin.default, aten.cos.default, aten.tanh.default]
    for i in range(100_000):
        y = program(
            ops[(i * i) % 7 % 3],
            [y],
            (2,),
            root="" if i % 2 else "Net",
            module="" if i % 2 else f"m.{i % 11}",
        )
    start = time.perf_counter()
    hierarchy = build_hierarchy(program.graph)
    assert time.perf_counter() - start < 20
    assert max(len(box.children) for box in hierarchy.boxes.values()) <= MAX_CHILDREN
    assert hierarchy.root.ops == 100_000


def test_a_deep_nest_of_modules_needs_no_recursion(write):
    program = write.Program()
    y = program.outside()
    for depth in range(100, 1500, 100):
        y = program(write.aten.sin.default, [y], module=".".join(["m"] * depth))
    assert build_hierarchy(program.graph).root.ops == 14


def test_boxes_drawn_before_are_used_again_until_an_op_fails_or_views_are_asked_for(step):
    drawn = build_hierarchy(step)
    assert build_hierarchy(step, drawn=drawn) is drawn
    assert build_hierarchy(step, drawn=drawn, views=True) is not drawn
    step.nodes[0].state = "failed"  # a view, which now has to be seen
    again = build_hierarchy(step, drawn=drawn)
    assert again is not drawn
    assert again.box_of[0] is not None


def test_a_data_set_made_by_many_ops_before_the_model_is_no_forward_pass():
    with lazyviz.lazy() as graph:
        images = [torch.arange(4.0).sub(at).abs() for at in range(20)]
        net = nn.Linear(4, 2)
        batch = torch.stack(images)
        net(batch).sum().backward()
    reads, _ = dataflow.data_flow(graph.ir, dataflow.hidden_views(graph.ir))
    lanes = dataflow.lanes_of(graph.ir, reads)
    of = {node.name.rpartition("_")[0]: lane for node, lane in zip(graph.ir.nodes, lanes)}
    assert (of["sub"], of["abs"], of["stack"], of["addmm"]) == ("other", "other", "forward", "forward")


def test_what_makes_the_forward_pass_s_inputs_is_drawn_with_it():
    net = nn.Linear(4, 2)
    with lazyviz.lazy() as graph:
        x = torch.randn(3, 4)
        unused = torch.ones(3)
        fresh = nn.Linear(2, 2)  # making a model is no part of running it
        loss = fresh(net(x)).sum()
        loss.backward()
    hierarchy = build_hierarchy(graph.ir)
    lanes = {lane.phase: [box.label for box in lane.children] for lane in hierarchy.lanes()}
    assert {"x = randn", "ones"} < set(lanes["forward"])
    assert lanes["other"] == ["initial values"]
    assert all(node.phase == "other" for node in graph.nodes if "randn" in node.name)
    del unused


def test_making_a_model_and_moving_it_is_no_part_of_the_forward_pass():
    with lazyviz.lazy(device="H100-80GB") as graph:
        net = nn.Linear(4, 2).cuda()
        x = torch.randn(3, 4, device="cuda")
        net(x).sum().backward()
    lanes = {lane.phase: lane for lane in build_hierarchy(graph.ir).lanes()}
    assert [lane.phase for lane in lanes.values()] == ["other", "forward", "backward"]
    assert "x = randn" in labels(lanes["forward"])
    assert not any("uniform_" in label or "_to_copy" in label for label in labels(lanes["forward"]))


def test_without_a_model_factories_are_in_the_forward_lane_and_a_model_alone_is_initialization():
    with lazyviz.lazy() as graph:
        x = torch.ones(3)
    assert [lane.phase for lane in build_hierarchy(graph.ir).lanes()] == ["forward"]
    with lazyviz.lazy() as graph:
        net = nn.Linear(4, 2)
        nn.init.orthogonal_(net.weight)  # by way of temporary tensors
    assert [lane.phase for lane in build_hierarchy(graph.ir).lanes()] == ["other"]
    del x


def descend(net, weight, velocity):
    """Updates of parameters, and of a tensor that is none, without an optimizer; with momentum and a mean."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad.zero_()
        velocity.mul_(0.9).add_(weight.grad)
        weight -= 0.1 * velocity


def test_updates_written_by_hand_are_in_the_optimizer_s_lane_of_their_step():
    net, x = nn.Linear(4, 4), torch.randn(3, 4)
    weight, velocity = torch.randn(4, 2, requires_grad=True), torch.zeros(4, 2)
    average = copy.deepcopy(net)
    norms = []
    with lazyviz.lazy() as graph:
        for _ in range(3):
            loss = (net(x) @ weight).square().mean()
            loss.backward()
            norms.append(weight.grad.norm())
            descend(net, weight, velocity)
            weight.grad = None
            with torch.no_grad():
                for mine, its in zip(average.parameters(), net.parameters(), strict=True):
                    mine.lerp_(its, 0.1)
    hierarchy = build_hierarchy(graph.ir)
    lanes = [lane.phase for lane in hierarchy.lanes()]
    assert lanes == ["forward", "backward", "optimizer"] * 3
    for node in graph.nodes:
        box = hierarchy.box_of[node.index]
        if node.op._schema.name in ("aten::sub_", "aten::add_", "aten::mul_", "aten::lerp_", "aten::zero_"):
            assert box.phase in ("backward", "optimizer"), node
        if node.op._schema.name == "aten::linalg_vector_norm":
            assert box.phase == "forward", "what only reads gradients is no update"


class _Mixed(nn.Module):
    """A layer of several parts, so that opening one of them fills a lane."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def test_the_backward_pass_opens_no_layer_that_the_forward_pass_shows_closed():
    net = nn.Sequential(nn.Linear(8, 8), *(_Mixed() for _ in range(3)))
    net[3].norm.weight.requires_grad_(False)  # its backward pass is unlike the others'
    net[3].norm.bias.requires_grad_(False)
    net[3].up.bias.requires_grad_(False)
    with lazyviz.lazy() as graph:
        net(torch.randn(4, 8)).sin().backward(torch.ones(4, 8))
    lanes = {lane.phase: lane for lane in build_hierarchy(graph.ir).lanes()}
    shown = {
        part.label for box in lanes["forward"].children for part in box.children if part.kind == "module"
    }
    assert "net.1–3" in shown, shown
    found = {box.label for box in lanes["backward"].children if box.kind == "module"}
    assert found <= {"net.0", "net.1", "net.2", "net.3", "net.2–1", "net.3–2", "net.3–1"}, found


def test_the_backward_pass_shows_as_many_parts_as_the_forward_pass():
    kinds = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU)
    layers = [layer for n in range(15) for layer in (nn.Linear(8 + n, 9 + n), kinds[n % 5]())]
    net = nn.Sequential(*layers)
    with lazyviz.lazy() as graph:
        net(torch.randn(4, 8)).sum().backward()
    lanes = {lane.phase: lane for lane in build_hierarchy(graph.ir).lanes()}
    (frame,) = (box for box in lanes["forward"].children if box.kind == "module")
    parts = {part.label for part in frame.children if part.kind == "module"}
    assert len(parts) > 24
    assert parts <= {box.label for box in lanes["backward"].children}


def test_batches_of_a_loop_have_the_names_of_its_variables_in_every_round():
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batches = [(torch.randn(3, 4), torch.randn(3, 1)) for _ in range(5)]
    with lazyviz.lazy() as graph:
        while batches:
            xb, yb = batches.pop()
            optimizer.zero_grad()
            nn.functional.mse_loss(net(xb), yb).backward()
            optimizer.step()
    hierarchy = build_hierarchy(graph.ir)
    names = [box.label for box in hierarchy.boxes.values() if box.kind == "input" and box.key == "input"]
    assert sorted(names) == ["xb"] * 5 + ["yb"] * 5


def test_tensors_of_other_lines_do_not_get_the_name_of_a_variable():
    net = nn.Linear(4, 1)
    with lazyviz.lazy() as graph:
        net(torch.from_numpy(numpy.ones((3, 4), "float32"))).sum().backward()
        x = torch.from_numpy(numpy.ones((3, 4), "float32"))
        net(x).sum().backward()
    hierarchy = build_hierarchy(graph.ir)
    names = [box.label for box in hierarchy.boxes.values() if box.kind == "input" and box.key == "input"]
    assert sorted(names) == ["input", "x"]


class Mixture(nn.Module):
    """Experts that read one tensor, each with its weight; with them around it, a residual block."""

    def __init__(self, width=8):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 32), nn.GELU()) for _ in range(4))
        self.out = nn.Linear(32, width)

    def forward(self, x):
        h = self.norm(x)
        weights = self.gate(h).softmax(-1)
        total = torch.zeros(32)
        for n, expert in enumerate(self.experts):
            total = total + weights[..., n : n + 1] * expert(h)
        return x + self.out(total)


@pytest.mark.parametrize("layers", [1, 3])
def test_layers_whose_gradients_are_added_up_are_folded_as_in_the_forward_pass(layers):
    net = nn.Sequential(*(Mixture() for _ in range(layers)))
    x = torch.randn(4, 8, requires_grad=True)
    with lazyviz.lazy() as graph:
        net(x).sum().backward()
    ranges = {}
    for box in build_hierarchy(graph.graph).boxes.values():
        if box.kind == "module" and box.name and box.repeats > 1:
            ranges.setdefault(box.phase, set()).add((frozenset(re.findall(r"\d+", box.label)), box.repeats))
    found = {(frozenset("03"), 4)} | ({(frozenset("02"), 3)} if layers == 3 else set())
    assert ranges == {"forward": found, "backward": found}


def test_many_sums_of_gradients_in_a_row_are_one_box():
    x = torch.randn(4, 8, requires_grad=True)
    with lazyviz.lazy() as graph:
        torch.stack([x] * 9).sum().backward()
    sums = [
        box.repeats
        for box in lanes_of(graph.graph)["backward"].children
        if box.label in ("add", "add_") or (box.repeats > 1 and box.children[0].label in ("add", "add_"))
    ]
    assert sums and len(sums) <= 2 and max(sums) >= 3


def test_what_an_optimizer_makes_when_it_is_made_is_titled_by_the_variable_and_the_class():
    x = torch.randn(4, 8)
    with lazyviz.lazy() as graph:
        net = nn.Linear(8, 8)
        my_opt = torch.optim.Adagrad(  # over more than one line
            net.parameters(),
            lr=0.1,
        )
        net(x).sum().backward()
        my_opt.step()
    lanes = lanes_of(graph.graph)
    assert "my_opt Adagrad" in [box.label for box in lanes["optimizer"].children]


def test_updates_with_what_autograd_grad_returns_are_an_optimizer_s_work_and_its_penalties_are_not():
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(4, 8)
    with lazyviz.lazy() as graph:
        loss = (x @ weight).tanh().sum()
        (slope,) = torch.autograd.grad(loss, [weight], create_graph=True)
        total = loss + slope.square().sum()
        (gradient,) = torch.autograd.grad(total, [weight])
        with torch.no_grad():
            weight -= 0.1 * gradient
    hierarchy = build_hierarchy(graph.ir)
    updates = [node.name for node in graph.nodes if hierarchy.lane_of(node) == "optimizer"]
    assert [name.rpartition("_")[0] for name in updates] == ["mul", "sub_"]
    penalty = graph.nodes[next(node.index for node in graph.nodes if node.name.startswith("pow"))]
    assert hierarchy.lane_of(penalty) == "forward"


def called_twice():
    encoder = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    left, right = torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8)
    with lazyviz.lazy() as graph:
        distance = (encoder(left) - encoder(right)).square().sum()
        distance.backward()
    return graph, (encoder, distance)


def test_the_one_big_module_is_open_at_its_first_call_where_it_is_called_twice():
    graph, keep = called_twice()
    hierarchy = build_hierarchy(graph.ir)
    module = next(box for box in hierarchy.boxes.values() if box.phase == "forward" and box.calls == 2)
    first, second = (box for box in module.children if box.kind == "step")
    assert {module.id, first.id} <= hierarchy.opened and second.id not in hierarchy.opened
    layers = [box.name.rpartition(".")[2] for box in first.children if box.kind == "module"]
    assert layers == ["0", "1", "2", "4"]
    backward = next(lane for lane in hierarchy.lanes() if lane.phase == "backward")
    names = {box.name for box in backward.children if box.kind == "module" and box.name}
    assert {name.rpartition(".")[2] for name in names} == {"0", "1", "2", "4"}, (
        "the same layers in both lanes"
    )
    del keep


def test_running_statistics_are_neither_what_a_layer_is_given_nor_what_it_gives():
    graph, keep = called_twice()
    hierarchy = build_hierarchy(graph.ir)
    norms = [box for box in hierarchy.boxes.values() if box.phase == "forward" and box.name.endswith("1")]
    assert len(norms) == 2
    for norm in norms:
        assert tuple(norm.takes.meta.shape) == tuple(norm.gives.meta.shape) == (2, 8, 6, 6)
    module = next(box for box in hierarchy.boxes.values() if box.phase == "forward" and box.calls == 2)
    assert not module.edges, "no call reads what another returns"
    del keep


class Wrapped(nn.Module):
    """A list of layers that is the only child of the only child: both are drawn as one box."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_the_backward_pass_lists_the_layers_of_a_list_whose_gradients_differ():
    model = nn.Sequential(Wrapped(), nn.Linear(8, 2))
    x = torch.randn(4, 8)
    with lazyviz.lazy() as graph:
        loss = model(x).square().sum()
        loss.backward()  # the first layer has no gradient to give
    lanes = {lane.phase: lane for lane in build_hierarchy(graph.ir).lanes()}
    names = [box.name for box in lanes["backward"].children if box.kind == "module" and box.name]
    assert not any(name.endswith("layers") for name in names), names
    assert sum("layers." in name for name in names) >= 2
    boxes = build_hierarchy(graph.ir).boxes.values()
    found = [
        box for box in boxes if box.name.startswith("model.0.layers.") and "layers" not in box.parent.name
    ]
    labels = {(box.phase, box.label.partition(".")[0]) for box in found}
    assert labels == {("forward", "layers"), ("backward", "layers")}, "the same names in both"
    del loss
