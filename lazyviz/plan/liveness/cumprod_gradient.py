"""The gradient of ``cumprod``, which eager PyTorch computes by the shorter of two formulas if it can.

``cumprod_backward`` (FunctionsManual.cpp) asks whether the operand has zeros.  Without any, as nearly always,
it is a reversed sum, divided by the operand.  While recording the answer is unknown, and the formula that is
right for any values is recorded, which takes up to twice the memory.  On the eager timeline of a plan the
operand has no zeros; the upper end of a range is for one that has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ...graph.ir import Node
from ..workspace.workspace_size import Need
from .lifetimes import Lifetime, formula_end, nodes_with

_aten = torch.ops.aten


class WithoutZeros(NamedTuple):
    """The run of eager PyTorch whose ``cumprod`` has operands without zeros: its lifetimes, and the positions
    of recorded nodes that it does not run.
    """

    spans: Sequence[Lifetime]
    skipped: frozenset[int]

    def needs(self, needs: Mapping[int, Need]) -> Mapping[int, Need]:
        """The scratch memory by position of the nodes that this run does run."""
        if not self.skipped:
            return needs
        return {position: need for position, need in needs.items() if position not in self.skipped}


def without_zeros(nodes: Sequence[Node], spans: Sequence[Lifetime]) -> WithoutZeros:
    """``spans`` without what only the formula for zeros allocates."""
    skipped: set[int] = set()
    results: dict[int, int] = {}  # by the last node of a formula: the one that makes eager PyTorch's result
    for node in nodes_with(nodes, _is_division):
        if node.forward is not None and node.forward.op is _aten.cumprod.default:
            found = _only_with_zeros(nodes, node)
            if found is not None:
                skipped.update(found)
                skipped.add(node.index)
                results[found[-1]] = node.index
    if not skipped:
        return WithoutZeros(spans, frozenset())
    kept = []
    for span in spans:
        made = span.maker.index if span.maker is not None and span.start == span.maker.index else -1
        if made in results:
            kept.append(span._replace(eager_start=results[made]))
        elif made not in skipped:
            kept.append(span)
    return WithoutZeros(kept, frozenset(skipped))


def _is_division(op: object) -> bool:
    return op is _aten.div.Tensor


def _only_with_zeros(nodes: Sequence[Node], division: Node) -> list[int] | None:
    """The positions of the formula's nodes that are there for zeros; ``None`` if it is another formula.

    ``w = output.conj() * grad``, ``is_zero = operand == 0``, a result of zeros, a mask of the places before
    the first zero; ``w`` masked, flipped, summed, flipped, divided; and what follows the first zero.
    """
    start = division.index
    while start > 0 and nodes[start - 1].forward is division.forward:
        start -= 1
    end = formula_end(nodes, division.index)
    names = [node.op._schema.name.removeprefix("aten::") for node in nodes[start:end]]
    here = division.index - start
    before = names[:here]
    if before[-4:].count("flip") != 2 or "zeros" not in before or "masked_fill" not in before:
        return None
    first, last = before.index("zeros"), before.index("masked_fill")
    if last < first or names[-1] != "where" or here == len(names) - 1:
        return None
    return [*range(start + first, start + last + 1), *range(division.index + 1, end)]
