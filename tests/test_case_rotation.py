"""Case rotation: which cases run on a day, and that every case runs within a few days."""

from __future__ import annotations

import datetime
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from . import case_rotation

ROOT = Path(__file__).parent.parent
FIRST = datetime.date(2026, 11, 28).toordinal()


class Item:
    """What a collected test says about itself."""

    def __init__(self, name: str, mark: str | None = None) -> None:
        self.nodeid, self.mark = f"tests/test_some.py::{name}", mark
        if name.endswith("]"):
            self.callspec = object()

    def get_closest_marker(self, name: str) -> str | None:
        return self.mark if self.mark == name else None


FAST = Item("test_fast")
SLOW = [Item(f"test_slow_{number}", "slow") for number in range(24)]
MANY = [Item(f"test_many[{number}]", "slow" if number == 3 else None) for number in range(13)]
TWO = [Item(f"TestOfClass::test_two[{number}]") for number in range(2)]
ONE = [Item("TestOfClass::test_one[0]")]
ITEMS = [FAST, *SLOW, *MANY, *TWO, *ONE]


def test_after_all_turns_every_test_has_run():
    days = [case_rotation.due(ITEMS, FIRST + day) for day in range(case_rotation.TURNS)]
    assert {item for day in days for item in day} == set(ITEMS)
    for item in [*SLOW, *MANY]:
        assert sum(item in day for day in days) == 1


def test_every_day_has_a_case_of_each_test_and_all_that_is_fast():
    for day in range(FIRST, FIRST + 6):
        due = case_rotation.due(ITEMS, day)
        assert len(due) == len(set(due))
        assert FAST in due
        assert [sum(item in due for item in cases) for cases in (TWO, ONE)] == [1, 1]
        assert 1 <= sum(item in due for item in MANY) <= 3


@pytest.mark.parametrize("every_test", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_every_day_has_one_of_a_few_tests_that_take_long(count, every_test):
    few = SLOW[:count]
    turns = case_rotation.EVERY_TEST_TURNS if every_test else case_rotation.TURNS
    days = [case_rotation.due(few, FIRST + day, every_test) for day in range(turns)]
    assert all(days)
    assert {item for day in days for item in day} == set(few)


def test_days_are_of_the_tests_that_a_marker_leaves():
    """``make test`` failed on a day on which none of the tests that take times had its turn."""
    command = [*(sys.executable, "-m", "pytest", "--collect-only", "-q", "--in-turn", "--day=2026-11-28")]
    command += ["-m", "takes_times", "tests/test_startup.py"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300).returncode == 0


def test_fast_tests_take_turns_where_it_is_asked_for():
    turns = range(case_rotation.EVERY_TEST_TURNS)
    days = [case_rotation.due(ITEMS, FIRST + day, every_test=True) for day in turns]
    assert {item for day in days for item in day} == set(ITEMS)
    assert all(len(day) < len(ITEMS) / 4 for day in days)


def test_all_folders_of_unit_tests_are_repeated_in_python_alone(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    check = importlib.import_module("run_checks")
    [alone] = [each for each in check.CHECKS if each.env == check.PYTHON_ALONE]
    ignored = {word.removeprefix("--ignore=") for word in alone.command if word.startswith("--ignore=")}
    assert "tests" in alone.command and "slow" not in " ".join(alone.command)
    tested = {f"tests/{path.name}" for path in (ROOT / "lazyviz").iterdir()}
    assert ignored and not ignored & tested
    assert all((ROOT / path).exists() for path in ignored)
