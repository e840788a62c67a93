"""What-if graphs: the recorded program in another precision, or with a larger batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...graph.ir import Node, TensorMeta, Value
from .work import likeness, shared


def in_dtype(nodes: Sequence[Node], dtype: torch.dtype) -> list[Node]:
    """Forward and backward pass with ``dtype`` instead of float32; the optimizer does not change."""

    def change(value: Value) -> TensorMeta:
        meta = value.meta
        if meta.dtype != torch.float32:
            return meta
        return TensorMeta(meta.shape, meta.stride, meta.offset, dtype, meta.device, meta.flags)

    found = _changed(nodes, change, lambda node: node.phase != "optimizer")
    for node, changed in zip(nodes, found):
        if changed is not node and (alike := likeness(node)) is not None:
            changed.likeness = shared((alike, dtype))  # ops with the same work still have the same work
    return found


def with_batch(nodes: Sequence[Node], factor: int) -> list[Node]:
    """``nodes`` with ``factor`` times as many samples; shapes show which dimensions grow with the batch."""

    def change(value: Value) -> TensorMeta:
        meta = value.meta
        shape = tuple(
            size * factor if isinstance(symbol, str) else size
            for size, symbol in zip(meta.shape, value.symbolic_shape)
        )
        if shape == meta.shape:
            return meta
        stride = _strides(meta, shape)
        return TensorMeta(shape, stride, meta.offset, meta.dtype, meta.device, meta.flags)

    return _changed(nodes, change, lambda node: True)


def _strides(meta: TensorMeta, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of the larger tensor in the same order of dimensions; broadcast dimensions keep stride 0."""
    order = sorted(range(len(shape)), key=lambda dim: (meta.stride[dim], meta.shape[dim]))
    strides, grown = list(meta.stride), 1
    for dim in order:
        strides[dim] *= grown
        if meta.stride[dim] and meta.shape[dim]:
            grown *= shape[dim] // meta.shape[dim]
    return tuple(strides)


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
