"""Every test starts and ends with no pending ops and an unmodified PyTorch."""

from __future__ import annotations

import gc
import signal

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import lazyviz
from lazyviz.plan.runtime import cpu_op_times
from lazyviz.session import lazy_graph

from . import case_rotation

# Modules that are not tests, but assert for them, say which values differ, too.
ASSERT_FOR_TESTS = (
    *("lazy_equals_eager", "programs", "splits"),
    *("execute.compiled_training", "libraries.compare_with_eager", "plan.remedy_checks"),
)
pytest.register_assert_rewrite(*(f"tests.{module}" for module in ASSERT_FOR_TESTS))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lazyviz")
    group.addoption("--all", action="store_true", help="every sample and case, not only representative ones")
    group.addoption(
        "--scores", action="append", default=[], metavar="FILE", help="write the score table (.md or .json)"
    )
    group.addoption(
        "--daily",
        action="store_true",
        help="no slow tests; conformance tests whose turn it is",
    )
    group.addoption(
        "--in-turn", action="store_true", help="of the cases of a test, and of slow tests, an eighth each day"
    )
    group.addoption(
        "--every-test-in-turn",
        action="store_true",
        help="one in 24 of all tests and their cases each day",
    )
    group.addoption("--day", metavar="DATE", help="what is run on that day (YYYY-MM-DD), not today")
    group.addoption("--fault-table", metavar="FILE", help="write the table of faults (.md)")
    group.addoption("--library-table", metavar="FILE", help="write the table of libraries (.md)")


@pytest.hookimpl(trylast=True)  # the days of what ``-m`` and ``-k`` leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--daily``: what takes seconds is left out, and each conformance test has its day.  With
    ``--in-turn``: each case of a test and each test that takes long has its day.  With
    ``--every-test-in-turn``: each test.
    """
    day, kept = case_rotation.day_of(config).toordinal(), set(items)
    if config.getoption("--daily"):
        kept &= set(case_rotation.for_daily_use(items, day))
    every_test = config.getoption("--every-test-in-turn")
    if every_test or config.getoption("--in-turn"):
        kept &= set(case_rotation.due(items, day, every_test))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture(autouse=True, scope="module")
def objects_of_other_tests():
    """The collector need not look at what thousands of other tests have left."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def interrupts():
    """A shell starts what runs in its background with SIGINT ignored, which Python leaves so."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def new_shell():
    """A shell of IPython without colors and history, in which the extension is not loaded."""
    InteractiveShell.clear_instance()
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    shell = InteractiveShell.instance(config=config)
    yield shell
    lazyviz.unload_ipython_extension(shell)
    lazy_graph.reset()
    InteractiveShell.clear_instance()


@pytest.fixture(autouse=True, scope="session")
def no_calibration_of_this_machine():
    """Plans would project times, or say that they are unknown, only where the user has calibrated the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_op_times, "_processor", lambda: "the processor of these tests")
        yield
        assert not cpu_op_times.cache_file().exists(), (
            "a test has calibrated this machine in the user's cache"
        )


class NoStack:
    """In place of ``traceback``, for modules that keep the stack of each call."""

    @staticmethod
    def format_stack() -> list[str]:
        return []


@pytest.fixture(autouse=True, scope="session")
def seeds_without_stacks():
    """``torch.manual_seed`` formats the stack for each kind of device that is absent: milliseconds a call."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (torch.cuda, torch.mtia, torch.xpu):
            if hasattr(module, "traceback"):
                patch.setattr(module, "traceback", NoStack)
        yield


@pytest.fixture(autouse=True)
def nothing_pending():
    yield
    lazy_graph.reset()
