"""Recording and planning without pauses of the garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No cycles are looked for meanwhile.

    A plan makes many objects that stay and no cycles, while a full collection goes over everything that
    the process has, which may take longer than the plan itself.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_PATIENCE = 50  # times as many new objects before the collector looks at them


class Patient:
    """Context in which cycles are looked for less often.

    A record makes a dozen objects an operator that stay, where eager PyTorch makes one or two: at the usual
    thresholds the collector takes a good part of the time that recording does.
    """

    def __enter__(self) -> None:
        self._usual = usual = gc.get_threshold()
        self._raised = usual[0] * _PATIENCE, *usual[1:]
        gc.set_threshold(*self._raised)

    def __exit__(self, *error: object) -> None:
        if gc.get_threshold() == self._raised:  # the user's code may have set its own
            gc.set_threshold(*self._usual)
