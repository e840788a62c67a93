"""Shutdown: at process exit, stops runs on daemon threads between two ops, and waits for them.

Python ends a daemon thread immediately when it requests the interpreter lock during exit.  Inside PyTorch,
this happens in C++ code that cannot be unwound, and the process aborts.  Python itself waits for other
threads.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Container
from types import FrameType

from ..process.deferred_signals import ENDING, ArrivedSignals, deferring
from ..torch_internals import dynamo

SECONDS = 60.0
"""How long the process waits for a kernel that runs on a daemon thread."""

_PATIENCE = 0.3  # seconds before a run is interrupted anywhere in Python, for example in a compiler
_REST = 0.5  # seconds that a thread outside of lazyviz gets to end, since it last made progress
_LONGEST_REST = 2.0  # and since it was first seen there
_AROUND = ("guarded_run",)  # the same for all threads, see record/interception/install_modes_and_patches.py
_TICK = 0.002

_main = threading.main_thread().ident
_threads: weakref.WeakSet[threading.Thread] = (
    weakref.WeakSet()
)  # other than the main one, that have used lazyviz
_runs: dict[int, list[ArrivedSignals]] = {}  # by thread: the signals of its runs, the outermost first
_ends = False


def uses() -> None:
    """Called before this thread records or evaluates; raises ``SystemExit`` if the process is ending.

    The process does not wait for a thread that starts after the others were stopped.
    """
    if threading.get_ident() != _main:
        _threads.add(threading.current_thread())
        if _ends:
            raise SystemExit


def enter(arrived: ArrivedSignals) -> None:
    """Called when a run begins on this thread; an entry in ``arrived`` stops it. Raises like :func:`uses`."""
    if (thread := threading.get_ident()) != _main:
        _threads.add(threading.current_thread())
        _runs.setdefault(thread, []).append(arrived)
        if _ends:
            raise SystemExit


def leave(arrived: ArrivedSignals) -> None:
    """Called when the run that called ``enter`` has ended."""
    if (levels := _runs.get(threading.get_ident())) is not None:
        levels[:] = [each for each in levels if each is not arrived]
        if not levels:
            _runs.pop(threading.get_ident(), None)


@deferring  # the process would abort if a second Ctrl-C ended the wait
def stop_all(seconds: float = SECONDS) -> None:
    """Stop runs and recording on other threads, and wait until they have left lazyviz and ended."""
    global _ends
    _ends = True
    begin = time.monotonic()
    interrupted_at: dict[int, float] = {}  # time at which each thread was interrupted
    _say_nothing_of_exits(interrupted_at)
    # Threads outside of lazyviz: their position, and since when.
    seen: dict[int, tuple[object, float, float]] = {}
    while (now := time.monotonic()) - begin < seconds:
        frames, here = sys._current_frames(), sys._getframe()
        # Identified by its frame, because gevent replaces the identities of threads by those of greenlets.
        own = next(thread for thread, frame in frames.items() if frame is here)
        waits = False
        # A thread that waits for another thread's run has stored nothing yet.
        ours = {thread for thread, frame in frames.items() if _is_ours(frame)}
        for thread in ours | {thread.ident for thread in list(_threads) if thread.is_alive()}:
            if thread is None or thread == own or thread not in frames:
                continue
            for arrived in list(_runs.get(thread, ())):
                if ENDING not in arrived:
                    arrived.append(ENDING)
            if thread in ours:
                seen.pop(thread, None)
                waits = True
                if now - interrupted_at.get(thread, begin) > _PATIENCE and not _imports(frames[thread]):
                    interrupted_at[thread] = now
                    dynamo.raise_in_thread(thread, SystemExit)
                continue
            where = id(frames[thread]), frames[thread].f_lasti
            before, moved, left = seen.get(thread, (None, now, now))
            seen[thread] = where, moved if where == before else now, left
            waits = waits or (now - seen[thread][1] < _REST and now - left < _LONGEST_REST)
        del frames, here
        if not waits:
            return
        time.sleep(_TICK)


def _say_nothing_of_exits(interrupted: Container[int | None]) -> None:
    """Do not report ``SystemExit`` in callbacks such as ``__del__``, or errors that end interrupted threads.

    Python ignores exceptions in callbacks and reports them as unraisable; the thread is then interrupted
    again. A C library, such as the one that draws pictures, reports a failed callback as an error of its own.
    """
    report, report_end = sys.unraisablehook, threading.excepthook

    def report_errors(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is not SystemExit or threading.get_ident() == _main:
            report(unraisable)

    def report_others(ended: threading.ExceptHookArgs) -> None:
        if ended.thread is None or ended.thread.ident not in interrupted:
            report_end(ended)

    sys.unraisablehook, threading.excepthook = report_errors, report_others


def _is_ours(frame: FrameType | None) -> bool:
    """Whether a thread whose current frame is ``frame`` was called by lazyviz."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        # Threads that only update pictures may end anywhere.
        ours = name.startswith("lazyviz.") and not name.startswith("lazyviz.view.")
        if ours and frame.f_code.co_name not in _AROUND:
            return True
        frame = frame.f_back
    return False


def _imports(frame: FrameType | None) -> bool:
    """Whether this thread is importing modules, without calling lazyviz from them.

    An exception inside of Python's import system may leave a module's lock taken, and other threads that
    import the module would then wait forever. Imports end by themselves.
    """
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("importlib.") or name == "_frozen_importlib":
            return True
        if name.startswith("lazyviz.") and frame.f_code.co_name != "<module>":
            return False
        frame = frame.f_back
    return False


def forget_in_child() -> None:
    """A forked process has none of the other threads, and the thread that forked is its main thread."""
    global _main
    _main = threading.get_ident()
    _threads.clear()
    _runs.clear()
