"""Relations of a box: its inputs and readers, saved activations, gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal

from ...graph.ir import Node, Value
from ...plan.units import format_bytes
from .boxes import Box, Hierarchy, chain, named

Kind = Literal["producer", "consumer", "saved", "gradient"]

MOST = 48  # maximum listed boxes of one kind


def relations(hierarchy: Hierarchy, box: Box) -> list[dict[str, Any]]:
    """The boxes that ``box`` is connected to, as JSON: kind of relation, chain of boxes, and text.

    Tensors that the forward pass creates and the backward pass reads are ``saved``; the ops that a backward
    op differentiates, and vice versa, are ``gradient``.
    """
    found: dict[Kind, dict[Box, dict[int, int]]] = {
        "producer": {},
        "consumer": {},
        "saved": {},
        "gradient": {},
    }

    def note(kind: Kind, other: Box | None, value: Value | None = None) -> None:
        if other is None or _within(other, box):
            return
        sizes = found[kind].setdefault(_end(other, box, hierarchy.opened), {})
        if value is not None:
            sizes[value.storage.id] = value.storage.nbytes

    if box.kind == "input":
        readers = [(index, value) for value in box.values for index in hierarchy.readers_of(value.id)]
        for index, value in sorted(readers, key=lambda reader: reader[0]):
            note("consumer", hierarchy.box_of[index], value)
        return _json(found)
    if box.kind == "output":
        maker = box.key if isinstance(box.key, int) else None
        if maker is not None:
            note("producer", hierarchy.box_of[maker], box.values[0])
        return _json(found)
    for node in hierarchy.nodes_in(box):
        _relations_of_node(hierarchy, node, note)
    return _json(found)


def _relations_of_node(hierarchy: Hierarchy, node: Node, note: Callable[..., None]) -> None:
    """Call ``note`` with the inputs of the node, its readers, and its partners in the other pass."""
    for producer, value in hierarchy.reads[node.index]:
        made = hierarchy.box_of[producer] if producer is not None else hierarchy.box_of_value.get(value.id)
        saved = producer is not None and _saved(hierarchy.graph.nodes[producer], node)
        note("saved" if saved else "producer", made, value)
    for reader in hierarchy.readers(node.index):
        kind: Kind = "saved" if _saved(node, hierarchy.graph.nodes[reader]) else "consumer"
        for producer, value in hierarchy.reads[reader]:
            if producer == node.index:
                note(kind, hierarchy.box_of[reader], value)
    for partner in partners(hierarchy, node):
        note("gradient", hierarchy.box_of[partner.index])


def partners(hierarchy: Hierarchy, node: Node) -> Iterable[Node]:
    """The op that a backward op differentiates; for a forward op, those that differentiate it."""
    if node.forward is not None:
        nodes = hierarchy.graph.nodes
        at = node.forward.index
        return [node.forward] if at < len(nodes) and nodes[at] is node.forward else []
    if hierarchy.gradients is None:
        hierarchy.gradients = {}
        for other in hierarchy.graph.nodes:
            if other.forward is not None:
                hierarchy.gradients.setdefault(other.forward, []).append(other)
    return hierarchy.gradients.get(node, [])


def _saved(maker: Node, reader: Node) -> bool:
    return maker.phase == "forward" and reader.phase == "backward"


def _within(other: Box, box: Box) -> bool:
    current: Box | None = other
    while current is not None and current is not box:
        current = current.parent
    return current is not None


def _end(other: Box, box: Box, opened: Collection[str]) -> Box:
    """The box that is listed for ``other``: for a group ``box``, the outermost group around ``other`` that
    does not contain ``box``, inside of lanes and of groups ``opened`` in the first picture.
    """
    if not box.is_group:
        return other
    around = set()
    current: Box | None = box
    while current is not None:
        around.add(current)
        current = current.parent
    end = other
    while (above := end.parent) is not None and above not in around:
        if above.kind == "lane" or above.id in opened:
            break
        end = above
    return end


def _json(found: dict[Kind, dict[Box, dict[int, int]]]) -> list[dict[str, Any]]:
    result = []
    for kind, ends in found.items():
        largest = sorted(ends, key=lambda end: -sum(ends[end].values()))
        for end in largest[:MOST]:
            label = end.label if end.node is None else str(named(end)["label"])
            nbytes = sum(ends[end].values())
            size = f" · {format_bytes(nbytes)}" if ends[end] else ""
            result.append({"kind": kind, "chain": chain(end), "label": label + size, "bytes": nbytes})
    return result
