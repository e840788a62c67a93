"""A plan of an evaluation by lazyviz agrees with the allocator where sync points have run parts of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lazyviz
from lazyviz.plan.liveness.lifetimes import lifetimes

from ..profiler import allocated_by

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")  # the profiler's own business

PROGRAMS: dict[str, Callable[[Step], Any]] = {}


class Convolution(nn.Module):
    """Of a graph: sums of neighbors' features. The backward pass keeps the features, but reads only their
    size, so that lazyviz frees them early where it may."""

    def __init__(self, width: int, to: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, to)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        h = self.linear(x)
        return torch.zeros_like(h).index_add(0, target, h[source])


class Step:
    """A model of three layers, and all that a training step needs."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Convolution(32, 64), Convolution(64, 64), Convolution(64, 5)])
        self.optimizer = torch.optim.AdamW(self.layers.parameters())
        self.x, self.y = torch.randn(400, 32), torch.randint(0, 5, (400,))
        self.edges = tuple(torch.randint(0, 400, (2, 3000)))
        self.mask = torch.rand(400) < 0.3

    def forward(self, see: Callable[[Tensor], Any] = lambda hidden: None) -> Tensor:
        x = self.x
        for layer in self.layers:
            x = torch.tanh(layer(x, *self.edges))
            see(x)
        return x

    def learn(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def program(run: Callable[[Step], Any]) -> Callable[[Step], Any]:
    PROGRAMS[run.__name__.replace("_", " ")] = run
    return run


@program
def no_sync_point(step):
    step.learn(F.cross_entropy(step.forward(), step.y))


@program
def the_loss_before_its_backward_pass(step):
    loss = F.cross_entropy(step.forward(), step.y)
    loss.item()
    step.learn(loss)


@program
def the_loss_after_its_backward_pass(step):
    loss = F.cross_entropy(step.forward(), step.y)
    step.learn(loss)
    return loss.item()


@program
def a_mask_computed_before(step):
    step.learn(F.cross_entropy(step.forward()[step.mask], step.y[step.mask]))


@program
def a_mask_that_is_pending(step):
    scores = step.forward()
    sure = scores.detach().amax(1) > 0.1
    step.learn(F.cross_entropy(scores[sure], step.y[sure]))


@program
def every_layer(step):
    means = []
    scores = step.forward(lambda hidden: means.append(hidden.mean().item()))
    step.learn(F.cross_entropy(scores, step.y))


@program
def the_first_layer_and_the_loss(step):
    seen = []
    scores = step.forward(lambda hidden: seen.append(1) if seen else seen.append(float(hidden.sum())))
    loss = F.cross_entropy(scores, step.y)
    if loss.isfinite():
        step.learn(loss)


@program
def between_backward_pass_and_optimizer(step):
    loss = F.cross_entropy(step.forward(), step.y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(step.layers.parameters(), 1.0)
    assert norm < 1e6
    step.optimizer.step()


@program
def three_steps_that_read_their_loss(step):
    for _ in range(3):
        loss = F.cross_entropy(step.forward(), step.y)
        loss.item()
        step.learn(loss)


@program
def two_losses_and_two_backward_passes(step):
    scores = step.forward()
    first, second = F.cross_entropy(scores, step.y), scores.square().mean()
    first.item()
    first.backward(retain_graph=True)
    second.item()
    second.backward()
    step.optimizer.step()


def steps_that_read_inside(*layers: int) -> Callable[[Step], Any]:
    """Three steps that check some of their layers' features, as a search for NaN does: each check needs some
    of the updated parameters, so that parts of the last step stay pending during the next one."""

    def run(step: Step) -> None:
        for _ in range(3):
            seen: list[Tensor] = []

            def see(hidden: Tensor, seen: list[Tensor] = seen) -> None:
                seen.append(hidden)
                if len(seen) - 1 in layers:
                    assert not hidden.isnan().any()

            step.learn(F.cross_entropy(step.forward(see), step.y))
            seen.clear()

    return run


PROGRAMS["steps_that_read_each_layer"] = steps_that_read_inside(0, 1, 2)
PROGRAMS["steps_that_read_the_first_layer"] = steps_that_read_inside(0)
PROGRAMS["steps_that_read_the_second_layer"] = steps_that_read_inside(1)


@program
def steps_that_check_their_batch(step):
    for _ in range(3):
        assert not step.x.isnan().any()
        step.learn(F.cross_entropy(step.forward(), step.y))


@program
def gradients_of_several_batches_that_read_a_layer(step):
    for _ in range(2):
        for _ in range(3):
            F.cross_entropy(step.forward(lambda hidden: float(hidden[0, 0])), step.y).backward()
        step.optimizer.step()
        step.optimizer.zero_grad()


@program
def ops_that_stay_pending(step):
    kept = []
    scores = step.forward(lambda hidden: kept.append(hidden.detach().exp()))
    loss = F.cross_entropy(scores, step.y)
    loss.item()
    step.learn(loss + sum(kept[:2])[0, 0])


@program
def backward_passes_that_stay_pending_while_losses_are_read(step):
    for _ in range(4):
        loss = F.cross_entropy(step.forward(), step.y)
        loss.backward()
        loss.item()
    step.optimizer.step()


def after_evaluating(evaluate: Callable[[Tensor], Any]) -> Callable[[Step], Any]:
    """A step that keeps its hidden features while ``evaluate`` has its loss computed, and then drops them."""

    def run(step: Step) -> None:
        kept: list[Tensor] = []
        loss = F.cross_entropy(step.forward(lambda hidden: kept.append(hidden + 1)), step.y)
        loss = loss + sum(hidden[0, 0] for hidden in kept)
        evaluate(loss)
        kept.clear()  # before anything else is recorded
        step.learn(loss)

    return run


PROGRAMS["dropped_after_a_read"] = after_evaluating(lambda loss: loss.item())
PROGRAMS["dropped_after_evaluate"] = after_evaluating(lazyviz.evaluate)
PROGRAMS["dropped_after_sync"] = after_evaluating(lambda loss: lazyviz.sync())
PROGRAMS["dropped_after_to_eager"] = after_evaluating(lazyviz.to_eager)


@program
def the_result_of_an_op_that_runs_at_once(step):
    scores = step.forward()
    selected = scores[scores.detach().amax(1) > 0.1]  # its size depends on data
    step.learn(selected.logsumexp(1).mean())


def planned_and_measured(run: Callable[[Step], Any]) -> tuple[int, int]:
    """The bytes that a block and its evaluation allocate at most."""
    steps = [Step(), Step()]

    def evaluated() -> Any:
        with lazyviz.lazy() as graph:
            result = run(steps[0])
        graph.evaluate()
        return result

    measured = allocated_by(evaluated)[0]
    with lazyviz.lazy() as graph:
        kept = run(steps[1])
    before = sum(span.storage.nbytes for span in lifetimes(graph.ir) if span.start < 0)
    planned = graph.plan().lazyviz_peak_bytes - before
    del kept
    graph.evaluate()
    return planned, measured


@functools.cache
def not_the_first_run_of_the_process() -> None:
    """What the first evaluation of a process allocates in addition is no part of these programs."""
    planned_and_measured(PROGRAMS["dropped_after_sync"])


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_planned_peak_of_an_evaluation_is_the_measured_one(name):
    not_the_first_run_of_the_process()
    planned, measured = planned_and_measured(PROGRAMS[name])
    assert abs(planned - measured) <= 64  # numbers of the optimizer that it makes outside of operators


def test_the_batches_of_a_loop_that_reads_its_losses_count_one_after_the_other():
    def planned(rounds: int) -> int:
        net = nn.Linear(256, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        data = DataLoader(TensorDataset(torch.randn(64 * rounds, 256)), batch_size=64)
        with lazyviz.lazy() as graph:
            for (x,) in data:
                loss = net(x).square().mean()
                loss.backward()
                optimizer.step()
                loss.item()
        return graph.plan().lazyviz_peak_bytes

    assert planned(12) < 1.05 * planned(4), "those to come did not exist yet"


def test_the_timeline_is_in_the_order_of_the_run():
    long, short = torch.rand(1000), torch.rand(500)
    with lazyviz.lazy() as graph:
        later = long.cos().exp()
        short.cos().sum().item()
        later = later.sum()
    plan = graph.plan()
    assert [index for index, _ in plan.timeline] == [2, 3, 0, 1, 4]
    assert plan.peak_node is graph.nodes[1] is plan.at(plan.peak_position).node
    assert plan.lifetime(graph.nodes[0]) == range(2, 4)
    assert [index for index, _ in plan.eager_timeline] == [0, 1, 2, 3, 4]
    assert plan.explain()
    graph.evaluate()


@pytest.mark.parametrize("read", ["before backward", "after backward", "as a Trainer does"])
def test_gradients_of_micro_batches_whose_losses_are_read_take_eager_memory(read: str) -> None:
    """Else the activations of all micro-batches would exist until the optimizer's step."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(128, 2))
    updates = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [(torch.randn(1024, 128), torch.zeros(1024, dtype=torch.long)) for _ in range(6)]
    activations = 9 * 1024 * 128 * 4

    def step() -> list[float]:
        losses = []
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            if read == "before backward":
                losses.append(loss.item())
            loss.backward()
            if read == "after backward":
                losses.append(loss.item())
            elif torch.isnan(loss.detach()) or torch.isinf(loss.detach()):
                break
        updates.step()
        updates.zero_grad()
        return losses

    def lazily() -> lazyviz.LazyGraph:
        with lazyviz.lazy() as graph:
            step()
        graph.evaluate()
        return graph

    step()
    eager, _ = allocated_by(step)
    plan = lazily().plan()
    lazyviz.reset()
    measured, _ = allocated_by(lazily)
    assert plan.lazyviz_peak_bytes <= eager + activations
    assert measured <= eager + 1.1 * activations


def test_a_read_runs_earlier_backward_passes_but_not_its_own() -> None:
    weight = nn.Parameter(torch.randn(512, 512))
    with lazyviz.lazy() as graph:
        ends = []
        for number in range(3):
            loss = torch.tanh(torch.randn(512, 512) @ weight).square().exp().sin().cos().mean()
            loss.backward()
            loss.item()
            ends.append(len(graph.nodes))
            left = {node.index for node in graph.nodes if node.state == "pending"}
            assert left and min(left) >= (ends[number - 1] if number else 0)
    graph.evaluate()
    assert not graph.pending and weight.grad is not None
