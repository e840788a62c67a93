"""The autograd nodes that a backward pass is about to call, as far as the recorder has to know them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .. import _compiled


def below(outputs: Sequence[Any], names: frozenset[str]) -> tuple[Iterable[Any], Iterable[Any]]:
    """Of the nodes below ``outputs`` (tensors or gradient edges): those of ``names``, and those that add.

    A gradient is a sum where more than one node makes a part of it: these nodes are the second.
    """
    found = None if _module is None else _module.below(outputs, names)
    return in_python(outputs, names) if found is None else found


def in_python(outputs: Sequence[Any], names: frozenset[str]) -> tuple[Iterable[Any], Iterable[Any]]:
    """:func:`below` where nothing is compiled, or an output is an edge."""
    stack = [output.grad_fn if isinstance(output, torch.Tensor) else output.node for output in outputs]
    seen: dict[Any, None] = {}
    maker: dict[Any, Any] = {}  # the first, by edge
    adding: dict[Any, None] = {}
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen[node] = None
        for edge in node.next_functions:
            following = edge[0]
            if following is None:
                continue
            if edge in maker:
                adding[maker[edge]] = adding[node] = None
            else:
                maker[edge] = node
                stack.append(following)
    return [node for node in seen if node.name() in names], adding


_module = _compiled.load("record._engine", "record/_engine.cpp")
