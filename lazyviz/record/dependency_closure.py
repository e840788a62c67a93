"""Dependencies between nodes: reads and writes of shared storages, and their closure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence

from ..graph.ir import Graph
from .partially_written_memory import can_run_after, is_partial_write
from .tracked_storages import TrackedNode, TrackedStorage, TrackedValue


def order(node: TrackedNode, written: Sequence[TrackedStorage]) -> None:
    """Append ``node`` to the program order of the storages it reads and writes.

    Sets ``node.after`` to the nodes that must run first, besides the producers of its inputs: the last write
    to the storages that it reads, and earlier reads of the storages that it writes.
    """
    after: list[TrackedNode] = []
    value: TrackedValue
    for value in node.inputs:
        value.uses += 1
        storage = value.storage
        storage.uses += 1
        writer = storage.writer
        if writer is not None and writer is not value.node:
            after.append(writer)
        readers = storage.readers
        readers.append(node)
        count = len(readers)
        # Occasionally, for storages that nothing writes, as in inference.
        if count >= 8 and not count & (count - 1):
            storage.readers = [reader for reader in readers if reader.state != "done"]
    if written:
        writes: list[TrackedStorage] = []
        for storage in written:
            after += [reader for reader in storage.readers if reader is not node]
            storage.writer = node
            storage.readers = []
            if storage not in writes:
                writes.append(storage)
        node.writes = writes
    if after:
        node.after = after


def order_check(node: TrackedNode) -> None:
    """Order ``node``, which raises an error or does nothing, before all nodes that will use what it checks.

    It checks all results of the op whose result it reads, such as the factors of a matrix in addition to the
    status code of the factorization.
    """
    for value in node.inputs:
        if value.node is not None:
            for result in value.node.outputs:
                if not result.storage.has_pending_write:
                    result.storage.writer = node


def closure(targets: Iterable[TrackedNode]) -> list[TrackedNode]:
    """The pending nodes that ``targets`` need, themselves included, in program order."""
    return Search.closure(targets)


def _closure(targets: Iterable[TrackedNode]) -> list[TrackedNode]:
    found: set[TrackedNode] = set()
    stack = [node for node in targets if node.state != "done"]
    while stack:
        node = stack.pop()
        if node in found:
            continue
        found.add(node)
        producers = [value.node for value in node.inputs]
        stack += [
            other
            for other in (*producers, *node.after)
            if other is not None and other.state != "done" and not can_run_without(other, node)
        ]
    return sorted(found, key=sequence_of)


def can_run_without(other: TrackedNode, node: TrackedNode) -> bool:
    """Whether ``other`` has failed, and ``node`` comes after it but does not need it.

    This holds if ``node`` only follows it in the order of draws, since in eager PyTorch the program and the
    generator continue after the error. It also holds if ``node`` overwrites everything that ``other`` left
    partially written.
    """
    if other.state != "failed":
        return False
    if is_partial_write(other):
        return can_run_after(node, other)
    if other.draws is None or node.draws is not other.draws:
        return False
    touched = {value.storage for value in (*node.inputs, *node.outputs)}
    return all(value.node is not other for value in node.inputs) and touched.isdisjoint(other.writes)


sequence_of = operator.attrgetter("sequence")


def _graph_of(nodes: Iterable[TrackedNode]) -> Graph | None:
    """The graph of ``nodes``, or None if they belong to several graphs, or one has failed."""
    graphs = {None if node.error is not None else node.graph for node in nodes}
    return graphs.pop() if len(graphs) == 1 else None


class Search:
    """How dependencies are traversed; :mod:`lazyviz.record.native_recorder` has a compiled form."""

    closure: Callable[[Iterable[TrackedNode]], list[TrackedNode]] = staticmethod(_closure)
    graph_of: Callable[[Iterable[TrackedNode]], Graph | None] = staticmethod(_graph_of)
