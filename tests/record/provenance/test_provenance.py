"""Every node knows its module, its source line and its phase."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lazyviz


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


def record():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(2, 4)
    with lazyviz.lazy() as graph:
        loss = model(x).sum()  # the forward line
        loss.backward()  # the backward line
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return graph


def test_forward_nodes_carry_their_module():
    graph = record()
    by_op = [(node.op._schema.name, node.module) for node in graph.nodes if node.phase == "forward"]
    assert [m for name, m in by_op if name == "aten::addmm"] == ["0.up", "0.down", "1.up", "1.down"]
    assert [m for name, m in by_op if name == "aten::relu"] == ["0", "1"]
    assert [m for name, m in by_op if name == "aten::sum"] == [""]
    assert {node.root for node in graph.nodes if node.module} == {"Sequential"}


def test_backward_nodes_sit_in_their_forward_module():
    graph = record()
    backward = [node for node in graph.nodes if node.phase == "backward"]
    multiplications = [node for node in backward if node.op._schema.name == "aten::mm"]
    assert [node.module for node in multiplications] == [
        "1.down", "1.down", "1.up", "1.up", "0.down", "0.down", "0.up",
    ]  # fmt: skip
    assert all(node.forward.op._schema.name == "aten::addmm" for node in multiplications)
    assert all(node.source.text == "loss.backward()  # the backward line" for node in backward)


def test_phases_follow_what_runs():
    graph = record()
    phases = [node.phase for node in graph.nodes]
    assert sorted(set(phases), key=phases.index) == ["forward", "backward", "optimizer"]
    clip = [node for node in graph.nodes if "clip_grad_norm_" in node.source.text]
    assert clip and {node.phase for node in clip} == {"optimizer"}


def test_sources_are_the_users_innermost_line():
    graph = record()
    relu = next(node for node in graph.nodes if node.op._schema.name == "aten::relu")
    assert relu.source.text == "return x + self.down(F.relu(self.up(x)))"
    assert relu.source.file == __file__


def test_storages_know_parameters_and_gradients():
    graph = record()
    named = {storage.name: storage.role for storage in graph.ir.storages if storage.name}
    assert named["0.up.weight"] == "parameter"
    assert named["0.up.weight.grad"] == "gradient"


def test_building_a_model_is_no_forward_phase():
    with lazyviz.lazy() as graph:
        nn.Linear(3, 3)
    assert {node.phase for node in graph.nodes} == {"other"}


@pytest.mark.parametrize("convert", [nn.Module.double, lambda model: model.to("cuda")])
def test_converting_a_model_s_weights_is_no_pass(convert):
    with lazyviz.lazy(device="A100-80GB") as graph:
        model = convert(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.LSTM(3, 2)))
        x = torch.ones(4, 3, dtype=model[0].weight.dtype, device=model[0].weight.device)
        model(x.requires_grad_())[0].sum().backward()
    converted = [node for node in graph.nodes if node.op._schema.name == "aten::_to_copy"]
    assert len(converted) >= 10 and {node.phase for node in converted} == {"other"}
    assert {node.phase for node in graph.nodes if node.module == "0" and node.forward is None} == {"forward"}


def test_module_call_is_restored_and_exceptions_unwind_scopes():
    class Broken(nn.Module):
        def forward(self, x):
            raise KeyError("mine")

    model = nn.Sequential(Broken())
    with lazyviz.lazy() as graph:
        try:
            model(torch.ones(1))
        except KeyError:
            pass
        y = torch.ones(1) + 1
    assert graph.nodes[-1].module == ""
    assert y.tolist() == [2]


def test_parameters_made_in_the_block_are_parameters_of_the_plan():
    with lazyviz.lazy() as graph:
        called = nn.Linear(3, 5)
        called(torch.ones(2, 3))
        alone = nn.Parameter(torch.zeros(7))
    roles = {storage.nbytes: (storage.role, storage.name) for storage in graph.ir.storages if storage.role}
    assert roles == {60: ("parameter", "weight"), 20: ("parameter", "bias"), 28: ("parameter", "")}
    assert lazyviz.is_lazy(alone)


def test_tensors_are_called_as_the_users_variables():
    images = torch.randn(2, 4)
    model = nn.Linear(4, 3)
    variables = {"images": images, "_hidden": images}
    with lazyviz.lazy(names=variables) as graph:
        scores = model(images)
        variables["loss"] = loss = scores.sum()
    names = {value.name for value in graph.ir.inputs}
    assert "images" in names
    assert graph.nodes[-1].outputs[0].name == "loss"
    assert lazyviz.is_lazy(loss)


def test_optimizer_state_is_named_after_its_parameter():
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):  # made in the first block, from outside in the second
        with lazyviz.lazy() as graph:
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
        roles = {storage.name: storage.role for storage in graph.ir.storages if storage.role == "optimizer"}
        assert {"0.weight.exp_avg", "0.bias.exp_avg_sq"} <= roles.keys()
        graph.evaluate()
    assert "0.weight.step" in roles


class Averages(torch.optim.Optimizer):
    """Keeps a new tensor in each step."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            before = self.state[parameter].get("average", 0)
            self.state[parameter]["average"] = before * 0.5 + parameter.grad


def test_state_that_a_step_has_exchanged_is_named_when_it_ends():
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = Averages(model.parameters())
    with lazyviz.lazy() as graph:
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            value = optimizer.state[model[0].weight]["average"]._lazyviz
            assert (value.storage.role, value.storage.name) == ("optimizer", "0.weight.average")
            model[0].weight.grad.sum().item()
    graph.evaluate()


def test_optimizer_state_goes_by_the_name_that_is_learned_of_its_parameter_later():
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    with lazyviz.lazy() as nameless:
        optimizer.step()
    nameless.evaluate()
    with lazyviz.lazy() as graph:
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    names = {storage.name for storage in graph.ir.storages if storage.role == "optimizer"}
    assert {"0.weight.exp_avg", "0.bias.exp_avg_sq"} <= names
    graph.evaluate()


def doubled(x):
    return x * 2


def test_callers_are_the_users_lines_up_to_the_block_however_deep_it_is_called():
    def block(depth):
        if depth:
            return block(depth - 1)
        with lazyviz.lazy() as graph:
            y = doubled(torch.ones(2))
            y.exp()
        return graph

    for depth in (0, 60):  # what called the block is not walked through for every op
        nodes = {node.name.rpartition("_")[0]: node for node in block(depth).nodes}
        assert nodes["mul"].source.text == "return x * 2"
        assert [line.text for line in nodes["mul"].callers] == ["y = doubled(torch.ones(2))"]
        assert nodes["exp"].callers == ()


def test_gradients_of_what_autograd_copies_before_it_is_written_sit_in_their_forward_module():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.act = nn.Linear(4, 4), nn.SiLU(inplace=True)

        def forward(self, x):
            return self.act(self.first(x))

    net, cell, x = Net(), nn.GRUCell(4, 4), torch.ones(2, 4)
    with lazyviz.lazy() as graph:
        cell(net(x), cell(x)).sum().backward()
    for name in ("aten::silu_backward", "aten::mul"):
        found = [node for node in graph.nodes if node.phase == "backward" and node.op._schema.name == name]
        assert found
        for node in found:
            assert node.forward is not None and node.forward.op._schema.name in ("aten::silu_", "aten::mul_")
            assert node.module == ("act" if "silu" in name else "") and node.root


LOOPING = """import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = x.relu()
        return x
"""
SHORTER = """import torch
class Net(torch.nn.Module):
    def forward(self, x): return x.exp()
"""


def test_a_module_that_was_edited_and_reloaded_has_its_new_lines(tmp_path, monkeypatch):
    file = tmp_path / "edited_module.py"

    def write(text, seconds):
        file.write_text(text)
        os.utime(file, (seconds, seconds))

    write(LOOPING, 10**9)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("edited_module")
    with lazyviz.lazy() as before:
        module.Net()(torch.ones(2, 3))
    drawn = before.text()
    assert before.nodes[-1].source.text == "x = x.relu()"
    write(SHORTER, 10**9 + 100)
    importlib.reload(module)
    with lazyviz.lazy() as after:
        module.Net()(torch.ones(2, 3))
    assert after.nodes[-1].source.text == "def forward(self, x): return x.exp()"
    assert before.nodes[-1].source.text == "x = x.relu()"
    for name in ("page.html", "picture.svg", "graph.dot"):  # the lines of the first are not in the file
        before.save(tmp_path / name)
    assert drawn and before.text()


def test_a_file_that_a_library_writes_for_a_module_of_its_own_is_not_the_users(tmp_path):
    name = "torch.nn.generated_layer"  # as torch_geometric writes the code of its layers
    file = tmp_path / f"{name}_x1y2.py"
    file.write_text("def apply(x):\n    return x.relu()\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        with lazyviz.lazy() as graph:
            module.apply(torch.randn(4))  # the user's line
    finally:
        del sys.modules[name]
    assert [node.source.file for node in graph.nodes] == [__file__] * 2


def test_a_users_file_may_have_dots_in_its_name(tmp_path):
    file = tmp_path / "torch.try.py"
    file.write_text("def apply(x):\n    return x.relu()\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location("my_try", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with lazyviz.lazy() as graph:
        module.apply(torch.randn(4))
    assert graph.nodes[-1].source.file == str(file)
