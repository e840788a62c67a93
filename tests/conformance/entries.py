"""What is run for an entry of PyTorch's operator databases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_leaves, tree_map_only

from .compared_runs import tensors_of

_DATA = torch.zeros(1_000)  # too large to be followed


def name_of(entry: OpInfo) -> str:
    return entry.name + (f".{entry.variant_test_name}" if entry.variant_test_name else "")


def forward(entry: OpInfo) -> Callable[[Any], Any]:
    return lambda sample: entry(sample.input, *sample.args, **sample.kwargs)


def forward_of_made_inputs(entry: OpInfo) -> Callable[[Any], Any]:
    """Forward of tensors that the program made itself: nothing is known of them before it runs."""

    def made(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided:
            return tensor
        return torch.where(_DATA.sum() == 0, tensor, tensor)

    def program(sample: Any) -> Any:
        args, kwargs = (sample.input, *sample.args), sample.kwargs
        args, kwargs = tree_map_only(torch.Tensor, made, (args, kwargs))
        return entry(*args, **kwargs)

    return program


def backward(entry: OpInfo) -> Callable[[Any], Any]:
    def program(sample: Any) -> Any:
        result = entry(sample.input, *sample.args, **sample.kwargs)
        outputs = [
            leaf
            for leaf in tree_leaves(sample.output_process_fn_grad(result))
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        weights = [
            torch.linspace(-0.75, 1.25, output.numel()).reshape(output.shape).to(output.dtype)
            for output in outputs
        ]
        if outputs:
            torch.autograd.backward(outputs, weights)
        return result, [tensor.grad for tensor in tensors_of(sample) if tensor.is_leaf]

    return program
