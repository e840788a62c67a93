"""Ctrl-C while the ``lazyviz`` command starts, which takes a second or more, ends it without a traceback.

Imports nothing but Python's own modules, because it is used before PyTorch is imported.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C has ended, as shells give it."""


def _begin() -> None:
    """lazyviz is about to be imported: if that is for the command, Ctrl-C ends the process at once."""
    if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def end() -> None:
    """The command has been imported, and handles Ctrl-C itself."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_command() -> bool:
    """Whether this process was started by ``lazyviz``, or by ``python -m lazyviz``."""
    name = sys.argv[0] if getattr(sys, "argv", None) else ""
    if name == "-m":  # as long as Python looks for the module
        return "lazyviz" in sys.orig_argv
    return os.path.splitext(os.path.basename(name))[0] in ("lazyviz", "lazyviz-script")


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


_begin()
