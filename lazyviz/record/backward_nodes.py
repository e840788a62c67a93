"""Backward nodes: the autograd nodes that a backward pass will call and that the recorder must know."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from ..torch_internals import native_module_loader, private_api


class Sums(Protocol):
    """The autograd nodes below some outputs whose results the engine adds to those of other nodes."""

    def nodes(self) -> Sequence[Any]: ...

    def watch(self, note: Callable[[Any], None]) -> None:
        """Call ``note`` after each node has computed its gradients, with a mark for :func:`is_calling`."""

    def release(self) -> None:
        """Stop calling ``note``."""


class SumsInPython:
    """:class:`Sums` implemented with Python hooks."""

    def __init__(self, nodes: Iterable[Any]) -> None:
        self._nodes = list(nodes)
        self._handles: list[Any] = []

    def nodes(self) -> Sequence[Any]:
        return self._nodes

    def watch(self, note: Callable[[Any], None]) -> None:
        self._handles = [node.register_hook(functools.partial(_computed, note, node)) for node in self._nodes]

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()


def _computed(note: Callable[[Any], None], node: Any, inputs: Any, outputs: Any) -> None:
    note(node)


def below(outputs: Sequence[Any], names: frozenset[str]) -> tuple[Iterable[Any], Sums]:
    """Find the autograd nodes below ``outputs`` (tensors or gradient edges) that have one of ``names``, or
    add.

    If several nodes compute parts of a gradient, the gradient is a sum. These nodes are the second result.
    """
    found = None if _module is None else _module.below(outputs, names)
    return in_python(outputs, names) if found is None else found


def in_python(outputs: Sequence[Any], names: frozenset[str]) -> tuple[Iterable[Any], Sums]:
    """:func:`below` without the compiled module, or for an output that is a gradient edge."""
    stack = [output.grad_fn if isinstance(output, torch.Tensor) else output.node for output in outputs]
    seen: dict[Any, None] = {}
    maker: dict[Any, Any] = {}  # the first node, by edge
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
    return [node for node in seen if node.name() in names], SumsInPython(adding)


def is_calling(mark: Any) -> bool:
    """Whether the engine is still running the node for which :meth:`Sums.watch` returned this mark."""
    if type(mark) is int and _module is not None:
        return bool(_module.is_calling(mark))
    return mark is private_api.current_autograd_node()


_module = native_module_loader.load("backward_nodes.cpp")
