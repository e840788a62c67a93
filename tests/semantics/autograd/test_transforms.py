"""functorch's transforms in a block: their wrapped tensors have no memory of their own."""

from __future__ import annotations

import pytest
import torch
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, linearize, vjp, vmap

import lazyviz

from ...bit_equality import difference

# Operators whose gradients run at a sync point on plain tensors, or whose gradients do.
FUNCTIONS = {
    "prod": lambda t: t.prod(),
    "prod of rows": lambda t: t.prod(-1).sum(),
    "max": lambda t: t.max(),
    "min": lambda t: t.min(),
    "median": lambda t: t.median(),
    "nanmedian": lambda t: t.nanmedian(),
    "cumprod": lambda t: t.cumprod(0).sum(),
    "masked_fill": lambda t: t.masked_fill(t > 0, t.sum()).square().sum(),
    "det": torch.linalg.det,
    "matrix_exp": lambda t: torch.matrix_exp(t).sum(),
    "vander": lambda t: torch.linalg.vander(t).sum(),
    "relu": lambda t: t.relu().square().sum(),
}
TRANSFORMS = {
    "grad": grad,
    "grad of each sample": lambda function: vmap(grad(function)),
    "jacrev": jacrev,
    "jacobian of rows": lambda function: jacrev(lambda t: torch.stack([function(t), function(t * 0.5)])),
    "jacfwd": jacfwd,
    "hessian": hessian,
    "gradient of a gradient": lambda function: grad(lambda t: grad(function)(t).square().sum()),
    "vjp": lambda function: lambda t: vjp(function, t)[1](torch.tensor(0.7)),
}


def samples(batched: bool) -> torch.Tensor:
    shape = (2, 3, 3) if batched else (3, 3)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:There is a performance drop")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_transform_has_eager_bits(name, transform):
    def program():
        x = samples("sample" in transform) * 1.5
        return TRANSFORMS[transform](FUNCTIONS[name])(x)

    def outcome():
        try:
            return program()
        except RuntimeError as error:  # not every operator has every derivative
            return str(error)

    expected = outcome()
    with lazyviz.lazy() as graph:
        result = outcome()
    graph.evaluate()
    if isinstance(expected, str):
        assert result == expected
    else:
        assert difference(expected, result) is None


def test_a_gradient_within_a_transform_stays_deferred():
    with lazyviz.lazy() as graph:
        result = vmap(grad(lambda t: t.max()))(samples(True))
    assert lazyviz.is_lazy(result) and not graph.sync_points


def test_a_resize_within_a_transform():
    def program():
        return vmap(lambda t: (t * 2).resize_(9))(samples(True))

    expected = program()
    with lazyviz.lazy() as graph:
        result = program()
    graph.evaluate()
    assert difference(expected, result) is None


@pytest.mark.parametrize(
    "read", [str, lambda t: t.sum().item(), lambda t: bool(t.any()), lambda t: t.tolist()]
)
def test_a_read_within_a_gradient_is_eager_s(read):
    def program():
        seen = []

        def function(t):
            try:
                seen.append(read(t * 2))
            except RuntimeError as error:
                seen.append(str(error))
            return t.square().sum()

        return grad(function)(samples(False)), seen

    expected, shown = program()
    with lazyviz.lazy() as graph:
        result, seen = program()
    graph.evaluate()
    assert difference(expected, result) is None
    assert seen == shown


def written(x):
    y = x.view(-1)
    y.add_(torch.ones(2).sum())
    return x * torch.arange(3.0)


def with_a_new_parameter(x):
    weight = torch.nn.Parameter(torch.ones(3) * 2)
    fixed = torch.nn.Parameter(torch.ones(3) * 3, requires_grad=False)
    return (x * weight * fixed).sum()


PROGRAMS = {
    "functionalize": lambda x: functionalize(written)(x * 1),
    "functionalized samples": lambda x: vmap(functionalize(written))((x * 1).unsqueeze(0)),
    "functionalize, then grad": lambda x: grad(functionalize(lambda t: written(t * 1).sum()))(x),
    "vmap in functionalize": lambda x: functionalize(vmap(lambda t: t.view(3).add(1)))(x),
    "a read in functionalize": lambda x: functionalize(lambda t: written(t * t.sum().item()))(x * 1),
    "a new parameter": lambda x: vmap(with_a_new_parameter)(x),
    "a new parameter, then grad": grad(with_a_new_parameter),
    "linearize, then vmap": lambda x: vmap(linearize(lambda t: (t.cos(), t.sum()), x)[1])(x.expand(2, 3, 3)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:There is a performance drop", "ignore:.*get_attr")
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_transforms_make_has_eager_bits(name):
    expected = PROGRAMS[name](samples(batched=False))
    with lazyviz.lazy() as graph:
        found = PROGRAMS[name](samples(batched=False))
    graph.evaluate()
    assert difference(expected, found) is None


def test_tensors_in_transforms_are_shown_with_the_pending_ones_in_them():
    shown = []

    def function(x):
        shown.append(" ".join(repr(x).split()))
        return x.sum()

    with lazyviz.lazy() as graph:
        torch.func.grad(function)(torch.ones(3) * 2)
        torch.func.vmap(torch.func.grad(function))(torch.ones(2, 3) * 2)
    assert shown == [
        "GradTrackingTensor(lvl=1, value= lazy[3] float32 cpu, pending )",
        "GradTrackingTensor(lvl=2, value= BatchedTensor(lvl=1, bdim=0, "
        "value= lazy[2, 3] float32 cpu, pending ) )",
    ]
    assert not graph.sync_points
