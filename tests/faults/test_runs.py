"""A training step that is interrupted anywhere and resumed is the step that was not, to the last bit.

``--all`` tries every kernel of each step in each way to run it, and writes docs/faults.md with
``--fault-table=FILE``; without it a few points of each are tried.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lazyviz

from .faulty_kernels import ThreadSwitch, another_signal, error, interrupt, out_of_memory
from .steps import WAYS, Result, Trial, signals_raise

KINDS: dict[str, Callable[[], Any]] = {
    "error of a kernel": lambda: error,
    "out of memory": lambda: out_of_memory,
    "Ctrl-C": lambda: interrupt,
    "another signal": lambda: another_signal,
    "thread switch": ThreadSwitch,
    "exception from a thread": lambda: None,
}
BETWEEN = "exception from a thread"
FEW, TOGETHER = 4, 5  # points that are tried without --all; faults in one step with it
MOST_BETWEEN = 600
HEADING = """# Faults

Made by `pytest tests/faults/test_runs.py --all --fault-table=docs/faults.md`. A training step of about
{kernels} kernels (dropout, batch norm, gradient clipping, AdamW) is run with something happening in a kernel,
or between two ops, and resumed. Its parameters, buffers, gradients, the optimizer's state and step counters,
the generator and the numbers of the next draw are compared, bit by bit, with those of the step that was not
interrupted (of a split step with those of one that was split; where memory ran out in a piece, pieces are
others, and numbers are compared up to rounding). A point is a fault that came; a step has up to five.

*error of a kernel*, *out of memory*: raised in place of a kernel. *Ctrl-C*, *another signal*: arrive while a
kernel runs, and their handlers raise. *thread switch*: another thread evaluates everything meanwhile.
*exception from a thread*: as by `PyThreadState_SetAsyncExc`, at the entry of a function of lazyviz or after
one of C that it has called; a sample of these points. *lost*: the step cannot be resumed; *wrong*: bits
differ, as where an op has run twice; *left behind*: a state, a handler or a setting is not what it was.

| way to run | fault | points tried | lost | wrong | left behind |
|---|---|---:|---:|---:|---:|
"""


@pytest.fixture(scope="module")
def table() -> dict[tuple[str, str], Counter[str]]:
    """What came of the points, by way and kind."""
    return {}


def write(found: dict[tuple[str, str], Counter[str]], file: Path) -> None:
    columns = "points", "lost", "wrong", "left behind"
    rows = [
        f"| {way} | {kind} | " + " | ".join(f"{counts[name]:,}" for name in columns) + " |"
        for (way, kind), counts in found.items()
    ]
    total: Counter[str] = sum(found.values(), Counter())
    rows.append("| **all** | | " + " | ".join(f"**{total[name]:,}**" for name in columns) + " |")
    file.write_text(HEADING.format(kernels=total["kernels"] // max(len(found), 1)) + "\n".join(rows) + "\n")


def plans(total: int, everything: bool, chance: random.Random) -> list[list[int]]:
    """The points to be tried, several in a step, in ascending order."""
    points = list(range(total)) if everything else sorted(chance.sample(range(total), FEW))
    if not everything:
        return [points]
    stride = -(-len(points) // TOGETHER)
    return [points[start::stride] for start in range(stride)]


@pytest.fixture(scope="module", params=[name for name in WAYS if name != "inductor"])
def trial(request: pytest.FixtureRequest) -> Iterator[Trial]:
    made = Trial(WAYS[request.param])
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one that came in a finalizer
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_interrupted_and_resumed_is_the_step(trial, kind, request, table):
    everything, way = request.config.getoption("--all"), trial.way.name
    chance = random.Random(f"{way} {kind}")
    counts = table[way, kind] = Counter(kernels=trial.total)
    problems = []
    try:
        with signals_raise():
            total = trial.points() if kind == BETWEEN else trial.total
            chosen = plans(total, everything, chance)
            if kind == "thread switch":  # which does not stop the step
                chosen = [[at] for at in itertools.chain.from_iterable(chosen)]
            if kind == BETWEEN:
                chosen = chance.sample(chosen, min(len(chosen), MOST_BETWEEN // TOGETHER))
            for at in chosen:
                gaps = [at[0], *[max(later - earlier - 1, 0) for earlier, later in itertools.pairwise(at)]]
                try:
                    counts["points"] += trial.run([(gap, KINDS[kind]()) for gap in gaps])
                except Result as result:
                    counts["points"] += len(at)
                    counts[result.kind] += 1
                    problems.append(f"{at}: {result}")
                    lazyviz.reset()
    finally:
        if file := request.config.getoption("--fault-table"):
            write(table, Path(file))
    assert not problems
