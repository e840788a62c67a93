"""``torch.func`` and forward-mode differentiation."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import nn
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)

from ...lazy_equals_eager import both

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),
]


def grid():
    return torch.linspace(-1, 1, 6).reshape(2, 3)


def f(x):
    return (x.sin() * x.exp()).sum()


def g(x):
    return x.tanh() @ torch.ones(3, 4)


PROGRAMS = {
    "grad": lambda x: grad(f)(x),
    "grad of grad": lambda x: grad(lambda y: grad(f)(y).sum())(x),
    "grad_and_value": lambda x: grad_and_value(f)(x),
    "grad with aux": lambda x: grad(lambda y: (f(y), y * 2), has_aux=True)(x),
    "vmap": lambda x: vmap(g)(x[:, None]),
    "vmap over another dim": lambda x: vmap(lambda r: r * 2, in_dims=1, out_dims=1)(x),
    "vmap in chunks": lambda x: vmap(f, chunk_size=1)(x),
    "vmap of vmap": lambda x: vmap(vmap(lambda e: e * e + 1))(x),
    "vmap of in place": lambda x: vmap(lambda r: r.clone().mul_(2).add_(r))(x),
    "vmap without batch": lambda x: vmap(lambda r, y: r + y, in_dims=(0, None))(x, x[0]),
    "vmap with same randomness": lambda x: vmap(lambda r: r + torch.rand(3), randomness="same")(x),
    "vmap with different randomness": lambda x: vmap(lambda r: r + torch.rand(3), randomness="different")(x),
    "vmap with an error for randomness": lambda x: vmap(lambda r: r + torch.rand(3))(x),
    "vmap of dropout": lambda x: vmap(lambda r: nn.functional.dropout(r, 0.5), randomness="different")(x),
    "vmap of item": lambda x: vmap(lambda r: r * r.sum().item())(x),
    "vmap of grad": lambda x: vmap(grad(f))(x),
    "vmap of a loop": lambda x: vmap(lambda r: torch.stack([r[i] * i for i in range(3)]))(x),
    "jvp": lambda x: jvp(g, (x,), (torch.ones_like(x),)),
    "vjp": lambda x: (lambda out, back: (out, back(torch.ones_like(out))))(*vjp(g, x)),
    "jacrev": lambda x: jacrev(g)(x),
    "jacfwd": lambda x: jacfwd(g)(x),
    "jacrev in chunks": lambda x: jacrev(g, chunk_size=2)(x),
    "hessian": lambda x: hessian(f)(x),
    "jvp of vjp": lambda x: jvp(lambda y: vjp(f, y)[1](torch.ones(()))[0], (x,), (torch.ones_like(x),)),
    "linearize": lambda x: (lambda out, push: (out, push(torch.ones_like(x))))(*linearize(g, x)),
    "functionalize": lambda x: functionalize(lambda y: y.clone().t().add_(1))(x),
    "linalg in vmap": lambda x: vmap(lambda r: torch.linalg.inv(torch.outer(r, r) + torch.eye(3)))(x),
    "writes a captured tensor": lambda x: vmap(lambda r: x.add_(r))(x.clone()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_function_transforms(name):
    def program(x):
        return PROGRAMS[name](x * 1)

    def real(x):
        return PROGRAMS[name](x)

    both(program, grid, syncs=None)
    both(real, grid, syncs=None)


@pytest.mark.parametrize(
    "name", ["grad", "vmap", "vjp", "jacrev", "jvp", "jacfwd", "hessian", "vmap of grad"]
)
def test_function_transforms_need_no_sync(name):
    both(lambda x: PROGRAMS[name](x * 1), grid)


def test_functional_calls():
    def program(model, x):
        parameters = {name: p.detach() * 2 for name, p in model.named_parameters()}
        out = functional_call(model, parameters, (x,))

        def loss(parameters, x):
            return functional_call(model, (parameters, dict(model.named_buffers())), (x,)).pow(2).mean()

        gradients = grad(loss)(parameters, x)
        per_sample = vmap(grad(loss), in_dims=(None, 0))(parameters, x[:, None])
        return out, gradients, per_sample, model(x)

    both(program, lambda: (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(5, 3)))


def test_an_ensemble_of_stacked_modules():
    def program(x, *models):
        parameters, buffers = stack_module_state(list(models))

        def call(parameters, buffers, x):
            return functional_call(models[0], (parameters, buffers), (x,))

        out = vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)
        out.sum().backward()
        return out, parameters

    both(program, lambda: (torch.randn(5, 3), *[nn.Linear(3, 2) for _ in range(3)]))


def test_dual_numbers():
    def program(x, tangent):
        with fwAD.dual_level():
            dual = fwAD.make_dual(x, tangent)
            out = dual.sin() * 2
            out.mul_(dual)
            primal, tangent_out = fwAD.unpack_dual(out)
            viewed = fwAD.unpack_dual(out[0].t())
        return primal, tangent_out, viewed

    both(program, lambda: (grid(), torch.ones(2, 3)), syncs=None)
    both(lambda x, t: program(x * 1, t * 2), lambda: (grid(), torch.ones(2, 3)), syncs=None)


def test_dual_numbers_through_a_model_and_backward():
    def program(model, x):
        x = x.requires_grad_()
        with fwAD.dual_level():
            out = model(fwAD.make_dual(x, torch.ones_like(x)))
            tangent = fwAD.unpack_dual(out).tangent
            tangent.sum().backward()
        return tangent

    both(
        program,
        lambda: (nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2)), grid()),
        syncs=None,
        versions=False,
    )


def test_old_functional_jacobians():
    functional = torch.autograd.functional
    for program in (
        lambda x: functional.jacobian(g, x),
        lambda x: functional.jacobian(g, x, vectorize=True),
        lambda x: functional.hessian(f, x),
        lambda x: functional.vjp(g, x, torch.ones(2, 4)),
        lambda x: functional.jvp(g, x, torch.ones(2, 3)),
        lambda x: functional.hvp(f, x, torch.ones(2, 3)),
        lambda x: functional.vhp(f, x, torch.ones(2, 3)),
        lambda x: functional.jacobian(g, x, vectorize=True, strategy="forward-mode"),
    ):
        both(program, grid, syncs=None, versions=False)


def test_pending_draws_run_at_a_sync_point_inside_of_batched_gradients():
    """The maximum's gradient is computed from its value, in a mode that refuses to draw random numbers."""

    def program():
        x = torch.rand(3, 2, requires_grad=True)
        functional = torch.autograd.functional
        return (
            torch.autograd.grad(x.max(), x, torch.rand(4), is_grads_batched=True),
            torch.autograd.grad(x.median(), x, torch.rand(4), is_grads_batched=True),
            functional.jacobian(lambda x: x.min(), torch.rand(3), vectorize=True),
        )

    both(program, lambda: (), syncs=None, versions=False)


def test_gradcheck_passes_in_a_block():
    def program(x):
        return torch.autograd.gradcheck(torch.sin, (x,), fast_mode=True)

    both(program, lambda: torch.linspace(0, 1, 3, dtype=torch.float64).requires_grad_(), syncs=None)
