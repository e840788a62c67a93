"""Native runs of short cached subgraphs, for programs that read a value after every op.

The compiled module ``short_runs.pyx`` makes them; this module decides which code may run that way, and
handles runs that were stopped.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from ...process.deferred_signals import Deferred
from ...record.interception.warning_routing import at_users_line
from ...record.tape import tape
from ...torch_internals import dispatch_level, native_module_loader
from .node_instructions import Stopped
from .program_cache import Known, Replay
from .program_key import Subgraph

LONGEST = 0.005  # seconds that signals may have to wait
module = native_module_loader.load("short_runs.pyx")


def can_run_in_one_go(subgraph: Subgraph, known: Known) -> bool:
    """Whether no kernel of the subgraph is in Python, so that its code can run in a single call."""
    own = all(step.op.namespace == "aten" for step in known.key.steps)
    return own and not subgraph.nodes[0].inference_mode and hasattr(known.code, "in_one_go")


def finish_stopped(
    subgraph: Subgraph,
    known: Known,
    times: array[float],
    ran: Sequence[Stopped | None],
    stage: list[Any],
) -> None:
    """Bookkeeping after a run that was stopped; can be called again if it was interrupted."""
    with dispatch_level.kernels_only():
        _replay(subgraph, known).note(tape, times, True, ran, stage)


def raise_stopped(
    subgraph: Subgraph, known: Known, times: array[float], stopped: Stopped, warn: Callable[[], None] | None
) -> None:
    """Warn, and raise the error that stopped a run, like :func:`lazyviz.execute.eager_backend.run`."""
    error, _, has_run, midway = stopped
    try:
        if warn is not None:
            at_users_line(tape.scopes.sources, sys._getframe(), warn)
    finally:
        _replay(subgraph, known).raise_from(Deferred(), len(times) - 1, error, has_run, midway)


def _replay(subgraph: Subgraph, known: Known) -> Replay:
    assert known.code is not None
    return Replay(subgraph, known, known.code)
