"""Recorders, readers, and evaluators on any threads: the right answer or one clear error, no deadlock."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import pytest
import torch

import lazyviz

ONE_CLEAR_ERROR = ("another thread is recording", "a cell is recording on another thread")


def run_together(*functions, seconds=60):
    """Run each on a thread of its own; their errors, and a failure if one does not end."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def guarded(function):
        start.wait()
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "stuck"
    return errors


@pytest.fixture(autouse=True)
def nobody_records(state):
    """After the test no thread is taken to be recording."""
    yield
    with lazyviz.lazy():  # nobody else is taken to be recording
        value = torch.ones(2) + 1
    assert value.tolist() == [2, 2]


def is_clear(error):
    return isinstance(error, RuntimeError) and str(error).startswith(ONE_CLEAR_ERROR)


@pytest.mark.parametrize("count", [2, 8])
def test_threads_that_open_blocks_get_the_right_answer_or_one_clear_error(count, state):
    outcomes: Counter[str] = Counter()

    def record(number):
        for turn in range(40):
            try:
                with lazyviz.lazy():
                    value = torch.full((3,), float(number)) * 2 + turn
            except RuntimeError as error:
                if not is_clear(error):
                    raise
                outcomes["refused"] += 1
            else:
                assert value.tolist() == [number * 2 + turn] * 3
                outcomes["recorded"] += 1

    errors = run_together(*[lambda number=number: record(number) for number in range(count)])
    assert not errors
    assert outcomes["recorded"] and outcomes.total() == 40 * count


def test_a_thread_that_never_leaves_its_block_blocks_no_other_after_it_has_ended(state):
    def record():
        block = lazyviz.lazy()
        block.__enter__()  # and that is that

    def abandon():
        generator = recorded()
        next(generator)

    def recorded():
        with lazyviz.lazy():
            yield torch.ones(2) + 1

    assert not run_together(abandon)
    with lazyviz.lazy():
        pass
    assert not run_together(record)
    with pytest.raises(RuntimeError, match="another thread is recording"), lazyviz.lazy():
        pass
    lazyviz.reset()  # nobody else can end it
    with lazyviz.lazy():
        pass


def test_readers_of_pending_tensors_are_many(state):
    values = []
    for _ in range(10):
        with lazyviz.lazy():
            base = torch.arange(4.0)
            values += [base * number for number in range(6)]

    def read(seed):
        order = list(range(len(values)))
        random.Random(seed).shuffle(order)
        for at in order:
            assert values[at].sum().item() == 6 * (at % 6)

    assert not run_together(*[lambda seed=seed: read(seed) for seed in range(6)])


def test_readers_evaluators_and_recorders_at_once(state):
    with lazyviz.lazy():  # what these call is known: of other ops, see docs/limits.md
        torch.ones(4).sum().item()
    shared: list[tuple[torch.Tensor, float]] = []
    ended = threading.Event()

    def record():
        try:
            for turn in range(60):
                with lazyviz.lazy():
                    value = torch.full((4,), float(turn)) + 1
                    shared.append((value, 4.0 * (turn + 1)))
        finally:
            ended.set()

    def read():
        seen = 0
        while not ended.is_set() or seen < len(shared):
            for value, expected in shared[seen:]:
                assert value.sum().item() == expected
                seen += 1

    def evaluate():
        while not ended.is_set():
            try:
                lazyviz.sync()
            except RuntimeError as error:
                if not is_clear(error):
                    raise
            time.sleep(0.001)

    assert not run_together(record, read, read, evaluate, evaluate)


def test_a_reader_does_not_pause_the_recording_of_another_thread(state):
    with lazyviz.lazy():
        value = torch.ones(1000) * 3
    ended = threading.Event()

    def read():
        while not ended.is_set():
            assert value.tolist()[0] == 3 and value.numpy()[1] == 3

    def record():
        try:
            for _ in range(100):
                with lazyviz.lazy() as graph:
                    result = torch.zeros(4) + 1
                    assert lazyviz.is_lazy(result)
                assert len(graph.nodes) == 2
        finally:
            ended.set()

    assert not run_together(read, record)
