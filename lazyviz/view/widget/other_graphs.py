"""Other displayed graphs to compare with, identified by name and token."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from ...plan.plan import Plan
from ...plan.units import format_bytes
from ..comparison.comparison import Comparison, chart_points
from ..render.figure import Figure
from ..render.shown_numbers import Compared
from ..render.svg import render_svg
from ..scene.boxes import Box
from ..scene.scene import BARRED, Scene
from .requests import Pictured

LANES = ("forward", "backward", "optimizer", "other")
OWN = "own"  # the token of the plan of the batch and device as recorded, while another one is shown
_numbers = itertools.count(1)


class Shown(Protocol):
    """A widget, as far as its graph is compared."""

    token: str

    @property
    def pictured(self) -> Pictured: ...
    @property
    def plans(self) -> tuple[Any, Any]:
        """The plan as recorded, and the one that is shown."""

    @property
    def drawn(self) -> Scene:
        """The picture, under the plan that is shown."""


def new_token() -> str:
    """A token that no other widget of this process has."""
    return f"w{next(_numbers)}"


def named(widget: Shown) -> str:
    """The name of its graph in a comparison."""
    pictured = widget.pictured
    title = pictured.title.removeprefix("lazyviz").removeprefix(", ")
    return title or pictured.graph.where


def others_json(widget: Shown, shown: Iterable[Shown]) -> dict[str, Any]:
    """What there is to compare ``widget``'s graph with; of one graph, the widget that was used last."""
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


def comparison_json(widget: Shown, token: str, shown: Iterable[Shown]) -> dict[str, Any]:
    """The comparison of ``widget``'s graph with another one, or the reason why there is none."""
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
        "boxes": (told := differences(here, there)),
        "pictures": [
            _picture(here, names[0], _compared(told, found)),
            _picture(there, names[1], _compared(differences(there, here), found, second=True)),
        ],
    }


def _compared(told: dict[str, list[Any]], found: Comparison, *, second: bool = False) -> Compared:
    """``told`` of :func:`differences` for a picture; ``second``: of that of the second graph."""
    boxes = {}
    for id, (own, other, alone) in told.items():
        sizes = sum(size for _, size in own), sum(size for _, size in other)
        boxes[id] = (*(sizes[::-1] if second else sizes), alone)
    return Compared(boxes, max(found.before.peak_bytes, found.after.peak_bytes))


def _picture(scene: Scene, name: str, compared: Compared | None = None) -> str:
    """The lanes of a graph as the address of an image, with what differs from another one in color."""
    figure = Figure(f"{name}, peak {format_bytes(scene.plan.peak_bytes)}", LANES, legend=False)
    text = render_svg(scene.graph, scene.plan, scene=scene, figure=figure, compared=compared)
    return "data:image/svg+xml;base64," + base64.b64encode(text.encode()).decode()


def differences(here: Scene, there: Scene) -> dict[str, list[Any]]:
    """For boxes of ``here`` that hold something at one of the peaks: by category what they and their
    counterparts in ``there`` hold, and whether there is no counterpart.

    A counterpart has the same name in the same place, and the same number among those with that name; what
    the variable of a model is called does not matter where each graph has one.
    """
    counterparts = {place: box for box, place in _places(there)}
    result: dict[str, list[Any]] = {}
    for box, place in _places(here):
        if box.kind not in BARRED:
            continue
        other = counterparts.get(place)
        before = here.held().get(box, {})
        after = there.held().get(other, {}) if other is not None else {}
        if before or after or other is None:
            result[box.id] = [list(before.items()), list(after.items()), other is None]
    return result


def _places(scene: Scene) -> Iterator[tuple[Box, tuple[Any, ...]]]:
    """Each box with its place: lane, module by its whole name, and its number among those alike.

    Folds and steps within a lane are no places: what is in them is where it would be without.
    """
    boxes = scene.hierarchy.boxes.values()
    models = {box.name.partition(".")[0] for box in boxes if box.kind == "module" and box.name}
    lanes: dict[Box, tuple[Any, ...]] = {}  # the place of the lane around
    inside: dict[Box, tuple[Any, ...]] = {}  # what the places of a box's children begin with
    counts: dict[tuple[Any, ...], int] = {}
    for box in boxes:  # children come after their parents
        lane, around = (lanes[box.parent], inside[box.parent]) if box.parent is not None else ((), ())
        label = box.name or box.label
        if box.name and len(models) == 1:
            label = label.partition(".")[2]
        module = box.kind == "module" and bool(box.name) and (box.repeats == 1 or box.calls > 1)
        place = (*(lane if module else around), box.kind, label)
        counts[place] = counts.get(place, 0) + 1
        place = (*place, counts[place])
        outside = not lane and box.kind in ("step", "lane")
        inside[box] = place if module or outside else around
        lanes[box] = place if box.kind == "lane" else lane
        yield box, place
