"""Exceptions while a block is entered or left: PyTorch is restored, and no op is lost."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
import signal
import threading
import time
from functools import partial

import pytest
import torch

import lazyviz
from lazyviz.record.tape import tape
from lazyviz.session import lazy_graph

from .support.inject_faults import (
    Fault,
    call_at,
    everywhere,
    inject,
    interrupted,
    is_plain,
    points,
    sampled,
)

# What is raised while an object is freed is not to be seen but by a warning.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def empty_block():
    with lazyviz.lazy():
        pass


def nested_blocks():
    with lazyviz.lazy(), lazyviz.lazy(allow_sync=False):
        pass


def for_an_absent_gpu():
    with lazyviz.lazy(device="A100-40GB"):
        pass


def failing_block():
    with contextlib.suppress(ZeroDivisionError), lazyviz.lazy():
        raise ZeroDivisionError


@lazyviz.lazy()
def decorated():
    pass


def through_a_stack():
    with contextlib.ExitStack() as stack:
        stack.enter_context(lazyviz.lazy())


BLOCKS = [empty_block, nested_blocks, for_an_absent_gpu, failing_block, decorated]


def test_the_injector_tells_an_open_block_from_plain_pytorch(state):
    assert is_plain()
    with lazyviz.lazy():
        assert state.differences()
        assert type(torch.ones(2)) is not torch.Tensor
    lazyviz.reset()
    assert sampled(1000, 5)[-1] == 999


@pytest.mark.parametrize("error", [KeyboardInterrupt, Fault])
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
def test_an_exception_at_any_line_of_entry_or_exit_leaves_pytorch_plain(block, error, state, request, table):
    most = 5000 if request.config.getoption("--all") else 60
    chosen = sampled(points(block, where=everywhere), most, seed=len(error.__name__))
    for at in chosen:
        raised = inject(block, at, error, where=everywhere)
        assert not state.differences(), raised and raised.__notes__
        assert is_plain(), raised and raised.__notes__
        block()  # the next one works, and finds everything at its place
        assert not state.differences()
    table.add_block(block.__name__, f"{error.__name__} at a line", len(chosen))


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
def test_an_exception_at_any_instruction_of_entry_or_exit_leaves_pytorch_plain(block, state, request, table):
    most = 10_000 if request.config.getoption("--all") else 60
    everything = {"where": everywhere, "opcodes": True}
    chosen = sampled(points(block, **everything), most)
    for at in chosen:
        raised = inject(block, at, **everything)
        assert not state.differences(), raised and raised.__notes__
        assert is_plain(), raised and raised.__notes__
    block()
    table.add_block(block.__name__, "KeyboardInterrupt at an instruction", len(chosen))


def test_exceptions_while_the_lock_of_evaluations_is_taken_leave_it_free(state):
    runs, stay = tape.runs, {"opcodes": True}

    def with_ops_that_nobody_has():
        with lazyviz.lazy():
            torch.rand(2).add_(1)
        tape.pending_ops.forget_lost()

    for action in (runs.lock.wait, with_ops_that_nobody_has, lazy_graph.cell_boundary):
        for at in sampled(points(action, **stay), 400):
            raised = inject(action, at, **stay)
            assert not runs.lock.is_mine, raised and raised.__notes__
            lazyviz.reset()


def records_and_reads():
    with lazyviz.lazy():
        value = torch.ones(2) + 1
    assert value.tolist() == [2, 2]


def records_and_raises():
    with lazyviz.lazy():
        value = torch.ones(2) + 1  # and stays pending
    raise Fault(value)


@pytest.mark.parametrize("handle", [records_and_reads, records_and_raises, lazyviz.sync, lazyviz.doctor])
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
def test_handlers_of_signals_find_pytorch_plain_or_a_whole_block_at_any_line_of_entry_or_exit(
    block, handle, state, request
):
    most = 5000 if request.config.getoption("--all") else 40
    for at in sampled(points(block), most, seed=len(handle.__name__)):
        with contextlib.suppress(Fault):
            call_at(block, at, handle)
        lazyviz.sync()
        assert not state.differences(), at
        assert lazyviz.doctor().ok


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("ask", ["everything", "a tensor", "a block"])
def test_handlers_of_signals_evaluate_the_ops_of_a_block_at_any_line_of_its_exit(ask, lost, state, request):
    weight, made = torch.zeros(3), []

    def block():
        with lazyviz.lazy():
            for _ in range(3 if lost else 0):
                with lazyviz.lazy():  # whose graph nobody has
                    torch.rand(2).add_(1)
            weight.add_(1)
            made[:] = [weight * 2, weight + 1]

    def handle():
        if ask == "everything":
            lazyviz.sync()
        elif ask == "a tensor":
            weight.tolist()
        else:
            records_and_reads()

    most = 10_000 if request.config.getoption("--all") else 60
    for at in sampled(points(block), most, seed=len(ask)):
        lazyviz.sync()
        weight.zero_()
        call_at(block, at, handle)
        assert is_plain()
        assert (
            weight.tolist() == [1, 1, 1] and made[0].tolist() == [2, 2, 2] and made[1].tolist() == [2, 2, 2]
        )
        lazyviz.sync()
        assert not state.differences(), at


def test_recorded_ops_stay_pending_whatever_is_raised_on_leaving(state, request):
    weight = torch.zeros(3)
    made = []

    def block():
        with lazyviz.lazy():
            weight.add_(1)
            made[:] = [weight * 2, torch.rand(2)]

    most = 10_000 if request.config.getoption("--all") else 60
    for at in sampled(points(block, where=everywhere), most):
        lazyviz.sync()
        weight.zero_()
        made.clear()
        torch.manual_seed(at)
        expected = torch.rand(2)
        torch.manual_seed(at)
        raised = inject(block, at, where=everywhere)
        assert is_plain()
        if made:  # all of it has been recorded
            assert made[0].tolist() == [2, 2, 2] and weight.tolist() == [1, 1, 1], raised
            assert torch.equal(made[1], expected), raised
        lazyviz.sync()
        assert not state.differences(), raised and raised.__notes__


@pytest.mark.parametrize("compiled", [False, True])
def test_signals_at_any_time_leave_pytorch_plain(compiled, state):
    from lazyviz.record import native_recorder

    rounds = 200
    begin = time.perf_counter()
    for _ in range(rounds):
        empty_block()
    patience = 2 * (time.perf_counter() - begin) / rounds
    used = native_recorder.use(compiled)
    try:
        assert used is compiled or native_recorder._module is None
        generator = random.Random(1)
        for turn in range(rounds):
            kept = interrupted(empty_block, generator.uniform(1e-6, patience), Fault)
            assert not state.differences(), (turn, kept)
            assert is_plain()
    finally:
        native_recorder.use(True)


def test_exceptions_that_another_thread_sends_leave_pytorch_plain(state):
    """As an IDE or a supervisor stops a cell: ``PyThreadState_SetAsyncExc``."""
    send = ctypes.pythonapi.PyThreadState_SetAsyncExc
    main, generator = threading.get_ident(), random.Random(2)
    for _ in range(100):
        wait, kept, sent = generator.uniform(0, 2e-3), None, []
        begun = threading.Lock()  # what Python's own `start` waits with is not to be interrupted
        begun.acquire()

        def stop(begun=begun, wait=wait, sent=sent):
            begun.acquire()
            time.sleep(wait)
            sent.append(send(ctypes.c_ulong(main), ctypes.py_object(Fault)))

        sender = threading.Thread(target=stop)
        sender.start()
        try:
            begun.release()
            while not sent:
                empty_block()
            empty_block()
        except Fault as error:  # or it was raised where an object was freed
            kept = error
        sender.join()
        assert not state.differences(), kept
        assert is_plain()


def test_a_block_is_left_when_a_generator_that_has_it_open_goes(state):
    def recorded():
        with lazyviz.lazy():
            yield torch.ones(2) + 1

    generator = recorded()
    value = next(generator)
    assert lazyviz.is_lazy(value)
    del generator
    assert is_plain()
    assert value.tolist() == [2, 2]

    generator = recorded()
    value = next(generator)
    holder = [generator]
    holder.append(holder)  # only the collector can free it
    del generator, holder
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    assert value.tolist() == [2, 2]
    assert is_plain()


def test_blocks_left_in_another_order_than_they_were_entered_leave_nothing(state):
    outer, inner = lazyviz.lazy(), lazyviz.lazy()
    first = outer.__enter__()
    second = inner.__enter__()
    a = torch.ones(2) + 1
    outer.__exit__(None, None, None)
    b = a + 1  # the inner one goes on
    assert lazyviz.is_lazy(b) and len(first.nodes) == 0 and len(second.nodes) == 3
    inner.__exit__(None, None, None)
    assert is_plain()
    assert b.tolist() == [3, 3]


def test_a_block_is_entered_once(state):
    block = lazyviz.lazy()
    with block:
        pass
    with pytest.raises(RuntimeError, match="this lazy block was already entered"), block:
        pass
    assert is_plain()


def test_a_block_that_is_never_entered_changes_nothing(state):
    latest = lazyviz.session.evaluation.latest
    block = lazyviz.lazy(device="A100-40GB")
    assert callable(block.__exit__)
    del block
    assert is_plain() and lazyviz.session.evaluation.latest is latest


def test_exit_stacks_and_decorators_take_blocks(state):
    through_a_stack()
    assert is_plain()
    values = []

    @lazyviz.lazy()
    def record():
        values.append(torch.ones(2) + 1)

    record()
    record()
    assert all(map(lazyviz.is_lazy, values)) and is_plain()


def test_what_naming_finds_may_fail_without_a_loss(state):
    class Hostile:
        def __getattribute__(self, name):
            raise SystemError(name)

    hostile = Hostile()  # noqa: F841
    with lazyviz.lazy() as graph:
        value = torch.ones(2) + 1
    assert is_plain()
    assert value.tolist() == [2, 2] and graph.nodes


def test_thresholds_of_the_collector_near_the_greatest_are_no_error(state):
    before = gc.get_threshold()
    try:
        gc.set_threshold(2**31 - 1, 5, 5)
        empty_block()
        assert gc.get_threshold() == (2**31 - 1, 5, 5)
    finally:
        gc.set_threshold(*before)


def test_handlers_of_signals_are_the_users_inside_a_block(state):
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with lazyviz.lazy():
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_block_left_on_another_thread_leaves_nothing_lazy(state):
    block = lazyviz.lazy()
    block.__enter__()
    value = torch.ones(2) + 1
    thread = threading.Thread(target=partial(block.__exit__, None, None, None))
    thread.start()
    thread.join()
    assert is_plain()
    assert value.tolist() == [2, 2]
