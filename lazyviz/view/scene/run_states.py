"""Run states of boxes: which ops have run, counted without slowing the run.

The state of a box is ``pending``, ``running``, ``done``, or ``failed``, and ``partly`` for a group that has
partly run. Seconds are summed over the ops inside; the alarm is that of the first op that has one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

from ...graph.ir import Node
from .boxes import Box, Hierarchy

PENDING, RUNNING, DONE, FAILED = range(4)
_CODES = {"pending": PENDING, "done": DONE, "failed": FAILED}
_NAMES = ("pending", "running", "done", "failed")


class _Count:
    """Totals of one group: ops inside by state, their seconds, and alarms."""

    __slots__ = ("inf", "nan", "ops", "seconds")

    def __init__(self) -> None:
        self.ops = [0, 0, 0, 0]
        self.seconds = 0.0
        self.nan = self.inf = 0


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _alone(
    method: Callable[Concatenate[States, Parameters], Result],
) -> Callable[Concatenate[States, Parameters], Result]:
    """Decorator: holds the lock during ``method``, because a run and the widgets use different threads."""

    @functools.wraps(method)
    def locked(states: States, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with states.lock:
            return method(states, *args, **kwargs)

    return locked


class States:
    """The states of all boxes of one hierarchy; any thread may call its methods."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy
        self._nodes = tuple(hierarchy.graph.nodes)  # an open block may record more
        self._codes: bytearray = bytearray()
        self._seconds: list[float] = []
        self._alarms: list[str] = []
        self._counts: dict[Box, _Count] = {}
        self._running: Node | None = None
        self._touched: set[Box] = set()  # groups and ops that changed since the last report
        self.lock = threading.RLock()

    @_alone
    def share(self, box: Box) -> float:
        """The fraction of a box's ops that have run."""
        self._begin()
        if box.node is not None:
            return float(self._codes[box.node.index] == DONE)
        count = self._counts.get(box)
        return count.ops[DONE] / max(sum(count.ops), 1) if count is not None else 0.0

    @_alone
    def of(self, box: Box) -> tuple[str, float | None, str | None] | None:
        """State, seconds if known, and alarm of a box; ``None`` for a box without ops."""
        self._begin()
        if box.node is not None:
            index = box.node.index
            return _NAMES[self._codes[index]], self._seconds[index] or None, self._alarms[index] or None
        count = self._counts.get(box)
        if count is None or not sum(count.ops):
            return None
        pending, running, done, failed = count.ops
        if failed:
            state = "failed"
        elif running:
            state = "running" if self._running is not None else "partly"
        else:
            state = "pending" if not done else "partly" if pending else "done"
        alarm = "nan" if count.nan else "inf" if count.inf else None
        return state, count.seconds or None, alarm

    @_alone
    def follow(self, ended: Iterable[Node], running: Node | None) -> None:
        """Update the states: ``ended`` have run since the last call, and ``running`` is the current node."""
        self._begin()
        graph = self._hierarchy.graph
        nodes = self._nodes
        for node in (*ended, *([self._running] if self._running is not None else ())):
            if node.index < len(nodes) and nodes[node.index] is node:
                # In a split run, a node is done only after it has run for all pieces.
                self._note(node, DONE if node.state == "done" else RUNNING)
        self._running = running if running is not None and getattr(running, "graph", graph) is graph else None
        if self._running is not None and self._running.state != "done":
            self._note(self._running, RUNNING)

    @_alone
    def look(self) -> None:
        """Update the states of all nodes, after a run that has ended or was not followed."""
        self._begin()
        self._running = None
        codes, seconds = self._codes, self._seconds
        for node in self._nodes:
            index = node.index
            code = _CODES[node.state]
            if codes[index] != code or (node.measured_seconds or 0.0) != seconds[index] or node.summaries:
                self._note(node, code)

    @_alone
    def changes(self, groups: Collection[str]) -> dict[str, list[Any]]:
        """The boxes in any of ``groups`` that have changed since the last call, by id.

        Each has its state, seconds, alarm, and the fraction of its ops that have run.
        """
        touched, self._touched = self._touched, set()
        return self._of_all(touched, groups)

    @_alone
    def told(self, groups: Collection[str]) -> dict[str, list[Any]]:
        """Like :meth:`changes`, for all boxes in any of ``groups`` that contain ops that have run."""
        self._begin()
        boxes = [box for box in self._hierarchy.boxes.values() if self.share(box) or box in self._touched]
        return self._of_all(boxes, groups)

    def _of_all(self, boxes: Iterable[Box], groups: Collection[str]) -> dict[str, list[Any]]:
        result: dict[str, list[Any]] = {}
        for box in boxes:
            if box.parent is not None and box.parent.id in groups:
                summary = self.of(box)
                if summary is not None:
                    state, seconds, alarm = summary
                    rounded = None if seconds is None else float(f"{seconds:.3g}")
                    result[box.id] = [state, rounded, alarm, round(self.share(box), 3)]
        return result

    def _begin(self) -> None:
        """Compute the totals on first use."""
        if self._codes or not self._nodes:
            return
        nodes = self._nodes
        self._codes = bytearray(len(nodes))
        self._seconds = [0.0] * len(nodes)
        self._alarms = [""] * len(nodes)
        order = [self._hierarchy.root]
        for box in order:  # grows while it is read
            order += [child for child in box.children if child.is_group]
        for box in order:
            self._counts[box] = _Count()
        for box in reversed(order):
            pending = sum(child.node is not None for child in box.children)
            pending += sum(self._counts[child].ops[PENDING] for child in box.children if child.is_group)
            self._counts[box].ops[PENDING] = pending
        if any(node.state != "pending" for node in nodes):
            self.look()

    def _note(self, node: Node, code: int) -> None:
        index = node.index
        box = self._hierarchy.box_of[index]
        before, self._codes[index] = self._codes[index], code
        seconds = node.measured_seconds or 0.0
        more, self._seconds[index] = seconds - self._seconds[index], seconds
        alarm, known = node.alarm or "", self._alarms[index]
        self._alarms[index] = alarm
        if box is None or (before == code and not more and alarm == known):
            return
        self._touched.add(box)
        group = box.parent
        while group is not None:
            count = self._counts[group]
            count.ops[before] -= 1
            count.ops[code] += 1
            count.seconds += more
            if alarm != known:
                count.nan += (alarm == "nan") - (known == "nan")
                count.inf += (alarm == "inf") - (known == "inf")
            self._touched.add(group)
            group = group.parent
