"""Compile context: modes during compilation, progress reports, and cancellation."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...torch_internals import dynamo, private_api
from ..eager_backend import Interrupted

_PATIENCE = 0.05  # seconds between two checks whether a compilation was canceled
_SHORT, _TICK = 0.2, 1.0  # seconds before the first progress notice about a compilation, and between two


@contextmanager
def without_active_modes(inference_mode: bool = False) -> Iterator[None]:
    """The context in which a backend is called: without the modes that are active around an evaluation.

    Shape rules do not log errors meanwhile: the run's report says what the backend refused because of them.
    """
    with (
        private_api.no_dispatch_modes(),
        dynamo.without_compile_context(),
        private_api.inference_mode(inference_mode),
        private_api.quiet_shape_rules(),
    ):
        yield


@contextmanager
def progress_notices(tell: Callable[[str | None], None], what: str) -> Iterator[None]:
    """Report a long compilation with ``tell``; an exception of ``tell`` is raised after the compilation."""
    over = threading.Event()
    raised: list[Exception] = []

    def tick() -> None:
        wait = _SHORT
        while not over.wait(wait):
            wait = _TICK
            try:
                tell(what)
            except Exception as error:
                raised.append(error)
                return

    context = contextvars.copy_context()  # determines where the output of ``tell`` appears
    ticker = threading.Thread(target=context.run, args=(tick,), name="lazyviz-compiling", daemon=True)
    ticker.start()
    try:
        yield
    finally:
        over.set()
        ticker.join()
        tell(None)
    if raised:
        raise raised[0]


@contextmanager
def interruptible(cancelled: Callable[[], bool] | None, where: str) -> Iterator[None]:
    """Raise :class:`Interrupted` in the block soon after ``cancelled`` returns true, because compilers cannot
    be stopped.

    The exception is raised between two Python instructions, like an interrupt by the user.
    """
    if cancelled is None:
        yield
        return
    thread = threading.get_ident()
    ended = threading.Event()
    lock = threading.Lock()
    stopped = False

    def watch() -> None:
        nonlocal stopped
        while not ended.wait(_PATIENCE):
            if cancelled():
                with lock:
                    if not ended.is_set():
                        stopped = True
                        dynamo.raise_in_thread(thread, _Stop)
                return

    watcher = threading.Thread(target=watch, name="lazyviz-cancel", daemon=True)
    watcher.start()
    try:
        try:
            yield
        finally:
            with lock:
                ended.set()
            for _ in range(1000 if stopped else 0):  # an exception that is already scheduled arrives in here
                time.sleep(0)
    except _Stop:
        raise Interrupted(where) from None
    finally:
        watcher.join()


class _Stop(BaseException):
    """Raised in a canceled compilation; a class of its own, so that no error handler catches it."""
