"""Compares the projected with the actual effect of a remedy."""

from __future__ import annotations

import pytest
import torch

from lazyviz.plan.plan import Plan
from lazyviz.torch_internals.cpu_kernel_selection import multiplies_in_onednn


def check_autocast(plan: Plan, actual: Plan, tolerance: float, *, may_cost: bool) -> None:
    """``actual``, recorded with autocast, peaks as foreseen.

    ``may_cost``: it is not offered where what it takes (casts; on some processors scratch memory, since
    without instructions for bfloat16 images are unfolded, and products summed in float32) is what it saves.
    """
    offered = [each for each in plan.remedies if each.kind == "autocast"]
    if not offered and may_cost:
        assert actual.peak_bytes > (1 - tolerance) * plan.peak_bytes
        return
    (foreseen,) = offered
    assert foreseen.peak_bytes == pytest.approx(actual.peak_bytes, rel=tolerance, abs=0)
    assert foreseen.estimate and foreseen.cost.numerics


def unfolds_in_bfloat16(device: str) -> bool:
    """Whether convolutions in bfloat16 are not oneDNN's."""
    return device == "cpu" and not multiplies_in_onednn(torch.bfloat16)
