"""What the user says about recomputing: a budget, ``"auto"`` or ``"off"``; and the run that comes of it.

A part of :mod:`lazyviz.session.lazy_graph`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..plan.projection import parts_of
from ..plan.remat.selection import Choice, Recomputation
from ..plan.units import parse_bytes
from ..record.storage import TrackedNode
from .option_checks import validate
from .recorded_graph import RecordedGraph

Recompute = int | str


class RecomputeError(RuntimeError):
    """The budget cannot be met, however much is computed again; the message says how much can."""


def recompute_option(given: Any) -> Recompute:
    """``"off"``, ``"auto"`` or a number of bytes.

    Raises ``ValueError`` for anything else.
    """
    if given is None:
        return "off"
    if given in ("off", "auto"):
        return str(given)
    try:
        return parse_bytes(given)
    except ValueError:
        raise ValueError(f"recompute is 'off', 'auto' or a size such as '2 GiB', not {given!r}") from None


def levers(
    graph: RecordedGraph, split: int | str | None, recompute: int | str | None, backend: str
) -> tuple[int | str, Recompute]:
    """What to split and recompute: as given, else as the block was, unless one rules out the other.

    Raises ``ValueError`` for what cannot be.
    """
    own_split = "off" if split is None and recompute not in (None, "off", "auto") else graph.split
    own_recompute = "off" if recompute is None and split not in (None, "off", "auto") else graph.recompute
    split = own_split if split is None else split
    recompute = own_recompute if recompute is None else recompute_option(recompute)
    validate(split=split, recompute=recompute, backend=backend)
    return split, recompute


def instead_of_split(graph: RecordedGraph) -> bool:
    """Whether the batch cannot be cut so that the run fits, and activations are to be recomputed."""
    return graph.plan(split="auto", recompute="auto").recompute.budget_bytes is not None


def choose_run(
    graph: RecordedGraph, nodes: Sequence[TrackedNode], recompute: Recompute, pending: Iterable[TrackedNode]
) -> Choice | None:
    """How to run ``nodes`` within the budget, with ``"auto"`` within the device's room; ``None``: as ever.

    Of all ``pending`` nodes those beyond ``nodes`` may need, after the run, what it works on.

    Raises:
        RecomputeError: the budget cannot be met.
    """
    if recompute == "off" or not nodes:
        return None
    budget = recompute
    if recompute == "auto":
        plan = graph.plan(split="off", recompute="auto")
        if plan.recompute.budget_bytes is None:
            return None
        budget = plan.recompute.budget_bytes
    assert isinstance(budget, int)
    graphs = list({id(node.graph): node.graph for node in nodes}.values())
    spans, needs = parts_of(graphs, nodes, pending)
    choice = Recomputation(nodes, spans, needs).within(budget)
    if choice.plan.reason and recompute != "auto":
        raise RecomputeError(f"{choice.plan.reason}. Nothing has run.")
    return choice if choice.again is not None else None
