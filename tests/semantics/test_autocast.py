"""Autocast on the CPU: nested, disabled, its weight cache, custom functions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz

from ..lazy_equals_eager import both


def net():
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    return model, torch.randn(5, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_under_autocast(dtype):
    def program(model, x):
        with torch.autocast("cpu", dtype=dtype):
            out = model(x)
            loss = nn.functional.mse_loss(out, torch.zeros_like(out))
        loss.backward()
        return out, loss

    both(program, net)


def test_nested_and_disabled_regions():
    def program(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a = x @ x.t()
            with torch.autocast("cpu", enabled=False):
                b = x @ x.t()
                c = a.float() @ b
            with torch.autocast("cpu", dtype=torch.float16):
                d = x @ x.t()
            e = x @ x.t()
        return a, b, c, d, e, x @ x.t()

    both(program, net)


@pytest.mark.parametrize("cached", [True, False])
def test_a_weight_is_cast_as_often_as_in_eager(cached):
    def program(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cached):
            out = model[0](x) + model[0](x * 2)
            with torch.no_grad():
                model[0].weight.mul_(2)
            again = model[0](x)
        out.sum().backward()
        return out, again

    graph = both(program, net, versions=False)
    casts = [
        node for node in graph.nodes if node.op is torch.ops.aten._to_copy.default and node.phase == "forward"
    ]
    assert len(casts) == (5 if cached else 9)


def test_autocast_entered_by_hand_and_left_by_an_error():
    def program(model, x):
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                model(x)
                model(x[:, :1])
        except RuntimeError as error:
            message = str(error)
        context = torch.amp.autocast("cpu", dtype=torch.bfloat16)
        context.__enter__()
        out = model(x)
        context.__exit__(None, None, None)
        return message, out, torch.is_autocast_enabled("cpu"), model(x)

    both(program, net)


def test_functions_that_decorate_for_autocast():
    class Linear(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return grad @ w.t(), x.t() @ grad

    def program(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = model(x)
            y = Linear.apply(h, torch.ones(2, 3, requires_grad=True))
        y.sum().backward()
        return h, y

    both(program, net)


def test_promotion_and_functions_kept_in_float32():
    def program(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = x @ x.t()
            return [
                h,
                torch.cat([h, x[:, :1]], 1),
                torch.stack([h, x @ x.t()]),
                nn.functional.softmax(h, 1),
                nn.functional.cross_entropy(h, torch.arange(5)),
                torch.linalg.vector_norm(h),
                h + x[:, :1],
                torch.bmm(x[None], x.t()[None]),
                nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
                nn.functional.conv1d(x[None], torch.ones(2, 5, 1)),
            ]

    both(program, net)


@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor.*")
def test_a_transformer_under_autocast():
    def program(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        out.float().pow(2).mean().backward()
        return out

    def make():
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        return nn.TransformerEncoder(layer, 2), torch.randn(2, 5, 8)

    both(program, make)


def test_recurrent_nets_under_autocast():
    def program(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, _ = model(x)
        out.float().sum().backward()
        return out

    both(program, lambda: (nn.LSTM(4, 6), torch.randn(3, 2, 4)), syncs=None)
    both(program, lambda: (nn.GRU(4, 6), torch.randn(3, 2, 4)), syncs=None)


@pytest.mark.parametrize("pending", [False, True])
def test_kernels_that_call_operators_of_autocast(pending):
    """Autocast passes over ``pinv`` and ``bilinear``, but converts what their kernels multiply."""

    def program(matrix, left, right, weight):
        with torch.autocast("cpu", torch.bfloat16):
            inverse = torch.linalg.pinv(matrix * 1)
            product = nn.functional.bilinear(left * 1, right, weight)
            (inverse.float().sum() + product.float().sum()).backward()
            return inverse, product, matrix.grad, weight.grad

    def make():
        matrix = torch.randn(5, 3, requires_grad=True)
        return matrix, torch.randn(4, 3), torch.randn(4, 5), torch.randn(2, 3, 5, requires_grad=True)

    if pending:  # ops outside of blocks pass through the recorder
        with lazyviz.lazy():
            kept = torch.ones(3) + 1
        torch.manual_seed(0)
        found = program(*make())
        lazyviz.sync()
        torch.manual_seed(0)
        assert all(map(torch.equal, found, program(*make()))) and kept.tolist() == [2, 2, 2]
    else:
        both(program, make, syncs=None, versions=False)
