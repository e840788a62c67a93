"""Taking part in PyTorch while something is recorded or pending, and leaving it as it was after."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from .. import _torch
from .composites import CompositeKernels
from .formulas import FormulaPatches
from .recorder import RecorderMode, Tape
from .scopes import ScopePatches
from .sync import Patches, SyncPatches
from .tensor import LazyTensor


class Watch:
    """Installs the dispatch mode and the patches that feed the tape; takes them out again.

    The mode is there per thread, on the one that records and those started while something
    is pending; older threads are guarded only where they touch a lazy tensor.  It can only
    be taken out by the thread that has it, and not while it is handling an op, so
    :meth:`release` is called wherever it might work.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._mode = RecorderMode()
        self._thread = threading.local()
        self._reads = SyncPatches(tape)
        self._formulas = FormulaPatches(tape, self._mode)
        self._composites = CompositeKernels(tape, self._reads.before_read)
        self._scopes = ScopePatches(tape.scopes, tape.value_of)
        self._patches = Patches()

    def begin_recording(self) -> None:
        if not _torch.has_mode(self._mode):
            _torch.insert_mode_at_bottom(self._mode)
            self._thread.entered = 0
        if not self._reads.installed:
            self._reads.install()
            self._composites.install()
            self._start = threading.Thread.start
            threading.Thread.start = self._guarded_start()  # type: ignore[method-assign, assignment]
        if not self._patches:
            self._watch_inference_mode()
        self._scopes.install()
        self._formulas.install()
        _torch.support_foreach(LazyTensor)

    def _guarded_start(self) -> Callable[[threading.Thread], None]:
        """``Thread.start`` that gives the new thread our mode; those that run already cannot be given it."""
        start, mode, local = threading.Thread.start, self._mode, self._thread

        @functools.wraps(start)
        def guarded_start(thread: threading.Thread) -> None:
            run = thread.run

            def guarded_run() -> None:
                _torch.insert_mode_at_bottom(mode)
                local.entered = 0
                run()

            thread.run = guarded_run  # type: ignore[method-assign]
            start(thread)

        return guarded_start

    def _watch_inference_mode(self) -> None:
        """Inference modes that are left restore the dispatch keys from when they were entered."""
        guard, local = _torch.InferenceGuard, self._thread
        enter, leave = guard.__enter__, guard.__exit__

        def __enter__(mode: Any) -> Any:
            local.entered = getattr(local, "entered", 0) + 1
            return enter(mode)

        def __exit__(mode: Any, *error: Any) -> Any:
            result = leave(mode, *error)
            local.entered = getattr(local, "entered", 0) - 1
            _torch.refresh_modes()
            self.release()
            return result

        self._patches.set(guard, "__enter__", __enter__)
        self._patches.set(guard, "__exit__", __exit__)

    def end_recording(self) -> None:
        self._scopes.remove()
        self._formulas.remove()
        self.release()

    def release(self) -> None:
        """Leave PyTorch as it was, if nothing is recording or pending."""
        if self._tape.graph is not None or self._tape.pending:
            return
        if self._reads.installed:
            self._reads.remove()
            self._composites.remove()
            threading.Thread.start = self._start  # type: ignore[method-assign]
        _torch.withdraw_foreach(LazyTensor)
        # Backward passes and inference modes bring back what was active when they were entered.
        if getattr(self._thread, "entered", 0) <= 0 and not self._tape.in_autograd():
            _torch.remove_mode(self._mode)
            self._patches.restore()
