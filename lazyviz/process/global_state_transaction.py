"""Transactions: global state of PyTorch and the process is changed as a whole and always restored.

A :class:`Transaction` registers how to undo each step before it takes the step, and undoes all of them in
reverse order.  It is exited whenever its ``with`` statement is, even if an exception occurs between any two
of its own instructions.  Python runs signal handlers at the start of every function, so an interrupt can
prevent ``__exit__`` from doing anything, and the traceback then keeps everything alive that its frames refer
to.  (A generator of :func:`contextlib.contextmanager`, for example, would stay suspended as long as a
notebook shows the error.) Therefore, the ``with`` statement calls a token that only the statement refers to.
If the token is destroyed and the transaction was not exited, it is exited at that moment.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, overload

_RETRIES = 3  # one interrupt may follow another

Leave = Callable[..., "bool | None"]


class _Exit:
    """``__exit__`` of a transaction: a token that only the ``with`` statement refers to."""

    @overload
    def __get__(self, transaction: None, owner: type) -> Leave: ...
    @overload
    def __get__(self, transaction: Transaction, owner: type) -> Leave: ...
    def __get__(self, transaction: Transaction | None, owner: type) -> Leave:
        if transaction is None:  # `ExitStack` looks it up on the class
            return _leave
        token = functools.partial(_leave, transaction)
        if not transaction.entered:  # other code may look it up and drop it at any time
            reference = weakref.ref(token, _let_go)
            transaction.token = id(reference)
            _tokens[id(reference)] = reference, transaction
        return token


_tokens: dict[int, tuple[weakref.ref[Any], Transaction]] = {}  # of `with` statements that may be running


def _let_go(reference: weakref.ref[Any]) -> None:
    """The token of a ``with`` statement was destroyed; if the statement was exited normally, nothing is left
    to do.
    """
    found = _tokens.pop(id(reference), None)
    if found is not None and found[1].entered:
        complete(found[1].abandoned)


def complete(step: Callable[[], object]) -> None:
    """Call ``step``, which is idempotent, until it completes: again if an asynchronous exception has stopped
    it.

    Such exceptions occur once, or a few times. Raises the first one at the end.
    """
    first: BaseException | None = None
    for _ in range(_RETRIES):
        try:
            step()
            break
        except BaseException as error:
            first = first or error
    if first is not None:
        try:
            raise first
        finally:
            del first  # this frame is in its traceback


def _leave(
    transaction: Transaction, kind: Any = None, error: BaseException | None = None, traceback: Any = None
) -> bool | None:
    if transaction.is_over:
        return None
    try:
        swallow = transaction.end(error)
    except BaseException:
        complete(transaction.abandoned)
        raise
    _tokens.pop(transaction.token, None)
    return swallow


def take_back(steps: list[Callable[[], object]], keep: int = 0) -> None:
    """Call all but the first ``keep`` of ``steps``, in reverse order, and drop each once it has returned.

    A step that raises is called again, because the exception may have been a signal handler's. If it fails
    permanently, the others are still undone. The first exception is raised at the end.
    """
    raised: BaseException | None = None
    failures = 0
    while len(steps) > keep:
        try:
            for step in steps[keep:][-1:]:  # none if a signal handler has undone them meanwhile
                step()
                if len(steps) > keep and steps[-1] is step:
                    del steps[-1:]  # not earlier: an interrupt before this leaves it to be undone
            failures = 0
        except BaseException as error:
            raised = raised or error
            failures += 1
            if failures == _RETRIES:
                del steps[max(keep, len(steps) - 1) :]
                failures = 0
    if raised is not None:
        raise raised


class Transaction(contextlib.ContextDecorator):
    """A context manager that is always exited once it has been entered, and as a whole.

    A subclass registers each step of :meth:`begin` with :meth:`undo_by` before taking it. Undoing must work
    even if the step was not taken, or only in part; after an interrupt, it is called again.
    """

    name = "this context"  # as errors call it
    entered = False
    is_over = False
    token = 0

    def __enter__(self) -> Any:
        if self.entered:
            raise RuntimeError(f"{self.name} was already entered; create a new one")
        self._undo: list[Callable[[], object]] = []
        self.entered = True
        try:
            return self.begin()
        except BaseException:
            complete(self.abandoned)
            raise

    __exit__ = _Exit()

    def begin(self) -> Any:
        """Take the steps; the return value is the target of ``as``."""

    def end(self, error: BaseException | None) -> bool | None:
        """Called when the statement ends, with ``error`` or without."""
        self.undo()
        return None

    def abandoned(self) -> None:
        """The transaction ends during :meth:`begin` or :meth:`end`, or together with its frame."""
        self.undo()

    def finish(self) -> None:
        """Exit it now, before its statement does: at the end of the process, when a later exit would call
        code of modules that are already gone.
        """
        complete(self.abandoned)
        self.is_over = True
        _tokens.pop(self.token, None)

    def undo_by(self, undo: Callable[[], object]) -> None:
        """Register how to undo the next step."""
        self._undo.append(undo)

    def undo(self, keep: int = 0) -> None:
        """Undo steps, in reverse order, until the first ``keep`` are left; see :func:`take_back`."""
        if self.entered:  # an interrupt may have come before it was
            take_back(self._undo, keep)


class no_warnings(Transaction):
    """Context in which Python's warnings are dropped.

    ``warnings.catch_warnings`` would make Python show warnings again that it has already shown.
    """

    has_dropped = False  # whether there were any

    def begin(self) -> None:
        filters: Any = warnings.filters
        entry = "ignore", None, Warning, _AnyModule(self), 0

        def remove() -> None:
            with contextlib.suppress(ValueError):  # it is removed already
                filters.remove(entry)

        self.undo_by(remove)
        filters.insert(0, entry)


class _AnyModule:
    """Replaces the pattern of a warning filter, so that its entry can be distinguished from all others."""

    def __init__(self, context: no_warnings) -> None:
        self._context = context

    def match(self, module: str) -> bool:
        self._context.has_dropped = True
        return True
