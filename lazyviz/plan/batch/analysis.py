"""Batch analysis results; see :mod:`lazyviz.plan.batch.propagation`."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...graph.ir import Node, Value
from .placement import Placement, Shard
from .rule import Call


@dataclass(frozen=True, slots=True)
class Blocker:
    """A node that allows no split, and why."""

    node: Node
    reason: str


@dataclass(slots=True)
class BatchAnalysis:
    """What became of the batch.

    Attributes:
        size: samples of the batch.
        roots: the named tensors, and their batch dimensions.
        placements: of every value that is spread at some time; what is not listed is replicated.
        calls: how each spread node runs on a piece.
        gathers: per node, what it reads that is spread until then and has to be put together: all of a
            whole node's, of a spread one the sums.
        unread: per whole node, spread arguments of which it only takes the shape.
        blocked: what allows no split; empty if the batch can be split.
        unknown: nodes of which it is not known how their results grow with the batch.
        group: pieces have a multiple of that many samples.
    """

    size: int
    roots: dict[Value, Shard]
    placements: dict[Value, Placement] = field(default_factory=dict)
    calls: dict[Node, Call] = field(default_factory=dict)
    gathers: dict[Node, list[Value]] = field(default_factory=dict)
    unread: dict[Node, list[Value]] = field(default_factory=dict)
    blocked: list[Blocker] = field(default_factory=list)
    unknown: list[Node] = field(default_factory=list)
    group: int = 1
