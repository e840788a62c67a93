"""Result of batch analysis; see :mod:`lazyviz.plan.batch.batch_dim_propagation`."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...graph.ir import Node, Value
from .batch_placement import Placement, Shard
from .batch_rule import Call


@dataclass(frozen=True, slots=True)
class Blocker:
    """A node that prevents a split, with the reason."""

    node: Node
    reason: str


@dataclass(slots=True)
class BatchAnalysis:
    """The batch dimension of every value of a graph, and what prevents a split.

    Attributes:
        size: samples of the batch.
        roots: the named tensors, and their batch dimensions.
        placements: of every value that is spread at some time; other values are replicated.
        calls: how each spread node runs on a piece.
        gathers: per node, the spread values that must be combined before it reads them: for a whole node all
            of them, for a spread node only the sums.
        unread: per whole node, spread arguments of which it uses only the shape.
        blocked: the nodes that prevent a split; empty if the batch can be split.
        unknown: nodes for which it is not known how their results grow with the batch.
        group: the number of samples of a piece is a multiple of it.
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
