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

# One turn of something: seconds by name.  A turn may take several times (record, run).
Turn = Callable[[], Mapping[str, float]]
Times = Mapping[str, Sequence[float]]


def settle() -> None:
    """Nothing of what went before is left to be done: garbage, kernels under way."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def now() -> float:
    """The time when all kernels launched so far have run."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(name: str, function: Callable[[], Any]) -> Turn:
    """A turn that calls ``function`` and takes its time; what it returns is dropped after the clock."""

    def turn() -> dict[str, float]:
        settle()
        begin = time.perf_counter()
        result = function()
        seconds = now() - begin
        del result
        return {name: seconds}

    return turn


def interleaved(turns: Sequence[Turn], rounds: int, *, warm_up: bool = True) -> dict[str, list[float]]:
    """Rounds of all ``turns``, each round beginning with another of them.

    With ``warm_up`` each runs once more before it is timed, so that none pays for what the one before has
    put in its place; what takes seconds does not need that.  A turn that begins with :func:`settle` finds the
    processor's caches emptied by the collector, whichever it is.
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
    """The turn after another one that is not timed: for rounds without a warm-up of all."""

    def second() -> Mapping[str, float]:
        turn()
        return turn()

    return second


def ratio(times: Times, over: str, under: str) -> float:
    """The median over the rounds of one time by another."""
    return statistics.median(a / b for a, b in zip(times[over], times[under]))


def medians(times: Times) -> dict[str, float]:
    """The median of each, in seconds, for a figure's detail."""
    return {f"{name}, s": statistics.median(values) for name, values in times.items()}


class Lazily(NamedTuple):
    """Turns of one program under lazyviz: ``turn``, what the last one left, and how many ops it had."""

    turn: Turn
    reports: list[lazyviz.session.lazy_graph.Report]

    @property
    def ops(self) -> int:
        return self.reports[-1].ops_run


def in_python(turn: Turn) -> Turn:
    """The turn with the recorder in Python, also where the compiled one is there."""

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

    Recording is the whole ``with`` block, entering and leaving included; what the step returns lives until
    the clock has stopped, as a user's variables do.
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
