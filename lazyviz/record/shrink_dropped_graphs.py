"""Dropped graphs: only the pending nodes are kept of a graph that can no longer be evaluated as a whole.

Pending draws and writes stay pending when their graph is deleted, because the generator and the memory show
their effect.  They refer to their graph, and it would keep all of its nodes until they run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from ..graph.ir import Graph
from .tracked_storages import TrackedNode, TrackedStorage, TrackedValue


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
    storages: dict[TrackedStorage, None] = {}
    for position, node in enumerate(kept):
        node.index, node.forward = position, None
        node.after = [before for before in node.after if before.state != "done"]
        for value in _values(node):
            storages[value.storage] = None
        storages.update(dict.fromkeys(node.writes))
    for storage in storages:
        storage.created = positions.get(storage.created, -1)
        storage.dropped = None if storage.live else len(kept)
        storage.dropped_in, storage.resized, storage.arrived = None, (), -1
        storage.readers = [reader for reader in storage.readers if reader.state != "done"]
        if storage.writer is not None and storage.writer.state == "done":
            storage.writer = None
    graph.nodes[:] = kept
    graph.storages[:] = [storage for storage in storages if storage.graph is graph]
    graph.inputs = [value for value in graph.inputs if value.storage in storages]
    for records in (graph.arrivals, graph.fetches, graph.sync_points, graph.runs_inside, graph.calls):
        records.clear()
    graph.from_others.clear()
    graph.handed_out.clear()
    graph.annotations.clear()
    graph.nested.clear()
    graph.by_sequence = {}


def _values(node: TrackedNode) -> Iterable[TrackedValue]:
    return (*node.inputs, *node.outputs)
