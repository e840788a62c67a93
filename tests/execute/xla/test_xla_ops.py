"""Operators in JAX agree with PyTorch, at the ends of their ranges and in every variant."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch.nn import functional as F

import lazyviz
from lazyviz.execute import backend_registry

if find_spec("jax") is None or find_spec("torchax") is None:
    pytest.skip("the extra xla is not installed", allow_module_level=True)

from lazyviz.execute.xla import ops as xla_ops
from lazyviz.execute.xla.backend import XlaBackend

pytestmark = pytest.mark.slow

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setitem(backend_registry._backends, "xla", XlaBackend())


def check(program, *inputs, **limits):
    """``program`` gives a dictionary of tensors, all of it run by XLA, and what eager PyTorch gives."""
    expected = program(*[each.clone() for each in inputs])
    with lazyviz.lazy(backend="xla") as graph:
        results = program(*[each.clone() for each in inputs])
    report = graph.evaluate()
    assert not report.fallbacks
    assert report.share == 1.0
    assert list(results) == list(expected) != []
    for name, mine in results.items():
        torch.testing.assert_close(
            mine, expected[name], equal_nan=True, **limits, msg=lambda m, n=name: f"{n}: {m}"
        )


def gradients(result, *inputs):
    return dict(enumerate(torch.autograd.grad(result.square().sum(), inputs)))


EDGES = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3e4, 1e-3])
UNARY = (
    "abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc erfinv exp exp2 expm1 floor frac isfinite "
    "isinf isnan lgamma log log10 log1p log2 logical_not neg reciprocal relu round rsqrt sigmoid sign "
    "signbit sin sinh sqrt square tan tanh trunc"
)
BINARY = (
    "add sub mul div eq ne lt le gt ge maximum minimum fmax fmin atan2 hypot copysign fmod remainder pow "
    "floor_divide logical_and logical_or logical_xor"
)


def test_pointwise_operators_of_floats():
    def program(x):
        one, other = x[:, None], x[None, :]
        results = {name: getattr(torch, name)(x) for name in UNARY.split()}
        results |= {name: getattr(torch, name)(one, other) for name in BINARY.split()}
        results |= {
            f"{name} with a number": getattr(torch, name)(x, 1.5)
            for name in BINARY.split()
            if name != "copysign" and hasattr(getattr(aten, name), "Scalar")
        }
        return results | {
            "truncated": torch.div(one, other, rounding_mode="trunc"),
            "chosen": torch.where(x > 0, x, 2.0),
            "clamped": x.clamp(-1, 2),
            "clamped by tensors": torch.clamp(one, other, other + 1),
            "lerp": torch.lerp(x, x + 1, 0.25),
            "filled": x.masked_fill(x.isnan(), 3.0),
            "whole": x.nan_to_num(0, 9, -9).to(torch.int64),
            "byte": x.nan_to_num(0, 9, -9).to(torch.uint8),
            "truth": x.to(torch.bool),
            "half": x.to(torch.float16),
        }

    check(program, EDGES, rtol=2e-5, atol=1e-5)


def test_pointwise_operators_of_whole_numbers():
    def program(x, y, flags):
        one, other = x[:, None], y[None, :]
        names = "add sub mul eq lt ge maximum minimum fmod remainder floor_divide bitwise_and bitwise_xor"
        results = {name: getattr(torch, name)(one, other) for name in names.split()}
        results |= {
            f"{name} by a number": getattr(torch, name)(x, -3)
            for name in names.split()[:11]
            if hasattr(getattr(aten, name), "Scalar")
        }
        return results | {
            "divided": one / other,
            "half": x / 2,
            "truncated": torch.div(one, other, rounding_mode="trunc"),
            "powers": x.pow(3),
            "power": 3 ** y.abs(),
            "root": x.abs().sqrt(),
            "mixed": x * 0.5,
            "compared": x > 0.5,
            "shifted": x[:, None] >> y.abs(),
            "up": x << 2,
            "inverted": ~x,
            "sign": x.sign(),
            "flags": flags[:, None] & ~flags,
            "plus": flags + flags,
            "count": flags.sum(),
            "chosen": torch.where(flags[:, None], x, 0.5),
            "small": x.to(torch.int8),
            "sums": x.cumsum(0),
            "total": x.sum(),
            "product": y.prod(),
            "largest": x.max(),
            "where": x.argmax(),
        }

    x = torch.tensor([2**53 + 1, -(2**62), 7, -7, 0, 1])
    check(program, x, torch.tensor([3, -3, 2, -1]), torch.tensor([True, False]))


def test_reductions():
    def program(x):
        results = {}
        for name in (
            "sum",
            "mean",
            "amax",
            "amin",
            "argmax",
            "argmin",
            "prod",
            "any",
            "all",
            "logsumexp",
            "norm",
        ):
            function = getattr(torch, name)
            results |= {name: function(x, 1), f"{name} kept": function(x, 0, keepdim=True)}
        for name in ("var", "std", "max", "min", "sum", "mean", "argmax"):
            results |= {f"{name} of all": getattr(x, name)()}
        results |= {f"largest {at}": each for at, each in enumerate(x.max(1))}
        results |= {f"least {at}": each for at, each in enumerate(x.min(0))}
        results |= {
            f"sorted {at}": each for at, each in enumerate(x.sort(dim=1, stable=True, descending=True))
        }
        variance, mean = torch.var_mean(x, 1, correction=0)
        return results | {
            "variance": variance,
            "average": mean,
            "cumsum": x.cumsum(1),
            "cumprod": x.cumprod(0),
            "softmax": x.softmax(1),
            "log_softmax": x.log_softmax(0),
        }

    x = torch.tensor([[1.0, -2.0, 3.0, 3.0], [0.0, float("nan"), 2.0, -0.0], [4.0, 4.0, -1.0, 0.5]])
    check(program, x, rtol=1e-5, atol=1e-6)


def test_shapes():
    def program(x):
        y = x.clone()
        y[1:, ::2] = 7
        y[0].add_(1)
        y.diagonal().mul_(2)
        y.select(1, -1).zero_()
        return {
            "written": y,
            "turned": x.t().contiguous(),
            "cut": x[:, 1:-1:2] + 0,
            "joined": torch.cat([x, x * 2], 1),
            "stacked": torch.stack([x, x], 1),
            "padded": F.pad(x, (1, -1, 2, 0), value=3.0),
            "rolled": x.roll(2, 1),
            "flipped": x.flip(0, 1),
            "repeated": x.repeat(2, 1, 2),
            "expanded": x[:, :1].expand(-1, 5) + 0,
            "triangle": x.tril(-1),
            "upper": x.triu(1),
            "windows": x.unfold(1, 2, 1) + 0,
            "parts": x.split([1, 3], 1)[1] + 0,
            "ramp": torch.arange(2, 9, 3),
            "floats": torch.arange(0, 1, 0.25),
            "line": torch.linspace(0, 1, 5),
            "unit": torch.eye(3),
            "hot": F.one_hot(x[:, 0].to(torch.int64), 20),
            "reflected": F.pad(x[None], (1, 1), "reflect"),
        }

    check(program, torch.arange(12.0).reshape(3, 4))


def test_indexing():
    def program(x, index, mask):
        places = index[:, :3]
        y, z = x.clone(), x.clone()
        y[mask] = -1
        y[index[0, :2], index[1, :2]] += 5
        z.index_add_(0, index[0], x)
        z.index_copy_(1, index[1, :2], x[:, :2] * 3)
        return {
            "rows": x[index[0]],
            "negative": x[index[0] - 4],
            "points": x[index[0, :3], index[1, :3]],
            "gathered": x.gather(1, places),
            "chosen": x.index_select(1, index[1]),
            "written": y,
            "added": z,
            "scattered": x.scatter(1, places, 9.0),
            "from": x.scatter(1, places, x * 2),
            "sums": x.scatter_add(0, places, x),
            "embedded": F.embedding(index, x),
            "loss": F.cross_entropy(x, index[0], ignore_index=2),
            "masked": x.masked_fill(mask, 0.0),
        }

    index = torch.tensor([[0, 3, 1, 2], [2, 1, 0, 3]])
    check(program, torch.randn(4, 4), index, torch.rand(4, 4) > 0.5)


def test_products():
    def program(x, y, z):
        return {
            "mm": x @ y,
            "bmm": torch.bmm(z, z.mT),
            "vector": x @ y[:, 0],
            "dot": torch.dot(x[0], x[1]),
            "outer": torch.outer(x[0], x[1]),
            "addmm": torch.addmm(x[:, :2], x, y, beta=0.5, alpha=2),
            "without": torch.addmm(x[:, :2] * float("nan"), x, y, beta=0),
            "baddbmm": torch.baddbmm(z, z, z.mT @ z[:, :, :4], alpha=0.1),
            "linear": F.linear(x, y.t(), y[0]),
            "einsum": torch.einsum("ij,bij->b", x, z),
        }

    check(program, torch.randn(3, 4), torch.randn(4, 2), torch.randn(2, 3, 4))


@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_and_their_gradients(transposed):
    def program(image, kernel, bias):
        three = [each.requires_grad_() for each in (image, kernel, bias)]
        function = F.conv_transpose2d if transposed else F.conv2d
        more = {"output_padding": (1, 0)} if transposed else {}
        result = function(*three, stride=(2, 1), padding=(1, 2), dilation=(2, 1), groups=2, **more)
        line = (F.conv_transpose1d if transposed else F.conv1d)(
            image[:, :, 0], kernel[:, :, 0], stride=2, groups=2
        )
        return {"result": result.detach(), "line": line.detach(), **gradients(result, *three)}

    kernel = torch.randn(4, 3, 3, 2) if transposed else torch.randn(6, 2, 3, 2)
    check(program, torch.randn(2, 4, 7, 6), kernel, torch.randn(6), rtol=1e-4, atol=1e-4)


def test_pools_and_norms_and_their_gradients():
    def program(image):
        image.requires_grad_()
        pools = {
            "largest": F.max_pool2d(image, 3, 2, 1),
            "dilated": F.max_pool2d(image, 2, (1, 2), dilation=2, ceil_mode=True),
            "average": F.avg_pool2d(image, 3, 2, 1),
            "inside": F.avg_pool2d(image, (2, 3), 2, (1, 0), ceil_mode=True, count_include_pad=False),
            "adaptive": F.adaptive_avg_pool2d(image, (3, 4)),
            "nearest": F.interpolate(image.detach(), scale_factor=2.0),
            "bilinear": F.interpolate(image.detach(), size=(9, 11), mode="bilinear"),
            "layer": F.layer_norm(image, (7, 6)),
            "group": F.group_norm(image, 2),
            "batch": F.batch_norm(image, torch.zeros(4).double(), torch.ones(4).double(), training=True),
            "gelu": F.gelu(image),
            "silu": F.silu(image),
            "elu": F.elu(image),
            "softplus": F.softplus(image),
            "tanh": F.gelu(image, approximate="tanh"),
            "hardswish": F.hardswish(image),
            "mish": F.mish(image),
            "leaky": F.leaky_relu(image),
            "huber": F.huber_loss(image, image.detach() + 1),
        }
        _, where = F.max_pool2d(image.relu(), 3, 2, return_indices=True)  # many that are equal
        total = sum((each * each).sum() for each in pools.values())
        return {name: each.detach() for name, each in pools.items()} | {
            "where": where,
            **gradients(total, image),
        }

    check(program, torch.randn(2, 4, 7, 6, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_and_its_gradients(dtype):
    def program(query, key, value, mask):
        three = [each.requires_grad_() for each in (query, key, value)]
        causal = F.scaled_dot_product_attention(*three, is_causal=True)
        masked = F.scaled_dot_product_attention(*three, attn_mask=mask, scale=0.3)
        return {"causal": causal.detach(), "masked": masked.detach(), **gradients(causal + masked, *three)}

    mask = torch.tensor([[True, False, True, True, False], [True] * 5, [False, True] * 2 + [True]])
    check(
        program,
        *[torch.randn(2, 2, size, 4).to(dtype) for size in (3, 5, 5)],
        mask,
        **({"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.05}),
    )


def test_every_operator_taken_from_torchax_is_there():
    assert [op for op in xla_ops.TAKEN if xla_ops.lowering_of(op) is None] == []
    assert not xla_ops.TAKEN & set(xla_ops.OWN)
