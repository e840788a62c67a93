"""A training step that is interrupted anywhere and resumed is bit-equal to an uninterrupted one.

``--all`` tries every kernel of the first step in each way to run it, and every third one of the others, and
writes docs/faults.md with ``--fault-table=FILE``; without it a few points of each are tried.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import lazyviz
from lazyviz.execute.compiler import single_segment_runs

from .support.fault_table import KINDS, Row, Table
from .support.faulty_kernels import (
    ThreadSwitch,
    another_signal,
    error,
    error_after_it,
    interrupt,
    out_of_memory,
)
from .support.interrupted_training_steps import STEPS, WAYS, Result, Trial, signals_raise

AFTER, SWITCH, BETWEEN = "error after it wrote", "thread switch", "exception from a thread"
FAULTS: dict[str, Callable[[], Any]] = {
    "error of a kernel": lambda: error,
    AFTER: lambda: error_after_it,
    "out of memory": lambda: out_of_memory,
    "Ctrl-C": lambda: interrupt,
    "another signal": lambda: another_signal,
    SWITCH: ThreadSwitch,
    BETWEEN: lambda: None,
}
FAILED = "error of a kernel", AFTER, "out of memory"
FIRST, LAYER_NORM, SMALL = "perceptron", "perceptron, layer norm", "perceptron, one layer"
COMPILED = SMALL, "inductor"  # which calls few kernels of ours, and takes long to compile
FEW = 4  # points that are tried without --all
MOST_BETWEEN = 1000  # of the first step, in steps with several; else a third of it
SWITCHES = 10  # in a step


def rows() -> list[Row]:
    """The steps in the ways that they are run in: batch norm's statistics are over the whole batch."""
    ways = [way for name, way in WAYS.items() if name != "inductor"]
    found = [(LAYER_NORM if way.batch else FIRST, way.name) for way in ways]
    others = [name for name in STEPS if name not in (FIRST, LAYER_NORM, SMALL)]
    found += [(step, way.name) for step in others for way in ways if not way.batch]
    return [*found, COMPILED]


SAMPLE = (
    *[row for row in rows() if row[0] in (FIRST, LAYER_NORM)],
    ("attention", "replay, C++"),
    ("LSTM", "sync points"),
    ("perceptron, AdamW over lists", "op by op"),
    ("perceptron, fused AdamW", "replay, Python"),
    COMPILED,
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "trial" in metafunc.fixturenames:
        chosen = rows() if metafunc.config.getoption("--all") else SAMPLE
        ids = ["-".join(row) for row in chosen]
        metafunc.parametrize("trial", chosen, ids=ids, indirect=True, scope="module")


@pytest.fixture(scope="module")
def trial(request: pytest.FixtureRequest) -> Iterator[Trial]:
    step, way = request.param
    made = Trial(WAYS[way], step)
    yield made
    made.close()


def points(trial: Trial, kind: str, everything: bool, chance: random.Random) -> list[int]:
    """The points of that kind to be tried, in ascending order."""
    found = range(trial.points() if kind == BETWEEN else trial.count(FAULTS[kind]()))
    first = trial.step.name in (FIRST, LAYER_NORM, SMALL)
    most = len(found) if first else -(-len(found) // 3)
    if kind == BETWEEN:
        most = MOST_BETWEEN if first and trial.way.together > 1 else MOST_BETWEEN // 3
    return sorted(chance.sample(found, min(len(found), most if everything else FEW)))


def plans(
    trial: Trial, kind: str, everything: bool, chance: random.Random
) -> Iterator[list[tuple[Any, Any]]]:
    """For each step the faults in it: after how many calls, and which."""
    chosen = points(trial, kind, everything, chance)
    together = trial.way.together if everything else FEW
    steps = -(-len(chosen) // (SWITCHES if kind == SWITCH else together))
    for at in (chosen[start::steps] for start in range(steps)):
        if kind == SWITCH:  # which does not stop the step
            yield [(frozenset(at), ThreadSwitch())]
        else:
            again = kind in FAILED  # the kernel that has failed is called once more
            gaps = [at[0], *[after - before - (not again) for before, after in itertools.pairwise(at)]]
            yield [(gap, FAULTS[kind]()) for gap in gaps]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one that came in a finalizer
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_interrupted_and_resumed_is_the_step(trial, kind, request, table):
    row = trial.step.name, trial.way.name
    counts: Counter[str] = Counter()
    problems = []
    chance = random.Random(f"{row} {kind}")
    try:
        with signals_raise():
            for faults in plans(trial, kind, request.config.getoption("--all"), chance):
                try:
                    counts["points"] += trial.run(faults)
                except Result as result:
                    counts["points"] += len(faults)
                    counts[result.kind] += 1
                    if result.kind == "refused":
                        continue
                    problems.append(f"{[at for at, _ in faults]}: {result}")
                    lazyviz.reset()
    finally:
        table.kernels[row], table.cells[row, kind] = trial.total, counts
        table.write()
    assert not problems


def test_the_table_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "faults.md"
    written = Table(file, rows())
    written.kernels["LSTM", "op by op"] = 1234
    written.cells[("LSTM", "op by op"), "Ctrl-C"] = Counter(points=2000, lost=1, wrong=12)
    written.cells[("LSTM", "op by op"), SWITCH] = Counter(points=7)
    written.cells[COMPILED, "Ctrl-C"] = Counter(points=1, refused=1)
    written.kernels[COMPILED] = 5
    written.blocks["empty block", "Ctrl-C at a line"] = 1000
    written.write()
    read = Table(file, rows())
    assert (read.kernels, read.cells, read.blocks) == (written.kernels, written.cells, written.blocks)
    assert "3,008 points: 1 lost, 12 wrong, 0 left behind, 1 refused" in read.text()


@pytest.mark.slow
def test_a_draw_that_is_made_again_in_vain_is_made_once_more_from_the_same_state():
    trial = Trial(WAYS["recompute"], FIRST)
    try:
        with signals_raise():
            for at in range(
                trial.total // 4, trial.total // 2
            ):  # kernels of the groups that run again are there
                trial.run([(at, error)])
    finally:
        trial.close()


@pytest.mark.slow
def test_compiled_code_that_has_run_and_was_not_noted_never_runs_again(monkeypatch):
    trial = Trial(WAYS["inductor"], SMALL)

    def stopped(step: Callable[[], object]) -> None:
        raise KeyboardInterrupt

    try:
        with trial._block() as graph:
            trial.step.take(*trial._begun)
        with monkeypatch.context() as patch:
            patch.setattr(single_segment_runs, "complete", stopped)
            with pytest.raises(RuntimeError, match="stopped midway"):
                graph.evaluate()
        with pytest.raises(RuntimeError, match="stopped midway"):
            graph.evaluate()
    finally:
        trial.close()
