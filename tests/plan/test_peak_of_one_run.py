"""The projected peak of a run equals the measured one, whatever cells its nodes are from."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.plan.units import format_bytes


def assert_as_projected(report):
    assert report.projected_bytes == report.peak_bytes, report.comparison
    assert report.error == 0 and report.difference == {}


def test_a_cell_after_the_one_that_made_its_storages_has_run():
    with lazyviz.lazy() as first:
        a = torch.ones(1000, 1000)
        b = a + 1
    with lazyviz.lazy() as second:
        c = b.sum()
    del a, b
    assert_as_projected(first.evaluate())
    report = second.evaluate()
    assert_as_projected(report)
    assert report.peak_bytes == 4_000_004
    assert c == 2_000_000


def test_a_cell_whose_results_a_later_cell_still_needs():
    with lazyviz.lazy() as first:
        a = torch.ones(1000, 1000)
        c = torch.ones(1000, 1000) * 2
    with lazyviz.lazy() as second:
        b = a.sum()
    del a
    report = first.evaluate()
    assert_as_projected(report)
    assert report.peak_bytes == 12_000_000
    assert_as_projected(second.evaluate())
    assert b == 1_000_000 and c[0, 0] == 2


def test_forward_and_backward_in_two_cells():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    x = torch.randn(16, 64)
    with lazyviz.lazy() as forward:
        loss = model(x).sum()
    with lazyviz.lazy() as backward:
        loss.backward()
    assert_as_projected(forward.evaluate())
    assert_as_projected(backward.evaluate())


def test_a_view_of_another_cells_tensor_counts_no_memory():
    x = torch.randn(100, 100)
    with lazyviz.lazy() as first:
        doubled = x * 2
    with lazyviz.lazy() as second:
        turned = doubled.t()  # the first node of its cell, as its memory was of the cell before
    report = second.evaluate()
    assert_as_projected(report)
    assert report.peak_bytes == 2 * x.nbytes
    assert first.pending == 0 and turned.shape == x.shape


def test_a_tensor_met_again_after_another_view_of_its_memory_was_dropped_stays():
    x = torch.randn(100, 100)
    flat = x.flatten()
    with lazyviz.lazy() as graph:
        one = flat.sum()
        del flat
        two = x.sum()
    plan = graph.plan()
    assert plan.timeline[-1][1] == x.nbytes + 8
    assert_as_projected(graph.evaluate())
    assert one == two


def random_ops(rng, tensors):
    for _ in range(rng.randint(3, 12)):
        if not tensors:
            tensors.append(torch.ones(100, 100))
        a = rng.choice(tensors)
        kind = rng.choice("abcdefghi")
        if kind == "a":
            tensors.append(a * 2)
        elif kind == "b":
            tensors.append(torch.randn(rng.randint(1, 200), 100))
        elif kind == "c":
            tensors.append(a.t())
        elif kind == "d":
            a.add_(1)
        elif kind == "e":
            tensors.append(a.sum())
        elif kind == "f" and len(tensors) > 1:
            tensors.pop(rng.randrange(len(tensors)))
        elif kind == "g":
            tensors.append(a.relu().exp())
        elif kind == "h" and rng.random() < 0.3:
            a.tolist()
        elif kind == "i" and rng.random() < 0.3:
            tensors.append(a.flatten().masked_select(torch.rand(1) > -1))


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_of_several_cells_evaluated_in_any_order_and_in_parts(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tensors = [torch.randn(100, 100) for _ in range(2)]
    graphs = []
    for _ in range(rng.randint(2, 5)):
        with lazyviz.lazy() as graph:
            random_ops(rng, tensors)
        graphs.append(graph)
    rng.shuffle(graphs)
    reports = 0
    for graph in graphs:
        while graph.pending:
            if tensors and rng.random() < 0.4:
                tensors.pop(rng.randrange(len(tensors)))
            part = [rng.choice(tensors)] if tensors and rng.random() < 0.5 else []
            report = graph.evaluate(*part)
            if report.projected_bytes is not None:
                assert_as_projected(report)
                reports += 1
    assert reports


MODELS = {
    "linear": lambda: (nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), torch.randn(16, 64)),
    "convolution": lambda: (
        nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
        ),
        torch.randn(64, 1, 8, 8),
    ),
    "attention": lambda: (
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0),
        torch.randn(4, 16, 32),
    ),
    "resizing": lambda: (
        nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(3, 4, 3)),
        torch.randn(2, 3, 16, 16),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_report_says_what_the_plan_says_with_and_without_scratch_memory(name):
    model, x = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):  # and again, replayed
        with lazyviz.lazy() as graph:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        plan = graph.plan()
        report = graph.evaluate()
        assert_as_projected(report)
        assert report.projected_bytes == plan.tensor_peak_bytes
        assert report.projected_total_bytes == plan.peak_bytes
        if plan.peak_bytes > plan.tensor_peak_bytes:
            assert f"peak {format_bytes(plan.tensor_peak_bytes)} of tensors (as projected; " in str(report)
            assert f"{format_bytes(plan.peak_bytes)} with kernels' scratch memory)" in str(report)
        else:
            assert f"peak {format_bytes(plan.peak_bytes)} (as projected)" in str(report)
        del loss
