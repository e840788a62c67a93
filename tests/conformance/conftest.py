"""The scoreboard: a table of counts at the end of every run that touches a conformance suite."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch.testing._internal import common_utils
from torch.testing._internal.opinfo import core
from torch.testing._internal.opinfo.core import OpInfo

from .compared_runs import Trials
from .entries import name_of
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


@pytest.fixture
def judge(scoreboard, everything):
    """Note what became of an entry, and fail where it is not what it should be."""

    def judge(
        suite: str, entry: OpInfo, trials: Trials, *listed: Mapping[str, str], strict: bool = True
    ) -> None:
        name = name_of(entry)
        scoreboard.add(suite, name, trials.outcome, trials.samples, trials.syncs)
        assert not trials.differences, "\n".join(trials.differences[:5])
        assert trials.uninitialized or not trials.unstable, "eager differs from itself"
        is_listed = any(name in reasons for reasons in listed)
        assert is_listed or not trials.syncs, (
            f"sync points that excepted_entries.py does not list: {trials.syncs}"
        )
        if everything and strict and name in listed[-1]:
            assert trials.syncs, "excepted_entries.py lists it, but it has no sync point"

    return judge


@pytest.fixture(autouse=True)
def one_thread():
    """Samples are small: threads cost more than they give, and other processes have the other cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def untracked_samples(monkeypatch):
    """Sample generators look for a unittest on the stack, which takes most of the time of a sweep."""
    for module in (common_utils, core):
        monkeypatch.setattr(module, "extract_test_fn", lambda: None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    board = _scoreboard(config)
    if not board.suites:
        return
    which = "all samples" if config.getoption("--all") else "representative samples"
    terminalreporter.section(f"conformance with eager PyTorch, {which}")
    terminalreporter.write_line(board.text())
    for path in config.getoption("--scores"):
        board.write(Path(path))
