"""tqdm progress bar for runs and compilations that take longer than a second.

It is shown in notebooks, and if stderr is a terminal, unless ``lazyviz.options.progress`` says otherwise.  It
does not slow the run: a thread checks its progress from time to time, and does not follow programs that took
less than a second before.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..execute.progress import Run
from ..process.stdio import is_terminal
from ..record.tracked_storages import TrackedNode
from .default_options import options

AFTER = 1.0
EVERY = 0.2
_THREAD = "lazyviz-progress"


def is_wanted() -> bool:
    """Whether a progress bar would be visible, and tqdm is installed to draw it."""
    chosen = options.progress
    if chosen is None:
        chosen = _in_notebook() or is_terminal(sys.stderr)
    return chosen and _tqdm() is not None


def _in_notebook() -> bool:
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)  # another thread may be importing it
    shell = get() if get is not None else None
    return getattr(shell, "kernel", None) is not None


def _tqdm() -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return None
    return tqdm


class Bar:
    """Context of a run: a thread follows it, and draws a bar once it has taken a second.

    If ``wanted`` is false, it does nothing. The bar is removed when the run ends; the report has its
    duration.
    """

    def __init__(self, live: Run, *, wanted: bool, draw: Callable[..., Any] | None = None) -> None:
        self._live, self._wanted, self._draw = live, wanted, draw
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Bar:
        if self._wanted:
            self._thread = threading.Thread(target=self._follow, name=_THREAD, daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no thread can be started, for example at interpreter shutdown
                self._thread = None
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def _follow(self) -> None:
        if self._over.wait(AFTER):
            return
        draw = self._draw or _tqdm()
        if draw is None:
            return
        nodes = self._live.nodes
        bar = draw(total=len(nodes), desc="evaluating", unit="op", leave=False, dynamic_ncols=True)
        bar.start_t = time.time() - self._live.now().seconds  # the run's, not the bar's
        try:
            done = 0
            while True:
                done = _done(nodes, done)
                now = self._live.now()
                bar.set_description_str(now.label if now.compiling else "evaluating", refresh=False)
                bar.n = max(done, now.done)
                bar.refresh()
                if self._over.wait(EVERY):
                    return
        finally:
            bar.n = bar.total  # an incomplete bar in a notebook would stay visible, in red
            bar.close()


def _done(nodes: Sequence[TrackedNode], known: int) -> int:
    """How many nodes have run. Nodes run in order; in a split run, each counts with its last piece."""
    # Bounded, for graphs of a million nodes: the rest is counted the next time.
    until = time.perf_counter() + 0.02
    while known < len(nodes) and nodes[known].state == "done":
        known += 1
        if known % 1024 == 0 and time.perf_counter() > until:
            break
    return known
