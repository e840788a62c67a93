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

    ``inputs`` are the values they read from outside the segment, ``outputs`` those that
    later nodes or the user need.  Nodes that write mutate their arguments in place.  ``open``, where it is
    known, is equal for two recordings of one structure that differ in nothing but their tensors.
    """

    nodes: Sequence[Node]
    inputs: Sequence[Value]
    outputs: Sequence[Value]
    open: Hashable = None


class Refused(RuntimeError):
    """What a backend's ``compile`` raises for a segment that it cannot run: the segment runs op by op."""


def first_line(error: BaseException) -> str:
    """What the error of a compiler or a device says first."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


@dataclass(frozen=True)
class Compiled:
    """A compiled segment that says whether its code was there already.

    ``cache_miss_reason`` names what was new about it.  ``reuse``, if there is one, is asked when a segment
    comes that differs in nothing but its tensors and the numbers that recording knows by their type
    alone; it gives None where that needs ``compile``.  ``left``, if there is one, tells after a run how
    many of the ops ran one by one all the same, and why.
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
    """Turns a segment into a callable from its input tensors to its output tensors, in order.

    ``compile`` may raise :class:`Refused`.  A backend with an attribute ``draws = True`` is given random
    operators, too: the default generators then stand where the segment's first draw begins.  One with a
    method ``refuses(node)``, which gives a reason or None, is spared the nodes it cannot run.
    """

    def compile(
        self, segment: Segment, inputs: Sequence[torch.Tensor], /
    ) -> Callable[..., Sequence[torch.Tensor]]: ...
