"""Trace event export of a run, for Perfetto and chrome://tracing.

The format is Chrome's "Trace Event Format": complete events (``"X"``) for modules and their nodes, in the
lanes of the picture, counters (``"C"``) for memory by category.  Times are microseconds: the position of a
node until the graph has run, measured times afterwards.  A split run shows two pieces of each pass, like its
plan, and no measured times, which are those of all pieces together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from ...graph.ir import Graph, Node, Phase
from ...graph.modules import root_parts
from ...plan.liveness.live_set_and_categories import CATEGORIES
from ..scene.boxes import LANE_TITLES
from ..scene.dataflow import drawn_lanes
from ..scene.plan_protocol import PlanLike

_LANES: tuple[Phase, ...] = ("forward", "backward", "optimizer", "other")
_PROCESS = 1
_SHORTEST = 1e-3  # minimum duration of a measured node, so that every node is visible


def trace_events(graph: Graph, plan: PlanLike, *, title: str) -> dict[str, Any]:
    """The whole file as JSON; sizes in ``args`` are bytes."""
    order = [graph.nodes[index] for index, _ in plan.timeline]
    lanes = drawn_lanes(graph)
    starts, measured = _clock(order, pieces=plan.split.pieces)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": _PROCESS, "tid": 0, "name": "process_name", "args": {"name": title}}
    ]
    for number, phase in enumerate(_LANES, 1):
        thread = {"ph": "M", "pid": _PROCESS, "tid": number}
        events.append({**thread, "name": "thread_name", "args": {"name": LANE_TITLES[phase]}})
        events.append({**thread, "name": "thread_sort_index", "args": {"sort_index": number}})
    about = _About(plan)
    for number, phase in enumerate(_LANES, 1):
        lane = [(position, node) for position, node in enumerate(order) if lanes[node.index] == phase]
        events += _lane(lane, number, starts, about)
    for position, (_, allocated) in enumerate(plan.timeline):
        sizes = {str(name): plan.category_timeline[name][position] for name in CATEGORIES}
        events.append(_counter("allocated bytes", starts[position], sizes))
        events.append(_counter("all allocated bytes", starts[position], {"bytes": allocated}))
    if order:
        events.append(_counter("allocated bytes", starts[-1], dict.fromkeys(map(str, CATEGORIES), 0)))
        events.append(_counter("all allocated bytes", starts[-1], {"bytes": 0}))
    cut = {"split": plan.split.explain()} if plan.split.pieces > 1 else {}
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "made by": "lazyviz",
            "time": "measured" if measured else "one microsecond per node: nothing has run",
            "memory": "projected for a lazyviz run",
            "device": plan.device,
            "peak_bytes": plan.peak_bytes,
            "eager_peak_bytes": plan.eager_peak_bytes,
            **cut,
        },
    }


def _clock(order: Sequence[Node], *, pieces: int) -> tuple[list[float], bool]:
    """The start of each node and the end of the last one in microseconds, and whether they were measured."""
    seconds = [node.measured_seconds for node in order if node.measured_seconds is not None]
    if not order or len(seconds) < len(order) or pieces > 1:
        return [float(position) for position in range(len(order) + 1)], False
    starts = [0.0]
    for duration in seconds:
        starts.append(starts[-1] + max(duration * 1e6, _SHORTEST))
    return starts, True


def _lane(
    nodes: Sequence[tuple[int, Node]], thread: int, starts: Sequence[float], about: _About
) -> list[dict[str, Any]]:
    """The events of one phase: every module is a slice around the nodes and modules that it calls; slices
    nest, and never overlap.
    """
    events: list[dict[str, Any]] = []
    opened: list[tuple[str, int]] = []  # (name, position of the first node), outermost first
    last, piece = -2, 0

    def close(depth: int) -> None:
        while len(opened) > depth:
            name, first = opened.pop()
            events.append(_slice(name, starts[first], starts[last + 1], thread, {}, "module"))

    for position, node in nodes:
        path = root_parts(node.root)
        path += node.module.split(".") if node.module else []
        same = 0
        # A gap is where another phase ran.
        if position == last + 1 and about.piece(position) == piece:
            for (name, _), part in zip(opened, path):
                if name != part:
                    break
                same += 1
        close(same)
        opened += [(part, position) for part in path[same:]]
        last, piece = position, about.piece(position)
        args = about(position, node)
        events.append(_slice(node.name, starts[last], starts[last + 1], thread, args, node.phase))
    close(0)
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    return events


class _About:
    """The arguments of a node's event, including its piece in a split run."""

    def __init__(self, plan: PlanLike) -> None:
        self._split = plan.split
        self._starts = [start for start, _ in plan.split.ranges]

    def piece(self, position: int) -> int:
        """The number of the piece; 0 for nodes that run once."""
        found = bisect_right(self._starts, position) - 1
        return self._split.ranges[found][1] if found >= 0 else 0

    def __call__(self, position: int, node: Node) -> dict[str, Any]:
        piece = self.piece(position)
        about: dict[str, Any] = {
            "op": str(node.op),
            "module": node.module,
            "outputs": ", ".join(map(str, (value.meta for value in node.outputs))),
            "state": node.state,
        }
        if piece:
            about["piece"] = f"{piece} of {self._split.pieces}"
        else:
            about["allocates_bytes"] = sum(storage.nbytes for storage in node.made)
        if node.source is not None:
            about["line"] = f"{node.source}: {node.source.text.strip()}"
        if node.forward is not None:
            about["backward of"] = node.forward.name
        return about


def _slice(
    name: str, start: float, stop: float, thread: int, args: dict[str, Any], category: str
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": _PROCESS,
        "tid": thread,
        "ts": start,
        "dur": stop - start,
        "args": args,
    }


def _counter(name: str, time: float, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": _PROCESS, "ts": time, "args": values}
