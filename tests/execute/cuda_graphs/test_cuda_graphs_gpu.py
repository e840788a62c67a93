"""The CUDA Graphs backend on a GPU: bits, random numbers, memory and time against eager PyTorch."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz
from lazyviz.execute.backend_registry import find_backend
from lazyviz.execute.cuda_graphs import backend as cuda_graphs_backend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def settled():
    yield
    lazyviz.session.lazy_graph.reset()
    gc.collect()
    assert not torch.cuda.is_current_stream_capturing()
    torch.rand(1, device=CUDA)  # the generator draws outside of a capture
    torch.cuda.synchronize()


def evaluate(function, *args):
    with lazyviz.lazy(backend="cudagraphs") as graph:
        result = function(*args)
    return result, graph.evaluate()


class Attention(nn.Module):
    """Heads by scaled_dot_product_attention, which has a random state of its own."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        parts = self.into(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, dropout_p=self.dropout if self.training else 0.0)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def perceptron():
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 10)), (16, 32)


def convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 10)
    )
    return model, (4, 3, 8, 8)


def transformer():
    layers = [layer for _ in range(4) for layer in (nn.LayerNorm(64), Attention(64, 4, 0.1), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(64, 10)), (4, 16, 64)


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 1e-3),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, 1e-3, fused=True),
    "capturable Adam": lambda parameters: torch.optim.Adam(parameters, 1e-3, capturable=True),
}


def train(make, optimizer, steps, lazily):
    """Losses, parameters, gradients, buffers and the generator's state after some steps; and the reports."""
    torch.manual_seed(0)
    model, shape = make()
    model.to(CUDA)
    update = OPTIMIZERS[optimizer](model.parameters())
    losses, reports = [], []

    def step(x, y):
        update.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, -2), y)
        loss.backward()
        update.step()
        return loss

    for _ in range(steps):
        x = torch.randn(shape, device=CUDA)
        rows = shape[0] * (shape[1] if len(shape) == 3 else 1)
        y = torch.randint(0, 10, (rows,), device=CUDA)
        if lazily:
            loss, report = evaluate(step, x, y)
            reports.append(report)
        else:
            loss = step(x, y)
        losses.append(loss.detach())
    left = [*model.state_dict().values(), *(each.grad for each in model.parameters())]
    return [*losses, *left, torch.cuda.get_rng_state(CUDA)], reports


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make", [perceptron, convolutions, transformer])
def test_training_has_eagers_bits_and_random_numbers(make, optimizer):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        expected, _ = train(make, optimizer, 8, lazily=False)
        got, reports = train(make, optimizer, 8, lazily=True)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
    last = reports[-1]
    assert last.cache_hit and last.share > 0.5, last.fallbacks
    if optimizer in ("SGD", "fused AdamW", "capturable Adam"):
        assert last.share > 0.95, last.fallbacks


def test_results_that_are_kept_are_not_overwritten():
    weight = torch.randn(64, 64, device=CUDA)
    step = lambda x: (x @ weight).tanh().add(1).mul(3).relu()  # noqa: E731
    inputs = [torch.randn(8, 64, device=CUDA) for _ in range(8)]
    results = [evaluate(step, x) for x in inputs]
    for (result, _), x in zip(results, inputs):
        assert torch.equal(result, step(x))
    assert results[-1][1].share == 1


def test_what_waits_for_the_gpu_runs_by_itself_and_nothing_is_broken_by_it():
    weight = torch.randn(64, 64, device=CUDA)

    def step(x):
        y = (x @ weight).tanh().add(1).mul(3)
        y[y > 2] = 0.5  # counts the elements of a mask
        y = torch.linalg.cholesky(y @ y.T + 100 * torch.eye(8, device=CUDA))
        return (y * 2).relu().add(1).sigmoid().sum()

    for _ in range(5):
        x = torch.randn(8, 64, device=CUDA)
        result, report = evaluate(step, x)
        assert torch.equal(result, step(x))
    assert report.fallbacks and 0 < report.share < 1


def test_an_op_that_waits_without_a_tag_is_detected(monkeypatch):
    from lazyviz.execute.cuda_graphs import capturable_segments

    monkeypatch.setattr(capturable_segments, "_INDEXED_WRITES", set())  # so that CUDA has to refuse it
    backend = cuda_graphs_backend.CudaGraphsBackend()
    lazyviz.register_backend("cudagraphs", backend)
    total = torch.zeros(64, device=CUDA)
    expected = total.clone()

    def step(x, total):
        noise = torch.rand_like(x)
        y = (x * 2 + noise).tanh().add(1).mul(3)
        y[y > 2] = 0.5
        total.add_(y.sum(0))
        return (y * 2).relu().add(1).sigmoid().sum()

    for number in range(6):
        x = torch.randn(8, 64, device=CUDA)
        torch.cuda.manual_seed(number)
        result, report = evaluate(step, x, total)
        after = torch.cuda.get_rng_state(CUDA)
        torch.cuda.manual_seed(number)
        assert torch.equal(result, step(x, expected)) and torch.equal(total, expected)
        assert torch.equal(after, torch.cuda.get_rng_state(CUDA))
    assert backend.counters["failed captures"] >= 1 and backend.counters["replays"] >= 1
    assert any("cannot be captured" in why for why in report.fallbacks)


def test_random_numbers_follow_the_seed():
    step = lambda x: F.dropout(x + torch.randn_like(x), 0.5).mul(2).add(1).relu()  # noqa: E731
    x = torch.ones(64, 64, device=CUDA)
    for _ in range(3):
        evaluate(step, x)
    torch.cuda.manual_seed(5)
    expected = [step(x) for _ in range(3)]
    state = torch.cuda.get_rng_state(CUDA)
    torch.cuda.manual_seed(5)
    for each in expected:
        result, report = evaluate(step, x)
        assert torch.equal(result, each) and report.cache_hit
    assert torch.equal(torch.cuda.get_rng_state(CUDA), state)


def test_precision_that_is_changed_is_heard():
    x = torch.randn(256, 256, device=CUDA)
    step = lambda: (x @ x).tanh().mul(2).add(1)  # noqa: E731
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for number in range(8):
            torch.backends.cuda.matmul.allow_tf32 = number // 4 == 1
            result, _ = evaluate(step)
            assert torch.equal(result, step())
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_memory_does_not_grow_from_run_to_run():
    make = transformer
    torch.manual_seed(0)
    model, shape = make()
    model.to(CUDA)
    update = torch.optim.SGD(model.parameters(), 0.01)

    def step(x):
        update.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        update.step()
        return loss

    held = []
    for _ in range(12):
        loss, _ = evaluate(step, torch.randn(shape, device=CUDA))
        del loss
        gc.collect()
        held.append(torch.cuda.memory_allocated(CUDA))
    assert held[-1] <= held[5]


def test_programs_that_are_dropped_give_their_memory_back_and_others_go_on():
    backend = cuda_graphs_backend.CudaGraphsBackend(most=1)
    lazyviz.register_backend("cudagraphs", backend)
    steps = [
        lambda x: (x * 2 + 1).relu().tanh().sum(0),
        lambda x: (x - 2).tanh().add(1).sigmoid().sum(0),
        lambda x: x.exp().add(1).log().abs().sum(0),
    ]
    for _ in range(2):
        for step in steps:
            for _ in range(3):
                x = torch.randn(64, 64, device=CUDA)
                result, report = evaluate(step, x)
                assert torch.equal(result, step(x))
            assert report.cache_hit
    assert len(backend.programs) == 1


def test_another_stream_may_launch_it():
    step = lambda x: (x * 2 + 1).relu().tanh().mul(3)  # noqa: E731
    for _ in range(3):
        evaluate(step, torch.randn(64, 64, device=CUDA))
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.randn(64, 64, device=CUDA)
        result, report = evaluate(step, x)
        assert report.cache_hit and torch.equal(result, step(x))


def test_it_is_checked_on_request():
    step = lambda x: (x * 2 + 1).relu().tanh().mul(3)  # noqa: E731
    for _ in range(3):
        x = torch.randn(64, 64, device=CUDA)
        with lazyviz.lazy(backend="cudagraphs") as graph:
            result = step(x)
        report = graph.evaluate(verify=True)
        assert torch.equal(result, step(x))
    assert report.cache_hit and not report.fallbacks


def test_a_graph_on_the_cpu_is_refused_with_a_reason():
    step = lambda x: (x * 2).relu().tanh().add(1).mul(3)  # noqa: E731
    for _ in range(2):
        x = torch.randn(4, 4)
        result, report = evaluate(step, x)
        assert torch.equal(result, step(x))
        assert report.share == 0 and "none of it is on a CUDA device" in report.fallbacks[0]
    assert find_backend("cudagraphs") is not None
