"""Shortened tracebacks: frames of the user and of libraries, and one of lazyviz.

A failing op raises deep inside an evaluation, in frames that mean nothing to a user.  Functions that user
code calls therefore remove the frames below themselves before an error leaves them.  The links between
traceback entries are changed, not the entries: causes, contexts, and the user's frames remain, also for
debuggers. With ``LAZYVIZ_FULL_TRACEBACK=1`` in the environment, all frames are shown.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import ParamSpec, TypeVar

from .install_paths import PACKAGE, TORCH

P = ParamSpec("P")
R = TypeVar("R")

# Code between PyTorch and a dispatch mode, and between lazyviz and a kernel.
_BETWEEN = tuple(os.path.join(TORCH, *parts) for parts in (("_compile.py",), ("_dynamo", ""), ("_ops.py",)))
_FULL = os.environ.get("LAZYVIZ_FULL_TRACEBACK", "") not in ("", "0")


def frames(traceback: TracebackType | None) -> list[TracebackType]:
    """The entries of a traceback, outermost first."""
    found = []
    while traceback is not None:
        found.append(traceback)
        traceback = traceback.tb_next
    return found


def is_ours(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(PACKAGE)


def without_ours(entries: Iterable[TracebackType]) -> list[TracebackType]:
    """The entries of user code and libraries, without those between them and lazyviz, and between lazyviz and
    a kernel.
    """
    kept: list[TracebackType] = []
    after_ours = False
    for entry in entries:
        if is_ours(entry):
            while kept and _is_between(kept[-1]):
                kept.pop()
            after_ours = True
        elif not (after_ours and _is_between(entry)):
            kept.append(entry)
            after_ours = False
    return kept


def _is_between(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(_BETWEEN)


def shorten(error: BaseException) -> None:
    """Remove lazyviz's frames below the one that has caught ``error`` and will raise it again."""
    entries = frames(error.__traceback__)
    if entries and not _FULL:
        _join([entries[0], *without_ours(entries[1:])])


def leave_out_ours(error: BaseException) -> None:
    """Remove all frames of lazyviz from an error that has left lazyviz, and from its causes."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen and not _FULL:
        seen.add(id(at))
        kept = without_ours(frames(at.__traceback__))
        _join(kept)
        at.__traceback__ = kept[0] if kept else None
        at = at.__cause__ or at.__context__


def shorten_block(error: BaseException) -> None:
    """Keep only the innermost frame of lazyviz, as if the error had left a block of the user."""
    entries = frames(error.__traceback__)
    while entries and is_ours(entries[0]):  # the block's own generator
        del entries[0]
    if not entries or _FULL:
        return
    last = next((entry for entry in reversed(entries) if is_ours(entry)), None)
    if last is not None:
        at = entries.index(last)
        _join([*without_ours(entries[:at]), last, *without_ours([last, *entries[at + 1 :]])])


def _join(entries: list[TracebackType]) -> None:
    for entry, following in zip(entries, [*entries[1:], None]):
        entry.tb_next = following


def shortened(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap ``function``, which user code calls, so that its errors show only one frame of lazyviz."""

    @functools.wraps(function)
    def evaluates_what_is_pending(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)  # a pending op has failed, or may not run
        except BaseException as error:
            shorten(error)
            raise

    return evaluates_what_is_pending


def report_ignored(what: str, error: BaseException) -> None:
    """Let ``sys.unraisablehook`` report ``error``, which ``what`` raised and which must not stop anything."""

    class Ignored:
        def __del__(self) -> None:  # Python has no other way to call that hook
            raise error

    Ignored.__del__.__qualname__ = what
    Ignored()
