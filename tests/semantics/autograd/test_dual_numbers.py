"""Forward-mode derivatives: dual numbers, zeros without memory, conjugate and negative views, torch.func."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import lazyviz

from ...bit_equality import difference
from ...lazy_equals_eager import assert_same_as_eager


def reals(*shape):
    return torch.rand(shape or 3, dtype=torch.double)


def complexes():
    return torch.rand(3, dtype=torch.cdouble)


def conjugates():
    return complexes().conj()


def negatives():
    return complexes().conj().imag


# A function, what makes its argument, and what makes the tangent.
FUNCTIONS = {
    "times i": (lambda x: x * 1j, reals, reals),
    "plus i": (lambda x: x + 1j, reals, reals),
    "i minus": (lambda x: 1j - x, reals, reals),
    "by i": (lambda x: x / 1j, reals, reals),
    "times 2": (lambda x: x * 2, complexes, complexes),
    "to the power of i": (lambda x: x**1j, reals, reals),
    "2 to the power": (lambda x: 2**x, reals, reals),
    "real part": (torch.real, complexes, complexes),
    "real part of a conjugate": (torch.real, conjugates, complexes),
    "imaginary part of a conjugate": (torch.imag, conjugates, complexes),
    "tangent is a conjugate": (torch.real, complexes, conjugates),
    "both are conjugates": (lambda x: x * 2, conjugates, conjugates),
    "negative view": (lambda x: x * 2, negatives, reals),
    "part of a negative view": (lambda x: x[1:] * 2, negatives, negatives),
    "conjugate on the way": (lambda x: (x.conj() * 2).real, complexes, complexes),
    "imaginary on the way": (lambda x: x.conj().imag, complexes, complexes),
    "view as real": (torch.view_as_real, complexes, complexes),
    "transposed": (lambda x: x.t() * 2, lambda: reals(3, 2).t(), lambda: reals(2, 3)),
    "expanded": (
        lambda x: reals(3, 2).t() + x,
        lambda: reals(3, 1).expand(3, 2).t(),
        lambda: reals(3, 1).expand(3, 2).t(),
    ),
    "in place": (lambda x: x.mul_(2), reals, reals),
    "complex of parts": (lambda x: torch.complex(x, torch.ones(3, dtype=torch.double)), reals, reals),
    "absolute value": (torch.abs, complexes, complexes),
    "angle": (torch.angle, complexes, complexes),
    "one of two": (lambda x: torch.where(x > 0.5, x, torch.zeros(3, dtype=torch.double)), reals, reals),
    "beside a constant": (lambda x: torch.cat([x, torch.ones(2, dtype=torch.double)]), reals, reals),
    "linear": (
        lambda x: F.linear(x, torch.ones(2, 3, dtype=torch.double), torch.ones(2, dtype=torch.double)),
        reals,
        reals,
    ),
    "layer norm": (lambda x: F.layer_norm(x, (3,)), reals, reals),
    "softmax": (lambda x: x.softmax(0), reals, reals),
    "fft": (torch.fft.fft, reals, reals),
    "inner product of conjugates": (lambda x: torch.dot(x, x), conjugates, conjugates),
    "determinant": (torch.linalg.det, lambda: reals(3, 3), lambda: reals(3, 3)),
    "by a mask": (lambda x: x[x > 0.3], reals, reals),
}


def derivative(name):
    function, argument, tangent = FUNCTIONS[name]
    x, t = argument(), tangent()
    with forward_ad.dual_level():
        result = forward_ad.unpack_dual(function(forward_ad.make_dual(x, t)))
        return result.primal.clone(), None if result.tangent is None else result.tangent.clone()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_dual_number_in_a_block(name):
    assert_same_as_eager(lambda: derivative(name))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_plain_eager_dual_numbers_while_something_is_pending(name):
    torch.manual_seed(0)
    expected = derivative(name)
    with lazyviz.lazy() as graph:
        pending = torch.ones(3) * 2
    torch.manual_seed(0)
    actual = derivative(name)
    assert graph.pending
    assert difference(expected, actual) is None
    assert pending.tolist() == [2, 2, 2]


PROGRAMS = {
    "jvp": lambda: jvp(lambda x: (x * 1j).real + x.sin(), (reals(),), (reals(),)),
    "jvp of complex numbers": lambda: jvp(lambda x: x.conj() * x, (complexes(),), (complexes(),)),
    "jacfwd": lambda: jacfwd(lambda x: (x * 1j).abs())(reals()),
    "jacrev": lambda: jacrev(lambda x: x**2)(reals()),
    "hessian": lambda: hessian(lambda x: (x**3).sum())(reals()),
    "jacfwd of jacfwd": lambda: jacfwd(jacfwd(lambda x: (x**3).sum()))(reals()),
    "jacrev of jacrev": lambda: jacrev(jacrev(lambda x: (x.sin() * x).sum()))(reals()),
    "vmap": lambda: vmap(lambda x: x * 1j)(reals(2, 3)),
    "vmap of jvp": lambda: vmap(lambda x: jvp(torch.sin, (x,), (x,)))(reals(2, 3)),
    "vmap of grad": lambda: vmap(grad(lambda x: (x * x).sum()))(reals(2, 3)),
    "vmap of conjugates": lambda: vmap(lambda x: x.conj() * 2)(torch.rand(2, 3, dtype=torch.cdouble).conj()),
    "grad": lambda: grad(lambda x: (x * 1j).abs().sum())(reals()),
    "grad of conjugates": lambda: grad(lambda x: x.conj().abs().sum())(complexes()),
    "zeros without memory": lambda: zeros_without_memory(torch.rand(3) * 2),
    "zeros without memory and conjugates": lambda: zeros_without_memory(
        torch.rand(3, dtype=torch.cfloat).conj()
    ),
    "gradcheck": lambda: torch.autograd.gradcheck(
        lambda x: (x.conj() * 2).real, [complexes().requires_grad_()], check_forward_ad=True
    ),
    "gradcheck in batches": lambda: torch.autograd.gradcheck(
        torch.sin,
        [reals().requires_grad_()],
        check_forward_ad=True,
        check_batched_forward_grad=True,
        check_batched_grad=True,
    ),
}


def zeros_without_memory(x):
    zeros = torch._efficientzerotensor((3,), dtype=x.dtype)
    return [item.clone() for item in (zeros * x, x * zeros, zeros + x, x - zeros, zeros * 1j, zeros)]


def _program(function):
    def register():
        PROGRAMS[function.__name__] = function

    register()
    return function


@_program
def linearized():
    value, function = linearize(lambda x: x.sin() * 2, reals())
    return value, function(reals())


@_program
def vjp_applied():
    value, function = vjp(lambda x: x**2, reals())
    return value, function(torch.ones(3, dtype=torch.double))


@_program
def jacfwd_of_a_module():
    module = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.LayerNorm(2))
    return jacfwd(lambda x: module(x))(torch.ones(3))


@_program
def forward_over_reverse():
    x = complexes().requires_grad_()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, complexes())
        (gradient,) = torch.autograd.grad((dual * dual.conj()).real.sum(), dual, create_graph=True)
        result = forward_ad.unpack_dual(gradient)
        return result.primal.clone(), result.tangent.clone()


@_program
def reverse_over_forward():
    x = reals().requires_grad_()
    with forward_ad.dual_level():
        result = forward_ad.unpack_dual(forward_ad.make_dual(x, reals()).sin() * 1j)
        result.tangent.abs().sum().backward()
    return x.grad


@_program
def tangent_of_another_shape():
    with forward_ad.dual_level():
        forward_ad.make_dual(torch.rand(3), torch.rand(2))


@_program
def tangent_of_another_layout():
    with forward_ad.dual_level():
        forward_ad.make_dual(reals(3, 1).expand(3, 2).t(), reals(2, 3))


@_program
def conjugate_view_of_what_numpy_has():
    t = torch.randn(4, dtype=torch.cfloat)
    v = t.conj()
    t.numpy()
    return v * 2


@_program
def conjugate_view_in_inference_mode():
    with torch.inference_mode():
        t = torch.randn(4, dtype=torch.cfloat) * 1
        v = t.conj()
        t.numpy()
        return v * 2


@_program
def negative_view_of_what_was_read():
    t = torch.randn(4, dtype=torch.cfloat)
    part = t.conj().imag
    t.numpy()
    part.mul_(2)
    return t * 1, part * 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_derivatives_and_views(name):
    assert_same_as_eager(PROGRAMS[name])
