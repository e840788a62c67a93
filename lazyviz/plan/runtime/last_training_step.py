"""The last complete training step in a graph: where one ends and the next begins."""

from __future__ import annotations

from collections.abc import Sequence

from ...graph.ir import Node, Storage

_KEPT = ("parameter", "buffer")  # roles of what a model holds


def last_step(nodes: Sequence[Node]) -> Sequence[Node]:
    """The nodes of the last complete training step. With fewer than two steps, these are all nodes, except
    those up to the last one that initializes or moves a model, which a later step would not repeat.

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
    if ends:
        end, last = ends.pop()
        start = next((earlier for earlier, before in reversed(ends) if before & last or not last), None)
        if start is not None:
            return nodes[start:end]
    return nodes[end_of_initialization(nodes) :]


def end_of_initialization(nodes: Sequence[Node]) -> int:
    """The position after the last op that fills a parameter or buffer before the first call of a module."""
    end = 0
    for position, node in enumerate(nodes, 1):
        if node.module or node.root or node.phase in ("backward", "optimizer"):
            return end
        filled = [value.storage for value in node.outputs if value.storage.role in _KEPT]
        if any(storage.created == node.index or storage in node.writes for storage in filled):
            end = position
    return 0  # no step follows: the work itself may be initialization
