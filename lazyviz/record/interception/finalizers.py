"""Finalizers (``__del__``) called by the garbage collector within an op: they run at the user's level."""

from __future__ import annotations

import contextlib
import gc

from .. import native_recorder


class FinalizerLevel:
    """While installed, finalizers that the garbage collector calls while an op is dispatched run at the
    dispatch level of the user's code.

    The callback is compiled: in one that is written in Python, the exception of a signal handler would be
    lost. So it needs the native modules.
    """

    def install(self) -> None:
        if native_recorder.active and not self.installed:
            gc.callbacks.extend(native_recorder.collection_callbacks())

    def remove(self) -> None:
        for callback in native_recorder.collection_callbacks():
            with contextlib.suppress(ValueError):  # not installed, or a signal handler has removed it
                gc.callbacks.remove(callback)

    @property
    def installed(self) -> bool:
        return any(callback in gc.callbacks for callback in native_recorder.collection_callbacks())
