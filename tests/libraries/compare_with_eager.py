"""Runs a program in eager mode and in a lazy block from one seed, and reports differences."""

from __future__ import annotations

import gc
import random
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils._pytree import tree_map

import lazyviz

from ..bit_equality import difference
from .catalog import Program


@dataclass
class Outcome:
    """What came of one program."""

    program: Program
    differences: list[str] = field(default_factory=list)
    unstable: str | None = None  # how eager differs from itself
    syncs: Counter[str] = field(default_factory=Counter)  # cause -> times, in the last lazy run
    places: dict[str, Counter[str]] = field(default_factory=dict)  # cause -> the lines that read
    ops: int = 0
    eager_seconds: list[float] = field(default_factory=list)
    lazy_seconds: list[float] = field(default_factory=list)  # with evaluation; the first ones recorded anew

    @property
    def first(self) -> float:
        """Time of the first lazy run over eager's."""
        return self.lazy_seconds[0] / statistics.median(self.eager_seconds)

    @property
    def again(self) -> float:
        """Time of a lazy run after the first over eager's."""
        return statistics.median(self.lazy_seconds[1:]) / statistics.median(self.eager_seconds)


@dataclass
class Run:
    """One run of a program: what it left, and how long it took."""

    left: Any
    seconds: float
    graph: lazyviz.LazyGraph | None = None


def compare(program: Program, rounds: int = 2) -> Outcome:
    """Run a program eagerly and lazily in turn, ``rounds`` times each, after an eager run to warm up."""
    outcome = Outcome(program)
    expected = eagerly(program).left
    for _ in range(rounds):
        again = eagerly(program)
        outcome.eager_seconds.append(again.seconds)
        outcome.unstable = outcome.unstable or difference(expected, again.left)
        try:
            actual = lazily(program)
        except Exception as error:
            outcome.differences.append(f"{type(error).__name__}: {error}")
            return outcome
        outcome.lazy_seconds.append(actual.seconds)
        found = named_difference(expected, actual.left)
        if found is not None:
            outcome.differences.append(found)
        assert actual.graph is not None
        note_syncs(outcome, actual.graph)
    return outcome


def eagerly(program: Program) -> Run:
    """The program as it is."""
    with fresh():
        begin = time.process_time()
        result = program.run()
        seconds = time.process_time() - begin
        return Run(left_behind(result), seconds)


def lazily(program: Program) -> Run:
    """The same in a block, and everything evaluated."""
    with fresh():
        begin = time.process_time()
        with lazyviz.lazy() as graph:
            result = program.run()
        graph.evaluate()
        seconds = time.process_time() - begin
        assert graph.pending == 0
        return Run(left_behind(result), seconds, graph)


@contextmanager
def fresh() -> Iterator[None]:
    """One seed for every generator, nothing to collect, and no warnings of the library's own."""
    gc.collect()
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def left_behind(result: Any) -> dict[str, Any]:
    """All that a user can see afterwards: tensors are copied, modules and optimizers taken apart."""
    return {
        "results": tree_map(_taken_apart, result),
        "torch's generator": torch.get_rng_state(),
        "numpy's generator": torch.tensor(numpy.random.get_state()[1].tolist()),
        "python's generator": random.getstate()[1],
    }


def _taken_apart(leaf: Any) -> Any:
    if isinstance(leaf, nn.Module):
        return {
            "state": {name: _taken_apart(value) for name, value in leaf.state_dict().items()},
            "gradients": {name: _taken_apart(value.grad) for name, value in leaf.named_parameters()},
            "classes": {name: type(value).__name__ for name, value in leaf.named_parameters()},
            "training": leaf.training,
        }
    if isinstance(leaf, torch.optim.Optimizer):
        return tree_map(_taken_apart, leaf.state_dict())
    if isinstance(leaf, torch.Tensor):
        return leaf
    if isinstance(leaf, numpy.ndarray):
        return torch.from_numpy(leaf.copy())
    return leaf


def named_difference(expected: dict[str, Any], actual: dict[str, Any]) -> str | None:
    """The first part that differs, with its name."""
    for name, value in expected.items():
        found = difference(value, actual[name])
        if found is not None:
            return f"{name}: {found}"
    return None


def note_syncs(outcome: Outcome, graph: lazyviz.LazyGraph) -> None:
    """Keep the sync points of a run, with how often each came, and the lines that asked."""
    outcome.ops = len(graph.nodes)
    outcome.syncs = Counter(point.cause for point in graph.sync_points)
    outcome.places = {}
    for point in graph.sync_points:
        line = point.reader or point.source
        outcome.places.setdefault(point.cause, Counter())[line.text.strip() if line else "?"] += 1
