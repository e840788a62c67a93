"""Compile context: modes during compilation, progress reports, and cancellation."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...torch_internals import dynamo, private_api
from ..eager import Interrupted

_PATIENCE = 0.05  # seconds between two looks at whether a compilation was cancelled
_SHORT, _TICK = 0.2, 1.0  # seconds before the first word about a compilation, and between two


@contextmanager
def without_active_modes(inference_mode: bool = False) -> Iterator[None]:
    """What a backend is asked in: none of the modes that are active around an evaluation.

    The shape rules that it asks log nothing: what it refuses for their errors is in the run's report.
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
    """Tell about a compilation that takes its time; what ``tell`` raises then is raised when it is over."""
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

    context = contextvars.copy_context()  # where the teller's output goes
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
    """Raise :class:`Interrupted` in the block soon after ``cancelled`` says so: compilers cannot be asked.

    The exception arrives between two Python instructions, as an interrupt of the user's does.
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
            for _ in range(1000 if stopped else 0):  # one that is on its way arrives in here
                time.sleep(0)
    except _Stop:
        raise Interrupted(where) from None
    finally:
        watcher.join()


class _Stop(BaseException):
    """Arrives in a compilation that was cancelled; none of its handlers for errors is to catch it."""
