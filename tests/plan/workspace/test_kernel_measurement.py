"""Kernels of libraries are called to find out what they allocate, if that takes little time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz
from lazyviz.plan.workspace import kernel_measurement
from lazyviz.torch_internals import dispatcher_bypasses

from ..profiler import allocated_by

pytestmark = pytest.mark.skipif(dispatcher_bypasses._native is None, reason="not compiled")
HALVES = (torch.bfloat16, torch.float16)


def linear(dtype):
    return nn.Sequential(nn.Linear(96, 200), nn.ReLU(), nn.Linear(200, 40)).to(dtype), (64, 96)


def convolutions(dtype):
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2), nn.SiLU(), nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 24, 1)
    )
    return model.to(dtype), (2, 3, 40, 40)


def one_dimension(dtype):
    model = nn.Sequential(nn.Conv1d(8, 16, 5, dilation=2), nn.ReLU(), nn.ConvTranspose1d(16, 8, 4, stride=2))
    return model.to(dtype), (4, 8, 200)


def attention(dtype):
    return nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True).to(dtype), (4, 40, 64)


def channels_last(dtype):
    model = nn.Sequential(nn.Conv2d(8, 24, 3), nn.ReLU(), nn.Conv2d(24, 24, 3, dilation=2))
    return model.to(memory_format=torch.channels_last), (2, 8, 30, 30)


def planned_and_measured(call: Callable[[], Any]) -> tuple[lazyviz.Plan, int]:
    call()
    measured, _ = allocated_by(call)
    with lazyviz.lazy() as graph:
        kept = call()
    plan = graph.plan()
    lazyviz.reset()
    del kept
    return plan, measured


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("make", [linear, convolutions, one_dimension, attention, channels_last])
def test_training_with_kernels_of_libraries_is_planned_to_the_byte(make, dtype):
    def call():
        model, shape = make(dtype)
        x = torch.randn(shape).to(next(model.parameters()).dtype)
        model(x).float().square().mean().backward()
        return model

    plan, measured = planned_and_measured(call)
    low, high = plan.eager_peak_range
    assert abs(plan.eager_peak_bytes - measured) <= 64
    assert low <= measured <= high <= low + 512


def test_calls_that_take_longer_keep_their_range():
    x, weight = torch.randn(4, 64, 64, 64).bfloat16(), torch.randn(64, 64, 3, 3).bfloat16()
    plan, measured = planned_and_measured(lambda: F.conv2d(x, weight))
    low, high = plan.eager_peak_range
    assert low < high
    assert low <= measured + x.nbytes + weight.nbytes <= high


@pytest.mark.parametrize("dtype", HALVES)
def test_nothing_is_remembered_while_a_profiler_is_active(dtype):
    a, b = torch.randn(61, 67).to(dtype), torch.randn(67, 71).to(dtype)
    with lazyviz.lazy() as graph:
        kept = a @ b
    during = []
    allocated_by(lambda: during.append(graph.plan(device="cpu", split="off").scratch))
    after = graph.plan().scratch
    # oneDNN computes products in these types if the CPU has instructions for them; else they need no scratch.
    by_library = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    assert during[0].keys() == after.keys() and len(after) == by_library[dtype]()
    assert not any(need.exact for need in during[0].values())
    assert all(need.exact for need in after.values())
    lazyviz.reset()
    del kept


def test_without_the_compiled_module_rules_estimate(monkeypatch):
    monkeypatch.setattr(dispatcher_bypasses, "_native", None)
    monkeypatch.setattr(kernel_measurement, "_known", {})
    a = torch.randn(64, 64).half()
    with lazyviz.lazy() as graph:
        kept = a @ a
    assert not any(need.exact for need in graph.plan().scratch.values())
    lazyviz.reset()
    del kept
