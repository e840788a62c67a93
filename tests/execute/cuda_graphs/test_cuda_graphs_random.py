"""Random repeated programs, captured on the fake device: bits, random numbers, written memory."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

import lazyviz
from lazyviz.execute import backend_registry
from lazyviz.execute.cuda_graphs import capturable_segments
from lazyviz.execute.cuda_graphs.backend import CudaGraphsBackend

from .fake_stream_capture import Captures

PROGRAMS = 48
RUNS = 5


def flat(x):
    return x.float().reshape(-1)


def write_row(x, y, n, m):
    x = x.float().clone()
    x.view(-1)[:2].add_(3)
    return x


def write_state(x, y, n, m):
    m.state[n % 3].add_(x.float().sum() * 0.01).tanh_()
    return m.state[n % 3] + 1


def copy_state(x, y, n, m):
    return torch.empty(4, 3).copy_(m.state[0])


def elsewhere_and_back(x, y, n, m):
    x = x.float().clone()
    return x.copy_(x.half())  # half is the stand-in's other device


def write_part(x, y, n, m):
    m.long[m.turn : m.turn + 2].mul_(1.5)
    return m.long[m.turn : m.turn + 2] + 1


INSTRUCTIONS = {
    "add": lambda x, y, n, m: x.float() + F.pad(flat(y), (0, 1))[:1],
    "multiply": lambda x, y, n, m: x.float() * 1.25,
    "relu": lambda x, y, n, m: x.float().relu(),
    "tanh": lambda x, y, n, m: x.float().tanh(),
    "view": lambda x, y, n, m: x.reshape(-1),
    "some": lambda x, y, n, m: x.reshape(-1)[: 1 + n],
    "half": lambda x, y, n, m: x.half(),
    "there and back": lambda x, y, n, m: x.half().float(),
    "elsewhere": elsewhere_and_back,
    "write a row": write_row,
    "state": lambda x, y, n, m: m.state[n % 3],
    "row of state": lambda x, y, n, m: m.state[n % 3][n % 4],
    "part of state": lambda x, y, n, m: m.state[0].view(-1)[2:6],
    "write state": write_state,
    "copy state": copy_state,
    "draw": lambda x, y, n, m: torch.rand(3, 4),
    "drop": lambda x, y, n, m: F.dropout(x.float(), 0.5),
    "a number that changes": lambda x, y, n, m: x.float() * (1.0 + m.turn // 2),
    "one in place": lambda x, y, n, m: x.float().clone().add_(1.0, alpha=m.turn),
    "cut": lambda x, y, n, m: m.data[m.turn * 3 : m.turn * 3 + 4],
    "write a part": write_part,
    "add up": lambda x, y, n, m: flat(x).cumsum(0),
    "sum": lambda x, y, n, m: x.float().sum(),
    "nothing": lambda x, y, n, m: flat(x)[:0],
    "strided": lambda x, y, n, m: F.pad(flat(x), (0, 2)).as_strided((2,), (1,), 0),
    "join": lambda x, y, n, m: torch.cat([flat(x), flat(y)])[:40],
    "expand": lambda x, y, n, m: x.float().reshape(1, -1).expand(2, -1),
    "new": lambda x, y, n, m: torch.ones(3, 4) * n,
}


class Machine:
    """Memory from outside, and a program that works on it."""

    def __init__(self, program, keep):
        self.program, self.keep = program, keep
        generator = torch.Generator().manual_seed(1)
        self.state = [torch.randn(4, 3, generator=generator) for _ in range(3)]
        self.data = torch.randn(24, 2, generator=generator)
        self.long = torch.randn(16, 3, generator=generator)
        self.turn = 0

    def run(self, *batch):
        values = list(batch)
        for name, first, second, number in self.program:
            x, y = values[first % len(values)], values[second % len(values)]
            values.append(INSTRUCTIONS[name](x, y, number, self))
        return [values[at % len(values)] for at in self.keep]


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_a_random_program(seed, monkeypatch):
    dice = random.Random(seed)
    monkeypatch.setattr(capturable_segments, "LEAST_KERNELS", dice.choice([1, 2, 4]))
    program = [
        (dice.choice(list(INSTRUCTIONS)), *(dice.randrange(100) for _ in range(2)), dice.randrange(12))
        for _ in range(dice.randint(4, 20))
    ]
    keep = [dice.randrange(100) for _ in range(dice.randint(1, 3))]
    captures = Captures()
    if dice.random() < 0.4:
        captures.forbidden.add(dice.choice(["aten.tanh.default", "aten.add.Tensor", "aten.relu.default"]))
    lazyviz.register_backend("random", CudaGraphsBackend(captures))
    machines = eager, lazily = Machine(program, keep), Machine(program, keep)
    moved = dice.random() < 0.2
    states = [torch.Generator().manual_seed(7).get_state()] * 2
    results = []
    try:
        for turn in range(RUNS):
            generator = torch.Generator().manual_seed(turn)
            batch = torch.randn(3, 4, generator=generator), torch.randn(5, generator=generator)
            for machine in machines:
                machine.turn = turn
                if moved and turn == 3:
                    machine.state[0] = machine.state[0].clone()
            torch.set_rng_state(states[0])
            expected = eager.run(*(each.clone() for each in batch))
            states[0] = torch.get_rng_state()
            torch.set_rng_state(states[1])
            with lazyviz.lazy(backend="random") as graph:
                got = lazily.run(*(each.clone() for each in batch))
            graph.evaluate()
            states[1] = torch.get_rng_state()
            assert torch.equal(*states)
            results.append((expected, got))
            for theirs, mine in results:  # also of earlier turns: nothing is overwritten
                for one, other in zip(theirs, mine, strict=True):
                    assert one.shape == other.shape and one.stride() == other.stride()
                    assert torch.equal(one, other)
            for one, other in zip(eager.state, lazily.state, strict=True):
                assert torch.equal(one, other)
            assert torch.equal(eager.long, lazily.long)
    finally:
        del backend_registry._backends["random"]
        lazyviz.session.lazy_graph.reset()
