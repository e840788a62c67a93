"""User-defined operators: deferred with a shape rule, otherwise run at a named sync point."""

from __future__ import annotations

import pytest
import torch

import lazyviz

from ..lazy_equals_eager import both

calls: list[str] = []


@torch.library.custom_op("lazyviz_tests::scale", mutates_args=())
def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    calls.append("scale")
    return torch.from_numpy(x.detach().numpy() * factor)


@scale.register_fake
def _(x, factor):
    return torch.empty_like(x)


def _setup(ctx, inputs, output):
    ctx.factor = inputs[1]


scale.register_autograd(lambda ctx, grad: (grad * ctx.factor, None), setup_context=_setup)


@torch.library.custom_op("lazyviz_tests::no_fake", mutates_args=())
def no_fake(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@torch.library.custom_op("lazyviz_tests::fill", mutates_args={"x"})
def fill(x: torch.Tensor, value: float) -> None:
    x.fill_(value)


@torch.library.custom_op("lazyviz_tests::step", mutates_args={"weights", "state"})
def step(weights: list[torch.Tensor], state: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
    for weight, grad in zip(weights, grads):
        weight.sub_(grad)
    state.add_(1)
    return state * 2


@step.register_fake
def _(weights, state, grads):
    return torch.empty_like(state)


@torch.library.custom_op("lazyviz_tests::several", mutates_args=())
def several(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    return x + 1, [x * 2, x * 3], x.sum()


@several.register_fake
def _(x):
    return torch.empty_like(x), [torch.empty_like(x) for _ in range(2)], x.new_empty(())


@torch.library.custom_op("lazyviz_tests::list_last", mutates_args=())
def list_last(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return x + 1, [x * 2, x * 3]


@list_last.register_fake
def _(x):
    return torch.empty_like(x), [torch.empty_like(x) for _ in range(2)]


@torch.library.custom_op("lazyviz_tests::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0].clone()


@positive.register_fake
def _(x):
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


@torch.library.custom_op("lazyviz_tests::largest", mutates_args=())
def largest(x: torch.Tensor) -> float:
    return float(x.max())


@torch.library.custom_op("lazyviz_tests::checked", mutates_args=())
def checked(x: torch.Tensor) -> torch.Tensor:
    if x.dim() != 2:
        raise ValueError(f"the kernel wants a matrix, not {x.dim()} dimensions")
    return x.clone()


@checked.register_fake
def _(x):
    if x.dim() != 2:
        raise RuntimeError("the fake has words of its own")
    return torch.empty_like(x)


@torch.library.custom_op("lazyviz_tests::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


@noise.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.triton_op("lazyviz_tests::composed", mutates_args={})
def composed(x: torch.Tensor) -> torch.Tensor:
    return x.exp() + 1


library = torch.library.Library("lazyviz_tests_old", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x * 2, "CPU")
library.define("composite(Tensor x) -> Tensor")
library.impl("composite", lambda x: x.sin() * x, "CompositeImplicitAutograd")
library.define("same(Tensor(a) x) -> Tensor(a)")
library.impl("same", lambda x: x.view(x.shape), "CPU")
library.define("hidden(Tensor(a!) x) -> Tensor(a!)")
library.impl("hidden", lambda x: x.mul_(3), "CPU")
old = torch.ops.lazyviz_tests_old


def weight():
    return torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()


def grid():
    return torch.linspace(-1, 1, 6).reshape(2, 3)


def test_an_op_with_a_shape_rule_is_deferred_with_its_gradient():
    def program(w):
        y = scale(w * 2, 3.0)
        y.sum().backward()
        return y

    both(program, weight)


def test_a_deferred_op_runs_once_and_when_evaluated():
    calls.clear()
    with lazyviz.lazy() as graph:
        y = scale(grid(), 2.0)
    assert calls == [] and graph.pending
    graph.evaluate()
    assert calls == ["scale"] and torch.equal(y, grid() * 2)


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        (lambda x: no_fake(x * 2) + 1, "no shape rule for lazyviz_tests.no_fake.default"),
        (lambda x: positive(x * 2) + 1, "the result of lazyviz_tests.positive.default depends on data"),
        (lambda x: largest(x * 2), "largest"),
        (lambda x: old.twice(x + 1), "the result of lazyviz_tests_old.twice.default depends on data"),
    ],
)
def test_an_op_that_cannot_be_deferred_is_a_named_sync_point(program, cause):
    both(program, grid, syncs=[cause])


def test_ops_that_return_several_tensors():
    cause = "lazyviz_tests.several.default returns list"
    both(lambda x: several(x * 2), grid, syncs=[cause], versions=False)
    cause = "lazyviz_tests.list_last.default returns list"
    both(lambda x: list_last(x * 2), grid, syncs=[cause], versions=False)


def test_composite_ops_are_their_parts():
    graph = both(lambda w: old.composite(w * 2).sum().backward(), weight)
    assert "sin" in [node.op._schema.name.rpartition("::")[2] for node in graph.nodes]
    both(lambda x: composed(x * 2), grid)


def test_an_op_that_writes_its_arguments():
    def program(x):
        y = x * 2
        before = y + 0
        fill(y[0], 4.0)
        fill(x, 1.0)
        return before, y, x + 0, y._version > 0

    both(program, grid, versions=False)  # eager counts the writes inside of the op, too


def test_an_op_that_writes_a_list_and_returns_something():
    def program(a, b):
        weights = [a * 1, b]
        state = torch.zeros(3)
        result = step(weights, state, [a, b * 0.5])
        return weights, state, result, state._version > 0

    both(program, lambda: (grid(), torch.ones(4)), versions=False)


def test_the_error_message_is_the_kernels_and_not_the_shape_rules():
    both(lambda x: checked(x[0]), grid, syncs=None)
    both(lambda x: checked(x * 2), grid, versions=False)


def test_an_op_with_random_numbers():
    def program(x):
        torch.manual_seed(3)
        return noise(x), torch.rand(2), noise(x)

    both(program, grid)


def test_views_and_writes_declared_by_schema():
    def program(x):
        y = x * 2
        view = old.same(y)
        old.hidden(y)
        return y, view

    both(program, grid, syncs=None, versions=False)


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered.*")
@pytest.mark.parametrize("beside", [False, True], ids=["in a block", "beside a pending graph"])
def test_an_op_without_autograd_has_that_of_the_ops_in_its_kernel(beside):
    def program(w):
        y = old.twice(w * 3)
        y.sum().backward()
        return y

    if not beside:
        both(program, weight, syncs=None)
        return
    w = weight()
    with lazyviz.lazy():
        pending = w.detach() + 1
    y = program(w)
    assert type(y.grad_fn).__name__ == "MulBackward0"
    assert torch.equal(w.grad, torch.full((2, 3), 6.0)) and lazyviz.is_lazy(pending)


def test_a_view_made_by_an_op_is_a_view():
    def program(w):
        y = w * 2
        view = old.same(y)
        view.mul_(3)
        return y, view

    both(program, weight, syncs=None, versions=False)
