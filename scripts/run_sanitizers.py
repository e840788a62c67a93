"""Runs recording and evaluation tests with the C++ and Cython modules under AddressSanitizer and UBSan.

python scripts/run_sanitizers.py                    # builds, then runs TESTS; needs g++ and its sanitizers
python scripts/run_sanitizers.py tests/record -k views    # the same with other arguments for pytest

It works in a copy of the tree, ``out/sanitized``, so that the installed modules do not change.  Python
allocates each object with malloc, so that uses of freed objects are also detected.  Leaks are checked once,
after the tests; only leaks of memory allocated by our modules count.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import build_native
from named_steps import OUT, ROOT, StepFailed, relative, run, say

COPY = OUT / "sanitized"
REPORTS = COPY / "reports"
TAKEN = ("lazyviz", "tests", "scripts", "benchmarks", "_lazyviz_pytest.py", "pyproject.toml", "README.md")
TESTS = (
    "tests/record",
    "tests/execute/replay",
    "tests/session/test_evaluation.py",
    "tests/session/test_cost_of_reads.py",
    "tests/session/asynchronous/test_async_evaluation.py",
    "tests/session/asynchronous/test_steps.py",
)
# The C++ library throws exceptions, and Python has not loaded it when the sanitizers look it up.
LIBRARIES = ("libasan.so", "libubsan.so", "libstdc++.so")
OURS = re.compile(
    r"\b(?:plan_passes|recorder|short_runs|allocations|dispatch|backward_nodes|graph_release|interpreter|node_passes|op_stream)\.c"
)
# An allocation below a Python frame belongs to that Python code.
PYTHON_CODE = re.compile(r"\b_PyEval_EvalFrameDefault\b")
# Known leaks of other libraries, each with its reason.
KNOWN: dict[str, str] = {}


def copied() -> None:
    """Update the copy; compiled modules stay in it."""
    for name in TAKEN:
        source, target = ROOT / name, COPY / name
        if source.is_file():
            shutil.copy2(source, target)
            continue
        for old in target.rglob("*.py"):
            old.unlink()
        left_out = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__", "golden")
        shutil.copytree(source, target, ignore=left_out, dirs_exist_ok=True)


def library(name: str) -> str:
    """The path of the compiler's library of that name."""
    compiler = os.environ.get("CXX", "g++")
    found = subprocess.run(
        [compiler, f"-print-file-name={name}"], capture_output=True, text=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        raise SystemExit(f"{compiler} has no {name}; install GCC with its sanitizers")
    return str(Path(found).resolve())


def environment() -> dict[str, str]:
    """The environment variables of the tests."""
    common = f"log_path={REPORTS}/report:print_stacktrace=1"
    return {
        "LD_PRELOAD": " ".join(library(name) for name in LIBRARIES),
        # Leaks of compilers and kernels that tests start are not checked.
        "ASAN_OPTIONS": f"{common}:detect_leaks=1:leak_check_at_exit=0:detect_odr_violation=0",
        "LSAN_OPTIONS": "max_leaks=0:report_objects=0",
        "UBSAN_OPTIONS": common,
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": f"{COPY}{os.pathsep}{COPY / 'scripts'}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def pytest_unconfigure() -> None:
    """Called by pytest at the end: check for leaks while all objects in use are still referenced."""
    ctypes.CDLL(None).__lsan_do_recoverable_leak_check()


def stacks(text: str) -> Iterator[tuple[str, list[str]]]:
    """The parts of a report that have a stack trace: the first line and the frames of each."""
    for part in text.split("\n\n"):
        frames = [line for line in part.splitlines() if re.match(r"\s+#\d+ ", line)]
        if frames:
            yield part.strip().splitlines()[0], frames


def asked_for(frames: list[str]) -> bool:
    """Whether one of our modules allocated the memory."""
    for frame in frames:
        if PYTHON_CODE.search(frame):
            return False
        if OURS.search(frame):
            return True
    return False


def judged() -> tuple[list[str], Counter[str]]:
    """Reports about our modules, and the number of leaks by others, by reason."""
    own: list[str] = []
    others: Counter[str] = Counter()
    for file in sorted(REPORTS.glob("report.*")):
        text = file.read_text(errors="replace")
        if "LeakSanitizer" not in text:
            own.append(f"{file}:\n{text}")
            continue
        for title, frames in stacks(text):
            why = next((why for words, why in KNOWN.items() if words in "\n".join(frames)), None)
            if "leak of" not in title:
                continue
            if asked_for(frames) and why is None:
                own.append("\n".join([title, *frames]))
            else:
                others[why or "not asked for by our modules"] += 1
    return own, others


def main(arguments: list[str]) -> int:
    """Build the modules and run the tests; returns the exit status."""
    environ = environment()
    COPY.mkdir(parents=True, exist_ok=True)
    copied()
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir()
    script = COPY / "scripts" / Path(build_native.__file__).name
    run("modules with sanitizers", [sys.executable, script, "--sanitize"])
    command = [sys.executable, "-m", "pytest", "-p", "run_sanitizers", "-p", "no:cacheprovider"]
    failed = ""
    try:
        run("tests with sanitizers", [*command, *(arguments or TESTS)], env=environ, cwd=COPY)
    except StepFailed as error:
        failed = str(error)
    own, others = judged()
    for why, count in others.items():
        say(f"   {count} stacks of leaks: {why}")
    for report in own:
        say(report)
    if failed or own:
        say(f"{failed or 'the tests passed'}; {len(own)} reports of sanitizers, in {relative(REPORTS)}/")
        return 1
    say("   the sanitizers found no problem in lazyviz's modules")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
