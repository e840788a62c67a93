"""Comparison of displayed graphs: the other graphs of the session, by name and token."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Protocol

from ...plan.plan import Plan
from ..comparison.comparison import Comparison, chart_points
from ..comparison.side_by_side_pictures import differences, side_by_side
from ..scene.scene import Scene
from .page_messages import Pictured

OWN = "own"  # token of the plan for the recorded batch and device, while another plan is shown
_numbers = itertools.count(1)


class Shown(Protocol):
    """The part of a widget that comparisons use."""

    token: str

    @property
    def pictured(self) -> Pictured: ...
    @property
    def plans(self) -> tuple[Any, Any]:
        """The plan for the recorded batch and device, and the shown plan."""

    @property
    def drawn(self) -> Scene:
        """The picture for the shown plan."""


def new_token() -> str:
    """A token that is unique in this process."""
    return f"w{next(_numbers)}"


def named(widget: Shown) -> str:
    """The name of the widget's graph in a comparison."""
    pictured = widget.pictured
    title = pictured.title.removeprefix("lazyviz").removeprefix(", ")
    unnamed = not title or title.startswith("after ")  # "after pending ops of earlier cells"
    return pictured.graph.where if unnamed else title


def others_json(widget: Shown, shown: Iterable[Shown]) -> dict[str, Any]:
    """The graphs that ``widget``'s graph can be compared with; for each graph, the last used widget."""
    found: dict[int, Shown] = {}
    for each in shown:
        if each.pictured.graph is not widget.pictured.graph:
            found[id(each.pictured.graph)] = each
    entries = [[each.token, named(each)] for each in found.values()]
    own, now = widget.plans
    return {
        "kind": "graphs",
        "graphs": [*([[OWN, "itself, as recorded"]] if own is not now else []), *entries],
    }


def comparison_json(widget: Shown, asked: str, shown: Iterable[Shown]) -> dict[str, Any]:
    """The comparison of ``widget``'s graph with another one, or the reason why there is none.

    ``asked`` is the other graph's token, followed by the word ``dark`` for a widget in a dark theme.
    """
    token, _, theme = asked.partition(" ")
    own, now = widget.plans
    here = there = widget.drawn
    if token == OWN:
        before, after, names = own, now, ("as recorded", "as shown")
        here = Scene(here.graph, own, drawn=here.hierarchy)
    else:
        other = next((each for each in shown if each.token == token), None)
        if other is None:
            note = "The other graph is not displayed in this kernel; lazyviz.compare(a, b) takes any two."
            return {"kind": "refused", "note": note}
        before, after, names = now, other.plans[1], (named(widget), named(other))
        there = other.drawn
    assert isinstance(before, Plan) and isinstance(after, Plan)
    names = names if names[0] != names[1] else ("this graph", "the other one")
    found = Comparison(before, after, names, (len(before.timeline), len(after.timeline)))
    top, curves = chart_points(found)
    return {
        "kind": "comparison",
        "names": names,
        "peaks": [before.peak_bytes, after.peak_bytes],
        "top": top,
        "curves": curves,
        "rows": [list(row) for row in found.table().rows],
        "lines": [list(row) for row in found.lines().rows],
        "boxes": differences(here, there),
        "pictures": side_by_side(here, there, names, theme or "light"),
    }
