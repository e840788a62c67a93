"""Eager's timeline of awkward code agrees with the allocator's events."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lazyviz
from lazyviz.plan.liveness.lifetimes import lifetimes

from ..profiler import allocated_by

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")  # the profiler's own business

PROGRAMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {}


def program(run: Callable[[nn.Module, Tensor], Any]) -> Callable[[nn.Module, Tensor], Any]:
    PROGRAMS[run.__name__.replace("_", " ")] = run
    return run


@program
def a_variable_rebound_in_a_loop(model, x):
    for _ in range(4):
        y = torch.tanh(model[0](x))
        y = torch.sigmoid(y) * 2
    return y


@program
def a_variable_deleted_before_its_last_line(model, x):
    with torch.no_grad():
        y = x @ torch.ones(64, 256)
        z = y.relu()
        del y
        w = z.exp()
        del z
        return w.log().sum()


@program
def a_closure_that_keeps_what_the_loop_has_left(model, x):
    kept = []

    def later(value):
        return lambda: value

    with torch.no_grad():
        for index in range(3):
            y = (x * index).exp()
            kept.append(later(y if index == 1 else None))
        y = kept[1]() + 1
    return y, kept


@program
def an_output_kept_for_its_loss(model, x):
    def forward():
        hidden = model[2](model[1](model[0](x)))
        return SimpleNamespace(loss=hidden.square().mean(), logits=hidden, extra=hidden.exp())

    for _ in range(2):
        loss = forward().loss
        loss.backward()
        model.zero_grad()
    return loss


@program
def an_output_kept_whole(model, x):
    for _ in range(2):
        hidden = model(x)
        out = SimpleNamespace(loss=hidden.square().mean(), logits=hidden, extra=hidden.exp())
        out.loss.backward()
        model.zero_grad()
    return out


@program
def an_exception_that_unwinds_through_activations(model, x):
    def fails():
        y = model(x).exp()
        if y.shape[0]:
            raise KeyError("on purpose")
        return y

    try:
        fails()
    except KeyError:
        pass
    with torch.no_grad():
        return (x @ torch.ones(64, 512)).sum()


@program
def an_exception_that_is_kept_with_its_frames(model, x):
    def fails():
        y = model(x).exp()
        raise KeyError(str(y.shape))

    try:
        fails()
    except KeyError as error:
        kept = error
    with torch.no_grad():
        return (x @ torch.ones(64, 512)).sum(), kept


@program
def writes_in_place(model, x):
    with torch.no_grad():
        y = x.clone()
        y.mul_(2).add_(1)
        y[:4] = 0
        y += torch.ones(64)
        torch.relu_(y)
        return F.dropout(y, 0.5, True, inplace=True).sum()


@program
def checkpointed_layers(model, x):
    h = checkpoint(model, x, use_reentrant=False)
    h = checkpoint(lambda t: torch.tanh(t) * torch.sigmoid(t), h, use_reentrant=False)
    h.sum().backward()
    return None


@program
def checkpointed_layers_of_the_reentrant_kind(model, x):
    x = x.clone().requires_grad_()
    checkpoint(model, x, use_reentrant=True).sum().backward()
    return x


@program
def gradients_accumulated_over_steps(model, x):
    for part in x.chunk(4):
        model(part).square().mean().backward()
    return None


@program
def backward_twice_through_one_graph(model, x):
    y = model(x)
    y.sum().backward(retain_graph=True)
    y.square().sum().backward()
    return y


@program
def a_gradient_of_a_gradient(model, x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    return None


@program
def hooks_that_keep_and_that_replace(model, x):
    seen = []
    handle = model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    other = model[1].register_full_backward_hook(lambda module, before, after: seen.append(after[0]))
    y = model(x)
    y.register_hook(lambda gradient: gradient * 2)
    y.sum().backward()
    handle.remove()
    other.remove()
    return seen


@program
def no_gradients_inside_of_training(model, x):
    y = model(x)
    with torch.no_grad():
        target = model(x).detach() * 0.5
    loss = F.mse_loss(y, target)
    del y, target
    loss.backward()
    return loss


@program
def saved_tensors_packed_away(model, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
        y = model(x)
    y.sum().backward()
    return None


@program
def a_list_grown_and_stacked(model, x):
    with torch.no_grad():
        rows = [row * 2 for row in x]
        stacked = torch.stack(rows)
        rows.clear()
        return torch.cat([stacked, stacked], 1)


@program
def gradients_set_to_zero_not_to_none(model, x):
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        model(x).sum().backward()
    return None


@program
def momentum_and_clipping(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return optimizer


@program
def a_value_read_in_the_middle(model, x):
    y = model[0](x)
    if y.mean().item() > 1e9:
        y = y * 2
    loss = model[2](model[1](y)).sum()
    loss.backward()
    return loss


@program
def a_maximum_s_gradient(model, x):
    y = model(x)
    y.max(1).values.sum().backward()
    x = x.clone().requires_grad_()
    x.repeat(8, 8).max(1).values.sum().backward()
    return x


@program
def a_few_rows_of_a_table(model, x):
    table = model[0].weight.repeat(8, 8)
    rows = torch.arange(7)
    for take in (
        lambda: table[rows],
        lambda: table.index_select(0, rows),
        lambda: table.gather(0, rows[None]),
    ):
        take().sum().backward(retain_graph=True)
    return None


@program
def a_linear_layer_of_a_turned_batch(model, x):
    with torch.no_grad():
        return model[0](x.view(4, 8, 64).transpose(0, 1)).sum()


def make() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)), torch.randn(32, 64)


@pytest.mark.parametrize("name", PROGRAMS)
def test_eager_s_peak_is_the_measured_one(name):
    run = PROGRAMS[name]
    model, x = make()
    measured, _ = allocated_by(lambda: run(model, x))
    model, x = make()
    with lazyviz.lazy() as graph:
        kept = run(model, x)
    plan = graph.plan()
    before = sum(
        span.storage.nbytes for span in lifetimes(graph.ir) if span.eager_start < 0 < span.eager_stop
    )
    # Python numbers that kernels make into tensors are not counted, nor a generator's state.
    uncounted = 64 + torch.get_rng_state().nbytes * name.startswith("checkpointed")
    assert plan.eager_peak_bytes - before == pytest.approx(measured, abs=uncounted)
    graph.evaluate()
    del kept


@pytest.mark.parametrize("name", PROGRAMS)
def test_our_peak_is_not_above_eager_s_and_what_is_held(name):
    model, x = make()
    with lazyviz.lazy() as graph:
        kept = PROGRAMS[name](model, x)
    plan = graph.plan()
    assert plan.peak_bytes <= plan.eager_peak_bytes + plan.by_category["held"]
    graph.evaluate()
    del kept
