"""Backend protocol: a backend receives a segment of nodes and returns a callable."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from ..graph.ir import Node, Value


@dataclass(frozen=True)
class Segment:
    """Nodes to run together, in program order.

    ``inputs`` are the values that the nodes read from outside the segment, ``outputs`` the values that later
    nodes or the user need.  Nodes that write mutate their arguments in place.  ``open``, if known, is equal
    for two recordings of the same structure that differ only in their tensors.
    """

    nodes: Sequence[Node]
    inputs: Sequence[Value]
    outputs: Sequence[Value]
    open: Hashable = None


class Refused(RuntimeError):
    """Raised by a backend's ``compile`` for a segment that it cannot run; the segment then runs op by op."""


def first_line(error: BaseException) -> str:
    """The first line of an error of a compiler or device."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


@dataclass(frozen=True)
class Compiled:
    """A compiled segment, and whether its code came from a cache.

    ``cache_miss_reason`` says what was new about it.  ``reuse``, if set, is called for a later segment that
    differs only in its tensors and in numbers of which recording knows only the type; it returns None if the
    segment must be compiled.  ``left``, if set, returns after a run how many ops ran one by one, and why.
    """

    run: Callable[..., Sequence[torch.Tensor]]
    cache_hit: bool
    cache_miss_reason: str | None = None
    reuse: Callable[[Segment], Compiled | None] | None = None
    left: Callable[[], tuple[int, Sequence[str]]] | None = None

    def __call__(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        return self.run(*inputs)


@runtime_checkable
class Backend(Protocol):
    """Compiles a segment into a callable from its input tensors to its output tensors, in order.

    ``compile`` may raise :class:`Refused`.  A backend with an attribute ``draws = True`` also receives random
    operators; the default generators then have the state at which the segment's first draw begins.  A backend
    with a method ``refuses(node)``, which returns a reason or None, does not receive nodes that it refuses.
    """

    def compile(
        self, segment: Segment, inputs: Sequence[torch.Tensor], /
    ) -> Callable[..., Sequence[torch.Tensor]]: ...
