"""A hanging test fails: after ten minutes, all threads are shown and the process exits."""

from __future__ import annotations

import faulthandler
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

import lazyviz

from .support.fault_table import Table
from .support.inject_faults import State, is_plain

SECONDS = 600


@pytest.fixture(autouse=True)
def watchdog(request: pytest.FixtureRequest) -> Iterator[None]:
    """``@pytest.mark.slow`` tests have ten times as long, and with ``--all`` all tests sixty times."""
    patience = SECONDS * (10 if request.node.get_closest_marker("slow") else 1)
    patience *= 60 if request.config.getoption("--all") else 1
    faulthandler.dump_traceback_later(patience, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True, scope="module")
def arrays_of_other_tests(objects_of_other_tests):
    """Arrays that were alive when they were frozen may be gone by now, and nothing is to watch them."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture
def state() -> Iterator[State]:
    """What PyTorch was before the test, which it is after it, too."""
    found = State()
    yield found
    lazyviz.sync()
    assert not found.differences()
    assert is_plain()


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> Table:
    """What comes of the points that are tried, which ``--fault-table=FILE`` has written."""
    from .test_injected_faults import rows

    file = request.config.getoption("--fault-table")
    return Table(Path(file) if file else None, rows())
