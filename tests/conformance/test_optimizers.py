"""PyTorch's list of optimizers, with schedulers and other parts of a training loop.

Every option set in every implementation the CPU has, three steps on gradients of recorded
backward passes, in one block and in a block for each step.  Parameters, gradients and the full
state must be equal to the last bit.  No optimizer that can do without data has a sync point; the
others are listed with the reason.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

import lazyviz
from lazyviz.session import lazy_graph

from ..bit_equality import difference
from .scoreboard import EQUAL, FAILING

# Optimizers with sync points: cause -> why it needs data.
SYNC_POINTS: dict[str, dict[str, str]] = {
    "Adafactor": {"item": "its step size is a Python number made of the norms of parameter and update"},
    "LBFGS": {"item": "its line search compares losses and directional derivatives in Python"},
    "SparseAdam": {
        "_coalesce of a sparse tensor cannot be deferred": "how many rows differ depends on data",
    },
}
REPRESENTATIVE = 9  # option sets of each optimizer that run without --all
STEPS = 3


def implementations(info: OptimizerInfo) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{}]
    if "foreach" in info.supported_impls:
        found += [{"foreach": False}, {"foreach": True}]
    if "fused" in info.supported_impls and "cpu" in info.supports_fused_on:
        found += [{"fused": True}]
    if info.has_capturable_arg:
        found += [{"capturable": True}]
    return found


def options_of(info: OptimizerInfo) -> list[tuple[str, dict[str, Any]]]:
    given = info.optim_inputs_func(device="cpu")
    if info.step_requires_closure:
        for one in given:
            one.kwargs.setdefault("max_iter", 5)
    return [
        (", ".join([one.desc or "default", *how]), {**copy.deepcopy(one.kwargs), **how})
        for how in implementations(info)
        for one in given
        if not (how.keys() & one.kwargs.keys())
    ]


class Net(nn.Module):
    """Two matrices; vectors, batch norm and dropout unless ``matrices`` alone are wanted."""

    def __init__(self, *, matrices: bool = False, sparse: bool = False) -> None:
        super().__init__()
        if sparse:
            self.layers = nn.Sequential(nn.Embedding(6, 4, sparse=True))
        elif matrices:
            self.layers = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))
        else:
            self.layers = nn.Sequential(
                nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def net_for(info: OptimizerInfo) -> Net:
    torch.manual_seed(0)
    return Net(matrices=info.name == "Muon", sparse=info.only_supports_sparse_grads)


def batch(info: OptimizerInfo | None = None) -> torch.Tensor:
    torch.manual_seed(1)
    if info is not None and info.only_supports_sparse_grads:
        return torch.randint(0, 6, (5,))
    return torch.randn(5, 4)


def left_behind(model: nn.Module, optimizer: torch.optim.Optimizer, *more: Any) -> Any:
    """All that a user can see afterwards."""
    return {
        "model": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "more": copy.deepcopy(more),
        "next random number": torch.rand(1),
    }


def blocks(lazily: str) -> Callable[[str], contextlib.AbstractContextManager[Any]]:
    """The contexts of a program: ``blocks(...)("all")`` around it, ``("step")`` around each step."""
    causes: set[str] = set()

    @contextlib.contextmanager
    def context(where: str) -> Iterator[None]:
        if where != lazily:
            yield
            return
        with lazyviz.lazy() as graph:
            yield
        causes.update(point.cause for point in graph.sync_points)
        graph.evaluate()

    context.causes = causes  # type: ignore[attr-defined]
    return context


def compare(program: Callable[[Any], Any], *, ways: tuple[str, ...] = ("all", "step")) -> set[str]:
    """Run ``program(context)`` in eager PyTorch and lazily; returns the causes of sync points.

    Raises:
        AssertionError: something differs; or eager raised, and lazily not the same came of it.
    """
    causes: set[str] = set()
    expected = outcome(program, blocks("never"))
    assert type(expected) is not str or "capturable" in expected, expected
    for way in ways:
        context = blocks(way)
        actual = outcome(program, context)
        wrong = difference(expected, actual)
        assert wrong is None, f"with {way} in a block: {wrong}: {actual if type(actual) is str else ''}"
        causes |= context.causes  # type: ignore[attr-defined]
    return causes


def outcome(program: Callable[[Any], Any], context: Any) -> Any:
    try:
        return program(context)
    except Exception as error:
        lazy_graph.reset()
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("info", optim_db, ids=lambda info: info.name)
def test_three_steps_are_those_of_eager_pytorch(info, everything, scoreboard):
    options = options_of(info)
    if not everything:
        options = options[:: -(-len(options) // REPRESENTATIVE)]
    wrong: list[str] = []
    causes: set[str] = set()
    compared = 0
    for name, kwargs in options:

        def program(context: Any, kwargs: dict[str, Any] = kwargs) -> Any:
            model, x = net_for(info), batch(info)
            with context("all"):
                optimizer = info.optim_cls(model.parameters(), **copy.deepcopy(kwargs))
                for _ in range(STEPS):
                    with context("step"):

                        def closure() -> torch.Tensor:
                            optimizer.zero_grad()
                            loss = model(x).pow(2).sum()
                            loss.backward()
                            return loss

                        if info.step_requires_closure:
                            optimizer.step(closure)
                        else:
                            closure()
                            optimizer.step()
            return left_behind(model, optimizer)

        try:
            causes |= compare(program)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
        compared += 2
    scoreboard.add("optim_db", info.name, FAILING if wrong else EQUAL, compared, causes)
    assert compared
    assert not wrong
    assert causes == set(SYNC_POINTS.get(info.name, ()))


@pytest.mark.parametrize(
    "info",
    [info for info in optim_db if "differentiable" in info.supported_impls],
    ids=lambda info: info.name,
)
def test_gradients_flow_through_a_differentiable_step(info):
    def program(context: Any) -> Any:
        torch.manual_seed(0)
        start = torch.randn(4, 3, requires_grad=True)
        with context("all"):
            weight = start.clone()
            optimizer = info.optim_cls([weight], differentiable=True)
            weight.grad = (weight * start).detach() + start
            optimizer.step()  # after a second one, some have overwritten what backward needs
            weight.pow(2).sum().backward()
        return start, start.grad, weight.detach()

    assert compare(program, ways=("all",)) == set()


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=3, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=3),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}
METRIC = {"item": "a plateau is where the metric, a loss, does not fall"}


def test_no_scheduler_is_forgotten():
    found = {
        name
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and name[0] != "_"
    }
    assert found - {"LRScheduler"} <= SCHEDULERS.keys()


@pytest.mark.parametrize("lr", ["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_steps_without_data(name, lr):
    def program(context: Any) -> Any:
        torch.manual_seed(0)
        model, x = Net(), batch()
        with context("all"):
            rate = torch.tensor(0.1) if lr == "tensor" else 0.1
            # Momentum is there for the schedulers that cycle it; Adam's foreach path refuses a tensor lr.
            optimizer = torch.optim.AdamW(model.parameters(), rate, foreach=lr == "float", capturable=False)
            scheduler = SCHEDULERS[name](optimizer)
            rates = []
            for _ in range(4):
                with context("step"):
                    loss = train_once(model, optimizer, x)
                    scheduler.step(loss.detach()) if name == "ReduceLROnPlateau" else scheduler.step()
                    rates.append(float(optimizer.param_groups[0]["lr"]))
        return left_behind(model, optimizer, rates, scheduler.state_dict().get("_last_lr"))

    assert compare(program) == (set(METRIC) if name == "ReduceLROnPlateau" else set())


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).pow(2).sum()
    loss.backward()
    optimizer.step()
    return loss


CLIPPING: dict[str, Callable[[nn.Module], Any]] = {
    "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "norm, one by one": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False),
    "largest": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=float("inf")),
    "value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    "total norm alone": lambda model: nn.utils.get_total_norm([p.grad for p in model.parameters()]),
    "checked norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True),
}


@pytest.mark.parametrize("how", CLIPPING)
def test_clipping(how):
    def program(context: Any) -> Any:
        torch.manual_seed(0)
        model, x = Net(), batch()
        norms = []
        with context("all"):
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            for _ in range(STEPS):
                with context("step"):
                    optimizer.zero_grad()
                    model(x).pow(2).sum().backward()
                    norms.append(CLIPPING[how](model))
                    optimizer.step()
        return left_behind(model, optimizer, norms)

    # error_if_nonfinite asks whether the norm is finite, which is data
    assert compare(program) == ({"item"} if how == "checked norm" else set())


@pytest.mark.parametrize("overflow", [False, True])
def test_a_gradient_scaler_skips_the_steps_that_eager_skips(overflow):
    def program(context: Any) -> Any:
        torch.manual_seed(0)
        model, x = Net(), batch()
        with context("all"):
            optimizer = torch.optim.Adam(model.parameters())
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
            for number in range(STEPS):
                with context("step"):
                    optimizer.zero_grad()
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        loss = model(x).float().pow(2).sum()
                    if overflow and number == 1:
                        loss = loss * float("inf")
                    scaler.scale(loss).backward()
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    scaler.step(optimizer)
                    scaler.update()
        return left_behind(model, optimizer, scaler.state_dict())

    assert compare(program) == {"item"}  # whether a gradient overflowed is data


@pytest.mark.parametrize("kind", ["average", "exponential average", "with buffers"])
def test_weight_averaging(kind):
    def program(context: Any) -> Any:
        torch.manual_seed(0)
        model, batches = Net(), [batch() for _ in range(2)]
        averaging = {
            "average": {},
            "exponential average": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
            "with buffers": {"use_buffers": True},
        }[kind]
        averaged = AveragedModel(model, **averaging)
        with context("all"):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(STEPS):
                with context("step"):
                    train_once(model, optimizer, batches[0])
                    averaged.update_parameters(model)
            with context("step"):
                update_bn(batches, averaged)
        return left_behind(averaged, optimizer)

    assert compare(program) == set()


def test_states_are_saved_and_loaded_inside_and_between_blocks():
    def program(context: Any) -> Any:
        torch.manual_seed(0)
        model, other, x = Net(), Net(), batch()
        with context("all"):
            optimizer = torch.optim.AdamW(model.parameters(), 0.1)
            resumed = torch.optim.AdamW(other.parameters(), 0.5)
            with context("step"):
                train_once(model, optimizer, x)
                other.load_state_dict(model.state_dict())
            with context("step"):
                resumed.load_state_dict(optimizer.state_dict())
                train_once(other, resumed, x)
        train_once(other, resumed, x)
        return left_behind(model, optimizer), left_behind(other, resumed)

    causes = compare(program)
    assert not causes


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_are_dropped_or_zeroed_and_accumulate(to_none):
    def program(context: Any) -> Any:
        torch.manual_seed(0)
        model, x = Net(), batch()
        with context("all"):
            optimizer = torch.optim.RMSprop(model.parameters(), 0.1, momentum=0.9)
            for _ in range(STEPS):
                with context("step"):
                    for part in x.split(2):
                        model(part[:2].repeat(2, 1)).pow(2).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=to_none)
        return left_behind(model, optimizer)

    assert compare(program) == set()


def test_hooks_of_steps_run_where_eager_runs_them():
    def double(parameter: nn.Parameter) -> None:
        parameter.grad.mul_(2)

    def program(context: Any) -> Any:
        torch.manual_seed(0)
        model, x, seen = Net(), batch(), []
        optimizer = torch.optim.NAdam(model.parameters())
        optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append("before"))
        optimizer.register_step_post_hook(
            lambda o, args, kwargs: [p.data.mul_(0.5) for group in o.param_groups for p in group["params"]]
        )
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(double)
        with context("all"):
            for _ in range(STEPS):
                with context("step"):
                    train_once(model, optimizer, x)
        return left_behind(model, optimizer, seen)

    assert compare(program) == set()


def test_an_optimizer_step_inside_backward():
    def program(context: Any) -> Any:
        torch.manual_seed(0)
        model, x = Net(), batch()
        optimizers = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}

        def step(parameter: nn.Parameter) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        with context("all"):
            for _ in range(STEPS):
                with context("step"):
                    model(x).pow(2).sum().backward()
        return [left_behind(model, optimizer) for optimizer in optimizers.values()]

    assert compare(program) == set()
