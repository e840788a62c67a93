"""The scoreboard: a table of counts at the end of every run that touches a conformance suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from .scoreboard import Scoreboard

_board = pytest.StashKey[Scoreboard]()


def _scoreboard(config: pytest.Config) -> Scoreboard:
    return config.stash.setdefault(_board, Scoreboard())


@pytest.fixture(scope="session")
def scoreboard(request: pytest.FixtureRequest) -> Scoreboard:
    """Where conformance tests note what ran: ``scoreboard.add(suite, entry, outcome, samples, syncs)``."""
    return _scoreboard(request.config)


@pytest.fixture(scope="session")
def everything(request: pytest.FixtureRequest) -> bool:
    """Whether all samples are wanted (``make test-all``), not only the representative ones."""
    return bool(request.config.getoption("--all"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    board = _scoreboard(config)
    if not board.suites:
        return
    which = "all samples" if config.getoption("--all") else "representative samples"
    terminalreporter.section(f"conformance with eager PyTorch, {which}")
    terminalreporter.write_line(board.text())
    for path in config.getoption("--scores"):
        board.write(Path(path))
