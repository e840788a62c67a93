"""Workspace rules: registration of table entries, and helpers for memory layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ...graph.ir import Node, TensorMeta, Value
from .workspace_size import Need

# Computes the memory that a node needs with that many threads.
Rule = Callable[[Node, int], Need]


def on(table: dict[str, Rule], *names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for the operators with these names."""

    def add(rule: Rule) -> Rule:
        table.update((f"aten::{name}", rule) for name in names)
        return rule

    return add


def exactly(nbytes: int) -> Need:
    return Need(nbytes, nbytes, nbytes)


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument by position or name, as passed in the call."""
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, default)


def meta_of(value: Any) -> TensorMeta | None:
    return value.meta if isinstance(value, Value) else None


def contiguous(meta: TensorMeta) -> bool:
    return in_order(meta, range(len(meta.shape) - 1, -1, -1))


def channels_last(meta: TensorMeta) -> bool:
    return in_order(meta, (1, *range(len(meta.shape) - 1, 1, -1), 0))


def suggests_channels_last(meta: TensorMeta) -> bool:
    """Whether ``suggest_memory_format`` answers channels-last, also for tensors that are not dense
    (``is_channels_last_strides_2d`` and ``_3d``, MemoryFormat.h).
    """
    shape, stride = meta.shape, meta.stride
    if len(shape) not in (4, 5) or not math.prod(shape) or not stride[1]:
        return False
    least = 0
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        if stride[dim] < least or (dim == 0 and least == stride[1]):
            return False
        least = stride[dim] * shape[dim]
    return True


def in_order(meta: TensorMeta, dims: Sequence[int]) -> bool:
    """Whether the memory layout is dense with ``dims`` nested, starting with the innermost."""
    expected = 1
    for dim in dims:
        if meta.shape[dim] != 1 and meta.stride[dim] != expected:
            return False
        expected *= meta.shape[dim]
    return True


def copied(*metas: TensorMeta | None) -> int:
    """Bytes of the copies that ``contiguous()`` makes of non-contiguous operands."""
    return sum(meta.nbytes for meta in metas if meta is not None and meta.nbytes and not contiguous(meta))
