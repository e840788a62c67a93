"""Warning routing: warnings of PyTorch's C++ code go to Python, or are dropped.

A PyTorch function collects warnings until it returns, and only then passes them to Python's ``warnings``.
Code that no such function calls writes them to standard error.

Python shows a warning with the line of the innermost frame, and once for each line.  That frame would be
ours, so such functions are called from a frame that has the user's file and line.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch

from ...process.global_state_transaction import Transaction, no_warnings
from ...torch_internals import dispatcher_bypasses
from ...torch_internals.redispatch_from_dispatch_mode import past_torch_function
from ..provenance.source_lines import AT_USERS_LINE, SourceFinder

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class _Called:
    """An argument that makes a PyTorch function call another function."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].function()


def _calls(call: Callable[[], Any]) -> Any: return call()  # fmt: skip


@functools.lru_cache(1024)
def _code_at(file: str, line: int) -> CodeType:
    return _calls.__code__.replace(co_name=AT_USERS_LINE, co_filename=file, co_firstlineno=line)


def at_users_line(sources: SourceFinder | None, frame: FrameType, call: Callable[[], Result]) -> Result:
    """Call the C function ``call`` as if the call were at the user's line above ``frame``."""
    found = sources.users(frame) if sources is not None else None
    if found is None:
        return call()
    users, line = found
    result: Result = FunctionType(_code_at(line.file, line.line), users.f_globals)(call)
    return result


def moved_to_users_line(sources: SourceFinder, frame: FrameType, function: Any) -> Any:
    """A copy of a generated function whose frame has the user's file and line above ``frame``.

    ``function`` must be on a single line; anything but a Python function is returned unchanged.
    """
    found = sources.users(frame) if isinstance(function, FunctionType) else None
    if found is None:
        return function
    line = found[1]
    code = function.__code__.replace(co_name=AT_USERS_LINE, co_filename=line.file, co_firstlineno=line.line)
    return FunctionType(code, function.__globals__, None, function.__defaults__, function.__closure__)


class _Outcome:
    """Calls a function, and keeps its error, whose traceback must not show the user's line twice."""

    __slots__ = ("error", "function")

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.error: BaseException | None = None

    def __call__(self) -> Any:
        try:
            return self.function()
        except BaseException as error:
            self.error = error
            return None

    def leave(self) -> None:
        """Raise the error, if there was one."""
        if self.error is not None:
            error, self.error = self.error, None
            try:
                raise error
            finally:
                del error  # otherwise, it refers to this frame, which refers to it


class _NoFunctionModes(Transaction):
    """Context without the function modes of the program, such as its default device."""

    def begin(self) -> None:
        self.undo_by(
            functools.partial(dispatcher_bypasses.put_function_modes, dispatcher_bypasses.function_modes())
        )
        dispatcher_bypasses.put_function_modes([])


def in_python(
    function: Callable[Parameters, Result], sources: SourceFinder | None = None
) -> Callable[Parameters, Result]:
    """``function``; its warnings have been passed to Python when it returns, with the user's line if
    ``sources`` are given.
    """

    @functools.wraps(function)
    def called(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if not dispatcher_bypasses.overrides_exist():
            return function(*args, **kwargs)
        if dispatcher_bypasses.function_modes():  # they would see the call of `torch.neg`
            with _NoFunctionModes():
                return called(*args, **kwargs)
        outcome = _Outcome(functools.partial(function, *args, **kwargs))

        def within() -> Result:  # in a mode's handler, function modes are already done
            with past_torch_function():
                return outcome()

        if dispatcher_bypasses.overrides_are_called():
            neg = functools.partial(torch.neg, _Called(outcome))  # type: ignore[arg-type]
            result = at_users_line(sources, sys._getframe(1), neg)
        else:
            neg = functools.partial(torch.neg, _Called(within))  # type: ignore[arg-type]
            with dispatcher_bypasses.calling_overrides():
                result = at_users_line(sources, sys._getframe(1), neg)
        outcome.leave()
        return result  # type: ignore[return-value]

    return called


class _Ignored(no_warnings):
    """The PyTorch setting applies to all threads: the last of several overlapping contexts restores it."""

    before = False  # the setting before the first one
    active: ClassVar[list[_Ignored]] = []

    def begin(self) -> None:
        if not self.active:
            _Ignored.before = torch.is_warn_always_enabled()
        self.undo_by(self._stop)
        self.active.append(self)
        torch.set_warn_always(True)  # otherwise a warning that is shown only once would be used up
        super().begin()

    def _stop(self) -> None:
        if not [each for each in self.active if each is not self]:
            torch.set_warn_always(_Ignored.before)
        # Not earlier, so that contexts that begin meanwhile do not mistake our setting for the user's.
        with contextlib.suppress(ValueError):  # removed already, perhaps by a signal handler
            self.active.remove(self)


def noting_warnings(function: Callable[Parameters, Result]) -> Callable[Parameters, tuple[Result, bool]]:
    """``function`` without its warnings; it also returns whether there were any."""
    below = in_python(function)

    @functools.wraps(function)
    def called(*args: Parameters.args, **kwargs: Parameters.kwargs) -> tuple[Result, bool]:
        ignored = _Ignored()
        with ignored:
            result = below(*args, **kwargs)
        return result, ignored.has_dropped

    return called


def silenced(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """``function`` without its warnings, because it computes something that the user did not request."""
    noting = noting_warnings(function)

    @functools.wraps(function)
    def called(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return noting(*args, **kwargs)[0]

    return called
