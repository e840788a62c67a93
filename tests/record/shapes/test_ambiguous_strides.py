"""Strides of results where those of operands have several meanings: dimensions of size 1, permutations."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import lazyviz

SHAPES = [(1, 2, 3, 1), (1, 3, 2, 4), (2, 2, 1, 1), (2, 1, 3, 3), (3, 2, 2, 2)]


def ones(x):
    return torch.ones(x.shape, dtype=x.dtype)


def channels(x):
    return torch.ones(x.shape[1], dtype=x.dtype)


def of_mode(mode, **options):
    return lambda x: F.interpolate(x, scale_factor=2, mode=mode, **options)


PROGRAMS = {
    "batch norm": lambda x: F.batch_norm(x, channels(x), channels(x), training=False),
    "batch norm in training": lambda x: F.batch_norm(x, None, None, channels(x), channels(x), training=True),
    "nearest": of_mode("nearest"),
    "nearest-exact": of_mode("nearest-exact"),
    "bilinear": of_mode("bilinear"),
    "bicubic": of_mode("bicubic"),
    "antialiased": lambda x: of_mode("bilinear", antialias=True)(x.float()),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "lerp": lambda x: x.lerp(ones(x), 0.5),
    "lerp by a tensor": lambda x: x.lerp(ones(x), ones(x)),
    "triangle": lambda x: x.tril(),
    "norm": lambda x: x.norm(dim=1),
    "relu": F.relu,
    "max pool": lambda x: F.max_pool2d(x, 1),
    "convolution": lambda x: F.conv2d(x, torch.ones(3, x.shape[1], 1, 1, dtype=x.dtype)),
    "sum": lambda x: x.sum(1),
}


def results(program, x):
    """Of the program, and the gradients of its operand for gradients in its own and in plain strides."""
    x = x.detach().requires_grad_()
    result = program(x)
    gradients = [
        torch.autograd.grad(result, x, gradient, retain_graph=True)[0]
        for gradient in (torch.ones_like(result), torch.ones(result.shape, dtype=result.dtype))
    ]
    return [tensor.stride() for tensor in (result, *gradients)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_strides_are_the_kernel_s(name, dtype):
    for shape, order in itertools.product(SHAPES, itertools.permutations(range(4))):
        x = torch.ones(shape, dtype=dtype).permute(order)
        expected = results(PROGRAMS[name], x)
        with lazyviz.lazy():
            found = results(PROGRAMS[name], x)
        lazyviz.reset()
        assert found == expected, (tuple(x.shape), x.stride())
