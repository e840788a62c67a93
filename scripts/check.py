"""Every check of `make test`, one after the other; what fails is shown, the rest still runs.

.venv/bin/python scripts/check.py [--only lint | --all]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from dataclasses import dataclass, field

from environment import find_chromium
from steps import LOGS, ROOT, StepFailed, relative, run, say


@dataclass(frozen=True)
class Check:
    """One step: its name, its command (after ``python``), and whether its output is shown as it comes."""

    title: str
    command: tuple[str, ...]
    lint: bool = False
    stream: bool = False
    more: tuple[str, ...] = ()  # arguments of `make test-all`
    env: dict[str, str] = field(default_factory=dict)


NPM = ("scripts/js_build.py", "npm", "run", "--silent")
BROWSER = "tests/browser"
EVERYTHING = ("--all", "--scores=docs/conformance.md", "--scores=out/conformance.json")

CHECKS = (
    Check("ruff check", ("-m", "ruff", "check", "."), lint=True),
    Check("ruff format", ("-m", "ruff", "format", "--check", "."), lint=True),
    Check("mypy", ("-m", "mypy"), lint=True),
    Check("eslint", (*NPM, "lint"), lint=True),
    Check("tsc", (*NPM, "typecheck"), lint=True),
    Check("Python tests", ("-m", "pytest", f"--ignore={BROWSER}"), stream=True, more=EVERYTHING),
    # The kernel is another process, and nbval's own warnings are not ours: errors in cells are what counts.
    Check("notebooks", ("-m", "pytest", "--nbval-lax", "-W", "default", "notebooks"), stream=True),
    Check("JavaScript tests", (*NPM, "test")),
    Check("browser test", ("-m", "pytest", BROWSER), stream=True),
)


def main(args: list[str]) -> int:
    """Run the checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["lint"], help="only the linters and type checkers")
    parser.add_argument("--all", action="store_true", help="every conformance sample; takes about an hour")
    options = parser.parse_args(args)
    only = options.only
    checks = [check for check in CHECKS if check.lint or only is None]
    name = "make lint" if only else "make test-all" if options.all else "make test"
    if importlib.util.find_spec("lazyviz") is None:
        say(f"lazyviz is not installed in {sys.prefix}; use `{name}`, which sets everything up")
        return 1
    chromium = find_chromium()
    env = {"CHROMIUM": chromium} if chromium else {}
    failed: list[str] = []
    begin = time.monotonic()
    for check in checks:
        try:
            command = [sys.executable, *check.command, *(check.more if options.all else ())]
            run(check.title, command, stream=check.stream, env={**env, **check.env})
        except StepFailed as error:
            say(f"   {error}")
            failed.append(check.title)
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
