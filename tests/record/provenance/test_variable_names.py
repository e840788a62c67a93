"""Variable names of tensors, and tensors that only a variable keeps alive."""

from __future__ import annotations

import copy
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.graph.modules import full_name
from lazyviz.record.provenance import module_variable_names, variable_names


def variables(graph) -> list[tuple[str, ...]]:
    return [storage.variables for storage in graph.ir.storages if storage.variables]


def test_a_storage_that_one_variable_keeps_knows_its_name():
    x = torch.ones(4)
    with lazyviz.lazy() as graph:
        y = x * 2
    assert ("y",) in variables(graph)
    assert torch.equal(y, torch.full((4,), 2.0))


def test_names_are_found_in_lists_dictionaries_and_plain_objects():
    x = torch.ones(4)
    with lazyviz.lazy() as graph:
        several = [x + 1, (x + 2,)]
        table = {"three": x + 3}
        thing = SimpleNamespace(four=x + 4)
    found = variables(graph)
    for name in ("several[0]", "several[1][0]", "table['three']", "thing.four"):
        assert (name,) in found
    assert several[0].sum() + several[1][0].sum() + table["three"].sum() + thing.four.sum() == 56


def test_two_names_of_one_storage_stand_together():
    x = torch.ones(4)
    with lazyviz.lazy() as graph:
        y = x * 2
        kept = [y]
        flat = y.detach()
    assert ("y", "kept[0]", "flat") in variables(graph)
    assert kept[0] is y and torch.equal(flat, y)


def test_a_view_s_base_has_no_name_and_goes_with_it():
    model = nn.Linear(4, 8)
    with lazyviz.lazy() as graph:
        out = model(torch.ones(6, 4)).view(2, 3, 8)
        part = out[0]
        out.sum().backward()
    assert ("out", "part") in variables(graph)
    assert out._base is not None and part.shape == (3, 8)
    graph.evaluate()


def test_a_view_whose_base_autograd_needs_is_not_all_that_keeps_it():
    x = torch.ones(4, requires_grad=True)
    with lazyviz.lazy() as graph:
        base = x * 2
        loss = (base * base).sum()
        part = base[:2]
        del base
    assert not any("part" in found for found in variables(graph))
    assert part.shape == (2,) and loss.requires_grad
    graph.evaluate()


def keep_with_autograd(x):
    y = x * 2
    return y, (y * y).sum()  # saves y


def keep_in_a_set(x):
    y = x * 2
    return y, {y}


def keep_in_a_closure(x):
    y = x * 2
    return y, lambda: y


def keep_in_a_list_that_something_else_keeps(x):
    y = [x * 2]
    return y, lambda: y


@pytest.mark.parametrize(
    "keep",
    [keep_with_autograd, keep_in_a_set, keep_in_a_closure, keep_in_a_list_that_something_else_keeps],
)
def test_what_something_else_keeps_too_is_not_said_to_be_kept_by_the_name(keep):
    x = torch.ones(4, requires_grad=True)
    with lazyviz.lazy() as graph:
        y, other = keep(x)
    assert not any("y" in name for found in variables(graph) for name in found)
    assert y is not None and other is not None
    graph.evaluate()


def test_once_backward_has_freed_what_it_saved_only_the_variable_is_left():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    with lazyviz.lazy() as graph:
        hidden = model[1](model[0](torch.ones(2, 4)))
        loss = model[2](hidden).sum()
        loss.backward()
    assert {("hidden",), ("loss",)} <= set(variables(graph))
    graph.evaluate()


def test_inspecting_a_function_s_variables_keeps_none_of_them_alive():
    x = torch.ones(4)
    with lazyviz.lazy():
        y = x * 2
    watch = weakref.ref(y)
    del y
    assert watch() is None


def test_the_user_s_own_dictionary_of_local_variables_stays_as_it_is():
    x = torch.ones(4)
    mine = locals()
    with lazyviz.lazy() as graph:
        y = x * 2
    assert mine["x"] is x
    assert torch.equal(y, x + 1) and graph.pending == 0


def test_what_a_sync_point_has_run_is_called_as_before_it():
    x, y = torch.ones(4), torch.ones(4)
    with lazyviz.lazy() as graph:
        double = x * 2
        both = (double + y).exp()
        if both.sum().item() > 0:
            last = both * double * x
    names = [[value.name for value in node.inputs] for node in graph.ir.nodes]
    assert [name for name in names[0] if name] == ["x"]
    assert names[1] == ["double", "y"]
    assert names[-2:] == [["both", "double"], ["", "x"]], "after it"
    assert [node.outputs[0].name for node in graph.ir.nodes] == ["double", "", "both", "", "", "last"]
    assert graph.ir.sync_points and torch.equal(last, both * double)


class Unwilling:
    """A proxy that has nothing to stand for, as web frameworks have them."""

    def __getattribute__(self, name):
        raise RuntimeError("working outside of a request")


def test_objects_that_do_not_want_to_be_looked_at_are_left_alone():
    x = torch.ones(4)
    with lazyviz.lazy() as graph:
        proxy = Unwilling()
        loop: list = []
        loop.append(loop)
        y = x * 2
    assert ("y",) in variables(graph)
    assert type(proxy) is Unwilling and loop and y.sum() == 8


def test_large_containers_are_not_looked_through_and_hide_no_variable(monkeypatch):
    looked_at = 0
    children = variable_names._children

    def counted(*args):
        nonlocal looked_at
        found = children(*args)
        looked_at += len(found)
        return found

    monkeypatch.setattr(variable_names, "_children", counted)
    many = {"rows": [[SimpleNamespace(number=i) for i in range(100)] for _ in range(2000)]}
    x = torch.ones(4)
    with lazyviz.lazy() as graph:
        y = x * 2
    assert ("y",) in variables(graph)
    assert 0 < looked_at <= variable_names.MAX_ITEMS + 2000
    assert many and y.sum() == 8


class Averaged:
    """Holds a copy of a model that no step calls."""

    def __init__(self, model):
        self.model = copy.deepcopy(model)


def names_of(graph):
    return {
        full_name(each.name): each.role for each in graph.ir.storages if each.role is not None and each.name
    }


@pytest.mark.parametrize("computed", [False, True])
def test_weights_of_modules_that_are_not_called_have_names(computed):
    with lazyviz.lazy() as graph:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        average = Averaged(model)
        targets = {"q": nn.Linear(4, 2)}
        if computed:
            lazyviz.sync()
    names = names_of(graph)
    assert {names[f"{of}.0.weight"] for of in ("model", "average.model")} == {"parameter"}
    assert names["average.model.1.running_mean"] == "buffer"
    assert names["targets['q'].bias"] == "parameter"
    assert average and targets


class Reading(torch.optim.Optimizer):
    """Reads what it has just made, as optimizers of sparse gradients do."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["average"] = torch.zeros_like(parameter)
            lazyviz.sync()
            parameter -= parameter.grad


def test_weights_and_optimizer_states_that_a_sync_point_computed_have_names():
    with lazyviz.lazy() as graph:
        model = nn.Linear(4, 4)
        lazyviz.sync()
        model(torch.ones(2, 4)).sum().backward()
        optimizer = Reading(model.parameters())
        optimizer.step()
    names = names_of(graph)
    assert names["model.weight"] == "parameter"
    assert names["model.weight.average"] == "optimizer"


first_global, second_global = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)


def test_global_models_of_a_function_that_opens_a_block_are_named():
    with lazyviz.lazy() as graph:
        second_global(first_global(torch.ones(2, 4))).sum().backward()
    names = {full_name(each.name) for each in graph.ir.storages if each.role == "parameter"}
    assert names == {f"{net}_global.{part}" for net in ("first", "second") for part in ("weight", "bias")}


def test_other_variables_are_searched_for_modules_only_if_one_has_no_variable(monkeypatch):
    searched = []
    items = module_variable_names._items

    def noted(expression, content):
        searched.append(expression)
        return items(expression, content)

    monkeypatch.setattr(module_variable_names, "_items", noted)
    thing = SimpleNamespace(net=nn.Linear(4, 2))
    model, table = nn.Linear(4, 4), {"net": thing.net}
    names = {"table": table, "model": model, "thing": thing}
    with lazyviz.lazy(names=names) as graph:
        model(torch.ones(2, 4))
    assert {node.root.variable for node in graph.nodes if node.root} == {"model"} and not searched
    with lazyviz.lazy(names=names) as graph:
        thing.net(model(torch.ones(2, 4)))
    assert [node.root.variable for node in graph.nodes if node.root][-1] == "table['net']"
    assert searched[:2] == ["table", "thing"]
