"""Undefined gradients: functions that return None, unused outputs, hooks, allow_unused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from ...lazy_equals_eager import assert_same_as_eager


class Nothing(torch.autograd.Function):
    """Its gradient is None."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


class Unmaterialized(torch.autograd.Function):
    """Two results; of one without a gradient it is told None."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        if first is None:
            return None if second is None else second * 3
        return first * 2 if second is None else first * 2 + second * 3


class Half(torch.autograd.Function):
    """None for the second of its arguments."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, gradient):
        _, y = ctx.saved_tensors
        return gradient * y, None


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)


def attention(**options):
    return lambda: lambda x: F.scaled_dot_product_attention(x, x, x, **options)


def of(function):
    return lambda: function


# What makes a function or module, and the shape that it takes.
MADE = {
    "lstm": (lambda: nn.LSTM(4, 5), (3, 2, 4)),
    "lstm both ways": (lambda: nn.LSTM(4, 5, 2, bidirectional=True, batch_first=True), (3, 2, 4)),
    "lstm projected": (lambda: nn.LSTM(4, 5, proj_size=3), (3, 2, 4)),
    "gru": (lambda: nn.GRU(4, 5), (3, 2, 4)),
    "gru with dropout": (lambda: nn.GRU(4, 5, 2, dropout=0.5, bidirectional=True), (3, 2, 4)),
    "rnn": (lambda: nn.RNN(4, 5), (3, 2, 4)),
    "lstm cell": (lambda: nn.LSTMCell(4, 5), (2, 4)),
    "gru cell": (lambda: nn.GRUCell(4, 5), (2, 4)),
    "convolution": (lambda: nn.Conv2d(1, 2, 3), (2, 1, 5, 5)),
    "transposed convolution": (lambda: nn.ConvTranspose1d(2, 2, 3), (2, 2, 5)),
    "batch norm": (lambda: nn.BatchNorm2d(2), (2, 2, 3, 3)),
    "batch norm in use": (lambda: nn.BatchNorm1d(4).eval(), (3, 4)),
    "layer norm": (lambda: nn.LayerNorm(4), (3, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (3, 4)),
    "rms norm": (lambda: nn.RMSNorm(4), (3, 4)),
    "prelu": (lambda: nn.PReLU(), (3, 3)),
    "attention": (attention(), (1, 2, 3, 4)),
    "causal attention": (attention(is_causal=True), (1, 2, 3, 4)),
    "attention of three dimensions": (attention(), (2, 3, 4)),
    "multi-head attention": (lambda: SelfAttention(4, 2), (3, 1, 4)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(4, 2, 8), (3, 1, 4)),
    "embedding bag": (
        of(lambda x: F.embedding_bag(torch.tensor([0, 1, 2]), x, torch.tensor([0, 2]))),
        (4, 3),
    ),
    "embedding": (of(lambda x: F.embedding(torch.tensor([0, 1, 2]), x)), (4, 3)),
    "split": (of(lambda x: x.split(1)), (4, 3)),
    "unbind": (of(lambda x: x.unbind()), (4, 3)),
    "svd": (of(lambda x: torch.linalg.svd(x, full_matrices=False)), (4, 3)),
    "qr": (of(torch.linalg.qr), (4, 3)),
    "eigh": (of(lambda x: torch.linalg.eigh(x @ x.mT)), (3, 3)),
    "slogdet": (of(torch.linalg.slogdet), (3, 3)),
    "lu": (of(torch.linalg.lu), (3, 3)),
    "topk": (of(lambda x: x.topk(2)), (3, 3)),
    "var_mean": (of(lambda x: torch.var_mean(x, 0)), (3, 3)),
    "aminmax": (of(lambda x: torch.aminmax(x, dim=0)), (3, 3)),
    "frexp": (of(torch.frexp), (3, 4)),
    "max pool": (lambda: nn.MaxPool2d(2, return_indices=True), (1, 1, 4, 4)),
    "two results": (of(Unmaterialized.apply), (3, 4)),
    "half": (of(lambda x: Half.apply(x, x * 2)), (3, 4)),
}


def made(name):
    make, shape = MADE[name]
    x = torch.randn(shape, requires_grad=True)
    function = make()
    return x, function, list(function.parameters()) if isinstance(function, nn.Module) else []


def results(item):
    if isinstance(item, torch.Tensor):
        return [item] if item.dtype.is_floating_point and item.requires_grad else []
    return [] if item is None else [result for part in item for result in results(part)]


@pytest.mark.parametrize("name", MADE)
def test_what_gets_no_gradient_gives_none(name):
    def program():
        x, function, parameters = made(name)
        total = x.sum()
        for result in results(function(x)):
            total = total + Nothing.apply(result).sum()
        total.backward()
        return x.grad, [parameter.grad for parameter in parameters]

    assert_same_as_eager(program)


@pytest.mark.parametrize("name", MADE)
def test_each_result_may_be_the_only_one_used(name):
    def program():
        x, function, parameters = made(name)
        return [
            torch.autograd.grad(result.sum(), [x, *parameters], retain_graph=True, allow_unused=True)
            for result in results(function(x))
        ]

    assert_same_as_eager(program)


@pytest.mark.parametrize("name", MADE)
def test_a_gradient_of_a_gradient_may_be_nothing(name):
    def program():
        x, function, parameters = made(name)
        result = results(function(x))[-1]
        (gradient,) = torch.autograd.grad(result.pow(2).sum(), x, create_graph=True)
        (Nothing.apply(gradient).sum() + gradient.pow(2).sum() + x.sum()).backward()
        return x.grad, [parameter.grad for parameter in parameters]

    assert_same_as_eager(program)


PROGRAMS = []


def program(function):
    PROGRAMS.append(function)
    return function


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.double, requires_grad=True)


@program
def hooks_that_return_nothing():
    x = leaf(3)
    y = x * 2
    y.register_hook(lambda gradient: None)
    y.retain_grad()
    z = y * 3
    z.register_hook(lambda gradient: gradient * 2)
    z.sum().backward()
    return x.grad, y.grad


@program
def hooks_of_nodes():
    x = leaf(3)
    y = x * 2
    y.grad_fn.register_hook(lambda inputs, outputs: (inputs[0] * 3, *inputs[1:]))
    y.grad_fn.register_prehook(lambda outputs: (outputs[0] * 5,))
    y.sum().backward()
    return x.grad


@program
def hooks_of_modules():
    x, module = leaf(2, 3), nn.Linear(3, 3)
    module.register_full_backward_hook(lambda module, inputs, outputs: None)
    module.register_full_backward_pre_hook(lambda module, outputs: tuple(g * 2 for g in outputs))
    module(x).sum().backward()
    return x.grad, module.weight.grad


@program
def a_hook_on_several_gradients():
    x, y, seen = leaf(3), leaf(3), []
    torch.autograd.graph.register_multi_grad_hook(
        [x, y], lambda gradients: seen.append([None if g is None else g * 1 for g in gradients])
    )
    (x * 2).sum().backward()
    return seen


@program
def an_unused_input():
    x, y = leaf(3), leaf(3)
    unused = torch.autograd.grad(x.sum(), [x, y], allow_unused=True)
    zeros = torch.autograd.grad((x * 1).sum(), [x, y], allow_unused=True, materialize_grads=True)
    return unused, zeros


@program
def an_unused_input_that_is_an_error():
    x, y = leaf(3), leaf(3)
    return torch.autograd.grad((x * 1).sum(), [x, y])


@program
def one_of_two_results_of_an_lstm():
    module, x = nn.LSTM(4, 5), leaf(3, 2, 4)
    out, (h, c) = module(x)
    (Nothing.apply(out).sum() + Nothing.apply(h).sum() + c.sum()).backward()
    return x.grad, [parameter.grad for parameter in module.parameters()]


@program
def a_checkpointed_lstm():
    module, x = nn.LSTM(4, 4), leaf(3, 2, 4)
    y = checkpoint(lambda x: module(x)[0], x, use_reentrant=False)
    (Nothing.apply(y).sum() + x.sum()).backward()
    return x.grad, [parameter.grad for parameter in module.parameters()]


@program
def a_reentrant_checkpoint():
    module, x = nn.LSTM(4, 4), leaf(3, 2, 4)
    y = checkpoint(lambda x: module(x)[0], x, use_reentrant=True)
    (Nothing.apply(y).sum() + y.sum() + x.sum()).backward()
    return x.grad, [parameter.grad for parameter in module.parameters()]


@program
def a_function_that_is_differentiated_once():
    x = leaf(3)
    (gradient,) = torch.autograd.grad(Once.apply(x).sum(), x, create_graph=True)
    gradient.sum().backward()


@program
def gradients_in_batches():
    x = leaf(3)
    return torch.autograd.grad(x**2, x, torch.eye(3), is_grads_batched=True)


@program
def a_jacobian_through_a_custom_function():
    return torch.autograd.functional.jacobian(lambda x: Half.apply(x, x) + x**2, torch.randn(3))


@program
def gradcheck_of_attention():
    return torch.autograd.gradcheck(F.scaled_dot_product_attention, [doubles(1, 2, 3, 4) for _ in range(3)])


@program
def gradgradcheck_of_attention():
    return torch.autograd.gradgradcheck(
        F.scaled_dot_product_attention, [doubles(1, 1, 2, 2) for _ in range(3)]
    )


@program
def gradcheck_of_multi_head_attention():
    return torch.autograd.gradcheck(SelfAttention(4, 2).double(), [doubles(3, 1, 4)])


@program
def gradcheck_of_an_encoder_layer():
    return torch.autograd.gradcheck(
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0).double(), [doubles(3, 1, 4)]
    )


@program
def gradcheck_of_recurrent_layers():
    lstm, gru = nn.LSTM(2, 2).double(), nn.GRU(2, 2).double()
    return [torch.autograd.gradcheck(lambda x, m=m: m(x)[0], [doubles(2, 1, 2)]) for m in (lstm, gru)]


@program
def gradgradcheck_of_norms():
    return [
        torch.autograd.gradgradcheck(lambda x: F.layer_norm(x, (3,)), [doubles(2, 3)]),
        torch.autograd.gradgradcheck(lambda x: F.batch_norm(x, None, None, training=True), [doubles(4, 2)]),
    ]


@program
def gradcheck_of_an_embedding_bag():
    positions, offsets = torch.tensor([0, 1, 2]), torch.tensor([0, 2])
    return torch.autograd.gradcheck(
        lambda weight: F.embedding_bag(positions, weight, offsets, mode="mean"), [doubles(4, 3)]
    )


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs_without_some_gradients(program):
    assert_same_as_eager(program)
