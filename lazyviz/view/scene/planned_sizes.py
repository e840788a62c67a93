"""Planned sizes: recorded bytes and FLOPs, converted to the batch of a plan."""

from __future__ import annotations

from ...graph.ir import Graph, Node, Value
from .boxes import Box, Hierarchy
from .plan_protocol import PlanLike


def grows(value: Value) -> bool:
    """Whether a dimension of ``value`` is the batch dimension."""
    return any(isinstance(size, str) for size in value.symbolic_shape)


def growing_storages(graph: Graph, plan: PlanLike) -> set[int]:
    """Ids of the storages whose size in the plan's batch differs from the recorded size."""
    if plan.batch_size == plan.recorded_batch_size:
        return set()
    made = (value for node in graph.nodes for value in node.outputs)
    found = {value.storage.id for values in (graph.inputs, made) for value in values if grows(value)}
    if plan.split.pieces > 1:
        return found  # the plan has the sizes of the pieces
    # Some grow although none of their dimensions is known to be the batch, such as an expanded gradient.
    for allocation in plan.made(0, len(plan.timeline)):
        storage = allocation.storage.origin
        if allocation.nbytes != storage.nbytes:
            found.add(storage.id)
    return found


def planned(nbytes: int, plan: PlanLike) -> int:
    """``nbytes`` with the recorded batch, converted to the plan's batch."""
    size, recorded = plan.batch_size, plan.recorded_batch_size
    return nbytes * size // recorded if size and recorded else nbytes


def node_flops(node: Node, plan: PlanLike) -> int:
    """The FLOPs of ``node`` in the plan's batch: they grow if an input or output has a batch dimension."""
    spread = any(grows(value) for value in (*node.inputs, *node.outputs))
    return planned(node.flops, plan) if spread else node.flops


def box_bytes(hierarchy: Hierarchy, plan: PlanLike, growing: set[int]) -> dict[Box, int]:
    """The bytes that the ops of each box allocate; for an outside tensor or a result, its size."""
    result: dict[Box, int] = {}

    def size(nbytes: int, storage: int) -> int:
        return planned(nbytes, plan) if storage in growing else nbytes

    for box in reversed(hierarchy.boxes.values()):  # children come after their parents
        if box.node is not None:
            result[box] = sum(size(storage.nbytes, storage.id) for storage in box.node.made)
        elif box.values:
            result[box] = sum(size(value.nbytes, value.storage.id) for value in box.values)
        else:
            result[box] = sum(
                result[child] for child in box.children if child.kind not in ("input", "output", "error")
            )
    return result
