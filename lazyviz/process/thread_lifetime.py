"""Whether a thread has ended, found out without asking :mod:`threading`.

``Thread.is_alive`` changes the thread: up to Python 3.12, if a signal handler raises in it, CPython's
``Thread._wait_for_tstate_lock`` notes that the thread has ended, even if it is the one that asks.
"""

from __future__ import annotations

import threading
import weakref


class _Lifetime:
    """Exists once in each thread, and as long as the thread."""


_of_thread = threading.local()


def lifetime() -> weakref.ref[_Lifetime]:
    """A reference that is dead once the calling thread has ended."""
    return weakref.ref(vars(_of_thread).setdefault("lifetime", _Lifetime()))
