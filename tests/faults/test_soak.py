"""Thousands of steps: memory and reference counts stay constant."""

from __future__ import annotations

import gc
import operator
import sys

import psutil
import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.execute import eager_backend
from lazyviz.execute.replay import program_cache
from lazyviz.graph import ir
from lazyviz.record.recorder import Recorder
from lazyviz.record.sync_points import SyncError
from lazyviz.record.tape import Tape, tape
from lazyviz.session import evaluation

pytestmark = pytest.mark.slow

MIB = 2**20


class Program:
    """A training step of a small model, and what it uses."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.x = torch.randn(16, 8)
        self.wrong = torch.full((16,), 99)

    def step(self):
        self.optimizer.zero_grad()
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss


def evaluated(program):
    with lazyviz.lazy() as graph:
        program.step()
    graph.evaluate()


def read_in_the_block(program):
    with lazyviz.lazy():
        program.step().item()
    lazyviz.evaluate()


def read_again_and_again(program):
    with lazyviz.lazy():
        total = program.x.sum()
        for _ in range(8):
            total = total + float(total.item() > 0)


def dropped(program):
    with lazyviz.lazy() as graph:
        program.model(program.x).sum()
        (program.x * 2).exp()
    del graph
    lazyviz.evaluate()  # running statistics have pending writes


def failed(program):
    with pytest.raises(ZeroDivisionError), lazyviz.lazy():
        (program.x * 2).exp()
        1 / 0


def failed_in_a_kernel(program):
    """What was not run is forgotten: PyTorch is left as it was, and taken part in anew, each time."""
    if not program.optimizer.state:
        evaluated(program)
    with lazyviz.lazy() as graph:
        nn.functional.cross_entropy(program.model(program.x), program.wrong).backward()
        program.optimizer.step()
    with pytest.raises(IndexError):
        graph.evaluate()
    lazyviz.reset()


def planned(program):
    with lazyviz.lazy() as graph:
        program.x.exp().sum()
    assert graph.plan().peak_bytes
    graph.evaluate()


def evaluated_in_parts(program):
    with lazyviz.lazy() as graph:
        loss = program.step()
    lazyviz.evaluate(loss)
    graph.evaluate()


def refused_at_a_read(program):
    with pytest.raises(SyncError), lazyviz.lazy(allow_sync=False):
        (program.x * 2).sum().item()
    lazyviz.evaluate()


def read_past_the_dispatcher(program):
    with lazyviz.lazy():
        total = (program.x + 1).sum(0)
        total.numpy()
        torch.from_dlpack(total + 1)
        assert (total > -1e9).all()
        total.tolist()
    lazyviz.evaluate()


def with_gradients_that_are_summed(program):
    with lazyviz.lazy() as graph:
        x = program.x.clone().requires_grad_()
        ((x * 2).sum() + (x * x).sum()).backward()
        torch.cat([x[:2], x[2:]])[0].add_(1)
    graph.evaluate()


WAYS = [
    evaluated,
    read_in_the_block,
    read_again_and_again,
    dropped,
    failed,
    failed_in_a_kernel,
    planned,
    evaluated_in_parts,
    refused_at_a_read,
    read_past_the_dispatcher,
    with_gradients_that_are_summed,
]

# What the compiled modules hand out references to; in Python 3.12 and later most of these are never counted.
SHARED = [
    *(None, True, False, NotImplemented, ..., (), "", b""),
    *range(-5, 64),
    *(
        "done",
        "pending",
        "real",
        "state",
        "args",
        "kwargs",
        "node",
        "storage",
        "tensor",
        "_lazyviz",
        "__class__",
    ),
    *(torch.float32, torch.int64, torch.bool, torch.strided, torch.preserve_format, torch.contiguous_format),
    *(torch.Tensor, nn.Parameter, torch.Size, torch.device, type(torch.device("cpu")), torch._C.TensorBase),
    *(ir.Node, ir.Value, ir.Storage, Tape, dict, list, tuple),
    *(
        Recorder.record.__code__,
        eager_backend.store_result.__code__,
        program_cache.__dict__,
        Program.step.__code__,
    ),
    *(getattr(torch.ops.aten, name).default for name in ("mm", "detach", "t", "relu", "sum", "exp", "clone")),
    *(torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten._local_scalar_dense.default),
    *(operator.getitem, sys.getrefcount),
]


def counted(program):
    """References to what every step meets, and how much is there of what a record is made of."""
    for _ in range(3):  # a graph that is collected leaves its record to the next collection
        gc.collect()
    objects = [*SHARED, tape, program.x, program.model, program.optimizer, Program]
    tensors = sum(type(each) in (torch.Tensor, nn.Parameter) for each in gc.get_objects())
    references = [sys.getrefcount(each) for each in objects]
    return references, tensors, len(gc.get_objects()), sys.getallocatedblocks(), objects


@pytest.mark.parametrize("way", WAYS)
def test_memory_and_references_are_flat_over_thousands_of_steps(way, request):
    count = 20_000 if request.config.getoption("--all") else 1_000
    program, process = Program(), psutil.Process()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # Code is made, caches are filled: logs of the last 1,000 are not, in a sample.
        for _ in range(count // 10 + 200):
            way(program)
        before, memory = counted(program), process.memory_info().rss
        for _ in range(count):
            way(program)
        after, grown = counted(program), process.memory_info().rss - memory
    finally:
        torch.set_num_threads(threads)
    lazyviz.sync()  # forgets what nobody can see
    assert not tape.pending
    assert not evaluation.graphs
    # Less is no leak: what tests before this one have left in caches may go meanwhile.
    more = {repr(each): new - old for old, new, each in zip(before[0], after[0], after[4])}
    assert not {each: number for each, number in more.items() if number >= count // 10}
    assert after[1] - before[1] <= 10
    assert after[2] - before[2] < 1000
    # Of Python's memory, with what the collector does not know of: numbers, strings, C++'s own objects.
    assert after[3] - before[3] < max(count // 10, 3_000)
    assert grown < 8 * MIB, f"{grown / count:.0f} bytes a step"
