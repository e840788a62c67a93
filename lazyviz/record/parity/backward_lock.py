"""One backward pass at a time while recording, although several threads may call ``backward()``.

The recorder registers hooks at nodes of the autograd graph for the time of a backward pass.  If another
thread's engine goes through the same nodes meanwhile, it reads lists of hooks that change, which crashes the
process.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ...torch_internals import private_api
from ..sync_points import RunLock

if TYPE_CHECKING:
    from ..tape import Tape

LONGEST = 60.0  # seconds in which nothing is recorded and nothing runs, before a thread stops waiting


class BackwardLock:
    """``with backward_lock.wait():`` waits until no other thread's backward pass is being recorded."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._lock = RunLock()

    def wait(self) -> RunLock:
        """The lock to hold during a backward pass; it is free, or this thread's.

        Raises:
            RuntimeError: the other thread makes no progress, perhaps because it waits for this one.
        """
        if self._lock.is_free or self._lock.is_mine:
            return self._lock
        if private_api.current_autograd_node() is not None:
            # A node of that pass calls this one: the engine continues in another thread when passes are
            # nested deeply, and the thread that holds the lock waits for this one.
            return RunLock()
        seen, since = self._progress(), time.monotonic()
        # Polled: only `with` is safe from asynchronous exceptions (see RunLock), and it has no timeout.
        while self._lock.owner and not self._lock.is_lost:
            time.sleep(0.0005)
            if (now := self._progress()) != seen or self._tape.runs.active_thread:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > LONGEST:
                raise RuntimeError(
                    "another thread's backward pass in a lazy block has recorded nothing for "
                    f"{LONGEST:.0f} s. "
                    "If a hook in it waits for this thread, let the threads call backward() one after the "
                    "other."
                )
        if self._lock.is_lost:  # a fork has left the other thread behind
            self._lock = RunLock()
        return self._lock

    def _progress(self) -> int:
        graph = self._tape.recording.graph
        return len(graph.nodes) if graph is not None else 0
