"""Modules by object, and by the name of the user's variables."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz
from lazyviz.graph.modules import full_name, module_path
from lazyviz.view.scene.details import describe
from lazyviz.view.scene.hierarchy import build_hierarchy
from lazyviz.view.scene.memory_chart import memory_json
from lazyviz.view.scene.scene import Scene


def scene_of(graph):
    return Scene(graph.ir, graph.plan())


def lane(scene, phase="forward"):
    return next(lane for lane in scene.hierarchy.lanes() if lane.phase == phase)


def modules(scene, phase="forward"):
    """(Full name, class, calls) of the modules' boxes in a lane, as they are sent to the page."""
    found, stack = [], [lane(scene, phase)]
    while stack:
        box = stack.pop()
        told = scene.box(box)
        if "name" in told:
            found.append((told["name"], told["cls"], told.get("calls", 1)))
        stack.extend(reversed(box.children))
    return found


@pytest.fixture
def gan():
    G = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
    D = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    real, z = torch.randn(5, 6), torch.randn(5, 4)
    optimizers = [torch.optim.Adam(net.parameters()) for net in (G, D)]
    with lazyviz.lazy() as graph:
        loss_d = F.softplus(-D(real)).mean() + F.softplus(D(G(z).detach())).mean()
        loss_d.backward()
        optimizers[1].step()
        loss_g = F.softplus(-D(G(z))).mean()
        loss_g.backward()
        optimizers[0].step()
    return graph, (G, D, loss_d, loss_g)


def test_two_models_of_one_class_are_a_box_each_with_the_users_names(gan):
    scene = scene_of(gan[0])
    outer = [(name, kind, calls) for name, kind, calls in modules(scene) if "." not in name]
    assert outer == [("G", "Sequential", 2), ("D", "Sequential", 3)]
    assert {name for name, _, _ in modules(scene, "backward") if "." not in name} == {"G", "D"}
    assert ("D.0", "Linear", 1) in modules(scene, "backward")
    assert not any("Sequential" in name for name, _, _ in modules(scene) + modules(scene, "backward"))


def test_weights_gradients_and_states_have_the_name_of_their_model(gan):
    alive = [row["label"] for row in memory_json(scene_of(gan[0]))["alive"]]
    named = [label for label in alive if "weight" in label]
    assert {"D.0.weight", "D.0.weight.grad", "G.2.weight.exp_avg_sq"} <= set(named)
    assert all(label.startswith(("G.", "D.")) for label in named)
    text = gan[0].text()
    assert "parameters: G.0.weight" in text or "parameters: D.0.weight" in text
    assert ": 0.weight" not in text


def test_layers_that_are_called_one_by_one_are_parts_of_the_model_that_has_them():
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    x = torch.randn(4, 8)
    with lazyviz.lazy() as graph:
        y = net[2](net[1](net[0](x)))
    expected = [
        ("net", "Sequential", 1),
        ("net.0", "Linear", 1),
        ("net.1", "ReLU", 1),
        ("net.2", "Linear", 1),
    ]
    assert modules(scene_of(graph)) == expected
    del y


def test_modules_in_containers_and_objects_are_called_by_the_expression():
    class Trainer:
        def __init__(self):
            self.model = nn.Linear(4, 4)

    trainer, models = Trainer(), {"a": nn.Linear(4, 4)}
    x = torch.randn(2, 4)
    with lazyviz.lazy() as graph:
        y = models["a"](trainer.model(x))
    assert [name for name, _, _ in modules(scene_of(graph))] == ["trainer.model", "models['a']"]
    del y


def test_modules_without_a_variable_go_by_their_class():
    def through(module, x):
        return module(x)

    x = torch.randn(2, 4)
    with lazyviz.lazy() as graph:
        y = through(nn.Linear(4, 4), x) + through(nn.Linear(4, 4), x)
    assert modules(scene_of(graph)) == [("Linear", "Linear", 1)] * 3  # one stands for both until it is opened
    del y


def trained_in_a_function(x):
    def through(module, batch):
        return module(batch)

    student = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    teacher = nn.Sequential(nn.Linear(6, 4), nn.Tanh())
    loss = F.mse_loss(student(x), through(teacher, x).detach())
    loss.backward()
    for _ in range(2):
        net = nn.Linear(6, 4)
        loss = loss.detach() + net(x).sum()
    return loss


def test_modules_that_only_a_function_had_go_by_its_variables_with_their_facts():
    x = torch.randn(5, 6)
    with lazyviz.lazy() as graph:
        loss = trained_in_a_function(x)
    scene = scene_of(graph)
    assert {each[:2] for each in modules(scene)} == {
        ("student", "Sequential"), ("student.0", "Linear"), ("student.1", "ReLU"), ("student.2", "Linear"),
        ("teacher", "Sequential"), ("teacher.0", "Linear"), ("teacher.1", "Tanh"),
        ("net", "Linear"), ("net (2)", "Linear"),
    }  # fmt: skip
    assert ("student.0", "Linear", 1) in modules(scene, "backward")
    assert {"student.0.weight", "teacher.0.bias"} <= {each.name for each in graph.plan().alive_at_peak} | {
        full_name(storage.name) for storage in graph.ir.storages
    }
    del loss


def test_a_function_s_module_is_numbered_if_another_has_that_name_when_the_block_ends():
    def first(x):
        net = nn.Linear(6, 4)
        return net(x)

    net, x = nn.Linear(4, 2), torch.randn(5, 6)
    with lazyviz.lazy() as graph:
        y = net(first(x))
    assert [each[:2] for each in modules(scene_of(graph))] == [("net (2)", "Linear"), ("net", "Linear")]
    del y


def test_a_function_that_names_its_modules_keeps_no_tensor_alive():
    def step(x):
        net = nn.Linear(6, 4)
        large = x * 2
        small = net(large)
        del large
        return small.sum()

    x = torch.randn(5, 6)
    with lazyviz.lazy() as graph, torch.no_grad():
        y = step(x)
    made = next(node for node in graph.nodes if "mul" in str(node.op))
    assert made.outputs[0].storage.dropped is not None
    del y


def test_a_module_called_twice_with_something_between_that_needs_the_first_is_drawn_twice():
    net = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    with lazyviz.lazy() as graph:
        y = net(torch.sin(net(x)))
    assert modules(scene_of(graph)) == [("net", "Linear", 1), ("net", "Linear", 1)]
    scene = scene_of(graph)
    assert all(start.position < end.position for start, end in lane(scene).edges)
    del y


def test_two_encodings_by_one_module_are_one_box_whatever_is_between():
    encoder, head = nn.Linear(4, 8), nn.Linear(16, 2)
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    with lazyviz.lazy() as graph:
        left = encoder(a).relu()
        right = encoder(b).relu()
        y = head(torch.cat([left, right], 1))
    scene = scene_of(graph)
    assert modules(scene) == [("encoder", "Linear", 2), ("head", "Linear", 1)]
    assert all(start.position < end.position for start, end in lane(scene).edges)
    (box,) = [box for box in lane(scene).children if box.name == "encoder"]
    assert [child.label for child in box.children if child.kind != "input"] == ["call 1", "call 2"]
    del y


def test_layers_in_a_loop_have_the_same_names_in_both_directions():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).relu()
            return self.head(x)

    net, x = Deep(), torch.randn(3, 8, requires_grad=True)
    with lazyviz.lazy() as graph:
        net(x).sum().backward()
    scene = scene_of(graph)
    (model,) = [box for box in lane(scene).children if box.name == "net"]
    forward = [(box.label, box.repeats) for box in model.children if box.kind == "module"]
    backward = [(box.label, box.repeats) for box in lane(scene, "backward").children if box.kind == "module"]
    assert forward == [("layers.0–3", 4), ("head", 1)]
    assert backward[0] == ("head", 1)
    assert ("layers.3–0", 4) in backward


def test_a_named_batch_is_no_label_of_a_later_cell():
    net = nn.Linear(20, 20)
    x = torch.randn(8, 20)
    with lazyviz.lazy(batch=[x]) as first:
        h = net(x)
    assert "B×20" in first.text()
    first.plan()
    with lazyviz.lazy() as second:
        y = h.relu() + x
    second.plan()
    scene = scene_of(second)
    told = [scene.box(box)["sub"] for box in scene.hierarchy.boxes.values()]
    shown = [describe(scene, box) for box in scene.hierarchy.boxes.values()]
    assert any("8×20" in sub for sub in told)
    assert "B×" not in str(told) + str(shown) + second.text()
    del y


def test_several_equal_steps_stay_steps_and_two_models_that_train_in_turn_are_one():
    net = nn.Linear(4, 2)
    x = torch.randn(3, 4)
    with lazyviz.lazy() as graph:
        for _ in range(3):
            net(x).sum().backward()
    assert "step 1" in graph.text()
    other = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    with lazyviz.lazy() as turns:
        net(x).sum().backward()
        other(x).sum().backward()
    assert "step" not in turns.text()
    assert {"net", "other"} <= {name for name, _, _ in modules(scene_of(turns))}


def test_naming_asks_no_code_of_the_user_s_and_takes_any_name():
    class Odd(nn.Module):
        def forward(self, x):
            return self._modules[".."](x)

    class Unfinished(nn.Module):
        def __init__(self) -> None:
            pass

    class Asked:
        def __getattribute__(self, name):
            raise RuntimeError(f"asked for {name}")

    odd, unfinished, asked = Odd(), Unfinished(), Asked()
    odd._modules[".."] = nn.Linear(2, 2)
    with lazyviz.lazy() as graph:
        odd(torch.ones(1, 2))
    assert unfinished is not None and asked is not None
    assert {node.root.variable for node in graph.nodes if node.root} == {"odd"}


def test_lists_of_modules_are_not_modules_that_are_called():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(16, 3)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU()) for _ in range(3))

        def forward(self, x):
            shares = self.gate(x).softmax(-1)
            return sum(shares[:, at : at + 1] * expert(x) for at, expert in enumerate(self.experts))

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Experts() for _ in range(3))
            self.between = nn.Linear(32, 16)
            self.out = nn.Linear(16, 4)

        def forward(self, x):
            for block in self.blocks:
                x = self.between(block(x)) + x
            return self.out(x)

    net, x = Deep(), torch.randn(8, 16)
    with lazyviz.lazy() as graph:
        loss = net(x).sum()
        loss.backward()
    scene = scene_of(graph)
    for phase in ("forward", "backward"):
        found = modules(scene, phase)
        assert not [name for name, kind, _ in found if kind == "ModuleList"]
        assert {calls for name, _, calls in found if "experts" in name} == {1}
    shown = {box.name for box in lane(scene, "backward").children if box.kind == "module"}
    assert any(name.startswith("net.blocks.") for name in shown)
    del loss


def test_parts_of_one_module_are_named_alike():
    towers = nn.ModuleDict(
        {side: nn.ModuleDict({"low": nn.Linear(8, 8), "high": nn.Linear(8, 4)}) for side in ("image", "text")}
    )

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.towers = towers
            self.out = nn.ModuleDict({"only": nn.Linear(8, 2)})

        def forward(self, x):
            image = self.towers["image"]["high"](self.towers["image"]["low"](x).relu())
            text = self.towers["text"]["high"](self.towers["text"]["low"](x))
            return self.out["only"](torch.cat([image, text], -1))

    net, x = Both(), torch.randn(3, 8)
    with lazyviz.lazy() as graph:
        y = net(x)
    (model,) = [box for box in lane(scene_of(graph)).children if box.name == "net"]
    labels = [box.label for box in model.children if box.kind == "module"]
    assert sorted(labels) == ["image.high", "image.low", "out.only", "text.high", "text.low"]
    del y


def test_the_last_item_of_a_loop_is_named_like_the_others():
    gnn = nn.ModuleDict({"first": nn.Linear(4, 8), "second": nn.Linear(8, 8), "last": nn.Linear(8, 2)})
    stages = [nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))]
    x = torch.ones(3, 4)
    with lazyviz.lazy() as graph:
        for layer in gnn.values():
            x = layer(x)
        for stage in stages:
            x = stage(x)
    assert list(dict.fromkeys(module_path(node) for node in graph.nodes if node.root)) == [
        "gnn.first",
        "gnn.second",
        "gnn.last",
        "stages[0].0",
        "stages[1].0",
    ]
    del layer, stage


def test_a_variable_of_a_listed_module_stays_its_name_where_all_have_one():
    backbone, head = nn.Linear(4, 8), nn.Linear(8, 2)
    net = nn.Sequential(backbone, head)
    x = torch.ones(3, 4)
    with lazyviz.lazy() as graph:
        head(backbone(x))
    assert {module_path(node) for node in graph.nodes if node.root} == {"backbone", "head"}
    del net


def shown(graph, phase="forward"):
    """Labels of what a lane shows at first: frames, and the boxes in them."""
    hierarchy = build_hierarchy(graph.graph)
    lane = next(lane for lane in hierarchy.lanes() if lane.phase == phase)
    found, stack = [], lane.children[::-1]
    while stack:
        box = stack.pop()
        if box.kind in ("module", "step"):
            found.append(box.label)
        stack += box.children[::-1] if box.id in hierarchy.opened else []
    return found


def test_a_model_that_is_one_list_of_layers_is_a_frame_around_them():
    tower = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 16, batch_first=True), 3)
    with lazyviz.lazy() as graph, torch.no_grad():
        tower(torch.ones(2, 3, 16), torch.ones(2, 3, 16))
    assert shown(graph) == ["tower", "layers.0–2"]


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, a, b):
        return self.branch(a), self.branch(b)


def test_a_model_that_only_calls_one_module_twice_keeps_its_name_and_shows_the_first_call():
    siamese = Siamese()
    with lazyviz.lazy() as graph:
        siamese(torch.ones(2, 8), torch.ones(2, 8))
    names = shown(graph)
    assert names[:3] == ["siamese", "branch", "call 1"] and names[-1] == "call 2"


class Speech(nn.Module):
    """An encoder and a decoder with parts of their own."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.decoder = Words()

    def forward(self, x, words):
        return self.decoder(words, self.encoder(x))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(8, 9)

    def forward(self, words, x):
        return self.out((self.mix(self.embed(words)) + x).relu().softmax(-1))


def test_parts_of_a_decoder_that_stand_beside_its_encoder_are_called_the_decoders():
    speech = Speech()
    with lazyviz.lazy() as graph:
        speech(torch.ones(2, 8), torch.zeros(2, dtype=torch.long)).sum().backward()
    for phase in ("forward", "backward"):
        own = {label for label in shown(graph, phase) if label.rpartition(".")[2] in ("embed", "mix", "out")}
        assert own == {"decoder.embed", "decoder.mix", "decoder.out"}, phase


def test_a_weight_in_the_details_of_an_op_and_as_a_box_has_the_name_of_its_model(gan):
    scene = scene_of(gan[0])
    names = set()
    for box in scene.hierarchy.boxes.values():
        if box.node is not None:
            names.update(each["name"] for each in describe(scene, box)["inputs"])
    weights = {name for name in names if name.endswith(("weight", "bias"))}
    assert {"G.0.weight", "D.0.weight", "G.2.bias", "D.2.bias"} <= weights
    assert all(name.startswith(("G.", "D.")) for name in weights)


def test_a_weight_that_is_drawn_outside_of_its_model_has_the_models_name():
    net = nn.Sequential(nn.Linear(4, 4))
    x = torch.randn(2, 4)
    with lazyviz.lazy() as graph:
        y = net(x) @ net[0].weight * 2
    scene = scene_of(graph)
    labels = [box.label for box in scene.hierarchy.boxes.values() if box.kind == "input"]
    assert not {"0.weight", "0.bias"} & set(labels)
    del y
