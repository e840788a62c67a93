"""Quantization-aware training on an absent GPU: the operators have no shape rule in PyTorch."""

from __future__ import annotations

import pytest
import torch

import lazyviz


def per_tensor(x):
    device = x.device
    scale, zero = torch.ones(1, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    return torch.fake_quantize_per_tensor_affine(x, scale, zero, 0, 255)


def per_tensor_by_numbers(x):
    return torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255)


def per_channel(x):
    scale = torch.ones(6, device=x.device)
    zero = torch.zeros(6, dtype=torch.int32, device=x.device)
    return torch.fake_quantize_per_channel_affine(x, scale, zero, 1, 0, 255)


def learnable(x):
    scale, zero = (torch.ones(1, device=x.device, requires_grad=True) for _ in range(2))
    return torch._fake_quantize_learnable_per_tensor_affine(x, scale, zero, 0, 255, 1.0)


def learnable_per_channel(x):
    scale, zero = (torch.ones(6, device=x.device, requires_grad=True) for _ in range(2))
    return torch._fake_quantize_learnable_per_channel_affine(x, scale, zero, 1, 0, 255, 1.0)


def recorded(quantize, place, device):
    with lazyviz.lazy(device=device) as graph:
        x = torch.randn(4, 5, 6, device=place).transpose(1, 2).requires_grad_()
        quantize(x).sum().backward()
        kept = x.grad
    found = [
        (node.op, [(value.shape, value.stride, value.dtype) for value in node.outputs])
        for node in graph.nodes
        if "quant" in node.op.name()
    ]
    del kept
    lazyviz.reset()
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
@pytest.mark.parametrize(
    "quantize",
    [per_tensor, per_tensor_by_numbers, per_channel, learnable, learnable_per_channel],
    ids=lambda function: function.__name__,
)
def test_results_are_those_of_the_cpu(quantize):
    on_cpu = recorded(quantize, "cpu", None)
    assert on_cpu and recorded(quantize, "cuda", "H100-80GB") == on_cpu
