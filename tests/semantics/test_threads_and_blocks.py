"""Threads, coroutines, nested and re-entered blocks, graphs that share tensors, interrupts, forks."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.torch_internals import private_api

from ..bit_equality import difference


def on_a_thread(function):
    outcome = []

    def work():
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


# --- threads ------------------------------------------------------------------------


def test_what_a_thread_inside_the_block_computes_is_eager_and_right():
    x = torch.ones(3)
    with lazyviz.lazy() as graph:
        y = x + 1
        total = on_a_thread(lambda: (y * 2).sum())
        assert type(total) is torch.Tensor and total.item() == 12
        x.mul_(5)
        assert on_a_thread(lambda: x.tolist()) == [5, 5, 5]
        z = y + total
    graph.evaluate()
    assert z.tolist() == [14, 14, 14]


def test_a_thread_that_writes_what_pending_ops_read():
    x = torch.ones(3)
    with lazyviz.lazy():
        y = x * 2
        on_a_thread(lambda: x.add_(10))
        z = x * 2
    assert y.tolist() == [2, 2, 2] and z.tolist() == [22, 22, 22]


def test_a_pool_from_before_the_block_uses_lazy_tensors():
    with ThreadPoolExecutor(2) as pool:
        pool.submit(int).result()
        x = torch.arange(4.0)
        with lazyviz.lazy():
            parts = [x * at for at in range(4)]
            sums = list(pool.map(lambda part: (part + 1).sum().item(), parts))
    assert sums == [4, 10, 16, 22]


def test_many_threads_evaluate_at_once():
    x = torch.arange(4.0)
    with lazyviz.lazy() as graph:
        y = x
        parts = []
        for at in range(200):
            y = y + 1
            parts.append(y * at)
    with ThreadPoolExecutor(4) as pool:
        values = list(pool.map(lambda part: part.sum().item(), parts[::-1]))
    assert values[::-1] == [((x + at + 1) * at).sum().item() for at in range(200)]
    graph.evaluate()
    assert graph.pending == 0


def test_evaluating_from_another_thread():
    x = torch.ones(3)
    with lazyviz.lazy() as graph:
        y = x * 2
    report = on_a_thread(graph.evaluate)
    assert report.ops_run == 1 and type(y) is torch.Tensor


def test_evaluating_from_another_thread_while_recording_is_one_clear_error():
    with lazyviz.lazy() as graph:
        torch.ones(3) * 2
        with pytest.raises(RuntimeError, match="recording on another thread"):
            on_a_thread(graph.evaluate)


def test_two_threads_cannot_record_at_once():
    def record():
        with lazyviz.lazy():
            return torch.ones(3) + 1

    with lazyviz.lazy():
        with pytest.raises(RuntimeError, match="another thread is recording"):
            on_a_thread(record)
    assert on_a_thread(record).tolist() == [2, 2, 2]


def test_a_block_on_a_thread_of_its_own():
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    expected = model(x)

    def work():
        with lazyviz.lazy() as graph:
            y = model(x)
        assert lazyviz.is_lazy(y)
        graph.evaluate()
        return y, private_api.active_dispatch_modes()

    y, modes = on_a_thread(work)
    assert difference(expected, y) is None and modes == 0


def test_a_gradient_computed_on_another_thread():
    def program(run):
        torch.manual_seed(1)
        model = nn.Linear(3, 2)
        loss = model(torch.ones(4, 3)).square().sum()
        run(loss.backward)
        return [parameter.grad for parameter in model.parameters()]

    expected = program(lambda backward: backward())
    with lazyviz.lazy():
        actual = program(on_a_thread)
    lazyviz.sync()
    assert difference(expected, actual) is None


# --- coroutines and generators --------------------------------------------------------


def test_a_block_inside_a_coroutine():
    async def work(start):
        await asyncio.sleep(0)
        with lazyviz.lazy():
            y = torch.ones(3) * start
        await asyncio.sleep(0)
        return (y + 1).tolist()

    async def main():
        return await asyncio.gather(*[work(at) for at in range(5)])

    assert asyncio.run(main()) == [[at + 1] * 3 for at in range(5)]


def test_a_block_around_an_event_loop():
    async def work(x):
        await asyncio.sleep(0)
        return x * 2

    x = torch.ones(3)
    with lazyviz.lazy() as graph:
        y = asyncio.run(work(x))
    assert graph.pending == 1 and y.tolist() == [2, 2, 2]


def test_a_block_in_a_generator():
    def batches():
        for at in range(3):
            with lazyviz.lazy():
                result = torch.full((2,), float(at)) * 2
            yield result

    assert [batch.tolist() for batch in batches()] == [[0, 0], [2, 2], [4, 4]]


def test_a_block_that_yields_records_what_its_caller_does_until_it_ends():
    def program():
        with lazyviz.lazy() as graph:
            yield graph, torch.ones(2) * 2

    running = program()
    graph, y = next(running)
    z = y + 1
    assert lazyviz.is_lazy(z) and len(graph.nodes) == 3
    running.close()
    assert z.tolist() == [3, 3]
    assert not lazyviz.is_lazy(torch.ones(1) + 1)


# --- blocks ---------------------------------------------------------------------------


def test_nested_blocks_are_graphs_of_their_own():
    x = torch.ones(3)
    with lazyviz.lazy() as outer:
        a = x + 1
        with lazyviz.lazy() as inner:
            b = a * 2
            x.add_(5)
        c = b + x
    assert (len(outer.nodes), len(inner.nodes)) == (2, 2)
    assert c.tolist() == [10, 10, 10]
    assert outer.pending == inner.pending == 0


def test_an_inner_block_evaluated_inside_the_outer_one():
    x = torch.ones(3)
    with lazyviz.lazy() as outer:
        a = x + 1
        with lazyviz.lazy() as inner:
            b = a * 2
        inner.evaluate()
        assert type(b) is torch.Tensor and outer.pending == 0
        c = b + a
    assert c.tolist() == [6, 6, 6]


def test_options_of_an_outer_block_come_back():
    x = torch.ones(3)
    with lazyviz.lazy(allow_sync=False):
        y = x + 1
        with lazyviz.lazy():
            assert y.sum().item() == 6
        with pytest.raises(lazyviz.SyncError):
            (x * 2).sum().item()


def test_a_function_with_a_block_called_from_a_block():
    @lazyviz.lazy_function
    def inner(x):
        return x * 2

    with lazyviz.lazy() as graph:
        y, inside = inner(torch.ones(2))
        z = y + 1
    assert inside.pending == 1 and graph.pending == 2
    assert z.tolist() == [3, 3]


def test_a_block_cannot_be_entered_twice():
    block = lazyviz.lazy()
    with block:
        torch.ones(1) + 1
    with pytest.raises((RuntimeError, AttributeError, TypeError)):
        with block:
            pass
    assert private_api.active_dispatch_modes() == 0 or lazyviz.metrics()["ops pending"]


def test_blocks_one_after_the_other_continue_one_program():
    def program(block):
        x = torch.arange(4.0)
        with block():
            y = x * 2
        with block():
            y[1:].add_(y[:-1].clone())
            x.mul_(3)
        with block():
            z = x + y
        return x, y, z

    from contextlib import nullcontext

    expected = program(nullcontext)
    actual = program(lazyviz.lazy)
    lazyviz.sync()
    assert difference(expected, actual) is None


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)])
def test_graphs_that_share_tensors_in_any_order_of_evaluation(order):
    def program(block, graphs):
        weight = torch.ones(3, requires_grad=True)
        data = torch.arange(3.0)
        with block() as graph:
            graphs.append(graph)
            y = weight * data
        with block() as graph:
            graphs.append(graph)
            data = data + 1
            z = weight * data
            z.sum().backward()
        with block() as graph:
            graphs.append(graph)
            with torch.no_grad():
                weight.sub_(weight.grad)
            out = weight * data
        return weight, weight.grad, data, y, z, out

    from contextlib import nullcontext

    expected = program(nullcontext, [])
    graphs = []
    actual = program(lazyviz.lazy, graphs)
    for at in order:
        graphs[at].evaluate()
        assert graphs[at].pending == 0
    assert difference(expected, actual) is None


def test_an_exception_in_the_middle_leaves_earlier_ops_pending():
    x = torch.ones(3)
    with pytest.raises(ZeroDivisionError):
        with lazyviz.lazy() as outer:
            x.add_(1)
            with lazyviz.lazy() as inner:
                y = x * 2
                1 / 0
    assert (outer.pending, inner.pending) == (1, 1)
    assert not lazyviz.is_lazy(torch.ones(1) * 2)
    assert y.tolist() == [4, 4, 4] and x.tolist() == [2, 2, 2]


def test_an_exception_in_a_gradient_hook_leaves_the_block_usable():
    def fail(grad):
        raise ValueError("no")

    x = torch.ones(3, requires_grad=True)
    with lazyviz.lazy() as graph:
        y = x * 2
        handle = y.register_hook(fail)
        with pytest.raises(ValueError, match="no"):
            y.sum().backward()
        handle.remove()
        (x * 3).sum().backward()
    graph.evaluate()
    assert x.grad.tolist() == [3, 3, 3]


# --- interrupts and forks ---------------------------------------------------------------


def test_an_interrupt_during_evaluation_keeps_what_is_finished():
    x = torch.ones(3)
    with lazyviz.lazy() as graph:
        a = x + 1
        x.mul_(2)
        b = x + a

    def interrupt(progress):
        if progress.done == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        graph.evaluate(progress=interrupt)
    assert graph.state == "interrupted" and graph.pending == 1
    assert a.tolist() == [2, 2, 2] and x.tolist() == [2, 2, 2]
    assert b.tolist() == [4, 4, 4]


def test_an_interrupt_at_a_sync_point_in_the_block():
    x = torch.ones(3)

    class Interrupt(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

    with pytest.raises(KeyboardInterrupt):
        with lazyviz.lazy() as graph:
            x.add_(1)
            raise KeyboardInterrupt
    assert graph.pending == 1 and x.tolist() == [2, 2, 2]


def _child(queue, y):
    try:
        queue.put((y + 1).tolist())
    except RuntimeError as error:
        queue.put(str(error).partition(";")[0])


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_what_a_forked_child_is_given_has_been_evaluated_before_the_fork():
    context = multiprocessing.get_context("fork")
    torch.set_num_threads(1)
    queue = context.SimpleQueue()
    x = torch.ones(3)
    with lazyviz.lazy() as graph:
        y = x * 2
        child = context.Process(target=_child, args=(queue, y))
        child.start()
        said = queue.get()
        child.join(60)
        z = y + 1
    assert said == [3, 3, 3]
    assert graph.pending == 1 and z.tolist() == [3, 3, 3]


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_child_computes_eagerly_with_real_tensors():
    context = multiprocessing.get_context("fork")
    torch.set_num_threads(1)
    queue = context.SimpleQueue()
    with lazyviz.lazy():
        real = lazyviz.to_eager(torch.ones(3) * 2)
        child = context.Process(target=_child, args=(queue, real))
        child.start()
        assert queue.get() == [3, 3, 3]
        child.join(60)
