"""Child processes of a process with pending ops: they read what they are given, or are told the remedy."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import traceback
from contextlib import ExitStack

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

import lazyviz

from .support.inject_faults import is_plain

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

TABLE = None  # a global variable of the function below


def in_a_fork(function):
    """What ``function`` returns in a child that is forked here, as text."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            text = repr(function())
        except BaseException:
            text = traceback.format_exc()
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


class Table(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.rows[index] * 2


def give(queue, rows):
    queue.put((rows * 2).tolist())


def give_global(queue):
    queue.put((TABLE * 2).tolist())


class Giving(multiprocessing.get_context("fork").Process):
    def __init__(self, queue, rows):
        super().__init__()
        self.queue, self.model = queue, {"rows": [rows]}

    def run(self):
        give(self.queue, self.model["rows"][0])


def processes(queue, rows):
    make = multiprocessing.get_context("fork").Process
    return {
        "argument": lambda: make(target=give, args=(queue, rows)),
        "keyword": lambda: make(target=give, kwargs={"queue": queue, "rows": rows}),
        "closure": lambda: make(target=lambda: give(queue, rows)),
        "partial function": lambda: make(target=functools.partial(give, rows=rows), args=(queue,)),
        "bound method": lambda: make(target=Giving(queue, rows).run),
        "attribute": lambda: Giving(queue, rows),
        "global variable": lambda: make(target=give_global, args=(queue,)),
    }


@pytest.mark.parametrize("kind", list(processes(None, None)))
def test_a_forked_process_reads_what_its_function_can_reach(kind, state, monkeypatch):
    queue = multiprocessing.get_context("fork").Queue()
    with lazyviz.lazy() as graph:
        rows = torch.arange(4.0) + 1
        other = torch.ones(3) * 3
    monkeypatch.setitem(globals(), "TABLE", rows)
    process = processes(queue, rows)[kind]()
    process.start()
    assert queue.get(timeout=60) == [2, 4, 6, 8]
    process.join()
    assert process.exitcode == 0
    assert lazyviz.is_lazy(other) and graph.report.cause.startswith(
        "a forked process at test_forked_children.py"
    )
    assert other.tolist() == [3, 3, 3]


def test_a_process_that_reads_nothing_evaluates_nothing(state):
    with lazyviz.lazy() as graph:
        rows = torch.arange(4.0) + 1
        process = multiprocessing.get_context("fork").Process(target=os.getpid)
        process.start()
        process.join()
    assert graph.pending and not graph.sync_points
    assert rows.tolist() == [1, 2, 3, 4]


def loaders(rows):
    plain = Table(torch.arange(4.0) + 1)
    scaled = lambda batch: torch.stack(batch) * rows  # noqa: E731
    return {
        "attribute": DataLoader(Table(rows), 2, num_workers=1),
        "nested attribute": DataLoader(Subset(Table({"a": rows}["a"]), range(4)), 2, num_workers=1),
        "closure of collate_fn": DataLoader(plain, 2, num_workers=1, collate_fn=scaled),
        "closure of worker_init_fn": DataLoader(
            plain, 2, num_workers=1, worker_init_fn=lambda _: plain.rows.mul_(rows[0])
        ),
    }


@pytest.mark.parametrize("kind", list(loaders(None)))
def test_workers_of_a_loader_read_what_they_can_reach(kind):  # PyTorch keeps a handler for its workers
    rows = torch.arange(1.0, 3.0).repeat(2)[:2] if kind == "closure of collate_fn" else torch.arange(4.0) + 1
    expected = [batch.tolist() for batch in loaders(rows)[kind]]
    with lazyviz.lazy() as graph:
        pending = rows * 1
    found = [batch.tolist() for batch in loaders(pending)[kind]]
    assert found == expected
    assert graph.report.cause.startswith("DataLoader workers at test_forked_children.py")
    assert is_plain()


def test_a_dataset_that_refers_to_its_trainer_does_not_evaluate_the_model():
    class Holder:
        pass

    dataset, trainer, loop = Table(torch.arange(4.0)), Holder(), Holder()
    with lazyviz.lazy() as graph:
        loop.model = torch.nn.Linear(3, 3)
        trainer.loop, dataset.trainer = loop, trainer
        loader = DataLoader(dataset, 2, num_workers=1, generator=torch.Generator())
        assert [batch.tolist() for batch in loader] == [[0, 2], [4, 6]]
    assert not graph.sync_points and lazyviz.is_lazy(loop.model.weight)


def test_reads_in_other_children_are_errors_with_a_remedy_and_the_parent_continues(state):
    with lazyviz.lazy():
        value = torch.ones(2) + 1
    for read in (value.tolist, lambda: value + 1, lambda: torch.cat([value, value])):
        said = in_a_fork(read)
        assert "lazy[2] float32 cpu, forgotten" in said
        assert "evaluate it before the fork, for example with lazyviz.sync()" in said
    assert value.tolist() == [2, 2]
    lazyviz.sync()


@pytest.mark.parametrize(
    "options",
    [{}, {"device": "A100-40GB"}, {"device": "A100-40GB", "mesh": (2,)}],
    ids=["here", "absent GPU", "one of two ranks"],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_pytorch_is_plain_in_a_child_that_is_forked_in_a_block(depth, options, state):
    def look():
        diagnosis = lazyviz.doctor()
        return is_plain(), str(diagnosis), torch.cuda.is_available(), torch.distributed.is_initialized()

    outside = in_a_fork(look)
    with ExitStack() as blocks:
        for _ in range(depth):
            blocks.enter_context(lazyviz.lazy(**options))
        value = torch.ones(2) + 1
        assert in_a_fork(look) == outside
        assert lazyviz.is_lazy(torch.ones(2) + 1)
        read, write = os.pipe()
        child = os.fork()
        if not child:
            torch.ones(2) + 3  # it goes on in the block, and leaves it
    if not child:
        os.write(write, repr(look()).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read().decode() == outside
    os.waitpid(child, 0)
    assert value.tolist() == [2, 2]


def test_a_child_that_a_progress_callback_forks_is_a_process_like_others(state):
    with lazyviz.lazy() as graph:
        value = torch.ones(4)
        for _ in range(4):
            value = value + 1
    said = []

    def record():
        with lazyviz.lazy() as inner:
            result = torch.ones(2) * 3
        assert lazyviz.is_lazy(result) and inner.evaluate().ops_run == 2
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            return result.tolist(), lazyviz.doctor().ok

    def progress(_):
        if not said:
            said.append(in_a_fork(record))

    graph.evaluate(progress=progress)
    assert said == ["([3.0, 3.0], True)"]
    assert value.tolist() == [5, 5, 5, 5]


def test_a_child_that_goes_on_with_the_run_has_its_values_or_an_error(state):
    with lazyviz.lazy() as graph:
        value = torch.ones(4)
        for _ in range(4):
            value = value + 1
    parent, read, write = os.getpid(), *os.pipe()

    def progress(now):
        if now.done == 2:
            os.fork()

    try:
        graph.evaluate(progress=progress)
        text = str(value.tolist())
    except RuntimeError as error:
        text = str(error)
    if os.getpid() != parent:
        os.write(write, text.encode())
        os._exit(0)
    os.wait()
    assert text == "[5.0, 5.0, 5.0, 5.0]"
    assert (said := os.read(read, 1000).decode()) == text or "forgotten before it ran" in said
    os.close(read)
    os.close(write)
