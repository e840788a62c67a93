"""Side-by-side pictures of two compared graphs, with differences in color."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ...plan.units import format_bytes
from ..render.box_bars import Compared
from ..render.publication_figure import Figure
from ..render.svg import render_svg
from ..scene.boxes import Box
from ..scene.scene import BARRED, Scene

Place = tuple[Any, ...]  # key that matches boxes of both graphs: lane, enclosing module, name, number

LANES = ("forward", "backward", "optimizer", "other")


def side_by_side(here: Scene, there: Scene, names: tuple[str, str], theme: str | None = "light") -> list[str]:
    """Both graphs as data URLs of images; boxes that hold more or fewer bytes at the peak are colored.

    A full bar is the larger of both peaks in both pictures.
    """
    most = max(here.plan.peak_bytes, there.plan.peak_bytes)
    return [
        _picture(here, names[0], _compared(differences(here, there), most), theme),
        _picture(there, names[1], _compared(differences(there, here), most, second=True), theme),
    ]


def _compared(by_box: dict[str, list[Any]], most: int, *, second: bool = False) -> Compared:
    """The result of :func:`differences` in the form that pictures use; ``second``: for the second graph."""
    boxes = {}
    for id, (own, other, alone) in by_box.items():
        sizes = sum(size for _, size in own), sum(size for _, size in other)
        boxes[id] = (*(sizes[::-1] if second else sizes), alone)
    return Compared(boxes, most)


def _picture(scene: Scene, name: str, compared: Compared | None = None, theme: str | None = "light") -> str:
    if compared is not None:
        pairs = {id: pair for id, pair in compared.boxes.items() if pair[0] != pair[1]}
        scene = scene.with_asides(
            {
                id: f"{format_bytes(before)} → {format_bytes(after)}"
                for id, (before, after, _) in pairs.items()
            }
        )
    title = f"{name}, peak {format_bytes(scene.plan.peak_bytes)}"
    figure = Figure(title, LANES, legend=False, theme=theme)
    text = render_svg(scene.graph, scene.plan, scene=scene, figure=figure, compared=compared)
    return "data:image/svg+xml;base64," + base64.b64encode(text.encode()).decode()


def differences(here: Scene, there: Scene) -> dict[str, list[Any]]:
    """For boxes of ``here`` that hold bytes at either peak: their bytes and those of their counterparts in
    ``there``, by category, and whether there is no counterpart.

    A counterpart has the same name in the same lane and module, and the same number among boxes with that
    name.  The variable of the model is ignored if each graph has a single model.  If only one graph folds a
    run of boxes, the counterparts of the fold are those of the boxes in it.
    """
    counterparts = {place: box for box, place in _places(there)}
    places = dict(_places(here))
    result: dict[str, list[Any]] = {}
    for box in places:
        if box.kind not in BARRED:
            continue
        others = _others(box, places, counterparts)
        before = here.held().get(box, {})
        after: Counter[str] = Counter()
        for other in others:
            after.update(there.held().get(other, {}))
        if before or after or not others:
            result[box.id] = [list(before.items()), list(after.items()), not others]
    return result


def _others(box: Box, places: Mapping[Box, Place], counterparts: Mapping[Place, Box]) -> list[Box]:
    """The counterpart of ``box``; if the other graph has no such fold, those of the boxes in the fold."""
    found: list[Box] = []
    stack = [box]
    while stack:
        current = stack.pop()
        other = counterparts.get(places[current])
        if other is not None:
            found.append(other)
        elif _is_fold(current):
            stack.extend(current.children)
    return found


def _is_fold(box: Box) -> bool:
    """Whether ``box`` is a fold of several boxes rather than a module, a lane, or an op."""
    return box.kind in ("module", "step") and not _is_module(box)


def _is_module(box: Box) -> bool:
    return box.kind == "module" and bool(box.name) and (box.repeats == 1 or box.calls > 1)


def _places(scene: Scene) -> Iterator[tuple[Box, Place]]:
    """Each box with its place: its lane, full module name, and number among boxes with the same key.

    Folds and steps within a lane are not part of a place: their content is treated as if unfolded.
    """
    boxes = scene.hierarchy.boxes.values()
    models = {box.name.partition(".")[0] for box in boxes if box.kind == "module" and box.name}
    lanes: dict[Box, Place] = {}  # place of the enclosing lane
    inside: dict[Box, Place] = {}  # prefix of the places of a box's children
    counts: dict[Place, int] = {}
    for box in boxes:  # children come after their parents
        lane, around = (lanes[box.parent], inside[box.parent]) if box.parent is not None else ((), ())
        label = box.name or box.label
        if box.name and len(models) == 1:
            label = label.partition(".")[2]
        module = _is_module(box)
        place: Place = (*(lane if module else around), box.kind, label)
        counts[place] = counts.get(place, 0) + 1
        place = (*place, counts[place])
        outside = not lane and box.kind in ("step", "lane")
        inside[box] = place if module or outside else around
        lanes[box] = place if box.kind == "lane" else lane
        yield box, place
