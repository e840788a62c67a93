"""Startup interrupt: Ctrl-C ends the ``lazyviz`` command without a traceback while it starts.

Starting takes a second or more. This module imports only the standard library, because it is used before
PyTorch is imported.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn


class InterruptedCode(int):
    """The exit code of a command that Ctrl-C ended, distinct from an equal exit code of a script."""


INTERRUPTED = InterruptedCode(128 + signal.SIGINT)
"""As shells show it; see :func:`end_interrupted` for what other parents see."""


def _begin() -> None:
    """Before lazyviz is imported: for the command, let Ctrl-C end the process immediately."""
    if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def end() -> None:
    """Called when the command has been imported, which then handles Ctrl-C itself."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_interrupted() -> NoReturn:
    """Let Python end this process as if a script had not caught Ctrl-C, but without a traceback.

    Exit handlers run, and then the process dies of SIGINT. A shell that runs commands in a loop stops for
    this signal, but not for an exit code of 130.
    """
    sys.excepthook = lambda *_: None
    raise KeyboardInterrupt


def _is_command() -> bool:
    """Whether this process was started by ``lazyviz``, or by ``python -m lazyviz``."""
    name = sys.argv[0] if getattr(sys, "argv", None) else ""
    if name == "-m":  # while Python is still locating the module
        return "lazyviz" in sys.orig_argv
    return os.path.splitext(os.path.basename(name))[0] in ("lazyviz", "lazyviz-script")


def _exit(number: int, frame: FrameType | None) -> None:
    if os.name == "posix":
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(INTERRUPTED)


_begin()
