"""Garbage collector pauses: recording and planning run without full collections."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from .global_state_transaction import Transaction


class paused(Transaction):
    """Context without garbage collections.

    A plan creates many objects that are kept and no cycles, while a full collection traverses all objects of
    the process, which may take longer than the plan itself.
    """

    def _recreate_cm(self) -> paused:
        return paused()

    def begin(self) -> None:
        if gc.isenabled():
            self.undo_by(_enable)
            gc.disable()


_MANY = 500_000  # objects that take a collection of the youngest generation longer than a tenth of a second


def _enable() -> None:
    """Enable collections; if there are many new objects, move them to the oldest generation first, so that
    younger collections do not traverse them.
    """
    if gc.get_count()[0] > _MANY and not gc.get_freeze_count():  # else, what the user froze would be thawed
        gc.freeze()
        gc.unfreeze()
    gc.enable()


@contextmanager
def during_import() -> Iterator[None]:
    """No garbage collections while lazyviz is imported.

    It creates enough objects for a full collection, which traverses all objects of PyTorch and would take a
    third of the time.  Afterwards, all objects belong to the oldest generation, as after a collection, so
    that the next object does not start that one.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        if not gc.get_freeze_count():  # otherwise, objects that the user froze would be unfrozen
            gc.freeze()
            gc.unfreeze()
    finally:
        if enabled:
            gc.enable()


_PATIENCE = 50  # factor for the number of new objects before the collector traverses them
_MOST = 2**31 - 1  # maximum of a threshold


class FewerCollections:
    """Makes the garbage collector run less often while ops are recorded.

    Recording creates a dozen long-lived objects per operator, while eager PyTorch creates one or two: with
    the usual thresholds, the collector would take a considerable part of the recording time.
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
        # The user's code may have set its own.
        if self._usual is not None and gc.get_threshold() == self._raised:
            gc.set_threshold(*self._usual)
        self._usual = None

    @property
    def lasts(self) -> bool:
        """Whether the thresholds for recording are still set."""
        return self._usual is not None and gc.get_threshold() == self._raised


patience = FewerCollections()
