"""How a graph is run: in parts, once, with progress, through interruptions and errors."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from collections import Counter

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.session import evaluation
from lazyviz.torch_internals import native_module_loader


def test_evaluating_twice_runs_nothing_twice():
    x = torch.ones(3)
    with lazyviz.lazy() as graph:
        y = x + 1
    assert graph.evaluate().ops_run == 1
    assert graph.evaluate().ops_run == 0
    assert lazyviz.evaluate().ops_run == 0
    assert y.tolist() == [2, 2, 2]


def test_progress_counts_ops():
    x = torch.ones(3)
    seen = []
    with lazyviz.lazy() as graph:
        y = (x + 1) * 2 - 3
    graph.evaluate(progress=seen.append)
    assert [(p.done, p.total) for p in seen] == [(1, 3), (2, 3), (3, 3)]
    assert y.tolist() == [1, 1, 1]


def test_cancelling_and_going_on():
    x = torch.ones(3)
    cancel = threading.Event()
    with lazyviz.lazy() as graph:
        y = x + 1
        z = y * 2
    with pytest.raises(lazyviz.Interrupted):
        graph.evaluate(progress=lambda p: cancel.set(), cancel=cancel)
    assert graph.state == "interrupted"
    assert graph.pending == 1
    assert type(y) is torch.Tensor and lazyviz.is_lazy(z)
    graph.evaluate()
    assert z.tolist() == [4, 4, 4]
    assert graph.state == "done"


def test_an_error_only_data_can_tell_names_the_line_and_may_be_tried_again():
    table = torch.randn(4, 2)
    index = torch.tensor([0, 9])
    with lazyviz.lazy() as graph:
        good = table * 2
        bad = table[index]
        worse = bad + 1
    with pytest.raises(IndexError, match=r"out of bounds[\s\S]*test_evaluation.py:\d+: bad = table\[index\]"):
        graph.evaluate()
    assert graph.state == "failed"
    assert torch.equal(good, table * 2)
    assert graph.pending == 2
    with pytest.raises(IndexError):
        worse.tolist()


def test_memory_is_freed_at_last_use():
    x = torch.ones(1000)
    with lazyviz.lazy() as graph:
        y = x
        for _ in range(50):
            y = y + 1
    report = graph.evaluate()
    assert report.peak_bytes <= 3 * x.nbytes
    assert y[0].item() == 51


def test_an_input_the_cell_drops_is_held_only_while_needed():
    x = torch.ones(1000)
    gone = weakref.ref(x.untyped_storage())
    with lazyviz.lazy() as graph:
        y = x + 1
        del x
    gc.collect()
    assert gone() is None or graph.pending
    graph.evaluate()
    del y
    assert not graph.pending


def test_the_byte_budget_is_a_named_sync_point():
    with lazyviz.lazy(held_bytes_limit=10_000) as graph:
        total = torch.zeros(1000)
        for step in range(10):
            total = total + torch.from_numpy(torch.full((1000,), float(step)).numpy())
    assert any("byte budget" in point.cause for point in graph.sync_points)
    assert total[0].item() == 45


def test_two_graphs_share_tensors_in_any_order():
    x = torch.ones(3)
    with lazyviz.lazy() as first:
        y = x + 1
    with lazyviz.lazy() as second:
        z = y * 2
        y.add_(10)
    second.evaluate()
    assert z.tolist() == [4, 4, 4]
    assert y.tolist() == [12, 12, 12]
    assert first.pending == 0


def test_nested_blocks_record_into_the_inner_graph():
    x = torch.ones(3)
    with lazyviz.lazy() as outer:
        y = x + 1
        with lazyviz.lazy() as inner:
            z = y + 1
        w = z + 1
    assert (len(outer.nodes), len(inner.nodes)) == (2, 1)
    outer.evaluate()
    assert w.tolist() == [4, 4, 4]


def test_lazy_function_gives_result_and_graph():
    @lazyviz.lazy_function
    def f(x):
        return x * 3

    result, graph = f(torch.ones(2))
    assert lazyviz.is_lazy(result) and graph.pending == 1
    assert lazyviz.to_eager(result).tolist() == [3, 3]


def test_ten_thousand_ops_need_no_recursion():
    x = torch.zeros(())
    with lazyviz.lazy() as graph:
        y = torch.ones(3) * x
        for _ in range(10_000):
            y = y + 1
    lazyviz.evaluate(y)
    assert y.tolist() == [10_000] * 3
    assert graph.pending == 0


def test_many_blocks_leave_nothing_behind():
    model = nn.Linear(4, 4)
    x = torch.randn(2, 4)

    def block():
        with lazyviz.lazy() as graph:
            model.zero_grad()
            model(x).sum().backward()
        graph.evaluate()

    from lazyviz.record.tracked_storages import TrackedNode

    for _ in range(3):  # recorded, known, replayed
        block()
    gc.collect()
    before = sum(type(o) is TrackedNode for o in gc.get_objects())
    for _ in range(20):
        block()
    gc.collect()
    assert sum(type(o) is TrackedNode for o in gc.get_objects()) <= before


def test_the_report_tells_what_ran():
    x = torch.ones(3)
    with lazyviz.lazy() as graph:
        y = x + 1
    report = graph.evaluate()
    assert (report.ops_run, report.backend, report.pieces, report.share) == (1, "eager", 1, 1.0)
    assert report.seconds > 0 and report.peak_bytes == 24
    why = lazyviz.why()
    assert "evaluate()" in why and "shape cache" not in why and "op by op: none" not in why
    assert lazyviz.metrics()["ops recorded"] >= 1
    assert y.tolist() == [2, 2, 2]


def test_why_names_the_last_op_that_was_recorded_more_slowly():
    with lazyviz.lazy():
        torch.ones(1, 1723) * 2
    [line] = [line for line in lazyviz.why().splitlines() if line.startswith("last op with new input shapes")]
    assert "aten.mul" in line and "[1, 1723]" in line and "more slowly" in line


def test_unsupported_asks_are_one_clear_error():
    for options in (
        {"batch": "x y"},
        {"split": 4},
        {"split": "many"},
        {"backend": "nope"},
        {"device": "TPU-9000"},
    ):
        with pytest.raises(ValueError):
            with lazyviz.lazy(**options):
                pass


def test_an_interrupt_lands_between_two_ops(monkeypatch):
    x = torch.zeros(3)
    with lazyviz.lazy() as graph:
        for _ in range(20):
            x.add_(1)

    def interrupt(progress):
        if progress.done == 7:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        graph.evaluate(progress=interrupt)
    assert graph.pending == 13
    assert graph.state == "interrupted"
    assert x.tolist() == [20, 20, 20]  # reading goes on from there


def test_evaluating_on_a_worker_thread_leaves_the_main_thread_right():
    torch.manual_seed(1)
    expected = [torch.rand(3), torch.rand(3)]
    torch.manual_seed(1)
    with lazyviz.lazy() as graph:
        y = torch.rand(3)
    thread = threading.Thread(target=graph.evaluate)
    thread.start()
    thread.join()
    assert type(y) is torch.Tensor
    assert torch.equal(y, expected[0])
    assert torch.equal(torch.rand(3), expected[1])


def test_a_loader_with_workers_inside_the_block():
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(12.0).reshape(6, 2))
    weight = torch.ones(2)
    with lazyviz.lazy() as graph:
        weight.add_(1)
        total = sum((batch @ weight).sum() for (batch,) in DataLoader(data, batch_size=2, num_workers=1))
    graph.evaluate()
    assert total.item() == 2 * sum(range(12))


def test_an_unreachable_graph_is_forgotten():
    from lazyviz.session.lazy_graph import cell_boundary

    x = torch.ones(3)
    with lazyviz.lazy() as graph:
        y = x + 1
        z = (y * 2).sum()
    del graph
    gc.collect()
    cell_boundary()
    assert lazyviz.metrics()["ops pending"] == 3  # y and z can still be seen
    del y, z
    cell_boundary()
    assert lazyviz.metrics()["ops pending"] == 0
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_pending_write_and_a_pending_draw_are_not_forgotten():
    from lazyviz.session.lazy_graph import cell_boundary

    torch.manual_seed(3)
    torch.rand(5)
    expected = torch.rand(2)
    torch.manual_seed(3)
    x = torch.ones(3)
    with lazyviz.lazy():
        x.add_(torch.ones(3) * 2)
        torch.rand(5)
        x * 5  # nobody sees this one
    gc.collect()
    cell_boundary()
    assert lazyviz.metrics()["ops pending"] == 4
    assert torch.equal(torch.rand(2), expected)
    assert x.tolist() == [3, 3, 3]


def test_an_interrupt_during_the_last_op_is_not_lost():
    x = torch.zeros(3)
    with lazyviz.lazy() as graph:
        y = x + 1
    with pytest.raises(KeyboardInterrupt):
        graph.evaluate(progress=lambda p: signal.raise_signal(signal.SIGINT))
    assert graph.pending == 0
    assert y.tolist() == [1, 1, 1]


def test_a_mark_step_training_loop():
    def train(mark_step):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).pow(2).mean()
            loss.backward()
            optimizer.step()
            mark_step()
        return loss, model.weight

    expected_loss, expected_weight = train(lambda: None)
    with lazyviz.lazy() as graph:
        loss, weight = train(lazyviz.mark_step)
    assert graph.pending == 0
    assert torch.equal(loss, expected_loss) and torch.equal(weight, expected_weight)
    assert lazyviz.mark_step is lazyviz.sync


def test_a_graph_says_what_else_its_evaluation_will_run():
    x = torch.ones(3)
    with lazyviz.lazy():
        y = (x + 1) * 2
    with lazyviz.lazy() as second:
        z = y * 3
    assert second.title == "lazyviz, after 2 pending ops of earlier cells"
    assert second.evaluate().ops_run == 3
    assert z.tolist() == [12, 12, 12]


def test_the_projection_of_what_is_left_after_a_sync_point_is_what_it_takes():
    with lazyviz.lazy() as graph:
        x, w = torch.randn(1000, 100), torch.randn(100, 100)
        h = x @ w
        assert h.sum().item() < 1e9
        y = h * 2
        z = y + x
        del y
    report = graph.evaluate()
    assert report.projected_bytes == report.peak_bytes
    assert report.error == 0 and report.difference == {} and report.comparison.startswith("as projected")
    assert z.shape == x.shape
    assert lazyviz.metrics()["projected peak errors"][-1] == 0


def test_the_projection_counts_what_earlier_cells_left_to_do():
    with lazyviz.lazy():
        model = torch.nn.Linear(100, 100)
        optimizer = torch.optim.AdamW(model.parameters())
    with lazyviz.lazy() as graph:
        model(torch.randn(8, 100)).sum().backward()
        optimizer.step()
    report = graph.evaluate()
    assert report.ops_run > len(graph.nodes)
    assert report.projected_bytes == report.peak_bytes and report.difference == {}


def test_a_first_evaluation_leaves_no_objects_of_its_own_for_each_op():
    """The garbage collector looks at all there are, again and again as their number grows."""

    def left_by(ops):
        x = torch.ones(3)
        with lazyviz.lazy() as graph:
            for _ in range(ops):
                x = x + 1.0
        gc.collect()
        before = len(gc.get_objects())
        graph.evaluate()
        return len(gc.get_objects()) - before

    left_by(8)  # what is made once
    assert left_by(400) < 100


def test_an_unknown_name_of_the_batch_is_an_error_that_names_what_is_close():
    images = torch.rand(6, 2)
    with (
        pytest.raises(ValueError, match=r"no variable 'imges'; did you mean images\?"),
        lazyviz.lazy(batch="imges"),
    ):
        pass
    with lazyviz.lazy(batch="images,made") as graph:
        made = images * 2
        made.sum()
    assert graph.plan().batch_size == 6


def test_what_a_run_calls_knows_that_it_is_called_by_one():
    x = torch.ones(3)
    known = []
    with lazyviz.lazy() as graph:
        y = x + 1
    graph.evaluate(progress=lambda _: known.append(evaluation.is_running_here()))
    assert known and all(known)
    assert not evaluation.is_running_here()
    assert y.tolist() == [2, 2, 2]


def test_a_profile_of_an_evaluation_lists_each_op_once():
    def counts(function):
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:  # torch 2.11 warns
            function()
        names = Counter(event.name for event in profile.events())
        return [names[f"aten::{name}"] for name in ("addmm", "relu", "sum", "mm", "threshold_backward")]

    layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4)

    def step():
        layer(x).relu().sum().backward()

    step()
    expected = counts(step)
    for _ in range(3):  # also generated code
        with lazyviz.lazy() as graph:
            step()
        found = counts(graph.evaluate)
        if native_module_loader.load("interpreter.cpp") is not None:
            assert found == expected
        else:  # calls from Python pass the dispatcher once more
            assert all(once <= seen <= 2 * once for seen, once in zip(found, expected))
