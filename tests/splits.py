"""Runs the same step whole and split, for comparison."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import lazyviz

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}
NOISE = {torch.float32: 2e-7, torch.float64: 1e-15}
"""Gradients this small are what rounding leaves of zero: a bias before a softmax over positions, say."""

Step = Callable[..., Any]


def same_in_pieces(
    model: nn.Module,
    batch: Sequence[Tensor],
    step: Step,
    pieces: int,
    *,
    dtype: torch.dtype = torch.float32,
    dims: Sequence[int] | None = None,
    **options: Any,
) -> lazyviz.Report:
    """Run ``step(model, *batch)``, which gives a tensor or several, whole and in ``pieces``.

    Asserts equal results, gradients and generator states; gives the split run's report.
    """
    whole = copy.deepcopy(model)
    torch.manual_seed(7)
    expected = step(whole, *batch)
    after = torch.rand(3)
    torch.manual_seed(7)
    named = dict(zip(batch, dims or [0] * len(batch)))
    with lazyviz.lazy(batch=named, split=pieces, **options) as graph:
        found = step(model, *batch)
    report = graph.evaluate()
    assert graph.pending == 0
    assert torch.equal(torch.rand(3), after)
    for one, other in zip(_tensors(found), _tensors(expected), strict=True):
        assert type(one) is torch.Tensor
        assert one.stride() == other.stride()
        assert close(one, other, dtype)
    for (name, one), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            assert one.grad.stride() == other.grad.stride(), name
            assert close(one.grad, other.grad, dtype), name
    return report


def close(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    if not other.is_floating_point():
        return torch.equal(one, other)
    far = (one - other).norm().item()
    return far <= TOLERANCE[dtype] * other.norm().item() or far <= NOISE[dtype] * other.numel() ** 0.5


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)
