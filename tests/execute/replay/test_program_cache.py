"""Repeated subgraphs run as generated code, with the same results, memory, errors, and interrupts."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.execute.replay import native_codegen, node_passes, program_cache, python_codegen
from lazyviz.execute.replay.program_cache import replays

from ... import programs
from ...bit_equality import difference


@pytest.fixture(autouse=True, params=[True, False], ids=["C++", "Python"])
def nothing_known(request):
    """Each test runs with both kinds of code, where there is a compiled module."""
    parts = (native_codegen, node_passes)
    before = [part.active for part in parts]
    if [part.use(request.param) for part in parts] != [request.param] * len(parts):
        pytest.skip("lazyviz was installed without compiled modules")
    replays.clear()
    yield
    replays.clear()
    for part, active in zip(parts, before):
        part.use(active)


class Attending(nn.Module):
    """Something of everything: views, in-place writes, random numbers, results in tuples and lists."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        queries, keys, values = self.mix(self.norm(x)).split(8, -1)
        weights = self.drop((queries @ keys.transpose(-1, -2)).softmax(-1))
        self.seen.add_(1)
        x = x + self.out(weights @ values).relu_()
        x[:, 0] += 0.5
        return torch.cat(x.unbind(1), -1).std(-1).mean()


def training(steps, lazily, optimizer=torch.optim.Adam):
    """``steps`` steps with a schedule; parameters, gradients, losses, the generator's state and reports."""
    torch.manual_seed(3)
    model = Attending()
    steps_of = optimizer(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(steps_of, 1, 0.7)
    data = torch.randn(steps, 4, 5, 8)
    losses, reports = [], []
    for step in range(steps):
        block = lazyviz.lazy() if lazily else contextlib.nullcontext()
        with block as graph:
            steps_of.zero_grad()
            loss = model(data[step])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            steps_of.step()
        losses.append(loss)
        schedule.step()
        if lazily:
            reports.append(graph.evaluate())
    state = [model.state_dict(), [p.grad for p in model.parameters()], losses, torch.get_rng_state()]
    return state, reports


@pytest.mark.parametrize(("optimizer", "nodes_in_one"), [(torch.optim.SGD, 20), (torch.optim.Adam, 1000)])
def test_a_training_loop_is_replayed_bit_by_bit(optimizer, nodes_in_one, monkeypatch):
    monkeypatch.setattr(python_codegen, "NODES_IN_ONE", nodes_in_one)
    expected, _ = training(5, lazily=False, optimizer=optimizer)
    actual, reports = training(5, lazily=True, optimizer=optimizer)
    assert difference(expected, actual) is None
    # The first step makes gradients and the optimizer's state, the second finds them there.
    assert [report.cache_hit for report in reports[2:]] == [True, True, True]
    assert reports[0].cache_miss_reason == "the first program of its kind"


def test_a_replay_reports_what_running_op_by_op_does(monkeypatch):
    _, replayed = training(5, lazily=True)
    replays.clear()
    monkeypatch.setattr(program_cache, "LEAST_NODES", 10**9)
    _, one_by_one = training(5, lazily=True)
    assert [report.cache_hit for report in replayed] == [False, False, True, True, True]
    assert not any(report.cache_hit for report in one_by_one)
    for left, right in zip(replayed, one_by_one):
        for name in ("ops_run", "peak_bytes", "projected_bytes", "difference", "timeline", "share"):
            assert getattr(left, name) == getattr(right, name), name


def test_nodes_are_left_as_running_op_by_op_leaves_them(monkeypatch):
    def run():
        model = Attending()
        for _ in range(3):
            with lazyviz.lazy() as graph:
                loss = model(torch.randn(2, 5, 8))
                loss.backward()
            report = graph.evaluate()
        return report.cache_hit, [
            (
                node.state,
                node.error,
                node.after,
                node.measured_seconds is not None,
                [(value.uses, value.real is None, value.storage.uses) for value in node.outputs],
                [(value.uses, value.real is None, value.storage.uses) for value in node.inputs],
            )
            for node in graph.nodes
        ]

    hit, replayed = run()
    monkeypatch.setattr(program_cache, "LEAST_NODES", 10**9)
    miss, one_by_one = run()
    assert (hit, miss) == (True, False)
    assert replayed == one_by_one


@pytest.mark.slow
def test_random_programs_are_replayed_as_eager(monkeypatch):
    """Of every length, and from several functions."""
    monkeypatch.setattr(program_cache, "LEAST_NODES", 1)
    monkeypatch.setattr(python_codegen, "NODES_IN_ONE", 4)
    names = [name for name, weight in programs.weights.items() for _ in range(weight)]
    chance = random.Random(5)
    before = replays.hits
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(12):
            lines = range(chance.randrange(20, 60))
            chosen = [(chance.choice(names), *(chance.randrange(16) for _ in range(3))) for _ in lines]
            program = [("open", 0, 0, 0), *chosen]
            for _ in range(3):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found = programs.disagreement(program)
                assert found is None, f"{found}\n{program}"
    finally:
        torch.set_num_threads(threads)
    assert replays.hits - before > 30


def looking_up(index):
    """A subgraph with an op that fails if ``index`` says so."""
    table, total = torch.arange(8.0).reshape(4, 2), torch.zeros(2)
    with lazyviz.lazy() as graph:
        doubled = table * 2
        total.add_(1)
        rows = doubled[index]
        summed = rows.sum() + total
        noise = torch.rand(2)
    return graph, doubled, total, rows, summed, noise


@pytest.mark.parametrize("nodes_in_one", [1, 2, 3, 1000])
def test_an_error_in_a_replay_leaves_finished_ops_finished(nodes_in_one, monkeypatch):
    monkeypatch.setattr(python_codegen, "NODES_IN_ONE", nodes_in_one)
    for _ in range(2):
        looking_up(torch.tensor([0, 3]))[0].evaluate()
    graph, doubled, total, rows, summed, _ = looking_up(torch.tensor([0, 9]))
    with pytest.raises(
        IndexError, match=r"out of bounds[\s\S]*program_cache.py:\d+: rows = doubled\[index\]"
    ):
        graph.evaluate()
    assert [node.state for node in graph.nodes[:4]] == ["done", "done", "failed", "pending"]
    assert type(doubled) is torch.Tensor and type(total) is torch.Tensor
    assert lazyviz.is_lazy(rows) and lazyviz.is_lazy(summed)
    assert total.tolist() == [1, 1]
    with pytest.raises(IndexError):  # again, and nothing runs twice
        graph.evaluate()
    assert total.tolist() == [1, 1]
    assert graph.state == "failed"


def test_the_error_of_a_replay_keeps_nothing_alive():
    table = torch.ones(4, 2)

    def run(index):
        x = torch.ones(3)
        with lazyviz.lazy() as graph:
            rows = (table * 2 + 1)[index]
            x.add_(1)
        with contextlib.suppress(IndexError):
            graph.evaluate()
        assert x.tolist() == [2, 2, 2]
        return weakref.ref(graph), rows

    for _ in range(2):
        run(torch.tensor([0, 3]))
    gc.collect()
    gc.disable()
    try:
        graph, rows = run(torch.tensor([0, 9]))
        assert lazyviz.is_lazy(rows)
        del rows
        lazyviz.session.lazy_graph.cell_boundary()
        assert graph() is None
        assert lazyviz.evaluate().ops_run == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("nodes_in_one", [3, 7, 1000])
def test_an_interrupt_of_a_replay_lands_between_two_ops(nodes_in_one, monkeypatch):
    monkeypatch.setattr(python_codegen, "NODES_IN_ONE", nodes_in_one)

    def counting():
        x = torch.zeros(3)
        with lazyviz.lazy() as graph:
            y = x + 1
            for _ in range(20):
                x.add_(y)
        return x, graph

    def interrupt(progress):
        if progress.done == 7:
            signal.raise_signal(signal.SIGINT)

    for _ in range(2):
        counting()[1].evaluate()
    x, graph = counting()
    with pytest.raises(KeyboardInterrupt, match="after 7 of 21"):
        graph.evaluate(progress=interrupt)
    assert graph.pending == 14
    assert graph.state == "interrupted"
    assert x.tolist() == [20, 20, 20]  # reading goes on from there


def test_a_replay_is_followed_and_cancelled_between_two_ops():
    def counting():
        x = torch.ones(3)
        with lazyviz.lazy() as graph:
            y = (x + 1).exp().log() * 2 - 3
        return y, graph

    for number in range(4):
        y, graph = counting()
        seen, cancel = [], threading.Event()

        def follow(progress, seen=seen, cancel=cancel, graph=graph):
            seen.append((progress.done, progress.total, progress.allocated_bytes, graph.pending))
            if progress.done == 3:
                cancel.set()

        if number == 1:
            graph.evaluate()  # the others are stopped: op by op first, then replays
            continue
        with pytest.raises(lazyviz.Interrupted, match="after 3 of 5"):
            graph.evaluate(progress=follow, cancel=cancel)
        assert seen == [(1, 5, 12, 4), (2, 5, 12, 3), (3, 5, 12, 2)]
        assert graph.report.ops_run == 3
        assert graph.report.cache_hit == (number > 1)
        assert graph.evaluate().ops_run == 2
        assert y.tolist() == pytest.approx([1, 1, 1])


def test_what_a_progress_callback_raises_fails_no_op():
    for left in range(3):
        with lazyviz.lazy() as graph:
            y = (torch.ones(3) + 1).exp().log() * 2
        if left < 2:
            graph.evaluate()
    with pytest.raises(ZeroDivisionError):
        graph.evaluate(progress=lambda p: 1 // (p.done - 2))
    assert [node.state for node in graph.nodes][:3] == ["done", "done", "pending"]
    assert not any(node.error for node in graph.nodes)
    assert y.tolist() == pytest.approx([4, 4, 4])


def test_the_memory_of_a_dropped_input_is_free_after_its_last_use():
    for _ in range(3):
        source = torch.ones(50)
        with lazyviz.lazy() as graph:
            a = source * 2
            b = a + 1
            c = b.exp()
        memory = lazyviz.torch_internals.private_api.MemoryRef(source)
        del source
        there = []
        graph.evaluate(progress=lambda p, memory=memory, there=there: there.append(memory.storage() is None))
        assert there == [True, True, True]
        assert c[0].item() == torch.tensor(3.0).exp().item()


def test_what_a_name_still_refers_to_is_no_structure():
    def run(keep):
        with lazyviz.lazy() as graph:
            x = torch.ones(4) * 3
            y = x + 1
            z = y.exp().log()
        if not keep:
            del y
        report = graph.evaluate()
        return report, (z, y if keep else None)

    assert not run(True)[0].cache_hit
    report, (z, _) = run(False)
    assert report.cache_hit and report.cache_miss_reason is None
    report, (z, y) = run(True)
    assert report.cache_hit
    assert y.tolist() == [4, 4, 4, 4] and type(z) is torch.Tensor


def keeping(kept, source, weight):
    """A program that keeps the results in ``kept``, and its input if that is in it; the graph."""
    source = source.clone()
    with lazyviz.lazy() as graph:
        first = source @ weight
        results = [first, first.relu(), first.t(), first.sum(0)]
        results.append(results[1] * 2)
        results[4].add_(1)
        results += results[4].unbind(0)[:2]
        results.append(torch.rand(3, 1))
        results.append(results[4].softmax(1).mean() + results[7].sum())
    held = [results[at] for at in sorted(kept) if at < len(results)]
    if len(results) in kept:
        held.append(source)
    return graph, held


def test_memory_is_what_it_is_op_by_op_whatever_is_kept(monkeypatch):
    source, weight = torch.randn(6, 5), torch.randn(5, 3, requires_grad=True)
    chance = random.Random(2)
    choices = [frozenset(chance.sample(range(10), chance.randrange(10))) for _ in range(25)]
    seen = {}
    for recognized in (True, False):
        if not recognized:
            monkeypatch.setattr(program_cache, "LEAST_NODES", 10**9)
        for number, kept in enumerate(choices):
            torch.manual_seed(number)
            graph, held = keeping(kept, source, weight)
            report = graph.evaluate()
            assert report.cache_hit is (recognized and number > 0)
            content = [item.detach().clone() for item in held]
            facts = (report.peak_bytes, report.projected_bytes, report.difference, [*report.timeline])
            if recognized:
                seen[number] = facts, content
            else:
                assert facts == seen[number][0], sorted(kept)
                assert all(torch.equal(one, other) for one, other in zip(content, seen[number][1]))
    assert len({facts[0] for facts, _ in seen.values()}) > 1  # it matters what is kept


def test_a_training_step_that_keeps_more_is_known():
    model = Attending()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []

    def step(keep):
        with lazyviz.lazy() as graph:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 5, 8))
            loss.backward()
            optimizer.step()
        if keep:
            kept.append(loss)
        del loss
        return graph.evaluate().cache_hit

    assert [step(keep) for keep in (False, True, False, True, True)] == [False, True, True, True, True]


def test_why_ops_of_two_modes_are_not_recognized():
    for _ in range(2):
        with lazyviz.lazy() as graph:
            torch.ones(2) * 2 + in_inference_mode(torch.ones(2))
        report = graph.evaluate()
        assert not report.cache_hit and "only partly recorded in inference mode" in report.cache_miss_reason


def test_few_ops_are_recognized_when_they_come_again():
    reports, source = [], torch.ones(2)
    for _ in range(5):
        source += 1
        with lazyviz.lazy() as graph:
            y = (source * 2).exp()
        reports.append(graph.evaluate())
        assert torch.equal(y, (source * 2).exp())
    if not node_passes.active:
        why = "subgraphs of fewer than 4 ops are cached only with the compiled modules"
        assert {report.cache_miss_reason for report in reports} == {why}
        return
    assert [report.cache_hit for report in reports] == [False, False, True, True, True]
    assert (
        reports[0].cache_miss_reason
        == "subgraphs of fewer than 4 ops are cached only when they run a second time"
    )
    assert len({(report.peak_bytes, *report.timeline) for report in reports}) == 1


def test_reads_of_few_ops_are_replayed_as_eager():
    """Of memory that goes and comes again, of views, and of what is written in place between."""

    def program():
        torch.manual_seed(3)
        x, seen = torch.randn(6), []
        count = torch.zeros(3)
        for step in range(30):
            x = x * 0.9 - 0.1 if step % 3 else (-x).abs()
            seen += [x[step % 6].item(), x.tolist(), bool((x > 0.2).any()), float(x.sum())]
            count[step % 3] += x.max()
            seen.append(count.tolist())
            if step % 7 == 0:
                x = x.clone()[:6]
        return seen

    expected = program()
    with lazyviz.lazy():
        assert program() == expected
    hits = replays.hits
    with lazyviz.lazy() as graph:
        assert program() == expected
    if node_passes.active:
        assert replays.hits - hits > 0.8 * len(graph.sync_points)


def test_what_is_known_of_a_subgraph_goes_with_it(monkeypatch):
    monkeypatch.setattr(replays._known, "limit", 8)
    x = torch.randn(4)
    for _ in range(3):
        for size in (1, 2, 3, 4):
            expected = (x[:size] * 2 + 1).sum().item()
            with lazyviz.lazy():
                for _ in range(4):
                    assert (x[:size] * 2 + 1).sum().item() == expected
    assert {id(known) for known in replays._by_fingerprint.values()} <= {
        id(known) for known in replays._known.values()
    }
    assert replays._known.total <= 8


@torch.inference_mode()
def in_inference_mode(x):
    return (x + 1).exp()


def test_a_miss_names_the_op_its_line_and_both_shapes():
    def run(rows):
        x = torch.ones(rows, 3)
        with lazyviz.lazy() as graph:
            y = x.t() @ x
            z = (x * 2).exp().sum() + y
        return graph.evaluate(), z

    assert run(4)[0].cache_miss_reason == "the first program of its kind"
    assert run(4)[0].cache_miss_reason is None
    reason = run(5)[0].cache_miss_reason
    assert reason.startswith("t_0 at ") and "test_program_cache.py" in reason
    assert reason.endswith("[3, 5] float32 cpu, was [3, 4] float32 cpu")


def test_numbers_are_read_again_and_zero_has_a_sign():
    def run(scale, zero, steps):
        with lazyviz.lazy() as graph:
            x = torch.full((2,), zero) * scale
            y = torch.arange(3) * steps
            z = 1 / x + y.sum()
            total = torch._foreach_add([x, y], [scale, steps])
        report = graph.evaluate()
        return report, [x, y, z, *total]

    run(1.0, 0.0, 1)
    for scale, zero, steps in ((2.0, 0.0, 3), (0.5, -0.0, 2), (float("nan"), 0.0, 5), (-0.0, -0.0, 7)):
        report, actual = run(scale, zero, steps)
        x = torch.full((2,), zero) * scale
        y = torch.arange(3) * steps
        assert report.cache_hit
        assert (
            difference([x, y, 1 / x + y.sum(), *torch._foreach_add([x, y], [scale, steps])], actual) is None
        )


def test_a_result_that_two_values_show_is_replayed():
    for number in range(3):
        with lazyviz.lazy() as graph:
            layer = nn.Linear(3, 2).to(torch.float32).train()
            layer.weight.data = weight = torch.ones(2, 3) * 2
            y = (layer(torch.ones(3)) - layer.bias) * weight.sum()
            y.sum().backward()
        assert graph.evaluate().cache_hit == (number > 0)
        assert y.tolist() == pytest.approx([72, 72])
        assert layer.weight.grad.tolist() == [[12] * 3] * 2
        assert type(layer.weight) is nn.Parameter


def test_where_a_batch_is_cut_from_is_no_structure():
    data = torch.randn(40, 3)
    noise = torch.randn(40, 3)
    for step in range(5):
        batch = noise[4 * step : 4 * step + 4]
        with lazyviz.lazy() as graph:
            x = data[8 * step : 8 * step + 4] + batch
            x[step % 4] *= 2
            y = torch.as_strided(x, (2, 2), (1, 1), step).exp() + x.narrow(0, step % 3, 2)[:, :2]
        assert graph.evaluate().cache_hit == (step > 0)
        expected = data[8 * step : 8 * step + 4] + batch
        expected[step % 4] *= 2
        part = torch.as_strided(expected, (2, 2), (1, 1), step).exp()
        assert difference(part + expected.narrow(0, step % 3, 2)[:, :2], y) is None


def test_a_part_is_replayed_and_the_rest_stays_pending():
    for number in range(4):
        x = torch.full((3,), float(number))
        with lazyviz.lazy() as graph:
            a = x + 1
            b = (a * 2).exp().log()
            c = a.sin().cos().tan()
            a.mul_(3)
        report = graph.evaluate(b)
        assert report.cache_hit == (number > 0)
        assert lazyviz.is_lazy(c)
        assert graph.pending == 4
        assert graph.evaluate().cache_hit == (number > 0)
        expected = x + 1
        assert difference(expected.sin().cos().tan(), c) is None
        assert difference(expected * 3, a) is None


def test_a_loop_that_reads_its_loss_inside_a_block_is_replayed():
    def run(lazily):
        torch.manual_seed(0)
        model, losses = Attending(), []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with lazyviz.lazy() if lazily else contextlib.nullcontext() as graph:
            for _ in range(6):
                optimizer.zero_grad()
                loss = model(torch.randn(2, 5, 8))
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        if lazily:
            graph.evaluate()
        return losses, [p.detach() for p in model.parameters()]

    expected = run(False)
    before = replays.hits
    assert difference(expected, run(True)) is None
    assert replays.hits - before >= 3


def test_replay_in_inference_mode_and_without_gradients():
    layer = nn.Linear(4, 4)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        for number in range(3):
            with lazyviz.lazy() as graph, mode():
                y = layer(torch.ones(2, 4)).relu().exp().sum()
            report = graph.evaluate()
            assert report.cache_hit == (number > 0)
            assert y.is_inference() == (mode is torch.inference_mode)
            assert y.requires_grad == (mode is torch.enable_grad)


def test_no_more_is_kept_than_the_limit(monkeypatch):
    monkeypatch.setattr(replays._known, "limit", 40)
    for size in range(2, 12):
        with lazyviz.lazy() as graph:
            y = torch.ones(size)
            for _ in range(9):
                y = y + 1
        graph.evaluate()
    assert len(replays) == 4
    assert lazyviz.metrics()["replayed subgraphs known"] == 4


def test_what_is_kept_holds_no_tensor_and_no_graph():
    for _ in range(3):
        x = torch.ones(3)
        with lazyviz.lazy() as graph:
            y = (x + 1).exp().log() * 2
        graph.evaluate()
    assert len(replays) == 1
    died = [weakref.ref(x.untyped_storage()), weakref.ref(graph), weakref.ref(graph.graph), weakref.ref(y)]
    del x, y, graph
    gc.collect()
    assert [ref() for ref in died[1:]] == [None, None, None]
