"""Backends: what runs a stretch of recorded nodes, and the registry that names them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol, runtime_checkable

import torch

from ..graph.ir import Node, Value


@dataclass(frozen=True)
class Segment:
    """Nodes to run together, in program order.

    ``inputs`` are the values they read from outside the segment, ``outputs`` those that
    later nodes or the user need.  Nodes that write mutate their arguments in place.
    """

    nodes: Sequence[Node]
    inputs: Sequence[Value]
    outputs: Sequence[Value]


@runtime_checkable
class Backend(Protocol):
    """Turns a segment into a callable from its input tensors to its output tensors, in order."""

    def compile(
        self, segment: Segment, inputs: Sequence[torch.Tensor], /
    ) -> Callable[..., Sequence[torch.Tensor]]: ...


_backends: dict[str, Backend | None] = {"eager": None}  # built in: lazyviz.execute.eager


def register_backend(name: str, backend: Backend) -> None:
    """Make ``backend`` available as ``backend=name``.

    Raises:
        TypeError: it has no ``compile`` method.
        ValueError: the name is taken by the built-in backend.
    """
    if name == "eager":
        raise ValueError("the name 'eager' is taken by the built-in backend")
    if not isinstance(backend, Backend):
        raise TypeError(
            f"a backend needs a method compile(segment, inputs), {type(backend).__name__} has none"
        )
    _backends[name] = backend


def backend_names() -> list[str]:
    """Registered backends and those that installed packages offer (entry points ``lazyviz.backends``)."""
    return sorted({*_backends, *(point.name for point in entry_points(group="lazyviz.backends"))})


def find_backend(name: str) -> Backend | None:
    """The backend of that name; None stands for the built-in eager one.

    Raises:
        ValueError: there is none; the message names those there are.
    """
    if name not in _backends:
        for point in entry_points(group="lazyviz.backends"):
            if point.name == name:
                register_backend(name, point.load()())
                break
        else:
            raise ValueError(f"no backend {name!r}; there are: {', '.join(backend_names())}")
    return _backends[name]
