"""The plan of a training step, compared with measurements of eager PyTorch and of an evaluation."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lazyviz
from lazyviz.plan.liveness.lifetimes import lifetimes

from .profiler import allocated_by


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(x)


def training(foreach: bool, warm: bool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), Block(32), Block(32), nn.Linear(32, 50))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    x, y = torch.randint(0, 50, (4, 16)), torch.randint(0, 50, (4, 16))

    def step() -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if warm:
        step()
    return step


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("warm", [False, True])
def test_the_planned_peaks_are_the_measured_ones_to_the_byte(foreach, warm):
    measured = allocated_by(training(foreach, warm))[0]
    step = training(foreach, warm)
    with lazyviz.lazy() as graph:
        kept = step()
    plan = graph.plan()
    before = sum(
        span.storage.nbytes for span in lifetimes(graph.ir) if span.eager_start < 0 < span.eager_stop
    )
    # AdamW's first step makes its counters with torch.tensor(0.0): no operator says when.
    counters = [s for s in graph.ir.storages if s.external and s.nbytes == 4]
    assert abs(plan.eager_peak_bytes - before - measured) <= (0 if warm else 8 * len(counters))
    report = graph.evaluate()
    assert report.peak_bytes == plan.tensor_peak_bytes
    assert plan.peak_bytes <= plan.eager_peak_bytes
    assert kept.isfinite()


def test_a_training_step_fills_every_category_it_has():
    step = training(foreach=False, warm=True)
    with lazyviz.lazy() as graph:
        step()
    plan = graph.plan()
    peaks = {category: max(series) for category, series in plan.category_timeline.items()}
    for category in ("parameters", "gradients", "optimizer", "activations", "inputs", "temporaries"):
        assert peaks[category] > 0, category
    assert plan.by_category["parameters"] == peaks["parameters"]
    graph.evaluate()


def test_a_second_graph_counts_the_parameters_it_shares_with_a_pending_first():
    step = training(foreach=False, warm=False)
    with lazyviz.lazy() as first:
        step()
    with lazyviz.lazy() as second:
        step()
    assert second.plan().by_category["parameters"] == first.plan().by_category["parameters"]
    lazyviz.sync()


def test_planning_runs_nothing():
    step = training(foreach=False, warm=False)
    with lazyviz.lazy() as graph:
        step()
    pending = graph.pending
    graph.plan().explain()
    assert graph.pending == pending
    graph.evaluate()


def test_a_loader_s_batches_are_held_by_our_run_and_pass_through_eager():
    model = nn.Linear(1000, 1)
    loader = DataLoader(TensorDataset(torch.randn(64, 1000)), batch_size=8)
    size = 8 * 1000 * 4
    with lazyviz.lazy() as graph:
        for (batch,) in loader:
            model(batch).sum().backward()
    plan = graph.plan()
    assert plan.by_category["held"] == 7 * size
    assert plan.by_category["inputs"] == size  # the loop's variable still names the last one
    assert size < plan.eager_peak_bytes < 3 * size
    assert graph.evaluate().peak_bytes == plan.tensor_peak_bytes
