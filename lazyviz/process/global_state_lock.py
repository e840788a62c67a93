"""Global state lock: one thread at a time changes global state, and no signal handler runs in between."""

from __future__ import annotations

import threading
import time

from .deferred_signals import Deferred
from .global_state_transaction import Transaction


class CriticalSection(Transaction):
    """While entered, no other thread can enter; the same thread can enter again.

    Signals wait until its end: their handlers may record and evaluate, which needs all patches in place.

    The holder *is* the state of the lock, so no instruction separates taking it from noting that. Sections
    are short and run no kernels, so that waiting threads simply retry.
    """

    def begin(self) -> None:
        self._thread = threading.get_ident()
        signals = Deferred()
        self.undo_by(signals.__exit__)
        self.undo_by(self._give)
        signals.__enter__()
        while _holder.setdefault("holder", self)._thread != self._thread:
            signals.__exit__()  # a handler may raise, which ends the wait
            time.sleep(0.0001)
            signals.__enter__()

    def _give(self) -> None:
        if _holder.get("holder") is self:
            del _holder["holder"]


_holder: dict[str, CriticalSection] = {}


def forget_holder() -> None:
    """Release the lock of a thread that no longer exists (in a forked process)."""
    _holder.clear()
