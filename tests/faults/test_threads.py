"""Recorders, readers, and evaluators on any threads: the right answer or one clear error, no deadlock."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
import torch

import lazyviz
from lazyviz.record import dead_node_detection, sync_points
from lazyviz.record.tape import tape
from lazyviz.session.evaluation import ActiveRun

from .support.inject_faults import is_plain

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


@pytest.mark.parametrize("device", [None, "A100-40GB"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_thread_that_never_leaves_its_block_blocks_no_other_after_it_has_ended(depth, device, state):
    left, values = [], []

    def record():
        for _ in range(depth):
            left.append(lazyviz.lazy(device=device))
            left[-1].__enter__()  # and that is that
        values.append(torch.ones(2) + 1)

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
    with lazyviz.lazy():
        other = torch.ones(2) + 2
    for block in reversed(left):
        block.__exit__(None, None, None)
    assert is_plain() and values[0].tolist() == [2, 2] and other.tolist() == [3, 3]
    assert not run_together(record)
    assert not run_together(record)  # its number may be that of the thread that has ended
    lazyviz.reset()


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


def test_a_thread_that_trains_beside_a_block_is_not_recorded_in_it(state):
    """Its backward passes are its own, whatever another thread records."""
    weight, x = torch.ones(3, 3, requires_grad=True), torch.arange(6.0).view(2, 3)
    gradients = []

    def train():
        weight.grad = None
        (x @ weight).square().sum().backward()
        gradients.append(weight.grad)

    train()
    with lazyviz.lazy() as graph:
        recorded = torch.ones(2) + 1
        assert not run_together(train)
    assert not any(map(lazyviz.is_lazy, gradients))
    assert torch.equal(*gradients)
    assert [node.op.name() for node in graph.nodes] == ["aten::ones", "aten::add.Tensor"]
    assert recorded.tolist() == [2, 2]


def test_plain_training_beside_threads_that_record(state):
    ended = threading.Event()

    def record():
        for turn in range(60):
            with lazyviz.lazy():
                value = torch.ones(3) * turn
            assert value.tolist() == [turn] * 3
        ended.set()

    def train():
        while not ended.is_set():
            layer = torch.nn.Linear(3, 3)
            layer(torch.ones(2, 3)).sum().backward()
            assert layer.weight.grad.tolist() == [[2.0] * 3] * 3

    assert not run_together(record, train, train)


def test_the_check_of_one_thread_does_not_undo_the_block_that_another_one_enters(state):
    """It restores PyTorch as the end of a cell does, and so does the end of each evaluation."""
    entering, restored = threading.Event(), threading.Event()

    def check():
        entering.wait()
        lazyviz.doctor()
        restored.set()

    def record():
        install = watch.begin_recording

        def begin():
            install()
            entering.set()
            assert not restored.wait(0.2)  # it waits for the block to be entered as a whole

        watch.begin_recording = begin
        try:
            with lazyviz.lazy() as graph:
                restored.wait()
                value = torch.zeros(3)
                value.add_(1)
            assert len(graph.nodes) == 2
            assert value.tolist() == [1, 1, 1]
        finally:
            del watch.begin_recording

    watch = lazyviz.session.evaluation.watch
    assert not run_together(check, record)


def test_evaluating_everything_while_another_thread_records_loses_nothing(state):
    ended = threading.Event()

    def record():
        try:
            for _ in range(40):
                counter = torch.zeros(4)
                for _ in lazyviz.steps(range(4), always_record=True):
                    counter.add_(1)
                assert counter.tolist() == [4] * 4
        finally:
            ended.set()

    def evaluate():
        while not ended.is_set():
            lazyviz.sync()
            lazyviz.evaluate()

    errors = run_together(record, evaluate, evaluate)
    assert all(map(is_clear, errors)), errors


def test_a_write_recorded_while_another_thread_looks_for_unreachable_ops_is_not_dropped(state, monkeypatch):
    """A block may begin right after the other thread has found none."""
    looking, recorded = threading.Event(), threading.Event()
    find = dead_node_detection.observable_storages

    def find_slowly(*args):
        found = find(*args)
        if threading.current_thread() is not threading.main_thread():
            looking.set()
            recorded.wait()
        return found

    monkeypatch.setattr(dead_node_detection, "observable_storages", find_slowly)
    with lazyviz.lazy():
        earlier = torch.ones(2) * 2
    pending = tape.pending_ops
    thread = threading.Thread(target=lambda: pending.forget_unreachable(pending.reachable()))
    thread.start()
    assert looking.wait(60)
    counter = torch.zeros(3)
    with lazyviz.lazy():
        counter.add_(1)
    recorded.set()
    thread.join()
    assert counter.tolist() == [1, 1, 1]
    assert earlier.tolist() == [2, 2]
    lazyviz.sync()


def test_a_run_waits_for_the_op_that_another_thread_is_recording(state, monkeypatch):
    """It may free what the op is about to refer to; an op that is recorded later waits for the run."""
    monkeypatch.setattr(sync_points, "_LONGEST_WAIT", 60)
    recording, begins, waited = tape.recording, threading.Event(), []

    def evaluate():
        waited.append(recording.busy)
        begins.set()
        with ActiveRun([]):
            waited.append(recording.busy)

    with lazyviz.lazy():
        value = torch.ones(2)
        recording.busy = True  # as in the middle of an op
        thread = threading.Thread(target=evaluate)
        thread.start()
        assert begins.wait(60)
        time.sleep(0.05)
        recording.busy = False
        thread.join()
        value = value + 1
    assert waited == [True, False]
    assert value.tolist() == [2, 2]


def test_a_graph_is_drawn_while_another_thread_records_in_it(state, tmp_path):
    """It sees one state of the graph, as recording goes on after it."""
    shown, ended = [], threading.Event()

    def record():
        try:
            for _ in range(60):
                value = torch.zeros(3)
                with lazyviz.lazy() as graph:
                    shown[:] = [graph]
                    for _ in range(200):
                        value = value + 1
                assert value.tolist() == [200] * 3
        finally:
            ended.set()

    def draw():
        looks = ("plan", "scene", "text", "to_dot", "to_fx", "widget", "static_bundle", "save")
        while not ended.is_set():
            for look in looks:
                for graph in shown[:1]:
                    getattr(graph, look)(*[tmp_path / "graph.html"] * (look == "save"))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        assert not run_together(record, draw)
    finally:
        sys.setswitchinterval(before)


def own_generator():
    return torch.Generator().manual_seed(1)


def default_generator():
    return torch.manual_seed(1)


@pytest.mark.parametrize("make", [default_generator, own_generator])
@pytest.mark.parametrize(
    "reseed",
    [
        lambda generator: generator.manual_seed(5) and 5,
        lambda generator: generator.set_state(torch.Generator().manual_seed(5).get_state()) and 5,
        lambda generator: generator.seed(),
    ],
    ids=["manual_seed", "set_state", "seed"],
)
@pytest.mark.parametrize("by", ["a thread", "a widget"])
def test_a_generator_is_reseeded_while_another_thread_evaluates_draws_of_it(make, reseed, by, state):
    """As by a cell that begins with a seed, after a click on Evaluate."""

    def draw(generator):
        return [torch.rand(1000, generator=generator) for _ in range(100)]

    expected = draw(make())
    for begun in (0, 1, 50, 99):
        generator, reached = make(), threading.Event()
        with lazyviz.lazy() as graph:
            drawn = draw(generator)

        def progress(now, begun=begun, reached=reached):
            if now.done >= begun and not reached.is_set():
                reached.set()
                time.sleep(0.02)  # for the other thread

        if by == "a thread":
            thread = threading.Thread(target=graph.evaluate, kwargs={"progress": progress})
            thread.start()
            reached.wait(30)
        else:
            graph.widget().run()
        seeded = torch.Generator().manual_seed(reseed(generator))
        lazyviz.sync()
        if by == "a thread":
            thread.join(30)
        assert torch.equal(generator.get_state(), seeded.get_state())
        assert all(map(torch.equal, drawn, expected))


def test_elements_are_read_while_another_thread_evaluates(state):
    ended = threading.Event()

    def read():
        try:
            for turn in range(200):
                with lazyviz.lazy():
                    value = torch.ones(3) * turn
                assert value.tolist() == [turn] * 3
        finally:
            ended.set()

    def evaluate():
        while not ended.is_set():
            lazyviz.sync()

    errors = run_together(read, evaluate, evaluate)
    assert not errors, errors


OTHER_THREADS = """
import itertools, threading
real, numbers = threading.get_ident, itertools.count(1 << 40)
identities = threading.local()

def get_ident():  # as gevent replaces it: not that of the system's thread
    if not hasattr(identities, "number"):
        identities.number = next(numbers)
    return identities.number

threading.get_ident, threading.RLock = get_ident, threading._PyRLock
threading.main_thread()._ident = get_ident()
import torch, lazyviz
with lazyviz.lazy() as graph:
    value = torch.ones(2) + 1
assert lazyviz.is_lazy(value) and graph.evaluate().ops_run == 2 and value.tolist() == [2, 2]
assert lazyviz.doctor().ok, lazyviz.doctor()
"""


@pytest.mark.slow
def test_threads_that_a_library_has_replaced_are_examined_and_end_as_usual():
    ended = subprocess.run([sys.executable, "-c", OTHER_THREADS], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


TWO_THREADS_MEET_AN_OPERATOR = """
import threading
import torch
import lazyviz
from lazyviz.record.shapes import shape_inference_cache

examine, met = shape_inference_cache.OpInfo, []
x = torch.ones(3)

def meanwhile(op):
    if op is torch.ops.aten.special_xlog1py.default and not met:
        met.append(op)
        thread = threading.Thread(target=torch.special.xlog1py, args=(x, x))
        thread.start()
        thread.join()
    return examine(op)

shape_inference_cache.OpInfo = meanwhile
with lazyviz.lazy():
    y = torch.special.xlog1py(x, x)
assert met and torch.equal(y, torch.special.xlog1py(x, x))
"""


def test_threads_that_meet_an_operator_at_the_same_time_register_it_once():
    ended = subprocess.run(
        [sys.executable, "-c", TWO_THREADS_MEET_AN_OPERATOR], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
