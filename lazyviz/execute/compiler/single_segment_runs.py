"""Single-segment runs: runs that are one compiled segment skip partitioning and run its code directly.

The first run of a subgraph with a backend partitions it into segments, requests code from the backend, and
inspects each node (:mod:`lazyviz.execute.compiler.partitioned_run`).  If the result is a single segment, its
code is stored under the structure of the subgraph (:mod:`lazyviz.execute.replay.program_key`), so that later
runs only call it.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...graph.ir import Failure, NodeError
from ...process.global_state_transaction import complete
from ...record.random_draw_order import state_of
from ...record.tape import Tape
from ...record.tracked_storages import PARTIAL_WRITE, DrawSequence, TrackedNode
from ..backend_protocol import Backend, Compiled, Refused, Segment
from ..eager_backend import (
    Progress,
    check_interrupts,
    kernel_level,
    recorded_modes,
    report_progress,
    store_result,
)
from ..lru_cache import LRUCache
from ..replay.program_cache import finish, replays
from ..replay.program_key import Key, Subgraph
from .output_metadata_checks import refuse_other_metadata

Reuse = Callable[[Segment], Compiled | None]
MAX_SEGMENTS = 128  # structures; the backends keep their programs


@dataclass(slots=True)
class _Known:
    """The backend that has code for a structure."""

    backend: Backend
    reuse: Reuse


class SegmentCache:
    """Structures that became one segment, with a function that finds their code."""

    def __init__(self) -> None:
        self._known: LRUCache[Key, _Known] = LRUCache(MAX_SEGMENTS)

    def subgraph_of(self, tape: Tape, nodes: Sequence[TrackedNode], backend: Backend) -> Subgraph | None:
        """The structure of ``nodes``, if it can be cached."""
        subgraph = replays.structure_of(tape, nodes, id(backend))  # the entry keeps the backend alive
        return None if subgraph is None or subgraph.later else subgraph

    def find(self, subgraph: Subgraph, backend: Backend) -> Compiled | None:
        """Code for the whole ``subgraph``."""
        assert subgraph.key is not None
        known = self._known.get(subgraph.key)
        if known is None or known.backend is not backend:
            return None
        return known.reuse(
            Segment(subgraph.nodes, subgraph.outside, subgraph.users, _unkeyed_inputs(subgraph))
        )

    def add(self, subgraph: Subgraph, backend: Backend, reuse: Reuse) -> None:
        """Add a subgraph that has run as one segment; ``reuse`` finds its code."""
        assert subgraph.key is not None
        self._known[subgraph.key] = _Known(backend, reuse)


def _unkeyed_inputs(subgraph: Subgraph) -> bytes | None:
    """Inputs besides tensors that are not in the key, as bits: 0.0 and -0.0, and 1 and 1.0, are different."""
    try:
        # Version 2 of the format: later versions also encode which objects are identical.
        return marshal.dumps((subgraph.scalars, [value.meta.offset for value in subgraph.outside]), 2)
    except ValueError:  # not a plain number
        return None


cached_segments = SegmentCache()


def run_compiled(
    tape: Tape,
    subgraph: Subgraph,
    compiled: Compiled,
    *,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> bool:
    """Run the whole ``subgraph`` by its code; False if that is not possible, and nothing has run.

    Raises:
        Interrupted, KeyboardInterrupt: before it; nothing has run.
        Exception: whatever the code raises, as in
        :func:`lazyviz.execute.compiler.partitioned_run.run_with_backend`.
    """
    nodes = subgraph.nodes
    drawing = [nodes[at] for at in subgraph.draws]
    draws: dict[DrawSequence, None] = {node.draws: None for node in drawing if node.draws is not None}
    if len({id(sequence.generator) for sequence in draws}) < len(draws):
        return False  # seeded in between in this recording, but the code draws from one state
    reals: list[torch.Tensor] = []
    for value in subgraph.outside:
        if value.real is None:
            raise RuntimeError(f"internal error: {value!r} was freed before its last use")
        reals.append(value.real)
    with kernel_level(tape, drawing) as interrupted, recorded_modes(nodes[0]):
        check_interrupts(interrupted, cancelled, f"after 0 of {len(nodes)} ops")
        for sequence in draws:
            sequence.generator.set_state(sequence.state)
        stage: list[None] = []

        def note() -> None:
            for sequence in draws:
                sequence.state = state_of(sequence.generator)
            for value, real in zip(subgraph.users, results, strict=True):
                store_result(value, real)
            for value in subgraph.outside:
                value.real = None
            finish(tape, subgraph, nodes, None, stage)

        try:
            results = compiled(*reals)
            refuse_other_metadata(subgraph.users, results)
            complete(note)
        except Refused:  # nothing has been written yet
            return False
        except BaseException as error:
            # Otherwise, it came from elsewhere, after the code and its bookkeeping.
            if nodes[-1].state != "done":
                note_partial_write(nodes, error)
            raise
        del reals, note
        if progress is not None:
            report_progress(interrupted, progress, len(nodes), len(nodes), nodes[-1])
    return True


def note_partial_write(nodes: Sequence[TrackedNode], error: BaseException) -> None:
    """Handle ``error``, raised by the code for ``nodes``, which may have written outside memory.

    Raises:
        RuntimeError: it may have been written, so the nodes can never be run again.
    """
    if any(storage.external for node in nodes for storage in node.writes):
        reason = NodeError(Failure.PARTIAL_WRITE, f"{PARTIAL_WRITE}: {_first(nodes)}")
        for node in nodes:
            node.state, node.error = "failed", reason
        raise RuntimeError(f"{reason}; it raised {type(error).__name__}: {error}") from error
    name_segment(nodes, error)


def name_segment(nodes: Sequence[TrackedNode], error: BaseException) -> None:
    """Add the ops that the code was for to an error that leaves ``nodes`` pending."""
    if error.args and isinstance(error.args[0], str) and isinstance(error, Exception):
        words = f"raised by the backend's code for {_first(nodes)}\nThese ops are still pending"
        error.args = (f"{error.args[0]}\n{words}", *error.args[1:])


def _first(nodes: Sequence[TrackedNode]) -> str:
    node = nodes[0]
    where = f" at {node.source}: {node.source.text}" if node.source is not None else ""
    return f"{node.name}{where}" if len(nodes) == 1 else f"{len(nodes):,} ops from {node.name}{where}"
