"""Taking part in PyTorch while something is recorded or pending, and leaving it as it was after."""

from __future__ import annotations

import threading

from .. import _torch
from .recorder import RecorderMode, Tape
from .scopes import ScopePatches
from .sync import SyncPatches
from .tensor import LazyTensor


class Watch:
    """Installs the dispatch mode and the patches that feed the tape; takes them out again.

    The mode is there per thread; it can only be taken out by the thread that has it, and
    not while it is handling an op, so :meth:`release` is called wherever it might work.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._mode = RecorderMode()
        self._thread = threading.local()
        self._reads = SyncPatches(tape)
        self._scopes = ScopePatches(tape.scopes)

    def begin_recording(self) -> None:
        if not getattr(self._thread, "watched", False):
            _torch.insert_mode_at_bottom(self._mode)
            self._thread.watched = True
        self._reads.install()
        self._scopes.install()
        _torch.support_foreach(LazyTensor)

    def end_recording(self) -> None:
        self._scopes.remove()
        self.release()

    def release(self) -> None:
        """Leave PyTorch as it was, if nothing is recording or pending."""
        if self._tape.graph is not None or self._tape.pending:
            return
        self._reads.remove()
        _torch.withdraw_foreach(LazyTensor)
        if getattr(self._thread, "watched", False) and _torch.remove_mode(self._mode):
            self._thread.watched = False
