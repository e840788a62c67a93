"""Selects the libraries of the day, and prints the table of results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ..case_rotation import day_of
from . import catalog
from .results_table import Table

_table = pytest.StashKey[Table]()


def wanted(config: pytest.Config) -> list[str]:
    """The libraries to run: all of them with ``--all``, else those of the day."""
    if config.getoption("--all"):
        return list(catalog.LIBRARIES)
    return catalog.due(day_of(config))


def pytest_report_header(config: pytest.Config) -> str:
    which = "all" if config.getoption("--all") else f"those of {day_of(config)}"
    return f"libraries, {which}: {', '.join(wanted(config))}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "program" not in metafunc.fixturenames:
        return
    cases = []
    for library in wanted(metafunc.config):
        absent = catalog.missing(library)
        if absent:
            reason = f"not installed: {', '.join(absent)} (pip install 'lazyviz[libraries]')"
            cases.append(pytest.param(None, id=library, marks=pytest.mark.skip(reason=reason)))
        else:
            cases += [
                pytest.param(program, id=f"{library}-{program.name}") for program in catalog.programs(library)
            ]
    metafunc.parametrize("program", cases)


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> Table:
    """Where outcomes are noted."""
    return request.config.stash.setdefault(_table, Table())


@pytest.fixture(autouse=True)
def one_thread():
    """The programs are small: threads cost more than they give, and other processes have the other cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    table = config.stash.get(_table, None)
    if table is None:
        return
    terminalreporter.section("programs of other libraries, lazy beside eager")
    terminalreporter.write_line(table.text())
    named = config.getoption("--library-table")
    if named:
        Path(named).write_text(table.page())
