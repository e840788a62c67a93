"""The layout of pointwise results equals that of ATen's kernels, for any operand strides."""

from __future__ import annotations

import random

import pytest
import torch

from lazyviz.record.shapes.pointwise_result_strides import output_stride

SIZES = (1, 1, 2, 3, 0)


def some_operand(random: random.Random, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor that broadcasts to ``shape``: permuted, stepped over, expanded, of any stride where 1."""
    own = [size if random.random() < 0.8 else 1 for size in shape]
    while own and random.random() < 0.15:
        own.pop(0)
    order = random.sample(range(len(own)), len(own))
    if random.random() < 0.4:
        order.sort()
    steps = [random.choice((1, 1, 1, 2)) for _ in own]
    whole = torch.zeros([own[at] * steps[at] for at in order])
    tensor = whole.permute([order.index(at) for at in range(len(own))])
    for at, step in enumerate(steps):
        tensor = tensor[(slice(None),) * at + (slice(None, None, step),)]
    if own and random.random() < 0.2:
        tensor = tensor.select(0, 0).unsqueeze(0).expand(own) if own[0] else tensor
    if random.random() < 0.3:
        odd = [random.choice((1, 2, 7)) if size == 1 else step for size, step in zip(own, tensor.stride())]
        tensor = tensor.as_strided(own, odd)
    return tensor


KERNELS = {1: torch.neg, 2: torch.add, 3: torch.addcmul}


@pytest.mark.parametrize("count", KERNELS)
@pytest.mark.parametrize("dims", range(6))
def test_strides_are_those_of_the_kernel(count, dims):
    chance = random.Random(dims)
    for _ in range(400):
        shape = tuple(chance.choice(SIZES) for _ in range(dims))
        operands = [some_operand(chance, shape) for _ in range(count)]
        result = KERNELS[count](*operands)
        told = output_stride(result.shape, [(each.shape, each.stride()) for each in operands])
        assert told == result.stride(), [(each.shape, each.stride()) for each in operands]
