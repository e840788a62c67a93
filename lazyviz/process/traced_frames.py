"""Frames that a trace function, such as a debugger's, is running for.

Up to Python 3.12, the interpreter copies such a frame's variables to ``frame.f_locals`` before it calls the
trace function, and copies them back afterwards: whoever clears that dictionary meanwhile deletes the
variables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

_PARAMETERS = 3  # of a trace function: frame, event, argument


def may_be_traced(frame: FrameType) -> bool:
    """Whether a trace function may be running for ``frame``."""
    called: FrameType | None = sys._getframe()
    while called is not None and called.f_back is not frame:
        called = called.f_back
    if called is None or called.f_code.co_argcount < _PARAMETERS:
        return is_traced(frame, ())
    variables = called.f_locals
    found = is_traced(frame, variables.values())
    # The frame keeps this dictionary, and all its content, alive.
    if (
        not found
        and type(variables) is dict
        and sys.getrefcount(variables) == 3
        and not may_be_traced(called)
    ):
        variables.clear()
    return found


def is_traced(frame: FrameType, given: Iterable[Any]) -> bool:
    """Whether a trace function may be running for ``frame``; ``given`` are the variables of the function that
    it has called.

    A handler of a signal may have switched tracing off; then, the trace function is found by its argument.
    """
    return sys.gettrace() is not None or frame.f_trace is not None or any(each is frame for each in given)
