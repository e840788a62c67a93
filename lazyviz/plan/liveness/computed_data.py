"""Data that a program computes itself: random batches, standardized images, labels.

Such tensors are not activations, although an op of the graph allocated them: they are what the model reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...graph.ir import Graph, Node, Storage


def mark_data(graph: Graph) -> None:
    """Set ``is_data`` of the storages that ops outside of modules computed from nothing but data.

    What is computed from parameters, by a module, or by an op that has a backward is not data, and neither is
    memory into which such results are written.  Without a module and a backward pass nothing tells a model
    from its data, and nothing is marked.
    """
    nodes = graph.nodes
    forwards = {id(node.forward) for node in nodes if node.phase == "backward"}
    if not forwards and not any(node.root or node.module for node in nodes):
        return
    made: dict[Storage, bool] = {}  # whether it is data
    for node in nodes:
        if node.phase not in ("backward", "optimizer") and not node.root and not node.module:
            is_data = id(node) not in forwards and _reads_data(node, made)
            for value in node.outputs:
                if not value.storage.external:
                    made.setdefault(value.storage, is_data)
        elif node.writes:
            is_data = False
        else:
            continue
        if not is_data:
            _forget(node.writes, made)
    for storage, is_data in made.items():
        storage.is_data = is_data


def _reads_data(node: Node, made: dict[Storage, bool]) -> bool:
    for value in node.inputs:
        storage = value.storage.origin  # the same memory before a sync point
        known = made.get(storage)
        if storage.role is not None or not (storage.external or storage.is_data if known is None else known):
            return False
    return True


def _forget(written: Sequence[Storage], made: dict[Storage, bool]) -> None:
    for storage in written:
        if storage.origin in made:
            made[storage.origin] = False
