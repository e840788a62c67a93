"""Unmodified programs of other libraries have the same effects in a lazy block as in eager mode."""

from __future__ import annotations

import datetime

import pytest

from . import catalog
from .compare_with_eager import compare

pytestmark = pytest.mark.filterwarnings("ignore")  # what the libraries warn of


def test_a_program_ends_with_the_bits_of_eager(program, table, pytestconfig):
    outcome = compare(program)
    table.add(outcome)
    assert not outcome.differences, outcome.differences[0]
    assert outcome.unstable is None, f"eager differs from itself: {outcome.unstable}"
    assert set(outcome.syncs) <= set(program.syncs), f"sync points without a reason: {outcome.places}"
    if pytestconfig.getoption("--all"):
        assert set(outcome.syncs) == set(program.syncs), (
            "a reason is given for a sync point that is not there"
        )


def test_every_library_has_its_turn_within_a_week():
    first = datetime.date(2026, 2, 25)
    seen = [catalog.due(first + datetime.timedelta(day)) for day in range(catalog.DAYS)]
    assert {library for libraries in seen for library in libraries} == set(catalog.LIBRARIES)
    assert all(set(catalog.ALWAYS) < set(libraries) for libraries in seen)
