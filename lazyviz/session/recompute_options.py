"""Recompute options: a budget, ``"auto"``, or ``"off"``, and the resulting rematerialized run.

Errors of options that cannot be met name the block.

A part of :mod:`lazyviz.session.lazy_graph`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..plan.peak_of_one_run import parts_of
from ..record.tracked_storages import TrackedNode
from .recorded_graph_interface import RecordedGraph
from .run_options import Recompute, RunOptions, recompute_option
from .split_options import SplitError

if TYPE_CHECKING:
    from ..plan.remat.recompute_selection import Choice


class RecomputeError(RuntimeError):
    """The budget cannot be met even by recomputing everything; the message has the lowest possible one."""


def name_block(error: SplitError | RecomputeError, graph: RecordedGraph) -> None:
    """Add to the message which block has the option, and what gets rid of it: a sync point far from the block
    may raise it, such as a random draw in another cell.
    """
    option = "recompute" if isinstance(error, RecomputeError) else "split"
    asks = f"This is the option {option} of {graph.ir.where}"
    if error.args and asks not in str(error):
        message = (
            f"{error.args[0]}\n{asks}, whose ops stay pending. evaluate({option}='off') of its graph runs "
            "them without it; %lazy reset or lazyviz.reset() drops all pending ops."
        )
        error.args = (message, *error.args[1:])


def split_and_recompute(
    graph: RecordedGraph, split: int | str | None, recompute: int | str | None, backend: str
) -> tuple[int | str, Recompute]:
    """The split and the recompute budget: as given, otherwise those of the block, unless they exclude each
    other.

    Raises ``ValueError`` for an invalid combination.
    """
    choices, given = graph.choices, (None, "off", "auto")
    own_split = "off" if split is None and recompute not in given else choices.split
    own_recompute = "off" if recompute is None and split not in given else choices.recompute
    split = own_split if split is None else split
    recompute = own_recompute if recompute is None else recompute_option(recompute)
    RunOptions(backend, split=split, recompute=recompute).validate()
    return split, recompute


def needs_recompute(graph: RecordedGraph) -> bool:
    """Whether no split makes the run fit, so that activations must be recomputed."""
    return graph.plan(split="auto", recompute="auto").recompute.budget_bytes is not None


def choose_run(
    graph: RecordedGraph, nodes: Sequence[TrackedNode], recompute: Recompute, pending: Iterable[TrackedNode]
) -> Choice | None:
    """How to run ``nodes`` within the budget, or for ``"auto"`` within the device's free memory; ``None``:
    run them as usual. ``pending`` nodes that are not in ``nodes`` may need the results of this run
    afterwards.

    Raises:
        RecomputeError: the budget cannot be met.
    """
    if recompute == "off" or not nodes:
        return None
    # Imported by the first rematerialized run.
    from ..plan.remat.recompute_candidates import Trace
    from ..plan.remat.recompute_selection import Recomputation

    budget = recompute
    if recompute == "auto":
        plan = graph.plan(split="off", recompute="auto")
        if plan.recompute.budget_bytes is None:
            return None
        budget = plan.recompute.budget_bytes
    assert isinstance(budget, int)
    graphs = list({id(node.graph): node.graph for node in nodes}.values())
    spans, needs = parts_of(graphs, nodes, pending)
    choice = Recomputation(Trace(nodes, spans, needs)).cheapest_within(budget)
    if choice.plan.reason and recompute != "auto":
        raise RecomputeError(f"{choice.plan.reason}. Nothing has run.")
    return choice if choice.schedule is not None else None
