"""The run as trace events, which Perfetto and chrome://tracing open.

The format is Chrome's "Trace Event Format": complete events (``"X"``) for modules and the nodes
in them, a lane for each phase, counters (``"C"``) for memory by category.  Times are microseconds:
a node's number as long as it has not run, measured times once all have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..graph.ir import Node, Phase
from ..plan.alive import CATEGORIES
from .scene import PHASE_TITLES, PlanLike

_LANES: tuple[Phase, ...] = ("forward", "backward", "optimizer", "other")
_PROCESS = 1
_SHORTEST = 1e-3  # of a measured node, so that every node can be seen and counted


def trace_events(nodes: Sequence[Node], plan: PlanLike, *, title: str) -> dict[str, Any]:
    """The whole file as JSON; sizes in ``args`` are bytes."""
    starts, measured = _clock(nodes)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": _PROCESS, "tid": 0, "name": "process_name", "args": {"name": title}}
    ]
    for number, phase in enumerate(_LANES, 1):
        thread = {"ph": "M", "pid": _PROCESS, "tid": number}
        events.append({**thread, "name": "thread_name", "args": {"name": PHASE_TITLES[phase]}})
        events.append({**thread, "name": "thread_sort_index", "args": {"sort_index": number}})
    for number, phase in enumerate(_LANES, 1):
        events += _lane([node for node in nodes if node.phase == phase], number, starts)
    allocated = [size for _, size in plan.timeline]
    for node in nodes:
        sizes = {str(name): plan.category_timeline[name][node.index] for name in CATEGORIES}
        events.append(_counter("allocated bytes", starts[node.index], sizes))
        events.append(_counter("all allocated bytes", starts[node.index], {"bytes": allocated[node.index]}))
    if nodes:
        events.append(_counter("allocated bytes", starts[-1], dict.fromkeys(map(str, CATEGORIES), 0)))
        events.append(_counter("all allocated bytes", starts[-1], {"bytes": 0}))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "made by": "lazyviz",
            "time": "measured" if measured else "one microsecond a node: nothing has run",
            "memory": "projected, of lazyviz's own run",
            "device": plan.device,
            "peak_bytes": plan.peak_bytes,
            "eager_peak_bytes": plan.eager_peak_bytes,
        },
    }


def _clock(nodes: Sequence[Node]) -> tuple[list[float], bool]:
    """When each node starts, and when the last ends, in microseconds; whether that was measured."""
    seconds = [node.seconds for node in nodes if node.seconds is not None]
    if not nodes or len(seconds) < len(nodes):
        return [float(index) for index in range(len(nodes) + 1)], False
    starts = [0.0]
    for duration in seconds:
        starts.append(starts[-1] + max(duration * 1e6, _SHORTEST))
    return starts, True


def _lane(nodes: list[Node], thread: int, starts: Sequence[float]) -> list[dict[str, Any]]:
    """One phase: every module a slice around what it calls; slices nest, and never overlap."""
    events: list[dict[str, Any]] = []
    opened: list[tuple[str, int]] = []  # (name, index of the first node), outermost first
    last = -2

    def close(depth: int) -> None:
        while len(opened) > depth:
            name, first = opened.pop()
            events.append(_slice(name, starts[first], starts[last + 1], thread, {}, "module"))

    for node in nodes:
        path = [node.root] if node.root else []
        path += node.module.split(".") if node.module else []
        same = 0
        if node.index == last + 1:  # a gap is where another phase ran
            for (name, _), part in zip(opened, path):
                if name != part:
                    break
                same += 1
        close(same)
        opened += [(part, node.index) for part in path[same:]]
        last = node.index
        events.append(_slice(node.name, starts[last], starts[last + 1], thread, _about(node), node.phase))
    close(0)
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    return events


def _about(node: Node) -> dict[str, Any]:
    about: dict[str, Any] = {
        "op": str(node.op),
        "module": node.module,
        "allocates_bytes": sum(storage.nbytes for storage in node.made),
        "outputs": ", ".join(map(str, (value.meta for value in node.outputs))),
        "state": node.state,
    }
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
