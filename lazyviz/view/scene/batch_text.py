"""Batch and split as text, and as data for the widget's slider and menu."""

from __future__ import annotations

from typing import Any

from ...plan.batch.batch_analysis_result import Blocker
from ...plan.batch.split_plan import describe
from .boxes import chain
from .plan_protocol import PlanLike
from .scene import Scene, plural

LISTED = 4  # maximum listed nodes that prevent a split
PIECES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # numbers of pieces in the menu


def batch_lines(plan: PlanLike) -> list[str]:
    """The batch and its split as one line, and what prevents a split as a second line. None if no batch
    was named.
    """
    if plan.batch_size is None:
        return []
    samples = plural(plan.batch_size, "sample")
    if not plan.split.blocked_by:
        return [f"Batch of {samples}: {plan.split.explain()}"]
    where, _ = blockers(plan)[0]
    count = len(plan.split.blocked_by)
    more = f" and {count - 1:,} more" if count > 1 else ""
    return [f"Batch of {samples}, cannot be split: {plan.split.reasons[0]}", f"  {where}{more}"]


def blockers(plan: PlanLike) -> list[tuple[str, str]]:
    """The nodes that prevent a split: name, location, and the reason with advice."""
    result = []
    for node, reason in zip(plan.split.blocked_by, plan.split.reasons):
        text = describe(Blocker(node, reason))
        at = text.index(f": {reason}")
        result.append((text[:at], text[at + 2 :]))
    return result


def batch_json(scene: Scene, recorded: int, split: int | str) -> dict[str, Any] | None:
    """The batch for the page; ``None`` if none was named.

    ``recorded`` is the number of samples that Evaluate runs, ``split`` the option for pieces.
    """
    plan = scene.plan
    if plan.batch_size is None:
        return None
    rows = []
    for node, (where, why) in zip(plan.split.blocked_by[:LISTED], blockers(plan)):
        box = scene.hierarchy.box_of[node.index]
        rows.append({"label": where, "why": why, "chain": chain(box) if box is not None else []})
    cut = str(split)
    blocks = recorded // plan.split.group
    offered = sorted({*(each for each in PIECES if each < blocks), *([blocks] if blocks > 1 else [])})
    choices = [["off", "off: one piece"], ["auto", "auto: as few as fit"]]
    choices += [[str(each), f"{each:,} pieces"] for each in offered]
    if cut not in [value for value, _ in choices]:
        choices.append([cut, plural(int(cut), "piece")])
    return {
        "size": plan.batch_size,
        "recorded": recorded,
        "group": plan.split.group,
        "split": cut,
        "choices": choices,
        "words": "cannot be split" if rows else plan.split.explain(),
        "pieces": plan.split.pieces,
        "blocked": rows,
        "blockedCount": len(plan.split.blocked_by),
    }
