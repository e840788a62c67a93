"""Error messages name the class that a pending tensor has after evaluation."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz

from ..lazy_equals_eager import both


class Reads(nn.Module):
    """Asks its input for what no tensor has."""

    def forward(self, x):
        return x.nope


class ReturnsText(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return "text"


PROGRAMS = {
    "add": lambda x: torch.add(x * 2, "x"),
    "add of text": lambda x: x * 2 + "a",
    "matmul of a list": lambda x: x * 2 @ [1],
    "comparison with text": lambda x: (x * 2 > 0) < "a",
    "view as a tensor": lambda x: (x * 2).view(x * 3),
    "reshape": lambda x: (x * 2).reshape("x"),
    "cat of a tensor": lambda x: torch.cat(x * 2),
    "stack of a tensor": lambda x: torch.stack(x * 2, x * 3),
    "einsum": lambda x: torch.einsum(x * 2, "i"),
    "split": lambda x: torch.split(x * 2, x * 3),
    "squeeze": lambda x: torch.squeeze(x * 2, x * 3),
    "sizes": lambda x: torch.zeros(x * 2),
    "stride of a convolution": lambda x: F.conv2d(x * 2, x * 3, stride=x * 4),
    "probability of dropout": lambda x: F.dropout(x * 2, x * 3),
    "generator": lambda x: torch.randn(2, generator=x * 2),
    "out": lambda x: torch.add(x * 2, 1, out="a"),
    "dtype": lambda x: (x * 2).to(dtype=x * 3),
    "unknown keyword": lambda x: (x * 2).sum(foo=x * 3),
    "where": lambda x: torch.where(x * 2 > 0, "a", x * 3),
    "text as an index": lambda x: (x * 2)["a"],
    "index of a list": lambda x: [1, 2][x * 2],
    "range": lambda x: range(x * 2),
    "call": lambda x: (x * 2)(),
    "length of a number": lambda x: len((x * 2).sum()),
    "contained text": lambda x: "a" in x * 2,
    "unknown attribute": lambda x: (x * 2).nope,
    "unknown attribute of a parameter": lambda x: nn.Parameter(x * 2).nope,
    "unknown attribute in a module": lambda x: Reads()(x * 2),
    "a tensor for a gradient": lambda x: setattr(x * 2, "grad", 3),
    "features of a layer": lambda x: nn.Linear(x * 2, 2),
    "a tensor for a module": lambda x: nn.Sequential(x * 2),
    "a tensor for a list of modules": lambda x: nn.ModuleList([x * 2]),
    "a tensor for a parameter": lambda x: setattr(nn.Linear(3, 3), "weight", x * 2),
    "a parameter with history": lambda x: nn.Linear(3, 3).register_parameter("x", nn.Parameter(x * 2) * 2),
    "a tensor for parameters": lambda x: torch.optim.SGD(x * 2, lr=0.1),
    "a number among parameters": lambda x: torch.optim.SGD([x.requires_grad_(), 3], lr=0.1),
    "a tensor for a state": lambda x: nn.Linear(2, 2).load_state_dict(x * 2),
    "legacy constructor": lambda x: torch.Tensor(x * 2, 3),
    "tensor from text and a tensor": lambda x: torch.tensor([x * 2, "a"]),
    "tensor from a dictionary": lambda x: torch.as_tensor({"a": x * 2}),
    "new": lambda x: (x * 2).new("a"),
    "gradient of a number": lambda x: torch.autograd.grad(3, x * 2),
    "gradient with respect to text": lambda x: torch.autograd.grad(x * 2, "a"),
    "gradient of a function that returns text": lambda x: torch.func.grad(lambda x: "a")(x * 2),
    "a function's gradient that is text": lambda x: (
        ReturnsText.apply((x * 2).requires_grad_()).sum().backward()
    ),
    "attention": lambda x: F.scaled_dot_product_attention(x * 2, x * 3, "v"),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_errors_name_the_class_that_eager_names(program):
    both(program, lambda: torch.ones(3), syncs=None, orders=("at once",))


@pytest.mark.parametrize(
    "program",
    [
        lambda x: str(type(x * 2)),
        lambda x: type(x * 2).__name__,
        lambda x: torch.typename(x * 2),
        lambda x: f"received ({type(x * 2).__qualname__}, int)",
    ],
)
def test_the_class_of_a_pending_tensor_is_called_tensor(program):
    both(program, lambda: torch.ones(3), orders=("at once",))


def test_what_is_not_there_can_be_asked_for():
    def program(x):
        y = x * 2
        return hasattr(y, "nope"), getattr(y, "nope", 3), hasattr(nn.Parameter(y), "nope")

    both(program, lambda: torch.ones(3), orders=("at once",))


def moved(x):
    layer = nn.Linear(3, 2)
    layer.weight.data = layer.weight.data * x
    layer.bias = nn.Parameter(layer.bias)
    return layer.double()


class Mine(nn.Parameter):
    pass


def marked(x):
    y = x.requires_grad_() * 2
    y._is_param = True  # does not make a tensor with a history a parameter
    return y


TENSORS = {
    "a result": lambda x: x * 2,
    "a view": lambda x: (x * 2)[1:],
    "a parameter": lambda x: nn.Parameter(x * 2),
    "a parameter without gradients": lambda x: nn.Parameter(x * 2, requires_grad=False),
    "a parameter of a parameter": lambda x: nn.Parameter(nn.Parameter(x * 2)),
    "what is computed from a parameter": lambda x: nn.Parameter(x * 2) * 2,
    "data of a parameter": lambda x: nn.Parameter(x * 2).data,
    "a detached parameter": lambda x: nn.Parameter(x * 2).detach(),
    "a clone of a parameter": lambda x: nn.Parameter(x * 2).clone(),
    "a copy of a parameter": lambda x: copy.deepcopy(nn.Parameter(x * 2)),
    "a weight of a module": lambda x: moved(x).weight,
    "a bias of a module": lambda x: moved(x).bias,
    "a gradient": lambda x: grad(nn.Parameter(x * 2)),
    "a buffer": lambda x: nn.Buffer(x * 2),
    "a parameter of a class of one's own": lambda x: Mine(x * 2),
    "a result that is marked": marked,
}


def grad(parameter):
    (parameter * 3).sum().backward()
    return parameter.grad


@functools.singledispatch
def kind(_item):
    return "another"


@kind.register
def _(_item: torch.Tensor):
    return "a tensor"


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_the_class_of_a_pending_tensor_is_equal_to_the_one_that_it_will_have(make):
    classes = (torch.Tensor, nn.Parameter, Mine)

    def program(x):
        cls = type(make(x))
        one, other = type(x * 2), type(make(x))
        real, real_parameter, new = type(x), type(nn.Parameter(x)), type(cls(torch.ones(3)))
        return (
            [cls == each for each in classes],
            [each == cls for each in classes],
            [cls != each for each in classes],
            [cls in (each,) for each in classes],
            {each: number for number, each in enumerate(classes)}.get(cls),
            len({cls, *classes}),
            (one == other, one != other, len({one, other})),
            (real == cls, real_parameter == cls, new == cls),
            kind(make(x)),
        )

    both(program, lambda: torch.ones(3), orders=("at once",))


def test_code_that_asks_for_the_exact_class_takes_its_path_for_subclasses_with_the_same_result():
    def program():
        torch.manual_seed(0)
        layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 2))
        out = layer(torch.ones(2, 3))
        torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")
        return layer, out

    expected_layer, expected = program()
    with lazyviz.lazy() as graph:
        layer, out = program()
        loss = out.sum()
        assert isinstance(loss, torch.Tensor) and type(loss) is not torch.Tensor
    graph.evaluate()
    assert type(loss) is torch.Tensor and type(layer.weight) is torch.nn.Parameter
    assert torch.equal(out, expected) and torch.equal(layer.weight, expected_layer.weight)
