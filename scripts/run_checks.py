"""Runs every check of `make test`; failures are shown, and the other checks still run.

Two checks run at a time, the longest first, and compute with one thread each.  Checks that measure times come
last, one after another, with PyTorch's own number of threads.  An eighth of the cases of each test runs each
day, unless all are asked for.

.venv/bin/python scripts/run_checks.py [--only lint|documentation | --daily | --every-case | --all]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from named_steps import LOGS, ROOT, StepFailed, relative, run, say
from prepare_venv import find_chromium

AT_A_TIME = 2
# With more, OpenMP threads of two processes on two cores would spin while they wait for each other.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# Hundreds of processes import lazyviz; with this variable set, each would compile all modules to bytecode.
BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}


@dataclass(frozen=True)
class Check:
    """One step: its name, its command (after ``python``), and the `make` targets that include it."""

    title: str
    command: tuple[str, ...]
    lint: bool = False  # a part of `make lint`
    daily: bool = False  # a part of `make check`
    only_all: bool = False  # a step of `make test-all` alone
    alone: bool = False  # it must run without other checks at the same time
    any_threads: bool = False  # depends on the number of threads, so PyTorch's default is used
    in_turn: str = "--in-turn"  # option that runs only a day's share of its cases in `make test`; "": all run
    env_in_turn: dict[str, str] = field(default_factory=dict)  # the same for commands other than pytest
    more: tuple[str, ...] = ()  # arguments of `make test-all`
    env: dict[str, str] = field(default_factory=dict)


DOCUMENTATION = "documentation"
NPM = ("scripts/build_js_with_node.py", "npm", "run", "--silent")
BROWSER, CONFORMANCE, LIBRARIES = "tests/browser", "tests/conformance", "tests/libraries"
PYTEST = ("-m", "pytest")
TESTS = (*PYTEST, "-m", "not takes_times")
# Tests of other things than lazyviz itself, or of more samples of the same.
NOT_UNIT_TESTS = (
    *(BROWSER, CONFORMANCE, LIBRARIES, "tests/docs"),
    *("tests/test_architecture.py", "tests/test_benchmarks.py", "tests/test_packaging.py"),
)
PYTHON_ALONE = {"LAZYVIZ_PURE_PYTHON": "1"}
FOLDERS = ("tests/execute", "tests/session", "tests/faults", "tests/record", "tests/semantics")
LATER_STAGES = ("tests/graph", "tests/plan", "tests/view")
PER_THREAD = ("tests/plan/workspace", "tests/plan/remedies")
# Collecting all 8,000 tests to find these takes longer than some of the checks.
TIMED = tuple(
    sorted(
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "tests").rglob("test_*.py")
        if "takes_times" in file.read_text(encoding="utf-8")
    )
)
EVERYTHING = ("--all", "--scores=docs/conformance.md", "--scores=out/conformance.json")
EVERY_FAULT = ("--all", "--fault-table=docs/faults.md")
EVERY_LIBRARY = ("--all", "--library-table=docs/libraries.md")


# Scratch memory depends on the CPU, so the tests also run with lower instruction sets.
ONE_PROCESSOR = (
    "tests/plan/workspace/test_workspace.py",
    "tests/plan/remedies/test_memory_at_lower_precision.py",
    "tests/plan/remedies/test_remedy_search.py",
    "tests/session/test_split_under_process_limit.py",
)
PROCESSORS = tuple(
    Check(
        f"plans: oneDNN {most or 'all'}, ATen {kernels or 'all'}, threads {threads}",
        ("-m", "pytest", *ONE_PROCESSOR),
        only_all=True,
        env={"OMP_NUM_THREADS": threads}
        | ({"ONEDNN_MAX_CPU_ISA": most} if most else {})
        | ({"ATEN_CPU_CAPABILITY": kernels} if kernels else {}),
    )
    for most in ("", "SSE41", "AVX2", "AVX512_CORE", "AVX512_CORE_BF16")
    for kernels in ("", "default", "avx2", "avx512")
    for threads in ("1", "2")
)

CHECKS = (
    Check("browser tests", (*TESTS, BROWSER)),
    Check(
        "other Python tests",
        (
            *TESTS,
            *(f"--ignore={path}" for path in (BROWSER, CONFORMANCE, LIBRARIES, *FOLDERS, *LATER_STAGES)),
        ),
        daily=True,
        more=("--all",),
    ),
    Check("mypy", ("-m", "mypy"), lint=True, daily=True),
    Check("ruff check", ("-m", "ruff", "check", "."), lint=True, daily=True),
    Check("ruff format", ("-m", "ruff", "format", "--check", "."), lint=True, daily=True),
    Check("eslint", (*NPM, "lint"), lint=True, daily=True),
    Check("tsc", (*NPM, "typecheck"), lint=True, daily=True),
    Check("README's picture", ("scripts/readme_picture.py", "--check"), daily=True),
    Check("warnings of the C++ modules", ("scripts/build_native.py", "--check"), only_all=True),
    Check("tests of faults", (*TESTS, "tests/faults"), daily=True, more=EVERY_FAULT),
    Check(
        "tests of graphs, plans and views",
        (*TESTS, *LATER_STAGES, *(f"--ignore={path}" for path in PER_THREAD)),
        daily=True,
        more=("--all",),
    ),
    Check(
        "tests of what kernels take for each thread",
        (*TESTS, *PER_THREAD),
        daily=True,
        more=("--all",),
        any_threads=True,
    ),
    Check(
        "unit tests in Python alone",
        (*TESTS, "tests", *(f"--ignore={path}" for path in NOT_UNIT_TESTS)),
        # The same tests run with the compiled modules on the same day.
        in_turn="--every-test-in-turn",
        env=PYTHON_ALONE,
    ),
    Check(
        DOCUMENTATION,
        ("-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", "out/docs"),
        env_in_turn={"LAZYVIZ_DOCS_TURNS": "8"},
    ),
    Check("tests of execution", (*TESTS, "tests/execute", "tests/session"), daily=True, more=("--all",)),
    Check("conformance", (*TESTS, CONFORMANCE), daily=True, more=EVERYTHING),
    # The kernel is another process, and nbval's own warnings are irrelevant: only errors in cells count.
    Check("notebooks", (*PYTEST, "--nbval-lax", "-W", "default", "notebooks"), in_turn=""),
    Check("tests of semantics", (*TESTS, "tests/semantics"), daily=True, more=("--all",)),
    Check("tests of recording", (*TESTS, "tests/record"), daily=True, more=("--all",)),
    Check("programs of other libraries", (*TESTS, LIBRARIES), in_turn="", more=EVERY_LIBRARY),
    Check("JavaScript tests", (*NPM, "test"), daily=True),
    *PROCESSORS,
    Check(
        "recording and evaluating with sanitizers", ("scripts/run_sanitizers.py",), only_all=True, alone=True
    ),
    Check(
        "tests that take times",
        (*PYTEST, "-m", "takes_times", *TIMED),
        alone=True,
    ),
)
DAILY = ("--daily", "--in-turn")


def chosen(options: argparse.Namespace) -> list[Check]:
    """The checks of a target."""
    if options.only == "lint":
        return [check for check in CHECKS if check.lint]
    if options.only:
        return [check for check in CHECKS if check.title == options.only]
    if options.daily:
        return [check for check in CHECKS if check.daily]
    return [check for check in CHECKS if options.all or not check.only_all]


def command_of(check: Check, options: argparse.Namespace) -> list[str]:
    """The command of a check: with more samples in `make test-all`, with fewer in `make check`."""
    more = check.more if options.all else ()
    if check.command[: len(PYTEST)] == PYTEST and not options.all:
        if options.daily:
            more = DAILY
        elif check.in_turn and not options.every_case:
            more = (check.in_turn,)
    return [sys.executable, *check.command, *more]


def environment_of(check: Check, options: argparse.Namespace) -> dict[str, str]:
    """The environment variables of a check; a number of threads set by the user is kept."""
    one_thread = not (check.alone or check.any_threads or "OMP_NUM_THREADS" in os.environ)
    in_turn = not (options.all or options.every_case or options.only)
    turns = check.env_in_turn if in_turn else {}
    return {**BYTECODE, **(ONE_THREAD if one_thread else {}), **check.env, **turns}


def main(args: list[str]) -> int:
    """Run the checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["lint", DOCUMENTATION], help="only these checks")
    parser.add_argument("--daily", action="store_true", help="the checks for daily work, which take minutes")
    parser.add_argument("--every-case", action="store_true", help="every case, not only those of the day")
    parser.add_argument("--all", action="store_true", help="every sample and library; takes over an hour")
    options = parser.parse_args(args)
    checks = chosen(options)
    target = "check" if options.daily else "test-all" if options.all else "test"
    if options.only:
        target = "docs" if options.only == DOCUMENTATION else "lint"
    if importlib.util.find_spec("lazyviz") is None:
        say(f"lazyviz is not installed in {sys.prefix}; use `make {target}`, which sets everything up")
        return 1
    chromium = find_chromium()
    env = {"CHROMIUM": chromium} if chromium else {}
    failed: list[str] = []
    begin = time.monotonic()
    talking = threading.Lock()

    def attempt(check: Check) -> None:
        try:
            run(
                check.title,
                command_of(check, options),
                among=talking,
                env={**env, **environment_of(check, options)},
            )
        except StepFailed as error:
            say(f"   {error}")
            failed.append(check.title)

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        list(pool.map(attempt, [check for check in checks if not check.alone]))
    for check in checks:
        if check.alone:
            attempt(check)
    seconds = time.monotonic() - begin
    logs = relative(LOGS)
    if failed:
        names = ", ".join(failed)
        say(f"make {target}: {len(failed)} of {len(checks)} checks failed: {names}")
        say(f"their logs are in {logs}/")
        return 1
    say(f"make {target}: all {len(checks)} checks passed in {seconds:.0f} s; the logs are in {logs}/")
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
