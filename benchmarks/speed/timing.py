"""Timing of alternatives in turns, so that drift of the machine affects all of them equally."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

import lazyviz
from lazyviz.record import native_recorder

# One timed call: seconds by name.  A turn may measure several times (record, run).
Turn = Callable[[], Mapping[str, float]]
Times = Mapping[str, Sequence[float]]


def settle() -> None:
    """Finish earlier work: collect garbage, and wait for running kernels."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def now() -> float:
    """The time after all kernels launched so far have run."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(name: str, function: Callable[[], Any]) -> Turn:
    """A turn that times ``function``; its result is freed after the measurement."""

    def turn() -> dict[str, float]:
        settle()
        begin = time.perf_counter()
        result = function()
        seconds = now() - begin
        del result
        return {name: seconds}

    return turn


def interleaved(turns: Sequence[Turn], rounds: int, *, warm_up: bool = True) -> dict[str, list[float]]:
    """Run rounds of all ``turns``, each round beginning with another of them.

    With ``warm_up``, each turn runs once more before it is timed, so that it does not pay for state evicted
    by the previous one; turns that take seconds do not need that.  Turns that begin with :func:`settle` all
    start with processor caches evicted by the garbage collector.
    """
    times: dict[str, list[float]] = {}
    for number in range(rounds):
        first = number % len(turns)
        for turn in [*turns[first:], *turns[:first]]:
            if warm_up:
                turn()
            for name, seconds in turn().items():
                times.setdefault(name, []).append(seconds)
    return times


def warm(turn: Turn) -> Turn:
    """``turn`` preceded by an untimed one, for rounds without a general warm-up."""

    def second() -> Mapping[str, float]:
        turn()
        return turn()

    return second


def ratio(times: Times, over: str, under: str) -> float:
    """The median over the rounds of the ratio of two times."""
    return statistics.median(a / b for a, b in zip(times[over], times[under]))


def medians(times: Times) -> dict[str, float]:
    """The median of each time in seconds, for a figure's detail."""
    return {f"{name}, s": statistics.median(values) for name, values in times.items()}


class Lazily(NamedTuple):
    """Turns of one program with lazyviz: ``turn``, the report of the last one, and its number of ops."""

    turn: Turn
    reports: list[lazyviz.session.lazy_graph.Report]

    @property
    def ops(self) -> int:
        return self.reports[-1].ops_run


def in_python(turn: Turn) -> Turn:
    """``turn`` with the recorder in Python, even if the compiled one is available."""

    def slower() -> Mapping[str, float]:
        before = native_recorder.active
        native_recorder.use(False)
        try:
            return turn()
        finally:
            native_recorder.use(before)

    return slower


def lazily(step: Callable[[], Any], *, backend: str = "eager", name: str = "lazyviz") -> Lazily:
    """A turn that records ``step`` and runs it: times ``record``, ``run``, ``total``, each after ``name``.

    Recording is the whole ``with`` block, including enter and exit; the result of the step stays alive until
    the end of the measurement, like a user's variables.
    """
    reports: list[lazyviz.session.lazy_graph.Report] = []

    def turn() -> dict[str, float]:
        settle()
        begin = time.perf_counter()
        with lazyviz.lazy(backend=backend) as graph:
            result = step()
        recorded = time.perf_counter()
        report = graph.evaluate()
        done = now()
        reports[:] = [report]
        del result, graph
        return {
            f"{name} record": recorded - begin,
            f"{name} run": done - recorded,
            f"{name} total": done - begin,
        }

    return Lazily(turn, reports)
