"""Remaining time of a run: from times of ops in earlier runs, otherwise from bytes read and written.

Times of ops differ by factors of thousands: the many small ops of an optimizer at the end of a step take
almost no time, a few matrix products most of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate

from ..graph.ir import Node

BYTES_PER_SECOND = 5e9
CALL_SECONDS = 8e-6  # for an op that does nothing
MOST_KNOWN = 20_000
MOST_SEEN = 4_000  # nodes that are examined; of more nodes, an evenly spaced sample

_known: dict[Hashable, float] = {}  # seconds that an op with operands of these shapes took in this process


def _key(node: Node) -> Hashable:
    return node.op, tuple(value.meta for value in node.inputs)  # metadata is interned


def learn(nodes: Sequence[Node]) -> None:
    """Store the times of ``nodes``, for later runs."""
    if len(nodes) > MOST_KNOWN:
        return
    if len(_known) > MOST_KNOWN:
        _known.clear()
    for node in nodes:
        if node.measured_seconds is not None:
            _known[_key(node)] = node.measured_seconds


class Forecast:
    """The share of a run's time that its first ops take."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        from ..plan.remat.recompute_selection import work  # imported by the first run with a progress display

        # An odd stride, so that samples of a loop are not always the same op.
        seen = nodes[:: (len(nodes) // MOST_SEEN) | 1]
        self._rate = len(seen) / max(len(nodes), 1)
        expected = (_known.get(_key(node)) or work(node) / BYTES_PER_SECOND + CALL_SECONDS for node in seen)
        self._sums = list(accumulate(expected, initial=0.0))

    def share(self, done: int) -> float:
        """The share of the total time after ``done`` ops, from 0 to 1."""
        sums, whole = self._sums, self._sums[-1]
        at, part = divmod(done * self._rate, 1)
        if at >= len(sums) - 1 or not whole:
            return 1.0
        return (sums[int(at)] + (sums[int(at) + 1] - sums[int(at)]) * part) / whole
