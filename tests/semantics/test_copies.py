"""``copy.deepcopy`` and ``copy.copy`` of pending tensors, modules and optimizers are recorded."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lazyviz

from ..lazy_equals_eager import both

PROGRAMS = {}
NOT_RECORDED = {}  # with the causes of their sync points


def recorded(program):
    PROGRAMS[program.__name__] = program
    return program


def at_sync_points(*causes):
    def note(program):
        NOT_RECORDED[program.__name__] = program, set(causes)
        return program

    return note


class Named(nn.Parameter):
    pass


def pending(*shape):
    return torch.randn(*shape) * 2


@recorded
def a_tensor(x):
    t = pending(3)
    return t, copy.deepcopy(t)


@recorded
def a_number_and_nothing(x):
    return copy.deepcopy(pending()), copy.deepcopy(pending(0, 3))


@recorded
def what_is_written_after_the_copy(x):
    t = pending(3)
    u = copy.deepcopy(t)
    t.add_(1)
    u.mul_(3)
    return t, u


@recorded
def views_of_one_storage(x):
    t = pending(6)
    v, w = t[1:4], t.view(2, 3).t()
    a, b, c = copy.deepcopy((t, v, w))
    b.add_(1)
    return t, v, w, a, b, c, b._is_view(), c._is_view()


@recorded
def a_view_before_its_base(x):
    t = pending(6)
    b, a = copy.deepcopy((t[1:4], t))
    b.add_(1)
    return t, a, b


@recorded
def a_view_in_another_dtype(x):
    t = pending(4)
    a, b = copy.deepcopy([t, t.view(torch.int32)])
    b.zero_()
    return a, b, t


@recorded
def elements_with_gaps(x):
    return copy.deepcopy(torch.empty(20).normal_()[::2])


@recorded
def a_leaf_with_a_gradient(x):
    t = pending(3).detach().requires_grad_()
    (t * 3).sum().backward()
    u = copy.deepcopy(t)
    (u * 5).sum().backward()
    return t, u, t.grad, u.grad


@recorded
def what_is_no_leaf(x):
    return copy.deepcopy(torch.randn(3, requires_grad=True) * 2)


@recorded
def a_parameter_with_attributes(x):
    p = nn.Parameter(pending(3))
    p.note = [1]
    (p * 2).sum().backward()
    q = copy.deepcopy(p)
    return p, q, q.grad, getattr(q, "note", None)


@recorded
def a_parameter_of_the_users_own_class(x):
    return copy.deepcopy(Named(pending(3)))


@recorded
def attributes(x):
    t = pending(3)
    t.note = {"a": [t, 1]}
    u = copy.deepcopy(t)
    return u, u.note["a"][1]


@recorded
def a_buffer(x):
    b = copy.deepcopy(nn.Buffer(pending(3)))
    return b, isinstance(b, nn.Buffer)


@recorded
def hooks(x):
    called = []
    t = pending(3).requires_grad_()
    t.register_hook(lambda gradient: called.append(1))
    u = copy.deepcopy(t)
    (u * 2).sum().backward()
    return u, u.grad, called


@recorded
def the_same_memo_twice(x):
    t, memo = pending(4), {}
    a, b = copy.deepcopy(t, memo), copy.deepcopy(t, memo)
    return a is b, a


@recorded
def a_tensor_with_a_pending_write(x):
    x.mul_(2)
    a, b = copy.deepcopy((x[1:], x))
    a.add_(1)
    return a, b


@recorded
def a_parameter_with_a_pending_write(x):
    p = nn.Parameter(x)
    with torch.no_grad():
        p.mul_(2)
    q = copy.deepcopy(p)
    with torch.no_grad():
        p.add_(1)
    return p, q


@recorded
def buffers_of_one_storage(x):
    x.mul_(2)
    m = nn.Module()
    m.register_buffer("whole", x)
    m.register_buffer("part", x[1:])
    twin = copy.deepcopy(m)
    twin.whole.add_(1)
    return twin.whole, twin.part


@recorded
def a_model_with_tied_weights_in_training(x):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    twin = copy.deepcopy(model)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    twin(torch.randn(4, 3)).sum().backward()
    return model, twin, twin[0].weight is twin[2].weight


@recorded
def a_model_and_its_optimizer(x):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    twin, other = copy.deepcopy((model, optimizer))
    twin(torch.randn(4, 3)).sum().backward()
    other.step()
    return model, twin, list(other.state_dict()["state"].values())


@recorded
def an_averaged_model(x):
    model = nn.Linear(3, 3)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        average.update_parameters(model)
    return model, average


@recorded
def layers_that_are_copies_of_one(x):
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    return nn.TransformerEncoder(layer, 3), nn.Transformer(8, 2, 1, 1, 16, batch_first=True)


@recorded
def a_recurrent_layer(x):
    twin = copy.deepcopy(nn.LSTM(3, 4))
    return twin, twin(torch.randn(2, 1, 3))[0]


@recorded
def a_parametrized_layer(x):
    twin = copy.deepcopy(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)))
    return list(twin.parameters()), twin(torch.randn(2, 3))


@recorded
def a_shallow_copy(x):
    t = pending(4)
    u = copy.copy(t)
    u.add_(1)
    return t, u


@recorded
def a_shallow_copy_of_a_view(x):
    t = pending(6)
    u = copy.copy(t[2:4])
    u.add_(5)
    return t, u, u._is_view()


@recorded
def a_shallow_copy_of_a_parameter(x):
    p = nn.Parameter(pending(4))
    p.note = [1]
    u = copy.copy(p)
    with torch.no_grad():
        u.add_(1)
    return p, u, u.note is p.note


@recorded
def a_shallow_copy_of_what_is_no_leaf(x):
    y = torch.randn(4, requires_grad=True) * 2
    u = copy.copy(y)
    (u * 2).sum().backward()
    return y, u, u.grad, u.is_leaf


@recorded
def a_shallow_copy_of_a_tensor_with_a_pending_write(x):
    x.mul_(2)
    u = copy.copy(x)
    u.add_(1)
    return u


@at_sync_points("deepcopy")
def a_conjugate(x):
    return copy.deepcopy((torch.randn(3, dtype=torch.cfloat) * 2).conj())


@at_sync_points("deepcopy")
def a_negative_view(x):
    return copy.deepcopy((torch.randn(3, dtype=torch.cfloat) * 2).conj().imag)


@recorded
def parts_of_complex_numbers(x):
    t = torch.randn(3, dtype=torch.cfloat) * 2
    return copy.deepcopy([t.real, t.imag])


@at_sync_points("deepcopy")
def tensors_of_inference(x):
    with torch.inference_mode():
        t = pending(3)
        return t, copy.deepcopy(t)


@at_sync_points("deepcopy")
def a_view_of_what_waits_for_nothing(x):
    a, b = copy.deepcopy((x[1:], x))
    a.add_(1)
    return a, b


@at_sync_points()  # the view of what is there computes nothing
def what_waits_for_nothing_and_its_view(x):
    v = x[1:]
    b, a = copy.deepcopy((x, v))
    a.add_(1)
    return a, b


@at_sync_points("tolist", "deepcopy")
def a_view_of_what_has_been_read(x):
    t = pending(6)
    v = t[1:4]
    t.tolist()
    a, b = copy.deepcopy((v, t))
    a.add_(1)
    return a, b, t, v


def labeled(make):
    tensor = make(pending(3))
    tensor.label = 7
    return tensor


def by_update(old, new):
    new.__dict__.update(old.__dict__)


def by_name(old, new):
    for name, attribute in old.__dict__.items():
        setattr(new, name, attribute)


def by_assignment(old, new):
    new.__dict__ = dict(old.__dict__)


def by_operator(old, new):
    new.__dict__ |= {**old.__dict__}


def by_deepcopy(old, new):
    vars(new).update(copy.deepcopy(vars(old)))


def cleared_before(old, new):
    new.__dict__.clear()
    vars(new)["label"] = vars(old).pop("label")


@pytest.mark.parametrize(
    "copied", [by_update, by_name, by_assignment, by_operator, by_deepcopy, cleared_before]
)
@pytest.mark.parametrize("make", [torch.Tensor.clone, nn.Parameter, Named])
def test_attributes_are_copied_without_the_value(copied, make):
    def program(x):
        old, new = labeled(make), make(pending(3))
        copied(old, new)
        y = new * old + x[:3]
        kinds = torch.tensor(
            [isinstance(new, type(old)), new.label == 7, list(vars(new)) == ["label"], "label" in dir(new)]
        )
        return old.detach(), new.detach(), y.detach(), kinds

    both(program, lambda: torch.arange(4.0))


@pytest.mark.parametrize("name", PROGRAMS)
def test_copies_are_recorded(name):
    both(PROGRAMS[name], lambda: torch.arange(4.0))


@pytest.mark.parametrize("name", NOT_RECORDED)
def test_other_copies_are_made_at_sync_points(name):
    program, causes = NOT_RECORDED[name]
    both(program, lambda: torch.arange(4.0), syncs=causes)


def test_building_a_transformer_evaluates_nothing():
    with lazyviz.lazy() as graph:
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 3)
        nn.Transformer(8, 2, 2, 2, 16, batch_first=True)
    assert graph.sync_points == []


def test_a_refused_copy_evaluates_nothing():
    with lazyviz.lazy() as graph:
        y = torch.randn(3, requires_grad=True) * 2
        with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
            copy.deepcopy(y)
    assert graph.sync_points == [] and graph.pending == len(graph.nodes)
