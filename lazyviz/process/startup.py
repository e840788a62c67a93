"""Ctrl-C while the ``lazyviz`` command starts, which takes a second or more, ends it without a traceback.

Imports nothing but Python's own modules, because it is used before PyTorch is imported.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class InterruptedCode(int):
    """The exit code of a command that Ctrl-C has ended, which is not a code that its script has given."""


INTERRUPTED = InterruptedCode(128 + signal.SIGINT)
"""As shells show it; see :func:`end_interrupted` for what other parents see."""


def _begin() -> None:
    """lazyviz is about to be imported: if that is for the command, Ctrl-C ends the process at once."""
    if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def end() -> None:
    """The command has been imported, and handles Ctrl-C itself."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def no_collections() -> Iterator[None]:
    """No garbage collections while lazyviz is imported.

    It creates enough objects for a full collection, which traverses all objects of PyTorch and would take a
    third of the time.  Afterwards, all objects belong to the oldest generation, as after a collection, so
    that the next object does not start that one.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        if not gc.get_freeze_count():  # else, what the user has frozen would be thawed
            gc.freeze()
            gc.unfreeze()
    finally:
        if enabled:
            gc.enable()


def end_interrupted() -> NoReturn:
    """Let Python end this process as if a script had not caught Ctrl-C, but without a traceback.

    Exit handlers run, and then the process dies of SIGINT. A shell that runs commands in a loop stops for
    that, but not for an exit code of 130.
    """
    sys.excepthook = lambda *_: None
    raise KeyboardInterrupt


def _is_command() -> bool:
    """Whether this process was started by ``lazyviz``, or by ``python -m lazyviz``."""
    name = sys.argv[0] if getattr(sys, "argv", None) else ""
    if name == "-m":  # as long as Python looks for the module
        return "lazyviz" in sys.orig_argv
    return os.path.splitext(os.path.basename(name))[0] in ("lazyviz", "lazyviz-script")


def _exit(number: int, frame: FrameType | None) -> None:
    if os.name == "posix":
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(INTERRUPTED)


_begin()
