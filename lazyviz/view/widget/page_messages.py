"""Message protocol of the widget: the page's requests that run nothing, and the answers.

Each request is an action with an id; the rest of a message is ignored. None of them runs the graph; see
:mod:`lazyviz.view.widget.widget` for that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ...graph.ir import Annotation, Graph
from ...graph.sync_point_groups import MOST_LISTED, listed, sites
from ..render.publication_figure import Drawing
from ..scene.batch_text import batch_json
from ..scene.box_numbers import COUNTED
from ..scene.boxes import Box, chain
from ..scene.details import describe, describe_moment, lifetime_of
from ..scene.largest_layers import largest_layers
from ..scene.memory_chart import memory_json, range_json
from ..scene.plan_protocol import PlanLike
from ..scene.saved_activations import kept_json
from ..scene.scene import Scene, plural
from ..scene.time_track import ASKED, track_json
from .page_lookups import Lookups
from .plan_settings import Planned, Targets, plans_of

FIRST_BYTES = 40_000  # approximate limit of the JSON of the first picture, without the chart
MESSAGE_BYTES = 80_000  # approximate limit of the JSON of one message with groups
MOST_CHAINS = 40  # maximum number of sync points of one line that the page can go to
EXPANDED_BOXES = 2000  # maximum number of boxes that "Expand all" opens


class Pictured(Planned, Protocol):
    """The part of a recorded graph that its picture uses."""

    drawing: Drawing | None

    @property
    def graph(self) -> Graph: ...
    @property
    def title(self) -> str: ...
    @property
    def measured(self) -> Sequence[tuple[int, int]]:
        """The memory of runs, as ``(node_index, bytes)`` in the order in which the nodes ran."""


class Answers:
    """Answers the requests of pages that show one graph.

    Args:
        pictured: the graph and its plan.
        send: sends a message to the page.
        redraw: called when the whole first picture has changed.
        scene: the existing scene of the graph and its plan, if there is one.
    """

    def __init__(
        self,
        pictured: Pictured,
        send: Callable[[dict[str, Any]], None],
        redraw: Callable[[], None],
        scene: Scene | None = None,
    ) -> None:
        self._pictured = pictured
        self._plans = plans_of(pictured, scene.plan if scene is not None else None)
        # A separate scene, because its plan may change later.
        drawn = scene.hierarchy if scene is not None else None
        by = scene.by if scene is not None else ""
        self.scene = Scene(pictured.graph, self._plans.shown, drawn=drawn, by=by)
        self._targets = Targets(self._plans.own)
        self._plans.subscribe(self._show_plan)
        self._views = False
        self._lookups = Lookups(pictured.graph, getattr(pictured, "code", ""), lambda: self.scene, send)
        self.given: set[str] = set()  # the groups that the page has received
        self._noted = self._annotations
        self.behind = False  # whether boxes have changed since the first picture was made
        self._send = send
        self._redraw = redraw

    def answer(self, action: str, id: str) -> bool:
        """Answer one request; False if the action is unknown."""
        handler = self._handlers.get(action)
        if handler is not None:
            handler(self, id)
        return handler is not None or self._lookups.answer(action, id)

    def first_picture(self) -> dict[str, Any]:
        """The first picture: the open groups, and as many groups below them as fit in a small message."""
        scene = self.scene
        self.behind = False
        self.given.clear()
        opened = scene.opened()
        groups = [self._group(box) for box in opened]
        size = sum(_size(group) for group in groups)
        queue = [child for box in opened for child in box.children if child.is_group and child not in opened]
        for box in queue:  # grows while it is read
            group = scene.group(box)
            size += _size(group)
            if size > FIRST_BYTES:
                break
            self.given.add(box.id)
            groups.append(group)
            queue += [child for child in box.children if child.is_group]
        return {
            "title": self._pictured.title,
            "root": scene.hierarchy.root.id,
            "opened": [box.id for box in opened],
            "groups": groups,
            "memory": self._memory() if scene.graph.nodes else None,
            "batch": self._batch() if scene.graph.nodes else None,
            "devices": self._devices() if scene.graph.nodes else None,
            "views": self._views,
            "by": scene.by if scene.by != "peak" else "",
            "notes": scene.numbers.notes_json(),
            "code": self._lookups.first_code(),
            "syncs": {
                "title": plural(len(scene.graph.sync_points), "sync point"),
                "lines": [line.removeprefix("sync point: ") for line in listed(scene.graph.sync_points)],
                "chains": _chains_of_syncs(scene),
            },
        }

    def _group(self, box: Box) -> dict[str, Any]:
        """A group for the page, which from now on is notified of state changes of the group's boxes."""
        self.given.add(box.id)
        return self.scene.group(box)

    def follow(self, first: dict[str, Any]) -> None:
        """Update the page after a choice in another widget of this graph, or an annotation.

        ``first``: the first picture as sent to the page, which gets boxes with the new numbers. Its boxes
        themselves do not change, because another thread may be sending them.
        """
        self._plans.follow()
        if self._noted != self._annotations:
            self._noted, self.behind = self._annotations, True
            numbers = self._send_numbers()
            first["notes"] = numbers["notes"]
            first["groups"] = [
                {**group, "boxes": [_with_numbers(box, numbers["boxes"]) for box in group["boxes"]]}
                for group in first["groups"]
            ]

    @property
    def is_complete(self) -> bool:
        """Whether the picture shows the whole graph: an open block may have recorded more ops since."""
        return len(self.scene.hierarchy.box_of) == len(self._pictured.graph.nodes)

    @property
    def _annotations(self) -> list[Annotation]:
        return list(self._pictured.graph.annotations.values())

    def _numbers(self, id: str) -> None:
        """Start sending an optional number of boxes: FLOPs or projected time."""
        if id in COUNTED:
            self.scene.numbers.asked.add(id)
            self._send_numbers()

    def _send_numbers(self) -> dict[str, Any]:
        """Send all numbers of the boxes that the page has received."""
        scene, boxes = self.scene, {}
        for box in scene.hierarchy.boxes.values():
            there = box.parent is not None and box.parent.id in self.given
            if there and (found := scene.numbers.of(box, scene.plan)):
                boxes[box.id] = found
        message = {"kind": "numbers", "notes": scene.numbers.notes_json(), "boxes": boxes}
        self._send(message)
        return message

    @property
    def plans(self) -> tuple[PlanLike, PlanLike]:
        """The plan for the recorded batch and device, and the shown plan."""
        return self._plans.own, self._plans.shown

    def _batch(self) -> dict[str, Any] | None:
        return batch_json(self.scene, self._plans.own.batch_size or 0, self._pictured.split)

    def _open(self, id: str) -> None:
        box = self.scene.hierarchy.boxes.get(id)
        if box is not None and box.is_group:
            self._send_groups(_with_lanes([box]))

    def _open_all(self, _: str) -> None:
        groups: list[Box] = []
        drawn, note = 0, ""
        queue = [self.scene.hierarchy.root]
        for box in queue:  # grows while it is read
            drawn += len(box.children)
            if drawn > EXPANDED_BOXES and groups:
                note = f"too many boxes to open all: {EXPANDED_BOXES:,} are shown, click others to open them"
                break
            groups.append(box)
            queue += [child for child in box.children if child.is_group]
        self._send_groups(_with_lanes(groups), note)

    def _send_groups(self, groups: list[Box], note: str = "") -> None:
        """Send groups in messages of about :data:`MESSAGE_BYTES`; the page waits while there are more."""
        part: list[dict[str, Any]] = []
        size = 0
        for box in groups:
            group = self._group(box)
            size += _size(group)
            if part and size > MESSAGE_BYTES:
                self._send({"kind": "groups", "groups": part, "note": "", "more": True})
                part, size = [], _size(group)
            part.append(group)
        self._send({"kind": "groups", "groups": part, "note": note})

    def _select(self, id: str) -> None:
        box = self.scene.hierarchy.boxes.get(id)
        if box is not None:
            details = {**describe(self.scene, box), "lines": self._lookups.lines_of(box)}
            if box.node is not None and self._pictured.readable([box.node]):
                details["readable"] = True
            self._send({"kind": "details", "details": details})

    def _life(self, id: str) -> None:
        """Send the lifetime of the box under the pointer."""
        box = self.scene.hierarchy.boxes.get(id)
        if box is not None:
            self._send({"kind": "life", "id": id, "lifetime": lifetime_of(self.scene, box)})

    def _summarize(self, id: str) -> None:
        """Compute statistics of a result that still exists, and send them."""
        box = self.scene.hierarchy.boxes.get(id)
        if box is not None and box.node is not None:
            self._pictured.summarize([box.node])
            self._select(id)

    def _moment(self, id: str) -> None:
        """Send the live set at the position ``id`` of the plan's timeline."""
        if id.isascii() and id.isdigit() and int(id) < len(self.scene.plan.timeline):
            self._send({"kind": "moment", "moment": describe_moment(self.scene, int(id))})

    def _alive(self, id: str) -> None:
        """Send the bytes that the page's boxes hold at the position ``id``, by category."""
        if id.isascii() and id.isdigit() and int(id) < len(self.scene.plan.timeline):
            boxes = self._told(self.scene.alive_at(int(id)))
            self._send({"kind": "alive", "position": int(id), "boxes": boxes})

    def _told(self, held: Mapping[Box, Mapping[str, int]]) -> dict[str, list[list[Any]]]:
        """The bytes that the page's boxes hold, by box id and category."""
        return {
            box.id: [[name, size] for name, size in sizes.items() if size]
            for box, sizes in held.items()
            if box.parent is not None and box.parent.id in self.given
        }

    def _devices(self) -> dict[str, Any]:
        return {**self._targets.menu(), "chosen": self._plans.device, "version": self._version}

    def _range(self, id: str) -> None:
        """Send the chart's points between two positions, ``"120-180"``, and the allocations there."""
        found = re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", id, re.ASCII)
        start, stop = (int(found[1]), int(found[2])) if found else (0, 0)
        if start < stop <= len(self.scene.plan.timeline):
            part = range_json(self.scene, start, stop, self._pictured.measured)
            if ASKED in self.scene.numbers.asked:
                part["track"] = track_json(self.scene, start, stop)
            self._send({"kind": "range", **part})

    def _track(self, _: str) -> None:
        """Send the projected time over the run and per line, which takes too long for the first picture.

        Every page requests it when it is displayed.  A page that shares its model with another page begins
        with the first picture as originally sent, so it also gets what has changed since.
        """
        if self.scene.graph.nodes:
            if self.behind:
                self._send({"kind": "states", "boxes": self.scene.states.told(self.given)})
                self._send_numbers()
            self.scene.numbers.asked.add(ASKED)
            self._send({"kind": "track", "track": track_json(self.scene), "kept": kept_json(self.scene)})
            self._lookups.answer("code", "facts")

    def _shown(self, version: str) -> None:
        """Send the shown plan with measurements, for a page that has another version of it."""
        if self.scene.graph.nodes and version != self._version:
            self._show_plan("")

    @property
    def _version(self) -> str:
        return f"{self._plans.version}.{len(self._pictured.measured)}"

    def _device(self, id: str) -> None:
        """Plan for another device."""
        if id in self._targets:
            self._plans.choose(id, self._targets[id])

    def _draw(self, id: str) -> None:
        """Store the state of the page's picture: the chosen number and the open groups, one per line."""
        by, *opened = id.split("\n")
        known = self.scene.hierarchy.boxes
        self._pictured.drawing = Drawing(frozenset(each for each in opened if each in known), by, self._views)

    def _largest(self, _: str) -> None:
        """Send the largest batch size known to fit; the page repeats the request until the search ends."""
        if self._plans.own.batch_size is not None:
            self._send({"kind": "largest", **self._plans.largest()})

    def _resize(self, id: str) -> None:
        """Plan for another number of samples."""
        if self._plans.own.batch_size is not None and re.fullmatch(r"[0-9]{1,13}", id) and int(id):
            self._plans.resize(int(id))

    def _cut(self, id: str) -> None:
        """Set the split for Evaluate: off, auto, or a number of pieces."""
        if self._plans.own.batch_size is not None and re.fullmatch(r"off|auto|[1-9][0-9]{0,8}", id):
            self._plans.cut(id if id in ("off", "auto") else int(id))

    def _show_plan(self, note: str) -> None:
        """Show another plan, requested by any page of the graph."""
        self.scene.plan = self._plans.shown
        plan = {"memory": self._memory(), "batch": self._batch(), "device": self._plans.device}
        plan["held"] = self._told(self.scene.held())
        plan["version"] = self._version
        plan["sizes"] = self._sizes()
        self._send({"kind": "plan", **plan, "note": note})
        if self.scene.numbers.asked.intersection(COUNTED):
            self._send_numbers()

    def _sizes(self) -> dict[str, Any]:
        """The bytes that the page's boxes and edges show, for the batch size of the plan."""
        scene, groups = self.scene, self.scene.hierarchy.boxes
        given = [groups[id] for id in sorted(self.given) if id in groups]
        boxes = {
            box.id: [scene.subtitle(box), scene.made(box)]
            for group in given
            for box in group.children
            if box.kind not in ("sync", "error")
        }
        edges = {
            group.id: [scene.edge_text(values) for values in group.edges.values()]
            for group in given
            if group.edges and group.children[0].kind != "lane"
        }
        return {"boxes": boxes, "edges": edges}

    def _memory(self) -> dict[str, Any]:
        return {**memory_json(self.scene, self._pictured.measured), "layers": largest_layers(self.scene)}

    def _reveal(self, id: str) -> None:
        box = self.scene.hierarchy.boxes.get(id)
        if box is None:
            return
        path = chain(box)
        around = _with_lanes([self.scene.hierarchy.boxes[each] for each in path[:-1]])
        self._send({"kind": "reveal", "groups": [self._group(each) for each in around], "chain": path})

    def _toggle_views(self, _: str) -> None:
        self._views = not self._views
        asked = self.scene.numbers.asked
        self.scene = Scene(self._pictured.graph, self.scene.plan, views=self._views)
        self.scene.numbers.asked |= asked
        self._redraw()

    _handlers = {  # noqa: RUF012 (constant)
        "open": _open,
        "open-all": _open_all,
        "select": _select,
        "summarize": _summarize,
        "life": _life,
        "moment": _moment,
        "alive": _alive,
        "range": _range,
        "track": _track,
        "shown": _shown,
        "device": _device,
        "largest": _largest,
        "batch-size": _resize,
        "split": _cut,
        "reveal": _reveal,
        "views": _toggle_views,
        "numbers": _numbers,
        "drawing": _draw,
    }


def _chains_of_syncs(scene: Scene) -> list[list[list[str]]]:
    """For each line of the list of sync points, the chains of ids to the first of them."""
    found: dict[object, list[list[str]]] = {
        (site.cause, site.source, site.reader): [] for site in sites(scene.graph.sync_points)[:MOST_LISTED]
    }
    for box in scene.hierarchy.boxes.values():
        if (sync := box.sync) is not None:
            chains = found.get((sync.cause, sync.source, sync.reader))
            if chains is not None and len(chains) < MOST_CHAINS:
                chains.append(chain(box))
    return list(found.values())


def _with_lanes(groups: list[Box]) -> list[Box]:
    """The groups, including all lanes of each step, because a step is shown with all its lanes."""
    lanes = [child for box in groups for child in box.children if child.kind == "lane"]
    return list(dict.fromkeys([*groups, *lanes]))


def _with_numbers(box: dict[str, Any], numbers: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``box`` with its current numbers, by the id of each box that has any."""
    changed = {key: item for key, item in box.items() if key != "numbers"}
    if box["id"] in numbers:
        changed["numbers"] = numbers[box["id"]]
    return changed


def _size(group: dict[str, Any]) -> int:
    """The approximate size of a group's JSON in bytes."""
    return 250 * len(group["boxes"]) + 45 * len(group.get("edges", ()))
