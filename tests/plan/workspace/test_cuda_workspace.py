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
def test_cudnns_benchmark_is_named_and_may_choose_what_the_heuristic_may():
    usual, tried = _convolved(False), _convolved(True)
    assert tried.peak_range == usual.peak_range and tried.peak_bytes == usual.peak_bytes
    assert "cudnn.benchmark" in tried.explain() and "cudnn.benchmark" not in usual.explain()


def _most(image, weight, dtype=torch.float32, **settings):
    """The largest workspace expected of a convolution on a GPU, as a multiple of its operands."""
    x, w = torch.ones(image, dtype=dtype), torch.ones(weight, dtype=dtype)
    with lazyviz.lazy() as graph:
        y = torch.nn.functional.conv2d(x, w, **settings)
    (need,) = graph.plan(device="RTX-3060").scratch.values()
    operands = sum(each.numel() * each.element_size() for each in (x, w, y))
    lazyviz.reset()
    return need.high / operands


def test_a_convolution_s_workspace_is_at_most_what_its_algorithms_need():
    """Winograd's transforms, FFT algorithms of large kernels, channels padded to eight."""
    images = 2.25 * (8 * 64 * 64 * 64 + 8 * 32 * 64 * 64)
    both = images / 2.25 + 64 * 32 * 9
    winograd = (images + 4 * 64 * 32 * 9) / both
    assert _most((8, 64, 64, 64), (32, 64, 3, 3), padding=1) == pytest.approx(winograd, rel=1e-6)
    assert _most((8, 64, 64, 64), (32, 64, 3, 3), stride=2) == _most((8, 64, 64, 64), (32, 64, 1, 1)) == 4
    assert _most((1, 128, 76, 102), (64, 128, 7, 7), padding=3) == 33  # pytorch#14614
    assert _most((1, 128, 76, 102), (64, 128, 7, 7), stride=2) == 4  # FFT algorithms have no stride
    assert _most((64, 1, 64, 64), (1, 1, 1, 1), torch.float16) == pytest.approx(12, rel=1e-3)  # pytorch#31500
