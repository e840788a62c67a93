"""The state after a stopped run, and the results of resuming it."""

from __future__ import annotations

import signal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz
from lazyviz.execute.replay.program_cache import replays
from lazyviz.process import deferred_signals
from lazyviz.session import evaluation

from ..bit_equality import difference
from .support.faulty_kernels import Alarm, FaultyKernels, KernelError, another_signal, error, interrupt
from .support.inject_faults import PACKAGE, inject, points, sampled
from .support.interrupted_training_steps import signals_raise


def test_the_next_draw_goes_on_where_a_resumed_one_has_ended():
    torch.manual_seed(5)
    expected = [torch.rand(3), torch.rand(3), torch.rand(3)]
    torch.manual_seed(5)
    with lazyviz.lazy() as graph:
        first, last = torch.rand(3), torch.rand(3)
    kernels = FaultyKernels({node.op for node in graph.nodes})
    kernels.arm(1, error)
    try:
        with pytest.raises(KernelError), kernels.active():
            graph.evaluate()
    finally:
        kernels.restore()
    graph.evaluate()
    assert difference(expected, [first, last, torch.rand(3)]) is None


def test_what_was_drawn_after_a_failed_draw_is_not_drawn_again():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with lazyviz.lazy() as graph:
        last = torch.rand(3)
    kernels = FaultyKernels({node.op for node in graph.nodes})
    kernels.arm(0, error)
    try:
        with pytest.raises(KernelError), kernels.active():
            graph.evaluate()
    finally:
        kernels.restore()
    assert torch.equal(torch.rand(3), expected)  # as after an error of eager PyTorch
    after = torch.get_rng_state()
    graph.evaluate()
    assert torch.equal(last, expected)
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_split_run_that_is_stopped_after_its_pieces_has_drawn(at):
    def step(model, optimizer, x, y):
        F.cross_entropy(F.dropout(model(x), 0.4), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    def run(stops):
        torch.manual_seed(3)
        model, x, y = nn.Linear(5, 4), torch.randn(12, 5), torch.randint(0, 4, (12,))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with lazyviz.lazy(batch=[x, y], split=3) as graph:
            step(model, optimizer, x, y)

        def progress(now):
            if stops and now.piece == 0 and now.done == now.total - 4 + at:
                raise KeyboardInterrupt

        if stops:
            with pytest.raises(KeyboardInterrupt):
                graph.evaluate(progress=progress)
        graph.evaluate()
        return [parameter.detach() for parameter in model.parameters()], torch.get_rng_state(), torch.rand(4)

    assert difference(run(False), run(True)) is None


def counting():
    """A tensor to which one is added twenty times, and the graph of that."""
    x = torch.zeros(3)
    with lazyviz.lazy() as graph:
        for _ in range(20):
            x.add_(1)
    return x, graph


def meet(known):
    """Have ``counting`` known, or not."""
    replays.clear()
    for _ in range(known):
        counting()[1].evaluate()


@pytest.mark.parametrize("known", [False, True])
def test_a_handler_that_raises_nothing_is_called_and_the_run_goes_on(known):
    came = []

    meet(known)
    x, graph = counting()
    kernels = FaultyKernels({torch.ops.aten.add_.Tensor})
    kernels.arm(4, another_signal)
    before = signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    try:
        with kernels.active():
            report = graph.evaluate()
    finally:
        signal.signal(signal.SIGUSR1, before)
        kernels.restore()
    assert came == [signal.SIGUSR1]
    assert report.ops_run == 20 and report.cache_hit is known
    assert x.tolist() == [20, 20, 20]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("fault", "kind"), [(another_signal, Alarm), (interrupt, KeyboardInterrupt)])
def test_a_signal_in_an_op_in_place_does_not_have_it_run_twice(fault, kind, known):
    meet(known)
    kernels = FaultyKernels({torch.ops.aten.add_.Tensor})
    try:
        with signals_raise():
            for at in range(20):
                x, graph = counting()
                kernels.arm(at, fault)
                with pytest.raises(kind), kernels.active():
                    graph.evaluate()
                assert graph.pending == 19 - at
                assert graph.state == ("interrupted" if graph.pending else "done")
                assert not deferred_signals.Deferred.current
                graph.evaluate()
                assert x.tolist() == [20, 20, 20]
    finally:
        kernels.restore()


def test_a_run_whose_end_is_stopped_anywhere_is_counted_at_most_once(request):
    def in_the_end(frame):
        inside = frame.f_code.co_filename.startswith(PACKAGE)
        while frame is not None and frame.f_code is not evaluation._end.__code__:
            frame = frame.f_back
        return inside and frame is not None

    def run():
        with lazyviz.lazy() as graph:
            (torch.ones(3) * 2).exp().sum()
        graphs.append(graph)
        graph.evaluate()

    graphs = []
    found = points(run, where=in_the_end)
    counted = []
    for at in sampled(found, found if request.config.getoption("--all") else 80):
        before = evaluation.metrics.counters["ops run"]
        inject(run, at, where=in_the_end)
        counted.append(evaluation.metrics.counters["ops run"] - before)
        assert graphs[-1].state == "done"
    assert set(counted) <= {0, 4} and counted.count(4) > len(counted) // 2
