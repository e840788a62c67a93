"""The CUDA Graphs backend on a fake device that records calls and repeats them on the same memory."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.execute import backend_registry
from lazyviz.execute.cuda_graphs import backend as cuda_graphs_backend
from lazyviz.execute.cuda_graphs.backend import CudaGraphsBackend
from lazyviz.execute.replay import program_cache
from lazyviz.session.run_strategies import base as strategies
from lazyviz.testing import PROGRAMS, check_backend
from lazyviz.torch_internals import fake_cuda_devices

from .fake_stream_capture import Captures, UseAfterFree

NAME = "captures"


@pytest.fixture
def captures():
    return Captures()


@pytest.fixture
def graphs(captures):
    backend = CudaGraphsBackend(captures)
    lazyviz.register_backend(NAME, backend)
    yield backend
    del backend_registry._backends[NAME]
    lazyviz.session.lazy_graph.reset()


def evaluate(function, *args):
    """The result of ``function``, run lazily, and the report."""
    with lazyviz.lazy(backend=NAME) as graph:
        result = function(*args)
    return result, graph.evaluate()


def training(make_optimizer, *, dropout=0.25):
    """A training step, and what it leaves: parameters and their gradients."""
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 3))
    optimizer = make_optimizer(model.parameters())

    def step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def left():
        return [
            *(each.detach().clone() for each in model.parameters()),
            *(each.grad for each in model.parameters()),
        ]

    return model, optimizer, step, left


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator))
        for _ in range(count)
    ]


def both(make_optimizer, steps, change=lambda number, optimizer: None, **options):
    """The same steps in eager PyTorch and lazily: losses, what is left, and the reports."""
    results = []
    reports = []
    for lazily in (False, True):
        torch.manual_seed(0)
        _, optimizer, step, left = training(make_optimizer, **options)
        torch.manual_seed(3)
        losses = []
        for number, batch in enumerate(batches(steps)):
            change(number, optimizer)
            if lazily:
                loss, report = evaluate(step, *batch)
                reports.append(report)
            else:
                loss = step(*batch)
            losses.append(loss.detach())
        results.append(([*losses, *left()], torch.get_rng_state()))
    (expected, state), (got, mine) = results
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(mine, state)
    return reports


SGD = lambda parameters: torch.optim.SGD(parameters, 0.1)  # noqa: E731


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_computes_what_eager_pytorch_does(graphs, program):
    check_backend(NAME, program, exact=True)
    assert graphs.counters["captures"] > 0


def test_a_step_is_captured_when_it_comes_again_and_launched_from_then_on(graphs, captures):
    first, second, *later = both(SGD, 5)
    assert first.share == 0 and first.fallbacks == (cuda_graphs_backend.WARM_UP,)
    assert second.share == 1 and not second.cache_hit
    assert second.cache_miss_reason == "captured as a CUDA Graph"
    assert all(report.share == 1 and report.cache_hit and not report.fallbacks for report in later)
    assert captures.replays == 4
    assert graphs.counters == {"warm-ups": 1, "captures": 1, "failed captures": 0, "replays": 3}
    assert lazyviz.metrics()["backend counters"][NAME] == graphs.counters
    assert lazyviz.metrics()["compiled programs"][NAME] == 1


def test_each_run_reads_its_own_batch(graphs):
    step = lambda x: (x * 2 + 1).relu().sum(1)  # noqa: E731
    for number in range(4):
        x = torch.full((3, 4), float(number))
        result, _ = evaluate(step, x)
        assert torch.equal(result, step(x))
    assert graphs.counters["replays"] == 2


def test_a_batch_may_be_cut_from_a_tensor_at_any_place(graphs):
    data = torch.randn(64, 8)

    def step(at):
        part = data[at : at + 16]
        return (part * 2 + part.tanh()).relu().sum(0)

    for at in (0, 16, 32, 48, 8):
        result, report = evaluate(step, at)
        assert torch.equal(result, step(at))
    assert report.share == 1 and report.cache_hit


def test_results_are_not_overwritten_by_the_next_run(graphs):
    weight = torch.randn(4, 4)
    step = lambda x: (x @ weight).tanh().add(1).mul(3)  # noqa: E731
    inputs = [torch.randn(2, 4) for _ in range(5)]
    results = [evaluate(step, x)[0] for x in inputs]
    for result, x in zip(results, inputs):
        assert torch.equal(result, step(x))
    assert len({result.data_ptr() for result in results}) == 5


def test_views_of_one_result_share_its_memory_and_no_others(graphs):
    def step(x):
        whole = (x * 2).tanh().add(1).mul(3)
        return whole, whole[1], whole.t(), x.view(-1)

    for _ in range(4):
        x = torch.randn(3, 4)
        (whole, row, turned, flat), _ = evaluate(step, x)
        assert torch.equal(row, whole[1]) and torch.equal(turned, whole.t())
        assert row.data_ptr() == whole.data_ptr() + 4 * whole.element_size()
        assert turned.data_ptr() == whole.data_ptr()
        assert flat.data_ptr() == x.data_ptr()


def test_what_a_program_writes_is_written_where_it_is(graphs):
    total = torch.zeros(4)

    def step(x):
        total.add_((x * 2).relu().tanh().add(1).sum(0))

    expected = total.clone()
    for _ in range(4):
        x = torch.randn(3, 4)
        evaluate(step, x)
        expected += (x * 2).relu().tanh().add(1).sum(0)
        assert torch.equal(total, expected)


def test_a_tensor_written_in_place_may_be_another_one_each_time(graphs):
    def step(total, x):
        total.add_((x * 2).relu().tanh().add(1).sum(0))
        return total * 2

    totals = []
    for number in range(6):
        total, x = torch.full((4,), float(number)), torch.randn(3, 4)
        expected = total + (x * 2).relu().tanh().add(1).sum(0)
        result, report = evaluate(step, total, x)
        assert torch.equal(total, expected) and torch.equal(result, expected * 2)
        totals.append(total)  # nobody else has its memory
    assert report.cache_hit and graphs.counters["captures"] == 2


def test_a_parameter_that_is_elsewhere_is_captured_where_it_is(graphs):
    model, _, step, left = training(SGD, dropout=0.0)
    data = batches(6)
    twin, _, plain, expected = training(SGD, dropout=0.0)
    twin.load_state_dict(model.state_dict())
    reports = []
    for number, batch in enumerate(data):
        if number == 4:
            kept = model[0].weight.data
            model[0].weight.data = kept.clone()
        reports.append(evaluate(step, *batch)[1])
        plain(*batch)
    assert reports[3].cache_hit and reports[5].cache_hit
    assert "1 tensor is at another address" in reports[4].cache_miss_reason
    assert all(torch.equal(one, other) for one, other in zip(left(), expected(), strict=True))


def test_models_of_one_structure_take_turns(graphs):
    pairs = []
    for _ in range(2):
        mine, theirs = training(SGD, dropout=0.0), training(SGD, dropout=0.0)
        theirs[0].load_state_dict(mine[0].state_dict())
        pairs.append((mine, theirs))
    data = batches(6)
    for batch in data:
        for mine, theirs in pairs:
            _, report = evaluate(mine[2], *batch)
            theirs[2](*batch)
    assert report.cache_hit and graphs.counters["captures"] == 2
    for mine, theirs in pairs:
        assert all(torch.equal(one, other) for one, other in zip(mine[3](), theirs[3](), strict=True))


def test_ops_with_numbers_that_change_run_by_themselves(graphs):
    reports = both(torch.optim.AdamW, 6)
    last = reports[-1]
    assert last.cache_hit and 0.5 < last.share < 1
    assert any("an argument that changes between runs" in why for why in last.fallbacks)


def test_a_number_that_changes_later_is_recaptured_once(graphs):
    def schedule(number, optimizer):
        optimizer.param_groups[0]["lr"] = 0.1 if number < 3 else 0.01 * number

    reports = both(SGD, 8, schedule)
    assert "has the argument -0.03, was -0.1" in reports[3].cache_miss_reason
    assert [report.cache_hit for report in reports] == [False, False, True, False, True, True, True, True]


def test_zeros_of_both_signs_are_different_numbers(graphs):
    def step(x, zero):
        return (x.abs() * 2 + 1).mul(zero).mul(3)

    x = torch.ones(3)
    for zero in (0.0, 0.0, 0.0, -0.0, 0.0):
        result, _ = evaluate(step, x, zero)
        assert torch.equal(result.signbit(), step(x, zero).signbit())


def test_random_numbers_go_on_from_the_generators_state(graphs):
    def step(x):
        noise = torch.randn(3, 4)
        return nn.functional.dropout(x + noise, 0.5).mul(2).add(1)

    x = torch.ones(3, 4)
    torch.manual_seed(5)
    expected = [step(x) for _ in range(5)]
    between = torch.rand(2)
    torch.manual_seed(5)
    results = [evaluate(step, x)[0] for _ in range(5)]
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))
    assert torch.equal(torch.rand(2), between)
    torch.manual_seed(5)
    assert torch.equal(evaluate(step, x)[0], expected[0])
    assert graphs.counters["replays"] == 4


def test_an_op_that_cannot_be_captured_runs_by_itself(graphs, captures):
    captures.forbidden.add("aten.cumsum.default")

    def step(x):
        y = (x * 2).relu().tanh().add(1)
        y = y.cumsum(0)
        return (y * 3).sigmoid().add(2).mul(y)

    reports = []
    for _ in range(5):
        x = torch.randn(3, 4)
        result, report = evaluate(step, x)
        assert torch.equal(result, step(x))
        reports.append(report)
    assert "aten.cumsum.default at" in reports[1].fallbacks[0]
    assert "cannot be captured: operation not permitted when stream is capturing" in reports[1].fallbacks[0]
    assert reports[-1].cache_hit and reports[-1].share == pytest.approx(8 / 9)
    assert graphs.counters["failed captures"] == 1


def test_a_capture_that_fails_loses_nothing(graphs, captures):
    captures.broken = True
    reports = both(SGD, 4)
    assert reports[1].share == 0
    assert "capture failed: the capture was invalidated" in reports[1].fallbacks[0]
    # Forward, backward and optimizer are tried each by itself, and nothing of it for ever.
    assert graphs.counters["captures"] == graphs.counters["failed captures"] == 3
    assert all(report.share == 0 and report.fallbacks for report in reports)


def test_a_capture_that_fails_after_others_loses_nothing(graphs, captures):
    total = torch.zeros(4)
    captures.forbidden.add("aten.sigmoid.default")

    def step(x, total):
        made = (x * 2).relu().tanh().add(1)
        total.add_(made.half().float().sum(0))  # half is elsewhere: it cuts the step in two
        return (made * 3).add(2).mul(made).sigmoid().add(1)

    expected = torch.zeros(4)
    for _ in range(5):
        x = torch.randn(3, 4)
        result, report = evaluate(step, x, total)
        assert torch.equal(result, step(x, expected)) and torch.equal(total, expected)
    assert graphs.counters["failed captures"] == 1 and report.cache_hit
    assert any("in addition to cpu" in why for why in report.fallbacks)


def test_ops_elsewhere_feed_what_is_captured(graphs):
    weight = torch.randn(4, 4)

    def step(batch):
        x = batch.float()  # as from the host to a GPU
        y = (x @ weight).relu().add(x).tanh().mul(2)
        x.add_(y)
        half = y.half()
        return (x + y).relu().add(half.float()).mul(3).sigmoid(), x, half

    for _ in range(5):
        batch = torch.randn(3, 4).half()
        results, report = evaluate(step, batch)
        for one, other in zip(results, step(batch), strict=True):
            assert torch.equal(one, other)
    assert report.cache_hit and 0 < report.share < 1


def test_where_a_device_counts_its_memory_a_repeat_is_found_as_quickly(graphs, monkeypatch):
    monkeypatch.setattr(strategies, "cuda_devices", lambda nodes: [0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda index: None)
    monkeypatch.setattr(fake_cuda_devices, "synchronize", lambda index: None)
    monkeypatch.setattr(fake_cuda_devices, "max_memory_allocated", lambda index: 12345)
    monkeypatch.setattr(graphs, "compile", compiles := Compiles(graphs.compile))
    known = len(program_cache.replays)
    reports = both(SGD, 5)
    assert compiles.count == 2 and [report.cache_hit for report in reports] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert [report.share for report in reports] == [0, 1, 1, 1, 1]
    assert all(report.peak_bytes == 12345 for report in reports[2:])
    assert reports[1].cache_miss_reason == "captured as a CUDA Graph"
    assert len(program_cache.replays) == known  # the eager backend has learned nothing of it


class Compiles:
    """Counts calls."""

    def __init__(self, function):
        self.function, self.count = function, 0

    def __call__(self, *args):
        self.count += 1
        return self.function(*args)


def test_a_setting_of_the_process_is_heard(graphs, captures):
    step = lambda x: (x * 2 + 1).relu().tanh().sum(1)  # noqa: E731
    reports = []
    for number in range(5):
        captures.switch = number // 3
        reports.append(evaluate(step, torch.randn(3, 4))[1])
    assert "settings" in reports[3].cache_miss_reason
    assert [report.cache_hit for report in reports] == [False, False, True, False, True]


def test_other_sizes_are_other_programs(graphs):
    step = lambda x: (x * 2 + 1).relu().tanh().sum(1)  # noqa: E731
    for size in (3, 5, 3, 5, 3, 5):
        x = torch.randn(size, 4)
        result, report = evaluate(step, x)
        assert torch.equal(result, step(x))
    assert report.cache_hit and graphs.counters["captures"] == 2


def test_another_result_that_is_kept_is_captured_once(graphs):
    def step(x):
        middle = (x * 2).relu().tanh()
        return middle, (middle + 1).sigmoid().mul(3)

    for keep in (False, False, False, True, True, False):
        x = torch.randn(3, 4)
        (middle, result), report = evaluate(step, x)
        expected = step(x)
        assert torch.equal(result, expected[1]) and torch.equal(middle, expected[0])
        with lazyviz.lazy(backend=NAME) as graph:
            result = step(x)[1] if not keep else step(x)
        report = graph.evaluate()
        assert torch.equal(result[1] if keep else result, expected[1])
    assert report.cache_hit


def test_the_buffers_of_a_form_live_as_long_as_it_does(graphs, captures):
    step = lambda x: (x * 2 + 1).relu().tanh().sum(1)  # noqa: E731
    for _ in range(3):
        evaluate(step, torch.randn(3, 4))
        gc.collect()
    (form,) = next(iter(graphs.programs._known.values())).variants[0].compiled.forms
    for each in form.captured._steps:
        each.fed.clear()
    with pytest.raises(UseAfterFree):
        evaluate(step, torch.randn(3, 4))


def test_a_dropped_program_is_freed(graphs, captures):
    backend = CudaGraphsBackend(captures, most=2)
    lazyviz.register_backend(NAME, backend)
    steps = [
        lambda x: (x * 2 + 1).relu().tanh(),
        lambda x: (x - 2).tanh().add(1).sigmoid(),
        lambda x: x.exp().add(1).mul(2).abs(),
    ]
    for step in steps:
        for _ in range(3):
            evaluate(step, torch.randn(3, 4))
    gc.collect()
    assert len(backend.programs) == 2 and len(captures.graphs) == 2
    result, report = evaluate(steps[0], torch.ones(3, 4))
    assert torch.equal(result, steps[0](torch.ones(3, 4))) and report.share == 0


def test_another_thread_runs_it_before_it_captures(graphs):
    step = lambda x: (x * 2 + 1).relu().tanh().sum(1)  # noqa: E731
    reports = []
    evaluate(step, torch.randn(3, 4))

    def run():
        reports.extend(evaluate(step, torch.randn(3, 4))[1] for _ in range(2))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [report.share for report in reports] == [0, 1]
    assert reports[0].cache_miss_reason == "its first run in this thread"


def test_inference_mode_gives_inference_tensors(graphs):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh())
    for _ in range(4):
        x = torch.randn(2, 4)
        with torch.inference_mode():
            result, report = evaluate(model, x)
            assert torch.equal(result, model(x))
        assert result.is_inference()
    assert report.cache_hit


def test_it_is_checked_when_asked_to_be(graphs):
    step = lambda x: (x * 2 + 1).relu().tanh().sum(1)  # noqa: E731
    for _ in range(3):
        with lazyviz.lazy(backend=NAME) as graph:
            result = step(torch.ones(3, 4))
        report = graph.evaluate(verify=True)
        assert torch.equal(result, step(torch.ones(3, 4)))
    assert report.cache_hit and report.share == 1


def test_wrong_kernels_are_found_out_when_checked(graphs, captures, monkeypatch):
    captured = type(captures).capture

    def wrong(self, device, run):
        graph = captured(self, device, run)
        graph.calls.pop()
        return graph

    monkeypatch.setattr(type(captures), "capture", wrong)
    step = lambda x: (x * 2 + 1).relu().tanh().sum(1)  # noqa: E731
    x = torch.ones(3, 4)
    reports = []
    for _ in range(3):
        with lazyviz.lazy(backend=NAME) as graph:
            result = step(x)
        reports.append(graph.evaluate(verify=True))
        assert torch.equal(result, step(x))
    assert "was wrong, so the eager results are used" in reports[1].fallbacks[0]
    assert reports[2].share == 0 and "a CUDA Graph was wrong" in reports[2].fallbacks[0]


def test_what_changes_too_often_is_given_up(graphs, captures):
    step = lambda x: (x * 2 + 1).relu().tanh().sum(1)  # noqa: E731
    for number in range(cuda_graphs_backend.MOST_CAPTURES + 4):
        captures.switch = number
        x = torch.randn(3, 4)
        result, report = evaluate(step, x)
        assert torch.equal(result, step(x))
    assert graphs.counters["captures"] == cuda_graphs_backend.MOST_CAPTURES
    assert f"it was captured {cuda_graphs_backend.MOST_CAPTURES} times" in report.fallbacks[0]


def test_the_backend_says_what_it_lacks():
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is present")
    with pytest.raises(ValueError, match="the backend 'cudagraphs' needs a CUDA device"):
        with lazyviz.lazy(backend="cudagraphs"):
            pass
    assert "cudagraphs" in backend_registry.backend_names()
    assert backend_registry.missing("cudagraphs").startswith("needs a CUDA device")
    assert not backend_registry.is_loaded("cudagraphs")


def test_strides_that_a_kernel_returns_unlike_recorded_are_returned_as_they_are(graphs, monkeypatch):
    record = cuda_graphs_backend.Layout

    class Otherwise(record):
        """The record of a kernel whose result has its columns side by side in truth."""

        def __init__(self, *args):
            super().__init__(*args)
            (number,) = [made for _, made in self.lines[0].outputs]
            meta = self.metas[number]
            self.metas[number] = type(meta)((3, 4), (1, 3), 0, meta.dtype, meta.device)

    monkeypatch.setattr(cuda_graphs_backend, "Layout", Otherwise)

    def step(x, also):
        made = x * 2
        return made, made.t() if also else made.relu().tanh().add(1).mul(3)

    for also in (False, False, False, True, True, True):
        x = torch.randn(3, 4)
        results, report = evaluate(step, x, also)
        for one, other in zip(results, step(x, also), strict=True):
            assert torch.equal(one, other)
        if not also:
            assert report.share == (
                report.cache_miss_reason is None or "captured" in report.cache_miss_reason
            )
    assert report.share == 0
