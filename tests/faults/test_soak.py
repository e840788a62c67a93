"""Thousands of steps: memory stays flat, and nothing is referred to more often than before."""

from __future__ import annotations

import gc
import sys

import psutil
import pytest
import torch
from torch import nn

import lazyviz
from lazyviz import evaluation
from lazyviz.record.recorder import tape

MIB = 2**20


class Program:
    """A training step of a small model, and what it uses."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.x = torch.randn(16, 8)

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
    lazyviz.evaluate()  # running statistics are owed their writes


def failed(program):
    with pytest.raises(ZeroDivisionError), lazyviz.lazy():
        (program.x * 2).exp()
        1 / 0


def planned(program):
    with lazyviz.lazy() as graph:
        program.x.exp().sum()
    assert graph.plan().peak_bytes
    graph.evaluate()


WAYS = [evaluated, read_in_the_block, read_again_and_again, dropped, failed, planned]


def counted(program):
    """References to what every step meets, and how much is there of what a record is made of."""
    gc.collect()
    objects = [None, torch.float32, torch.ops.aten.add.Tensor, torch.Tensor, tape, program.x, program.model]
    objects += [torch.ops.aten.mm.default, torch.strided, torch.device("cpu").__class__, dict, Program]
    tensors = sum(type(each) in (torch.Tensor, nn.Parameter) for each in gc.get_objects())
    return [sys.getrefcount(each) for each in objects], tensors, len(gc.get_objects())


@pytest.mark.parametrize("way", WAYS)
def test_memory_and_references_are_flat_over_thousands_of_steps(way, request):
    count = 20_000 if request.config.getoption("--all") else 1_000
    program, process = Program(), psutil.Process()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(300):  # code is made, caches are filled
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
    references = [new - old for old, new in zip(before[0], after[0])]
    # Less is no leak: what tests before this one have left in caches may go meanwhile.
    assert all(more < count // 10 for more in references), references
    assert after[1] - before[1] <= 10
    assert after[2] - before[2] < 1000
    assert grown < 8 * MIB, f"{grown / count:.0f} bytes a step"
