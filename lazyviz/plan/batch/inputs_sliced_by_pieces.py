"""Partial inputs: whole tensors whose slice a piece can compute itself.

For example, the gradient of a mean is an expanded scalar, divided, which as a whole tensor is as large as the
batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...graph.ir import Node, Storage, Value, works_by_element
from .batch_analysis_result import BatchAnalysis
from .batch_placement import Shard
from .batch_rule import FACTORIES, Call, base_name
from .pointwise_rules import POINTWISE


def is_pointwise(node: Node) -> bool:
    """Whether each element of the result depends only on the same element of the arguments."""
    if works_by_element(node.op):
        return True
    name = base_name(node.op)
    if name in POINTWISE:
        return True
    packet = getattr(torch.ops.aten, name, None) if node.writes else None  # in-place forms lack some tags
    return packet is not None and works_by_element(getattr(packet, packet.overloads()[0]))


def resize_factory(call: Call, shard: Shard) -> None:
    """Let a factory create only a piece's part."""
    result = call.node.outputs[0]
    if call.has("size"):
        call.local("size", shard, result.shape)
        if call.has("stride"):
            call.sizes["stride"] = lambda samples: shard.stride(result.meta, samples)
    else:  # created like a whole tensor
        call.slices[call.node.inputs[0]] = shard


def pull(nodes: Sequence[Node], analysis: BatchAnalysis) -> None:
    """Let pieces compute their own part of tensors that do not depend on the batch and are only used in
    parts.
    """
    wants: dict[Value, set[Shard | None]] = {}
    readers: dict[Value, list[Call]] = {}
    shared: set[Storage] = set()

    def read(value: Value, part: Shard | None, call: Call | None) -> None:
        wants.setdefault(value, set()).add(part)
        if call is not None:
            readers.setdefault(value, []).append(call)

    for node in reversed(nodes):
        call = analysis.calls.get(node)
        if call is None and node not in analysis.gathers and can_make_part(node):
            value = node.outputs[0]
            parts = wants.get(value, set())
            part = next(iter(parts)) if len(parts) == 1 else None
            kept = value.storage.dropped is None and base_name(node.op) != "expand"
            if part is not None and not kept and value.storage not in shared:
                pulled = Call(node, analysis.size, lambda each: None)
                if make_part(pulled, part):
                    pulled.outputs = (part,)
                    unread = analysis.unread.pop(node, ())
                    pulled.whole = {
                        each for each in node.inputs if each in analysis.placements and each not in unread
                    }
                    analysis.calls[node] = call = pulled
                    analysis.placements[value] = part
                    for reader in readers[value]:
                        reader.slices.pop(value, None)
        for value in dict.fromkeys(node.inputs):
            if call is None:
                read(value, None, None)
            elif value in call.heads:
                read(value, None, call)
            elif value not in analysis.placements or value in call.slices:
                read(value, call.slices.get(value), call)
        shared.update(node.writes)


def can_make_part(node: Node) -> bool:
    if node.writes or len(node.outputs) != 1 or torch.Tag.nondeterministic_seeded in node.op.tags:
        return False
    name = base_name(node.op)
    return works_by_element(node.op) or name in ("expand", "clone", "_to_copy", "mm") or name in FACTORIES


def make_part(call: Call, part: Shard) -> bool:
    """Fill in the call that computes ``part`` of the node's result."""
    node = call.node
    name = base_name(node.op)
    result = node.outputs[0]
    if name in FACTORIES:
        resize_factory(call, part)
        return True
    if name == "mm":
        if part.dim == 0:
            call.slices[node.inputs[0]] = part
        return part.dim == 0
    for value in call.tensors:
        dim = part.dim - (len(result.shape) - len(value.shape))
        if dim >= 0 and value.shape[dim] != 1:
            call.slices[value] = part.at(dim)
    if name == "expand":
        call.local("size", part, result.shape)
    return True
