"""Communication: bytes that one rank sends to the others while it runs a graph.

Bytes are computed for the ring algorithm, in which every rank has the same share of the work: each of ``n``
ranks sends ``2 (n - 1) / n`` of the tensor for an all-reduce, and ``(n - 1) / n`` of the gathered or
scattered tensor for an all-gather, a reduce-scatter, and an all-to-all.  NCCL's own tests use these factors
to compute bus bandwidth from time (nccl-tests, ``doc/PERFORMANCE.md``).  For a broadcast or a reduce, whose
factor is 1, a rank passes on the whole tensor.  The root of a scatter sends every other rank its part, the
root of a gather sends nothing.  A rank receives as much as it sends, except for rooted collectives and
point-to-point messages.
"""

from __future__ import annotations

from collections.abc import Callable

from ..graph.collective_info import collective_of
from ..graph.ir import Graph, Value
from .units import format_bytes


def sent(graph: Graph, size: Callable[[Value], int] | None = None) -> dict[str, int]:
    """Bytes that the graph's rank sends, by kind of collective, largest first.

    ``size`` returns the bytes of a value for other sizes than the recorded ones.
    """
    found: dict[str, int] = {}
    if graph.world_size < 2:
        return found
    for node in graph.nodes:
        collective = collective_of(node, size)
        if collective is not None and (nbytes := collective.sent_bytes):
            found[collective.kind] = found.get(collective.kind, 0) + nbytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def communication_lines(graph: Graph, by_kind: dict[str, int]) -> list[str]:
    """Text with the recorded rank and the bytes that it sends; empty for a program on one device."""
    if graph.world_size < 2:
        return []
    which = f"Rank {graph.rank} of {graph.world_size}"
    if not by_kind:
        return [f"{which}; it sends nothing to the others."]
    kinds = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in by_kind.items())
    return [f"{which}; it sends {format_bytes(sum(by_kind.values()))} to the others: {kinds}."]
