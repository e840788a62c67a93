"""Errors in TorchScript, whose interpreter drops the message of an exception that a dispatch mode raises.

It says where the program failed, but shows messages of C++ exceptions only.  So while anything is pending, a
call of a compiled function keeps the last exception that left the mode, and adds its message.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from ...process.tracebacks import shorten
from ..sync_points import AbsentDeviceError, SyncError

_BEFORE_MESSAGE = "\nRuntimeError: "  # in errors of TorchScript; nothing follows if it was a Python exception
# Not errors of the program that TorchScript runs: they come out as they are.
_OURS = (SyncError, AbsentDeviceError)


class _Calls(threading.local):
    """The exception that left the mode in this thread's innermost call, in a list, if there is a call."""

    innermost: list[BaseException] | None = None


_calls = _Calls()


def note(error: BaseException) -> None:
    """``error`` leaves the dispatch mode."""
    if _calls.innermost is not None:
        _calls.innermost[:] = [error]


def with_messages(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, which runs TorchScript, with errors that say what is wrong, as in eager mode."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        outer, raised = _calls.innermost, list[BaseException]()
        _calls.innermost = raised
        try:
            return original(*args, **kwargs)
        except RuntimeError as error:
            shorten(error)
            where, has_message, message = str(error).rpartition(_BEFORE_MESSAGE)
            if raised and has_message and message.strip() in ("", str(raised[0])):
                (cause,) = raised
                if isinstance(cause, _OURS) or not isinstance(cause, Exception):
                    raise cause from None
                notes = "".join(f"\n{note}" for note in getattr(cause, "__notes__", ()))
                error.args = (f"{where}{_BEFORE_MESSAGE}{cause}{notes}\n",)
            raise
        finally:
            _calls.innermost = outer
            raised.clear()

    return call
