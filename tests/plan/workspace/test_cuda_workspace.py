"""Workspace of CUDA kernels that depends on PyTorch settings."""

from __future__ import annotations

import pytest
import torch

import lazyviz


def _convolved(benchmark):
    """The plan of a convolution on a GPU, recorded with ``torch.backends.cudnn.benchmark`` so."""
    before = torch.backends.cudnn.benchmark
    lazyviz.reset()
    try:
        with lazyviz.lazy(device="A100-40GB") as graph:
            torch.backends.cudnn.benchmark = benchmark
            layer = torch.nn.Conv2d(16, 16, 3, padding=1, device="cuda")
            kept = layer(torch.ones(8, 16, 64, 64, device="cuda"))
        plan = graph.plan()
        del kept
        return plan
    finally:
        torch.backends.cudnn.benchmark = before
        lazyviz.reset()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_with_cudnns_benchmark_the_range_goes_up_to_what_was_reported():
    usual, tried = _convolved(False), _convolved(True)
    operands = 2 * 8 * 16 * 64 * 64 * 4
    assert tried.peak_bytes == usual.peak_bytes
    assert tried.peak_range[0] == usual.peak_range[0]
    assert tried.peak_range[1] - usual.peak_range[1] > 28 * operands
    assert "cudnn.benchmark" in tried.explain() and "cudnn.benchmark" not in usual.explain()
