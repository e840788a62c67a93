"""Deferred signals: handlers wait during state changes, and between a kernel and its bookkeeping.

Python runs signal handlers on the main thread between any two instructions.  Where that must not happen,
signals are collected, and their handlers run later, when the state is consistent.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` wraps it, and looks up names of handlers
import functools
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from types import FrameType
from typing import Any, ClassVar, ParamSpec, TypeVar

from .global_state_transaction import Transaction

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

ENDING = 0
"""Marks the end of the process among the signals that have arrived: it raises ``SystemExit``.

Python prints nothing if this exception ends a thread, unlike exceptions derived from it.
"""

_NUMBERS = tuple(sorted(int(number) for number in signal.valid_signals()))


Handler = Callable[[int, "FrameType | None"], Any]
Level = Callable[[], AbstractContextManager[Any]]


class ArrivedSignals(list[int]):
    """The numbers of signals that have arrived and are waiting."""

    __slots__ = ()


class Deferred(ArrivedSignals):
    """A context that collects signals with Python handlers; its items are those that have arrived.

    If nested in another one on the same thread, it returns the outer one. ``level`` creates the context in
    which handlers are called; ``raised`` is an exception raised by one of them, or by another user function.
    ``leave`` restores state that was set inside of it, if an asynchronous exception prevented a context from
    being exited. ``of_op`` is set while an op is recorded, see :class:`at_once`: it creates the context of
    the user's code, in which handlers are called.
    """

    __slots__ = ("_handlers", "leave", "level", "of_op", "raised")

    current: ClassVar[dict[int, Deferred]] = {}  # by thread
    # The handlers of all signals when a context was last entered, and those of them that are callable.
    _found: ClassVar[tuple[list[Any], dict[int, Handler]]] = [], {}

    def __init__(self, *, of_op: Level | None = None) -> None:
        super().__init__()
        self.of_op = of_op
        self._handlers: dict[int, Handler] = {}
        self.level: Level = nullcontext
        self.leave: Callable[[], None] | None = None
        self.raised: BaseException | None = None

    @property
    def numbers(self) -> list[int]:
        """The numbers of the signals that it collects."""
        return list(self._handlers)

    def __enter__(self) -> Deferred:
        thread = threading.get_ident()
        if (outer := Deferred.current.get(thread)) is not None:
            return outer
        if thread == threading.main_thread().ident:  # other threads never run handlers
            self._defer()
        Deferred.current[thread] = self
        return self

    def __exit__(self, *error: object) -> None:
        thread = threading.get_ident()
        if Deferred.current.get(thread) is self:
            # Before a handler can raise: contexts that are entered inside of this one defer nothing.
            del Deferred.current[thread]
        first: BaseException | None = None
        while self._handlers:
            try:
                self._restore()
            except BaseException as error:  # an asynchronous exception may have come before it did anything
                first = first or error
        try:
            self._raise_arrived()
        except BaseException as error:
            first = first or error
        self.raised = None
        if first is not None:
            try:
                raise first
            finally:
                del first  # this frame is in its traceback

    def _raise_arrived(self) -> None:
        """Raise the signals that have arrived again, so that their handlers are called."""
        first: BaseException | None = None
        level = self.of_op or nullcontext
        while self:
            try:
                if (number := self.pop(0)) != ENDING:
                    with level():
                        signal.raise_signal(number)
            except BaseException as error:
                first = first or error
        if first is not None:
            try:
                raise first
            finally:
                del first

    def _resume(self, thread: int, defer: bool) -> None:
        if Deferred.current.get(thread) is not self:
            if defer:
                self._defer()
            Deferred.current[thread] = self

    def handle(self, where: str) -> None:
        """Call the handlers of signals that have arrived, now that the state is consistent.

        Raises:
            BaseException: what one of them raised; Python's own for an interrupt says ``where`` it was.
        """
        mine = bool(self._handlers)
        self._restore()
        try:
            with self.level():
                while self:
                    number = self.pop(0)
                    if number == ENDING:
                        raise SystemExit
                    handler = _signal.getsignal(number)
                    if handler is _signal.default_int_handler:
                        raise KeyboardInterrupt(f"interrupted {where}")
                    if callable(handler):
                        handler(number, sys._getframe())
        except BaseException as error:
            self.raised = error
            raise
        finally:
            if mine:
                self._defer()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.append(number)

    def _defer(self) -> None:
        found = list(map(_signal.getsignal, _NUMBERS))
        note = self._note
        all_handlers, ours = Deferred._found
        if found != all_handlers:  # comparing is faster than checking whether each is callable
            ours = dict(compress(zip(_NUMBERS, found), map(callable, found)))
            Deferred._found = found, ours
        self._handlers = ours.copy()
        try:
            # The other signals have no Python handler or are ignored, so they are not changed.
            for number in self._handlers:
                _signal.signal(number, note)
        except BaseException:  # raised by a signal that arrived before deferral
            self._restore()
            raise

    def _restore(self) -> None:
        first: BaseException | None = None
        note = self._note
        while self._handlers:
            try:
                for number, handler in list(self._handlers.items()):
                    if _signal.getsignal(number) == note:  # user code may have set another handler
                        _signal.signal(number, handler)
                    self._handlers.pop(number, None)  # a handler that came now may have restored all
            except BaseException as error:  # a signal that came after it was restored
                first = first or error
        if first is not None:
            try:
                raise first
            finally:
                del first


class _AtLevel:
    """Wraps a signal handler, and calls it at the level of the user's code."""

    def __init__(self, handler: Handler, level: Level) -> None:
        self._handler, self._level = handler, level

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        with self._level():
            return self._handler(number, frame)

    def remove(self, number: int) -> None:
        if _signal.getsignal(number) is self:  # the handler may have set another one
            _signal.signal(number, self._handler)


class at_once(Transaction):
    """In a :class:`Deferred` of an op that is recorded, for a part of it that may take a long time: handle
    signals as soon as they arrive.
    """

    def begin(self) -> None:
        thread = threading.get_ident()
        outer = Deferred.current.get(thread)
        if outer is not None and outer.of_op:
            mine = bool(outer._handlers)
            self.undo_by(lambda: outer._resume(thread, mine))
            del Deferred.current[thread]
            outer._restore()
            outer._raise_arrived()
            if mine:  # on the main thread
                self._call_at(outer.of_op)

    def _call_at(self, level: Level) -> None:
        """Call the user's handlers at ``level``; Python's own SIGINT handler is left as it is, because it
        only raises.
        """
        for number, handler in Deferred._found[1].items():
            if handler is not _signal.default_int_handler and _signal.getsignal(number) is handler:
                at_level = _AtLevel(handler, level)
                self.undo_by(functools.partial(at_level.remove, number))
                _signal.signal(number, at_level)


class deferred(Transaction):
    """A :class:`Deferred` that is always exited, even if an exception occurs between two of its own
    instructions.
    """

    def begin(self) -> None:
        context = Deferred()
        self.undo_by(context.__exit__)
        context.__enter__()


def abandoned() -> dict[int, Deferred]:
    """The signals that a :class:`Deferred` still collects, although an exception has ended it."""
    found: dict[int, Deferred] = {}
    for number in _NUMBERS:
        context = getattr(_signal.getsignal(number), "__self__", None)
        if isinstance(context, Deferred) and not any(context is each for each in Deferred.current.values()):
            found[number] = context
    return found


def forget_signals() -> None:
    """In a forked process: drop waiting signals, which are the parent's, and handle others as usual."""
    contexts = [*Deferred.current.values()]
    Deferred.current.clear()
    for context in contexts:
        context.clear()
        context._restore()


def deferring(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """``function`` in a :class:`Deferred`: handlers of signals that arrive meanwhile are called at its end.

    For code whose errors are meaningful, or that sets state which an asynchronous exception could leave set.
    """

    @functools.wraps(function)
    def called(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        signals = Deferred()
        try:
            with signals:
                return function(*args, **kwargs)
        finally:
            signals.__exit__()  # another thread's exception may have stopped it

    return called
