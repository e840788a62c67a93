"""Details of a box, shown in the panel when it is clicked."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ...graph.collective_info import collective_of
from ...graph.ir import Node, SourceLine, Storage, Value
from ...graph.modules import full_name, module_path
from ...plan.explain_memory import keeper
from ...plan.node_formatting import line_text
from ...plan.runtime.gpu_timeline import duration
from ...plan.units import format_bytes, format_flops
from ..printable_text import as_written
from .box_numbers import span_text
from .boxes import (
    LANE_TITLES,
    Box,
    Hierarchy,
    chain,
    module_facts,
    named,
    op_name,
    rejected_of,
)
from .inputs_readers_and_gradients import relations
from .memory_chart import alive_json
from .scene import Scene, dtype_text, plural, shape_of, shape_text
from .value_stats_text import values_of

LISTED = 12  # tensors, readers or flows listed at most
CONSTANT_CHARS = 160


def source_json(source: SourceLine | None) -> dict[str, Any] | None:
    """A source line for the page; only the name of the file, by which the user knows it."""
    if source is None:
        return None
    file = source.short.rpartition(":")[0]
    if source.cell is not None:
        file = f"cell [{source.cell}]"
    elif source.in_cell:
        file = "this notebook"
    return {"file": file, "line": source.line, "text": as_written(source.text.strip())}


def describe(scene: Scene, box: Box) -> dict[str, Any]:
    """Everything the details panel shows for ``box``, as JSON."""
    result: dict[str, Any] = {
        "id": box.id,
        "title": f"{box.label} × {box.repeats}" if box.repeats > 1 and box.calls == 1 else box.label,
        "subtitle": scene.subtitle(box),
        "facts": [],
        "source": None,
        "inputs": [],
        "outputs": [],
        "forward": None,
        "flows": [],
        "relations": relations(scene.hierarchy, box) if box.sync is None else [],
        "lifetime": [],
    }
    refused = rejected_of(box)
    if refused is not None:
        result["source"] = source_json(refused.source)
        result["facts"] = [["op", str(refused.op)], ["refused", "nothing after it was recorded"]]
        result["inputs"] = [_tensor(scene, value) for value in refused.inputs]
    elif box.node is not None:
        result |= _of_op(scene, box, box.node)
    elif box.sync is not None:
        sync = box.sync
        result["subtitle"] = "sync point: recording had to evaluate pending ops here"
        result["source"] = source_json(sync.source)
        result["facts"] = [
            ["cause", sync.cause],
            *([["read by", sync.reader.short]] if sync.reader is not None else []),
            ["ran", plural(sync.ops, "op")],
            ["took", f"{sync.seconds:.3g} s"],
            ["read", format_bytes(sync.bytes)],
        ]
    elif box.values:
        result |= _of_tensors(scene, box)
    else:
        result |= _of_group(scene, box)
    for name, span in scene.numbers.notes_of(box).items():
        result["facts"].append([name, span_text(span)])
    result["flows"] = _told_apart(scene.hierarchy, result["flows"])
    for row in result["outputs"]:
        if row.get("readers"):
            row["readers"] = _told_apart(scene.hierarchy, row["readers"])
    return result


def _told_apart(hierarchy: Hierarchy, links: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``links`` with unique labels: equal labels of different boxes get the phase and, within a phase, a
    number in program order.
    """
    alike: dict[str, set[str]] = {}
    for link in links:
        if link["chain"]:
            alike.setdefault(link["label"], set()).add(link["chain"][-1])
    if all(len(ids) == 1 for ids in alike.values()):
        return list(links)
    name_of: dict[str, str] = {}
    for label, ids in alike.items():
        phases: dict[str, list[str]] = {}
        for id in sorted(ids, key=hierarchy.place_in_program):
            phases.setdefault(LANE_TITLES[hierarchy.boxes[id].phase].lower(), []).append(id)
        for phase, same in phases.items():
            for number, id in enumerate(same, 1):
                parts = [phase] if len(phases) > 1 and not label.startswith(f"{phase}: ") else []
                parts += [f"{number} of {len(same)}"] if len(same) > 1 else []
                name_of[id] = f"{label} ({', '.join(parts)})" if parts else label
    return [{**link, "label": name_of[link["chain"][-1]]} if link["chain"] else link for link in links]


def describe_moment(scene: Scene, position: int) -> dict[str, Any]:
    """The storages alive in a lazyviz run at ``position`` as JSON: bytes by category, and the largest
    storages individually.

    Raises ``IndexError`` if there is no such node.
    """
    moment = scene.plan.at(position)
    rows = alive_json(scene, moment.alive)
    for row, allocation in zip(rows, moment.alive):
        row["line"] = line_text(allocation.source) if allocation.source is not None else ""
        row["keeper"] = keeper(allocation)
    node = moment.node
    box = scene.near(node)
    # A view without a reader that is drawn nearby, such as a gradient that is kept.
    if box is None or (scene.hierarchy.box_of[node.index] is None and box.phase != node.phase):
        box = _box_before(scene.hierarchy, node)
    return {
        "position": position,
        "chain": chain(box) if box is not None else [],
        "name": scene.hierarchy.title_of(node),
        "bytes": format_bytes(moment.nbytes),
        "source": source_json(node.source),
        "categories": [[str(name), format_bytes(size)] for name, size in moment.by_category.items() if size],
        "alive": rows,
        "aliveCount": len(moment.alive),
    }


def _communication(node: Node) -> list[list[str]]:
    """For a collective: its group, its size, and the bytes that this rank sends."""
    found = collective_of(node)
    if found is None:
        return []
    sizes = f"{format_bytes(found.nbytes)}, {format_bytes(found.sent_bytes)} of them sent by this rank"
    group = f"{found.group.name}, rank {found.group.rank} of {found.group.size}"
    return [["group", group], ["collective", sizes]]


def _of_op(scene: Scene, box: Box, node: Node) -> dict[str, Any]:
    hierarchy = scene.hierarchy
    facts = [
        ["op", str(node.op)],
        *_communication(node),
        ["module", module_path(node)],
        ["phase", LANE_TITLES[box.phase].lower()],
        ["state", node.state],
    ]
    if node.measured_seconds is not None:
        facts.append(["time", duration(node.measured_seconds)])
    constants = _constants(node)
    if constants:
        facts.append(["arguments", constants])
    if node.flops:
        facts.append(["work", format_flops(node.flops)])
    behind = hierarchy.behind.get(node.index)
    if behind:
        facts.append(["through", ", ".join(dict.fromkeys(op_name(view) for view in behind))])
    if node.error:
        facts.append(["error", node.error])
    inputs = []
    for producer, value in hierarchy.reads[node.index][:LISTED]:
        row = _tensor(scene, value)
        made = hierarchy.box_of[producer] if producer is not None else hierarchy.box_of_value.get(value.id)
        row["from"] = _link(made)
        inputs.append(row)
    readers = [
        made for reader in hierarchy.readers(node.index) if (made := hierarchy.box_of[reader]) is not None
    ]
    outputs = []
    for position, value in enumerate(node.outputs[:LISTED]):
        mine = [
            reader
            for reader in readers
            if reader.node is not None and _reads(hierarchy, reader.node, node, value)
        ]
        outputs.append(
            {
                **_tensor(scene, value),
                **values_of(node, position),
                "readers": [_link(reader) for reader in mine[:LISTED]],
                "more": max(len(mine) - LISTED, 0),
            }
        )
    forward = node.forward
    forward_box = _box_near(hierarchy, forward) if forward is not None else None
    return {
        "subtitle": "",
        "facts": facts,
        "source": source_json(node.source),
        "inputs": inputs,
        "outputs": outputs,
        "forward": _link(forward_box),
        "flows": _flows(scene, [node], box),
        "lifetime": _lifetime(scene, [value.storage for value in node.outputs]),
    }


def _reads(hierarchy: Hierarchy, reader: Node, maker: Node, value: Value) -> bool:
    return any(
        producer == maker.index and source.storage.id == value.storage.id
        for producer, source in hierarchy.reads[reader.index]
    )


def _of_tensors(scene: Scene, box: Box) -> dict[str, Any]:
    hierarchy = scene.hierarchy
    wanted = {value.id for value in box.values}
    readers: list[Box] = []
    group = box.parent
    for index in sorted({index for value in wanted for index in hierarchy.readers_of(value)}):
        reader = hierarchy.box_of[index]
        if reader is not None:
            readers.append(reader)
    rows = [_tensor(scene, value) for value in box.values[:LISTED]]
    if box.kind == "input" and rows:
        rows[0]["readers"] = [_link(reader) for reader in readers[:LISTED]]
        rows[0]["more"] = max(len(readers) - LISTED, 0)
    facts = [["role", str(box.key) if box.kind == "input" else "result"]]
    if len(box.values) > LISTED:
        facts.append(["tensors", f"{len(box.values):,}, the first {LISTED} listed"])
    return {
        "facts": facts,
        "outputs": rows,
        "flows": _merged(
            (reader, scene.planned(value.storage.nbytes, value))
            for reader in readers
            for value in box.values[:1]
        )
        if group is not None
        else [],
        "lifetime": _lifetime(scene, [value.storage for value in box.values]),
    }


def _of_group(scene: Scene, box: Box) -> dict[str, Any]:
    nodes = list(scene.hierarchy.nodes_in(box))
    first = nodes[0] if nodes else None
    counts: dict[str, int] = {}
    for node in nodes:
        counts[op_name(node)] = counts.get(op_name(node), 0) + 1
    common = sorted(counts.items(), key=lambda item: -item[1])[:6]
    facts = [
        ["ops", f"{box.ops:,}"],
        ["allocates", format_bytes(scene.made(box))],
        ["phase", LANE_TITLES[box.phase].lower()],
    ]
    if first is not None and module_path(first) and box.repeats == 1:
        facts.insert(0, ["path", _common_path(nodes)])
    known = module_facts(box)
    if known is not None and box.phase != "optimizer":
        facts.insert(1, ["class", f"{known.kind}({known.settings})" if known.settings else known.kind])
        if known.parameters:
            count = known.parameters * (box.repeats if box.calls == 1 else 1)
            facts.append(["parameters", f"{count:,}"])
    if dtype := scene.coloring(box).get("dtype"):
        facts.append(["dtype", str(dtype)])
    if flops := sum(node.flops for node in nodes):
        facts.append(["work", format_flops(flops)])
    done = sum(node.state == "done" for node in nodes)
    if done:
        facts.append(["done", f"{done:,} of {len(nodes):,}"])
    seconds = [node.measured_seconds for node in nodes if node.measured_seconds is not None]
    if seconds:
        facts.append(["time", duration(sum(seconds))])
    if common:
        facts.append(
            ["mostly", ", ".join(f"{name} × {count}" if count > 1 else name for name, count in common)]
        )
    return {
        "subtitle": "",
        "facts": [fact for fact in facts if fact[1]],
        "source": source_json(first.source) if first is not None else None,
        "flows": _flows(scene, nodes, box),
        "lifetime": _ranges(scene, {node.index for node in nodes}),
    }


def _flows(scene: Scene, nodes: Sequence[Node], box: Box) -> list[dict[str, Any]]:
    """Data flow of these nodes from and to other lanes: saved activations, gradients, and parameters."""
    hierarchy = scene.hierarchy
    lane = _lane(box)
    whole = box.is_group
    sizes: dict[tuple[str, bool], dict[int, int]] = {}
    ends: dict[tuple[str, bool], Box] = {}

    def note(other: Box | None, value: Value, out: bool) -> None:
        if other is None or _lane(other) is lane:
            return
        end = _near_lane(other) if whole else other
        key = end.id, out
        ends[key] = end
        sizes.setdefault(key, {})[value.storage.id] = scene.planned(value.storage.nbytes, value)

    for node in nodes:
        for producer, value in hierarchy.reads[node.index]:
            made = (
                hierarchy.box_of[producer] if producer is not None else hierarchy.box_of_value.get(value.id)
            )
            note(made, value, False)
        for reader in hierarchy.readers(node.index):
            for producer, value in hierarchy.reads[reader]:
                if producer == node.index:
                    note(hierarchy.box_of[reader], value, True)
    order = sorted(ends, key=lambda key: -sum(sizes[key].values()))
    return [
        {
            **named(ends[key]),
            "bytes": format_bytes(sum(sizes[key].values())),
            "out": key[1],
        }
        for key in order[: 2 * LISTED]
    ]


def _merged(ends: Iterable[tuple[Box, int]]) -> list[dict[str, Any]]:
    sizes: dict[str, int] = {}
    boxes: dict[str, Box] = {}
    for box, nbytes in ends:
        near = _near_lane(box)
        boxes[near.id] = near
        sizes[near.id] = max(sizes.get(near.id, 0), nbytes)
    return [{**named(box), "bytes": format_bytes(sizes[id]), "out": True} for id, box in boxes.items()][
        :LISTED
    ]


def _lane(box: Box) -> Box | None:
    current: Box | None = box
    while current is not None and current.kind != "lane":
        current = current.parent
    return current


def _near_lane(box: Box) -> Box:
    """The ancestor of ``box`` that is a direct child of its lane."""
    current = box
    while current.parent is not None and current.parent.kind != "lane":
        current = current.parent
    return current


def _box_near(hierarchy: Hierarchy, node: Node) -> Box | None:
    """The box of ``node``, or of its reader if it is a hidden view."""
    nodes = hierarchy.graph.nodes
    if not (0 <= node.index < len(nodes)) or nodes[node.index] is not node:
        return None
    return hierarchy.box_of[node.index]


def _box_before(hierarchy: Hierarchy, node: Node) -> Box | None:
    """For a hidden view without a reader, the box of the last drawn node of its phase before it."""
    before = [box for box in hierarchy.box_of[: node.index] if box is not None]
    return next((box for box in reversed(before) if box.phase == node.phase), before[-1] if before else None)


def _link(box: Box | None) -> dict[str, Any] | None:
    return named(box) if box is not None else None


def _tensor(scene: Scene, value: Value) -> dict[str, Any]:
    return {
        "name": full_name(value.name or value.storage.name),
        "shape": shape_text(shape_of(value, scene.graph)),
        "dtype": dtype_text(value),
        "bytes": format_bytes(scene.planned(value.nbytes, value)),
    }


def _common_path(nodes: Sequence[Node]) -> str:
    paths = [module_path(node).split(".") for node in nodes]
    common = paths[0]
    for path in paths:
        same = 0
        while same < min(len(common), len(path)) and common[same] == path[same]:
            same += 1
        common = common[:same]
    return ".".join(common)


def _constants(node: Node) -> str:
    """The non-tensor arguments that differ from their defaults: ``"stride=2, padding=1"``."""
    schema = node.op._schema.arguments
    given = {argument.name: item for argument, item in zip(schema, node.args)} | dict(node.kwargs)
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    parts = [
        f"{name}={text}"
        for name, item in given.items()
        if not isinstance(item, Value)
        and item is not None
        and not (name in defaults and _plain(defaults[name]) == _plain(item))
        and (text := _constant(item))
    ]
    text = ", ".join(parts)
    return text if len(text) <= CONSTANT_CHARS else text[: CONSTANT_CHARS - 1] + "…"


def _plain(item: object) -> object:
    return list(item) if isinstance(item, tuple) else item


def _constant(argument: object) -> str:
    if isinstance(argument, (list, tuple)):
        if any(isinstance(item, Value) for item in argument):
            return ""
        if len(argument) > 1 and len(set(map(str, argument))) == 1:
            return str(argument[0])  # the same in every dimension
        return f"[{', '.join(map(str, argument[:8]))}{', …' if len(argument) > 8 else ''}]"
    return str(argument)


def lifetime_of(scene: Scene, box: Box) -> list[list[int]]:
    """The ranges [start, stop) in which results of ``box`` are alive; for a group, in which its ops run."""
    if box.node is not None:
        return _lifetime(scene, [value.storage for value in box.node.outputs])
    if box.values:
        return _lifetime(scene, [value.storage for value in box.values])
    return _ranges(scene, {node.index for node in scene.hierarchy.nodes_in(box)})


def _lifetime(scene: Scene, storages: Sequence[Storage]) -> list[list[int]]:
    """The ranges [start, stop) in which the largest of ``storages`` is alive in a lazyviz run; a split run
    can have several.
    """
    if not storages:
        return []
    held = scene.plan.held(max(storages, key=lambda each: each.nbytes))
    return [[each.start, each.stop] for each in held if len(each)]


def _ranges(scene: Scene, indices: Collection[int]) -> list[list[int]]:
    """The range [start, stop) from the first to the last of these nodes; one for each part of a split run."""
    starts = [start for start, _ in scene.plan.split.ranges]
    ranges: dict[int, list[int]] = {}
    places = scene.places()
    for position in sorted(position for index in indices for position in places.get(index, ())):
        part = bisect_right(starts, position)
        ranges.setdefault(part, [position, position])[1] = position + 1
    return list(ranges.values())
