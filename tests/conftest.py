"""Every test starts and ends with nothing pending and PyTorch as it was."""

from __future__ import annotations

import signal

import pytest

from lazyviz.session import lazy_graph


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lazyviz")
    group.addoption("--all", action="store_true", help="every sample and case, not only representative ones")
    group.addoption(
        "--scores", action="append", default=[], metavar="FILE", help="write the score table (.md or .json)"
    )
    group.addoption("--day", metavar="DATE", help="the libraries of that day (YYYY-MM-DD), not of today")
    group.addoption("--fault-table", metavar="FILE", help="write the table of faults (.md)")
    group.addoption("--library-table", metavar="FILE", help="write the table of libraries (.md)")


@pytest.fixture(autouse=True, scope="session")
def interrupts():
    """A shell starts what runs in its background with SIGINT ignored, which Python leaves so."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def nothing_pending():
    yield
    lazy_graph.reset()
