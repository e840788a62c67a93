"""Every check of `make test`; what fails is shown, the rest still runs.

Two cores are used: about half of the tests, those of conformance first, run one suite after another beside
the others; those that take times come last, with the machine for themselves.

.venv/bin/python scripts/check.py [--only lint | --all]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from environment import find_chromium
from steps import LOGS, ROOT, StepFailed, relative, run, say


@dataclass(frozen=True)
class Check:
    """One step: its name, its command (after ``python``), whether its output is shown as it comes,
    whether the next checks run meanwhile, or whether it has to have the machine for itself.
    """

    title: str
    command: tuple[str, ...]
    lint: bool = False
    stream: bool = False
    beside: bool = False
    alone: bool = False
    more: tuple[str, ...] = ()  # arguments of `make test-all`
    env: dict[str, str] = field(default_factory=dict)
    only_all: bool = False  # a step of `make test-all` alone


NPM = ("scripts/js_build.py", "npm", "run", "--silent")
BROWSER, CONFORMANCE, LIBRARIES = "tests/browser", "tests/conformance", "tests/libraries"
BESIDE = ("tests/graph", "tests/plan", "tests/view")
EVERYTHING = ("--all", "--scores=docs/conformance.md", "--scores=out/conformance.json")
EVERY_FAULT = ("--all", "--fault-table=docs/faults.md")
EVERY_LIBRARY = ("--all", "--library-table=docs/libraries.md")

# What kernels take while they run depends on the processor: each is asked to do as lesser ones would.
ONE_PROCESSOR = (
    "tests/plan/test_workspace.py",
    "tests/plan/test_precision.py",
    "tests/plan/test_remedies.py",
    "tests/execute/test_memory_limit.py",
)
PROCESSORS = tuple(
    Check(
        f"plans: oneDNN {most or 'all'}, ATen {kernels or 'all'}, threads {threads}",
        ("-m", "pytest", *ONE_PROCESSOR),
        beside=True,
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
    Check("ruff check", ("-m", "ruff", "check", "."), lint=True),
    Check("ruff format", ("-m", "ruff", "format", "--check", "."), lint=True),
    Check("mypy", ("-m", "mypy"), lint=True),
    Check("warnings of the C++ modules", ("scripts/build_native.py", "--check"), only_all=True),
    Check("eslint", (*NPM, "lint"), lint=True),
    Check("tsc", (*NPM, "typecheck"), lint=True),
    Check("conformance", ("-m", "pytest", CONFORMANCE), beside=True, more=EVERYTHING),
    # The kernel is another process, and nbval's own warnings are not ours: errors in cells are what counts.
    Check("notebooks", ("-m", "pytest", "--nbval-lax", "-W", "default", "notebooks"), beside=True),
    Check("tests of graphs, plans and views", ("-m", "pytest", *BESIDE), beside=True, more=("--all",)),
    Check("browser tests", ("-m", "pytest", BROWSER, "-m", "not takes_times"), beside=True),
    Check(
        "Python tests",
        ("-m", "pytest", *(f"--ignore={path}" for path in (BROWSER, CONFORMANCE, LIBRARIES, *BESIDE))),
        stream=True,
        more=EVERY_FAULT,
    ),
    Check("recording and evaluating with sanitizers", ("scripts/sanitize.py",), stream=True, only_all=True),
    Check("programs of other libraries", ("-m", "pytest", LIBRARIES), more=EVERY_LIBRARY),
    *PROCESSORS,
    Check("JavaScript tests", (*NPM, "test")),
    Check(
        "browser tests that take times",
        ("-m", "pytest", BROWSER, "-m", "takes_times"),
        stream=True,
        alone=True,
    ),
)


def main(args: list[str]) -> int:
    """Run the checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["lint"], help="only the linters and type checkers")
    parser.add_argument("--all", action="store_true", help="every sample and library; takes over an hour")
    options = parser.parse_args(args)
    only = options.only
    checks = [check for check in CHECKS if check.lint or only is None]
    checks = [check for check in checks if options.all or not check.only_all]
    name = "make lint" if only else "make test-all" if options.all else "make test"
    if importlib.util.find_spec("lazyviz") is None:
        say(f"lazyviz is not installed in {sys.prefix}; use `{name}`, which sets everything up")
        return 1
    chromium = find_chromium()
    env = {"CHROMIUM": chromium} if chromium else {}
    failed: list[str] = []
    begin = time.monotonic()

    def attempt(check: Check) -> None:
        try:
            command = [sys.executable, *check.command, *(check.more if options.all else ())]
            run(check.title, command, stream=check.stream, beside=check.beside, env={**env, **check.env})
        except StepFailed as error:
            say(f"   {error}")
            failed.append(check.title)

    with ThreadPoolExecutor(1) as meanwhile:
        under_way: Future[None] | None = None  # the last one: they are begun in order
        for check in checks:
            if check.alone and under_way is not None:
                under_way.result()
            if check.beside:
                under_way = meanwhile.submit(attempt, check)
            else:
                attempt(check)
    seconds = time.monotonic() - begin
    logs = relative(LOGS)
    if failed:
        say(f"{name}: {len(failed)} of {len(checks)} checks failed: {', '.join(failed)}; look in {logs}/")
        return 1
    say(f"{name}: all {len(checks)} checks passed in {seconds:.0f} s; the logs are in {logs}/")
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
