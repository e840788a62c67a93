"""Text renderer: the output in terminals, logs, and notebooks without pictures."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from wcwidth import wcswidth

from ...graph.ir import Graph
from ...graph.sync_point_groups import listed
from ...plan.node_formatting import category_text, line_text, line_with_text
from ...plan.units import format_bytes
from ..layout.text_width import letters
from ..printable_text import visible
from ..scene.batch_text import batch_lines
from ..scene.boxes import LANE_TITLES, Box, module_facts, name_of
from ..scene.memory_chart import alive_name, needed_for, other_run, verdict
from ..scene.plan_protocol import PlanLike
from ..scene.scene import Scene

_BARS = " ▁▂▃▄▅▆▇█"
_LISTED = 6


def render_text(graph: Graph, plan: PlanLike, *, width: int = 100, scene: Scene | None = None) -> str:
    """A summary of ``graph`` and its projected memory, at most ``width`` terminal cells wide.

    It has the recorded ops, sync points with cause and line, modules by phase with repeats folded, memory
    over time, the live set at the peak, and whether it fits.
    """
    width = max(width, 48)
    scene = scene or Scene(graph, plan)
    lines = [scene.summary()]
    lines += [f"  {line}" for line in listed(graph.sync_points, width=width - 2)]
    if not graph.nodes:
        return "\n".join(_cut(line, width) for line in [*lines, "Nothing was recorded: no PyTorch op ran."])
    for lane in _steps_and_lanes(scene):
        lines += ["", *_lane(lane, scene, width)]
    lines += ["", *_memory(scene, width)]
    return "\n".join(_cut(visible(line), width) for line in lines)


def _steps_and_lanes(scene: Scene) -> list[Box]:
    """Visible lanes, and steps that represent several folded steps, in program order."""
    result: list[Box] = []
    stack = [scene.hierarchy.root]
    opened = {box.id for box in scene.opened()}
    while stack:
        box = stack.pop()
        if box.id in opened and box.kind != "lane":
            stack.extend(reversed(box.children))
        else:
            result.append(box)
    return result


def _lane(lane: Box, scene: Scene, width: int) -> list[str]:
    if lane.kind != "lane":
        times = f" × {lane.repeats}" if lane.repeats > 1 else ""
        return [f"{lane.label}{times}: {scene.subtitle(lane)}"]
    lines = [f"{LANE_TITLES[lane.phase]}: {scene.subtitle(lane)}"]
    rows = list(_rows(lane, scene))
    widest = max((_cells(name) for name, _ in rows), default=0)
    name_width = min(widest, max(width // 2 - 4, 20))
    for name, text in rows:
        name = _cut(name, name_width)
        lines.append(f"  {name}{' ' * (name_width - _cells(name))}  {text}")
    return lines


def _rows(lane: Box, scene: Scene) -> Iterator[tuple[str, str]]:
    """Name and text of each box in a lane; the parts of an open model are indented."""
    opened = {box.id for box in scene.opened()}
    stack = [(box, lane, 0) for box in reversed(lane.children)]
    while stack:
        box, group, depth = stack.pop()
        mark = {"input": "> ", "output": "< ", "sync": "! ", "error": "x "}.get(box.kind, "  ")
        name = f"{'  ' * depth}{mark}{name_of(box)}"
        if box.id in opened:
            facts = module_facts(box)
            yield name, " ".join([facts.kind if facts is not None else "", scene.subtitle(box)]).strip()
            stack.extend((child, box, depth + 1) for child in reversed(box.children))
            continue
        out = scene.edge_text(
            [value for (start, _), found in group.edges.items() if start is box for value in found]
        )
        arrow = f"  -> {out}" if box.is_group and out else ""
        yield name, f"{scene.subtitle(box)}{arrow}"


def _memory(scene: Scene, width: int) -> list[str]:
    plan = scene.plan
    sizes = [size for _, size in plan.timeline]
    columns = min(len(sizes), width - 2)
    most = max(plan.peak_bytes, 1)
    bars = ""
    for column in range(columns):
        part = sizes[column * len(sizes) // columns : (column + 1) * len(sizes) // columns]
        bars += _BARS[min(round(max(part) / most * 8), 8)]
    lines = [f"Memory over the run, peak {format_bytes(plan.peak_bytes)}:", f"  {bars}"]
    peak = plan.peak_node
    if peak is not None:
        source = f", {line_with_text(peak.source)}" if peak.source is not None else ""
        lines.append(f"  peak at {peak.name} ({scene.hierarchy.place_of(peak)}){source}")
    lines.append(f"  {other_run(plan)}")
    lines.append("Alive at the peak:")
    shown = [(category_text(name), size) for name, size in plan.by_category.items() if size]
    for name, size in sorted(shown, key=lambda item: -item[1]):
        lines.append(f"  {format_bytes(size):>10}  {name}")
    if plan.alive_at_peak:
        lines.append("Largest:")
    for allocation in plan.alive_at_peak[:_LISTED]:
        name = alive_name(allocation) or "(outside of modules)"
        made = f", {allocation.node.name}" if allocation.node is not None else ""
        line = f", {line_text(allocation.source)}" if allocation.source is not None else ""
        what = f"{category_text(allocation.category)}: {name}{made}{line}"
        lines.append(f"  {format_bytes(allocation.nbytes):>10}  {what}")
    lines += batch_lines(plan)
    if parts := needed_for(plan):
        lines.append(f"Needed: {parts}")
    lines.append(verdict(plan)[1])
    return lines


def _cut(text: str, width: int) -> str:
    """One line of at most ``width`` terminal cells, truncated in the middle."""
    text = " ".join(text.splitlines())
    if _cells(text) <= width:
        return text
    parts = letters(text)
    head = (width - 1) * 3 // 5
    first, last = _fitting(parts, head), _fitting(parts[::-1], width - 1 - head)
    return f"{''.join(parts[:first])}…{''.join(parts[len(parts) - last :])}"


def _fitting(parts: list[str], width: int) -> int:
    """The number of leading characters that fit in ``width`` cells."""
    return sum(used <= width for used in accumulate(map(_cells, parts)))


def _cells(text: str) -> int:
    """The width of ``text`` in terminal cells; for text with control characters, its length."""
    cells: int = wcswidth(text)
    return cells if cells >= 0 else len(text)
