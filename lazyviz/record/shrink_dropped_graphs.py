"""Dropped graphs: only the pending nodes are kept of a graph that can no longer be evaluated as a whole.

Pending draws and writes stay pending when their graph is deleted, because the generator and the memory show
their effect.  They refer to their graph, and it would keep all of its nodes until they run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence, Set
from operator import attrgetter

from ..graph.ir import Graph
from ..process.global_state_transaction import complete
from .tracked_storages import TrackedNode, TrackedStorage


def shrink(holder: list[Graph], pending: dict[TrackedNode, None]) -> None:
    """Keep only the ``pending`` nodes of the dropped graph in ``holder``.

    Unless something else refers to it, such as a plan, or they use results of nodes that have run.
    """
    graph = holder[0]
    graph.has_dropped_nodes = False
    nodes: list[TrackedNode] = graph.nodes  # type: ignore[assignment]
    kept = [node for node in nodes if node in pending]
    if not graph.lost or not kept or len(kept) == len(nodes) or _use_others(kept, graph):
        return
    own = sum(node.graph is graph for node in nodes)
    own += sum(storage.graph is graph for storage in graph.storages)  # type: ignore[attr-defined]
    del graph
    if _references(holder) == own + _UNSHARED:
        _keep(holder[0], kept)


def _use_others(kept: list[TrackedNode], graph: Graph) -> bool:
    """Whether a node in ``kept`` reads the result of another node of ``graph``."""
    among = set(kept)
    makers = {value.node for node in kept for value in node.inputs if value.node is not None}
    return any(maker.graph is graph for maker in makers - among)


def _references(holder: Sequence[object]) -> int:
    return sys.getrefcount(holder[0])


_UNSHARED = _references([object()])  # for an object that only a list refers to


def _keep(graph: Graph, kept: list[TrackedNode]) -> None:
    """Make ``kept`` all nodes of ``graph``, at new positions."""
    positions = {node.index: position for position, node in enumerate(kept)}
    storages = {value.storage for node in kept for value in (*node.inputs, *node.outputs)}
    storages.update(storage for node in kept for storage in node.writes)
    created = {storage: positions.get(storage.created, -1) for storage in storages}

    def keep() -> None:
        for position, node in enumerate(kept):
            node.index, node.forward = position, None
            node.after = [before for before in node.after if before.state != "done"]
        for storage, position in created.items():
            _forget_others(storage, position, len(kept))
        _take_nodes(graph, kept, created.keys())

    complete(keep)


def _forget_others(storage: TrackedStorage, created: int, end: int) -> None:
    """Let ``storage`` refer to pending nodes only; ``created`` and ``end`` are positions in the graph."""
    storage.created = created
    storage.dropped = None if storage.live else end
    storage.dropped_in, storage.resized, storage.arrived = None, (), -1
    storage.readers = [reader for reader in storage.readers if reader.state != "done"]
    if storage.writer is not None and storage.writer.state == "done":
        storage.writer = None


def _take_nodes(graph: Graph, kept: list[TrackedNode], storages: Set[TrackedStorage]) -> None:
    graph.nodes[:] = kept
    graph.storages[:] = sorted((each for each in storages if each.graph is graph), key=attrgetter("id"))
    graph.inputs = [value for value in graph.inputs if value.storage in storages]
    for records in (graph.arrivals, graph.fetches, graph.sync_points, graph.runs_inside, graph.calls):
        records.clear()
    for more in (graph.from_others, graph.handed_out, graph.annotations, graph.nested):
        more.clear()
    graph.by_sequence = {}
