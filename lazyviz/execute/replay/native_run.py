"""Native runs of short cached subgraphs, for programs that read a value after every op.

The steps that :mod:`lazyviz.execute.replay.program_cache` takes around its code are omitted: signals need not
be deferred, because no Python code runs between a kernel and its bookkeeping (``Program.in_one_go`` of
``interpreter.cpp``).
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from ...process.signals import Deferred
from ...process.transaction import complete
from ...record.interception.warning_routing import at_users_line
from ...record.tape import Tape
from ...torch_internals import dispatch_level
from . import node_passes
from .instructions import Stopped
from .program_cache import Known, Replay
from .program_key import Subgraph

LONGEST = 0.005  # seconds that signals may have to wait
_main = threading.main_thread().ident


def is_possible(tape: Tape) -> bool:
    """Whether such runs may start on this thread now.

    On other threads than the main one, it must be possible to stop a run when the process ends.
    """
    runs, recording = tape.runs, tape.recording
    return (
        node_passes.active
        and not runs.active_thread
        and not runs.running
        and not recording.appending
        and threading.get_ident() == _main
        and (recording.graph is None or recording.owner == _main)
    )


def is_suited(subgraph: Subgraph, known: Known) -> bool:
    """Whether it is short and simple enough to run without interruption."""
    if known.seconds is None or known.seconds > LONGEST or len(subgraph.graphs) != 1:
        return False
    if known.in_one_go is None:
        own = all(step.op.namespace == "aten" for step in known.key.steps)  # no kernel is in Python
        plain = own and not subgraph.nodes[0].inference_mode
        known.in_one_go = plain and hasattr(known.code, "in_one_go")
    graph = subgraph.graphs[0]
    for value in subgraph.outside:
        if value.node is not None and value.node.graph is not graph:
            return False
    return known.in_one_go


def run(tape: Tape, subgraph: Subgraph, known: Known) -> bool:
    """Run the subgraph; False if that is not possible here. Raises a kernel's errors, like
    :func:`lazyviz.execute.eager.run`.
    """
    nodes, outside, later = subgraph.nodes, subgraph.outside, subgraph.later
    tape.recording.changed()
    drawn_from: Sequence[int] | None = ()
    saved: list[Any] = []
    draws: list[Any] = []
    if subgraph.draws:  # most reads draw nothing
        drawing = [nodes[at] for at in subgraph.draws]
        drawn_from = tape.generators.drawn_whole(drawing)
        if drawn_from is None:
            return False
        saved, draws = tape.generators.save(drawing), [node.draws for node in drawing]
    times = array("d", [perf_counter()])
    notes: tuple[Callable[[], Any], ...] = (partial(node_passes.note_done, nodes, times),)
    if subgraph.whole and not later:
        notes += partial(node_passes.note_unused, subgraph.values, subgraph.storages), tape.pending.clear
    else:
        notes += (
            partial(node_passes.note_used, nodes),
            partial(node_passes.release_inputs, nodes, outside, later, tape.pending),
        )
    if drawn_from:  # its state is already the one after the last draw
        notes += tape.generators.forgetting(drawn_from)
    # A signal handler may have run them meanwhile.
    take = partial(node_passes.take, outside, subgraph.kept, nodes)
    ran: list[Stopped | None] = []  # the result of the code, as soon as it has run
    stage: list[Any] = []
    go: Callable[..., object] = known.code.in_one_go  # type: ignore[union-attr]
    end = partial(_end, tape, subgraph, known, times, ran, stage, saved)
    try:
        lists = subgraph.scalars, draws, subgraph.users, later
        call = partial(go, tape.runs, threading.get_ident(), take, *lists, times, notes, ran)
        if at_users_line(tape.scopes.sources, sys._getframe(), call) is NotImplemented:
            return False
        end()
    except BaseException:
        complete(end)
        raise
    if ran[0] is not None:
        error, _, has_run, midway = ran.pop()  # type: ignore[misc]
        _replay(subgraph, known).raise_from(Deferred(), len(times) - 1, error, has_run, midway)
    return True


def _replay(subgraph: Subgraph, known: Known) -> Replay:
    assert known.code is not None
    return Replay(subgraph, known, known.code)


def _end(
    tape: Tape,
    subgraph: Subgraph,
    known: Known,
    times: array[float],
    ran: list[Stopped | None],
    stage: list[Any],
    saved: list[Any],
) -> None:
    """It has run, or was stopped; may be called again. ``saved`` are the states of generators before it."""
    nodes = subgraph.nodes
    is_stopped = bool(ran) and ran[0] is not None
    if is_stopped:
        with dispatch_level.kernels_only():
            _replay(subgraph, known).note(tape, times, True, ran, stage)
    elif nodes[-1].state == "done":
        known.seconds = times[-1] - times[0]
        if tape.recording.graph is not None:
            tape.tensors.made_real(subgraph.users)
    if saved and (is_stopped or nodes[-1].state != "done"):
        tape.generators.restore(saved)
    tape.runs.running = tape.runs.active_thread = 0
    tape.pending_ops.release_unused(nodes)
