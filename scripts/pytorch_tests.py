"""Runs PyTorch's own test files twice, the second time with each test's body in a lazy block, and compares.

The tests are not part of this repository: take the ``test`` folder of PyTorch's sources, of a release near
the one that is installed.  Each test file runs in processes of its own, with one thread.

.venv/bin/python scripts/pytorch_tests.py TEST_FOLDER test_indexing.py nn/test_pooling.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
# Environment of the process that runs the tests: output file, seconds per test, whether in lazy blocks.
INTO, LIMIT, LAZY = "PYTORCH_TESTS_INTO", "PYTORCH_TESTS_LIMIT", "PYTORCH_TESTS_LAZY"
LONGEST = 3600.0  # seconds for each run of a file

Outcomes = dict[str, tuple[str, float, str]]  # by test: outcome, seconds, and the end of the error


# --- in the process that runs the tests ------------------------------------------------


def _too_long(*_: Any) -> NoReturn:
    raise TimeoutError(f"it takes more than {os.environ[LIMIT]} s")


def _body(self: unittest.TestCase, method: Callable[[], None]) -> None:
    """Replacement for the method that ``unittest`` calls between ``setUp`` and ``tearDown``."""
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(int(os.environ[LIMIT]))
    try:
        if os.environ[LAZY] == "1":
            import lazyviz

            with lazyviz.lazy():
                method()
        else:
            method()
    finally:
        signal.alarm(0)


def pytest_configure(config: Any) -> None:
    """Called by pytest, which loads this module as a plugin."""
    unittest.TestCase._callTestMethod = _body  # type: ignore[attr-defined]


def pytest_runtest_logreport(report: Any) -> None:
    """Called by pytest after each phase of a test."""
    if report.when != "call" and report.outcome == "passed":
        return
    error = str(report.longrepr)[-2000:] if report.failed else ""
    with open(os.environ[INTO], "a", encoding="utf-8") as file:
        file.write(json.dumps([report.nodeid, report.outcome, report.duration, error]) + "\n")


# --- in the process that compares ------------------------------------------------------


def outcomes(folder: Path, name: str, *, lazily: bool, limit: int) -> Outcomes:
    """The outcomes of the tests of a file; tests after a crash of the process are missing."""
    with tempfile.TemporaryDirectory() as there:
        into = Path(there) / "outcomes"
        into.touch()
        path = os.pathsep.join([str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, INTO: str(into), LIMIT: str(limit), LAZY: str(int(lazily)), "PYTHONPATH": path}
        env["OMP_NUM_THREADS"] = "1"
        command = [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, "-p", "no:cacheprovider", "-q"]
        command += ["-c", os.devnull, "--rootdir=.", "--noconftest", "--tb=short", "-W", "ignore", name]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=LONGEST)
        lines = into.read_text(encoding="utf-8").splitlines()
    if not lines:
        sys.exit(f"{name}: no test ran\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found: Outcomes = {}
    for test, outcome, seconds, error in map(json.loads, lines):
        if outcome != "passed" or test not in found:
            found[test] = outcome, seconds, error
    return found


def compare(folder: Path, name: str, limit: int) -> dict[str, Any]:
    """The tests that pass in eager mode and have another outcome in a block."""
    eager = outcomes(folder, name, lazily=False, limit=limit)
    lazy = outcomes(folder, name, lazily=True, limit=limit)
    passed = [test for test, (outcome, *_) in eager.items() if outcome == "passed"]
    missing = ("missing", 0.0, "")
    differ = {test: lazy.get(test, missing) for test in passed if lazy.get(test, missing)[0] != "passed"}
    return {
        "file": name,
        "passed in eager mode": len(passed),
        "seconds in eager mode": round(sum(eager[test][1] for test in passed), 1),
        "seconds in a block": round(sum(lazy[test][1] for test in passed if test in lazy), 1),
        "differ in a block": {test: [outcome, error] for test, (outcome, _, error) in differ.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the test folder of PyTorch's sources")
    parser.add_argument("files", nargs="+", help="test files, relative to it")
    parser.add_argument("--limit", type=int, default=60, help="seconds for a test")
    parser.add_argument("--json", type=Path, help="write the results, with the errors, into this file")
    options = parser.parse_args()
    results = []
    for name in options.files:
        found = compare(options.folder, name, options.limit)
        results.append(found)
        differ = found["differ in a block"]
        print(f"{name}: {len(differ)} of {found['passed in eager mode']} differ", flush=True)
        for test, (outcome, error) in differ.items():
            said = [line for line in error.splitlines() if line.startswith("E ")]
            print(
                f"   {test.partition('::')[2]}: {outcome} {said[0][1:].strip() if said else ''}"[:160],
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
