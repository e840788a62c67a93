"""Runs commands as named steps: prints a short line for each, and the end of its log file on failure.

Standard library only: used before anything is installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out"
LOGS = OUT / "logs"

HEARTBEAT_S = 30.0  # seconds between progress messages of a step without output
TAIL_LINES = 40  # lines of a failed step's log that are shown


class StepFailed(RuntimeError):
    """A step failed; callers print the message, which is complete, and stop."""


def say(text: str) -> None:
    """Print a line without buffering, even to a pipe."""
    print(text, flush=True)


def relative(path: Path) -> str:
    """``path`` relative to the repository root."""
    try:
        return str(path.relative_to(ROOT))
    except ValueError:
        return str(path)


def _log_path(title: str) -> Path:
    LOGS.mkdir(parents=True, exist_ok=True)
    return LOGS / (re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") + ".log")


def run(
    title: str,
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    among: threading.Lock | None = None,
    quiet_failure: bool = False,
) -> float:
    """Run ``command`` as the step ``title`` and return its wall time in seconds.

    Its output goes to a log file.  ``among`` is a lock for concurrent steps, so that the end of a log is
    printed in one piece.  Raises :class:`StepFailed` if the command cannot start or exits with an error,
    after printing the end of the log (unless ``quiet_failure``: the caller has an alternative).
    """
    log = _log_path(title)
    say(f"-- {title}")
    begin = time.monotonic()
    full_env = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
    words = [str(word) for word in command]
    with log.open("w", encoding="utf-8") as sink:
        sink.write(f"$ {' '.join(words)}\n")
        sink.flush()
        try:
            process = subprocess.Popen(
                words,
                cwd=cwd,
                env=full_env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise StepFailed(f"{title}: cannot start {words[0]}: {error}") from error
        finished = threading.Event()
        of = "" if among is None else f" {title}:"
        threading.Thread(target=_heartbeat, args=(of, begin, finished), daemon=True).start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                sink.write(line)
            status = process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
        finally:
            finished.set()
    seconds = time.monotonic() - begin
    with among or threading.Lock():
        if among is not None:
            say(f"-- {title}: done in {seconds:.0f} s" if not status else f"-- {title}: failed")
        if (among is not None or status) and not quiet_failure:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            say("\n".join(lines[-TAIL_LINES:] if status else lines[-1:]))
    if status:
        if quiet_failure:
            say("   did not work here; trying another way")
        raise StepFailed(f"{title}: failed (exit {status}), the whole output is in {relative(log)}")
    if among is None:
        say(f"   done in {seconds:.0f} s" if seconds >= 1 else "   done")
    return seconds


def _heartbeat(of: str, begin: float, finished: threading.Event) -> None:
    while not finished.wait(HEARTBEAT_S):
        say(f"   ...{of} {time.monotonic() - begin:.0f} s")
