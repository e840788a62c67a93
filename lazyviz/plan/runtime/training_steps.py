"""Training steps in a graph: where one ends and the next begins."""

from __future__ import annotations

from collections.abc import Sequence

from ...graph.ir import Node


def last_step(nodes: Sequence[Node]) -> Sequence[Node]:
    """The nodes of the last complete training step; all nodes if there are fewer than two steps.

    A step ends with the last op of an optimizer before a forward pass, or before the end of the graph.
    """
    ends: list[int] = []
    stepped = 0
    for position, node in enumerate(nodes, 1):
        if node.phase == "optimizer":
            stepped = position
        elif node.phase == "forward" and stepped:
            ends.append(stepped)
            stepped = 0
    if stepped:
        ends.append(stepped)
    return nodes[ends[-2] : ends[-1]] if len(ends) > 1 else nodes
