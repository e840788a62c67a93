"""Garbage collector pauses: recording and planning run without full collections."""

from __future__ import annotations

import gc

from .transaction import Transaction


class paused(Transaction):
    """Context in which no cycles are looked for.

    A plan makes many objects that stay and no cycles, while a full collection goes over everything that
    the process has, which may take longer than the plan itself.
    """

    def _recreate_cm(self) -> paused:
        return paused()

    def begin(self) -> None:
        if gc.isenabled():
            self.undo_by(gc.enable)
            gc.disable()


_PATIENCE = 50  # times as many new objects before the collector looks at them
_MOST = 2**31 - 1  # that a threshold may be


class Patience:
    """Cycles are looked for less often while something is recorded.

    A record makes a dozen objects an operator that stay, where eager PyTorch makes one or two: at the usual
    thresholds the collector takes a good part of the time that recording does.
    """

    def __init__(self) -> None:
        self._usual: tuple[int, ...] | None = None
        self._raised: tuple[int, ...] = ()

    def begin(self) -> None:
        usual = gc.get_threshold()
        if self._usual is None or usual != self._raised:
            self._raised = min(_MOST, usual[0] * _PATIENCE), *usual[1:]
            self._usual = usual
            gc.set_threshold(*self._raised)

    def end(self) -> None:
        if self._usual is not None and gc.get_threshold() == self._raised:  # the user's code may have its own
            gc.set_threshold(*self._usual)
        self._usual = None

    @property
    def lasts(self) -> bool:
        """Whether the thresholds are those of a recording."""
        return self._usual is not None and gc.get_threshold() == self._raised


patience = Patience()
