"""Dtype change: the recorded program in another precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...graph.ir import Node, TensorMeta, Value
from .bytes_and_launches import interned, work_key


def in_dtype(nodes: Sequence[Node], dtype: torch.dtype) -> list[Node]:
    """Forward and backward pass with ``dtype`` instead of float32; the optimizer does not change."""

    def change(value: Value) -> TensorMeta:
        meta = value.meta
        if meta.dtype != torch.float32:
            return meta
        return TensorMeta(meta.shape, meta.stride, meta.offset, dtype, meta.device, meta.flags)

    def is_changed(node: Node) -> bool:
        places = {value.device.type for value in (*node.inputs, *node.outputs)}
        # Host-to-device copies do not change.
        return node.phase in ("forward", "backward") and len(places) == 1

    found = _changed(nodes, change, is_changed)
    for node, changed in zip(nodes, found):
        if changed is not node and (alike := work_key(node)) is not None:
            changed.work_key = interned((alike, dtype))  # ops with the same work still have the same work
    return found


def _changed(
    nodes: Sequence[Node], change: Callable[[Value], TensorMeta], wanted: Callable[[Node], bool]
) -> list[Node]:
    made: dict[Value, Value] = {}

    def of(argument: Any) -> Any:
        if isinstance(argument, Value):
            if argument not in made:
                made[argument] = Value(change(argument), argument.storage, argument.node, argument.index)
            return made[argument]
        if isinstance(argument, (tuple, list)):
            return type(argument)(map(of, argument)) if type(argument) in (tuple, list) else argument
        return argument

    found = []
    for node in nodes:
        if not wanted(node):
            found.append(node)
            continue
        args = of(node.args)
        copy = Node(node.index, node.op, args, {key: of(each) for key, each in node.kwargs.items()})
        copy.inputs, copy.outputs = [of(each) for each in node.inputs], [of(each) for each in node.outputs]
        copy.writes, copy.phase, copy.module, copy.source = node.writes, node.phase, node.module, node.source
        found.append(copy)
    return found
