"""Saved activations: tensors that the forward pass creates and the backward pass reads, by pair of boxes."""

from __future__ import annotations

from typing import Any

from ...graph.ir import Node
from ...plan.units import format_bytes
from .boxes import Box, chain
from .scene import Scene

MOST = 24  # pairs of boxes, the largest first


def kept_json(scene: Scene) -> list[dict[str, Any]]:
    """The largest tensors saved for the backward pass, summed by pair of boxes in the first picture.

    ``from`` and ``to`` have the ids from the outermost group to the producer's and the reader's box; the
    bytes are those of the displayed plan, also as text.
    """
    if scene.plan.split.pieces > 1:
        return []  # each piece keeps its own tensors, and frees them before the next one
    opened = {box.id for box in scene.opened()}
    hierarchy = scene.hierarchy
    behind = {view.index: at for at, views in hierarchy.behind.items() for view in views}

    def drawn(node: Node) -> Box | None:
        box = hierarchy.box_of[node.index] or hierarchy.box_of[behind.get(node.index, node.index)]
        return _drawn(box, opened)

    sizes: dict[tuple[Box, Box], int] = {}
    for allocation in scene.plan.made(0, len(scene.plan.timeline)):
        maker, reader = allocation.node, allocation.saved_for
        if maker is None or reader is None or not (scene.owns(maker) and scene.owns(reader)):
            continue
        start, end = drawn(maker), drawn(reader)
        if maker.phase == "forward" and start is not None and end is not None:
            sizes[start, end] = sizes.get((start, end), 0) + allocation.nbytes
    largest = sorted(sizes.items(), key=lambda each: -each[1])[:MOST]
    return [
        {"from": chain(start), "to": chain(end), "bytes": size, "text": f"{format_bytes(size)} kept"}
        for (start, end), size in largest
    ]


def _drawn(box: Box | None, opened: set[str]) -> Box | None:
    """The box drawn for ``box`` in the first picture: the outermost closed group around it, or itself."""
    found = box
    while box is not None and box.parent is not None:
        if box.parent.id in opened:
            found = box
            break
        box = box.parent
    return found
