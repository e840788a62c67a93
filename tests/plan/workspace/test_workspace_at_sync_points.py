"""Scratch memory of what runs during recording, measured as it runs, against the allocator's events."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.profiler import ProfilerActivity, profile

import lazyviz
from lazyviz.torch_internals import native_module_loader

from ..profiler import allocated_by

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),  # the profiler's own business
    pytest.mark.skipif("allocations" not in native_module_loader.loaded, reason="it is not compiled"),
]


def gradient_of_eigenvectors():
    matrix = torch.randn(40, 40, requires_grad=True)
    torch.linalg.eig(matrix)[1].abs().sum().backward()
    return matrix


def nested_encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.arange(24) >= torch.tensor([24, 20, 11, 5])[:, None]
    with torch.no_grad():
        return encoder(torch.randn(4, 24, 32), src_key_padding_mask=padding), encoder


def sparse_optimizer():
    bag = nn.EmbeddingBag(500, 16, sparse=True, mode="sum")
    optimizer = torch.optim.SGD(bag.parameters(), 0.1)
    bag(torch.arange(200).reshape(20, 10) % 70).square().sum().backward()
    optimizer.step()
    return bag


def selection():
    torch.manual_seed(0)
    values = torch.randn(3000)
    return values[torch.nonzero(values > 0)[:, 0]]


def attention_by_scores():
    tensors = [torch.randn(2, 4, 128, 32) for _ in range(3)]
    return flex_attention(*tensors, score_mod=lambda score, b, h, q, k: score * 0.5 + (q - k))


def attention_of_halves_in_blocks():
    tensors = [torch.randn(1, 2, 128, 16, dtype=torch.bfloat16) for _ in range(3)]
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")
    return flex_attention(*tensors, block_mask=mask)


def one_of_two_branches():
    values = torch.randn(300, 300)
    return torch.cond(values.sum() < 1e9, lambda x: (x * 2).exp().softmax(-1) + 1, lambda x: x + 1, (values,))


@pytest.mark.parametrize(
    "program",
    [
        gradient_of_eigenvectors, nested_encoder, sparse_optimizer, selection,
        attention_by_scores, attention_of_halves_in_blocks, one_of_two_branches,
    ],
)  # fmt: skip
def test_the_planned_peak_is_the_measured_one(program):
    program()
    gc.collect()  # what earlier tests have left, which would be freed in the measurement
    measured = min(allocated_by(program)[0] for _ in range(2))
    with lazyviz.lazy() as graph:
        kept = program()
    assert graph.sync_points
    plan = graph.plan()
    assert plan.eager_peak_bytes == pytest.approx(measured, rel=0.002)
    assert "is unknown" not in plan.explain()
    del kept
    lazyviz.reset()


def test_what_was_measured_on_the_cpu_is_unknown_on_a_gpu():
    with lazyviz.lazy() as graph:
        kept = torch.nonzero(torch.randn(300) > 0)
    assert graph.nodes[-1].scratch_bytes is not None
    assert "is unknown" not in graph.plan().explain()
    assert "is unknown" in graph.plan(device="A100-40GB").explain()
    del kept


def test_nothing_is_measured_while_a_profiler_uses_the_events():
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True):
        with lazyviz.lazy() as graph:
            kept = torch.nonzero(torch.randn(30) > 0)
    (node,) = [node for node in graph.nodes if node.at_once]
    assert node.scratch_bytes is None and kept.dim() == 2
    assert "is unknown" in graph.plan().explain()


def test_an_error_of_a_kernel_ends_the_measurement():
    with lazyviz.lazy():
        for _ in range(2):
            with pytest.raises(RuntimeError):
                torch.nonzero_static(torch.ones(3), size=-2)
            with pytest.raises(IndexError):
                torch.unique_consecutive(torch.ones(3, 3), dim=7)
        kept = torch.nonzero(torch.ones(3))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True):
        assert kept.sum() == 3  # a profiler finds its place free
