"""The last complete training step in a graph: where one ends and the next begins."""

from __future__ import annotations

from collections.abc import Sequence

from ...graph.ir import Node, Storage


def last_step(nodes: Sequence[Node]) -> Sequence[Node]:
    """The nodes of the last complete training step; all nodes if there are fewer than two steps.

    An optimizer's step ends with its last op before a forward pass, or before the end of the graph. A
    training step is what runs from one of them to the next that updates the same parameters: in a GAN, the
    steps of both optimizers.
    """
    ends: list[tuple[int, set[Storage]]] = []
    stepped = 0
    updated: set[Storage] = set()
    for position, node in enumerate(nodes, 1):
        if node.phase == "optimizer":
            stepped = position
            updated.update(storage.origin for storage in node.writes if storage.role == "parameter")
        elif node.phase == "forward" and stepped:
            ends.append((stepped, updated))
            stepped, updated = 0, set()
    if stepped:
        ends.append((stepped, updated))
    if not ends:
        return nodes
    end, last = ends.pop()
    start = next((earlier for earlier, before in reversed(ends) if before & last or not last), None)
    return nodes if start is None else nodes[start:end]
