"""Box of the rejected op, whose error ended the recording: inputs, mismatched sizes, and their origin; and
the lanes that the error kept the program from reaching.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from typing import Any

from ...graph.ir import Graph, Node, Phase, RejectedOp, SourceLine, Value
from ...graph.modules import facts_of, full_name, module_path, root_parts
from ...graph.rejected_op_and_mismatched_sizes import clashes
from .boxes import Box, op_name, rejected_of

LEAST_WIDTH, MOST_WIDTH = 296, 640  # pixels of the card
SHAPE_CHAR, SHAPE_GAP = 7.3, 18  # pixels: of a character, between two shapes
MOST_CODE = 16  # characters of a line of code that fit below a lane's title
_DEF = re.compile(r"\s*(?:async\s+)?def\s")
_CALLS: dict[Phase, re.Pattern[str]] = {
    "backward": re.compile(r"\.backward\("),
    "optimizer": re.compile(r"(?<!scheduler)(?<!sched)\.step\("),
}
UNREACHED = "unreached"


def find_error(root: Box) -> Box | None:
    """The box of the op that was rejected, if there is one."""
    stack = [root]
    while stack:
        box = stack.pop()
        if box.kind == "error":
            return box
        stack.extend(box.children)
    return None


def add_unreached_lanes(root: Box, graph: Graph) -> None:
    """Add an empty lane for each phase that the program calls in lines that the error kept it from reaching,
    beside the lanes of the last step.
    """
    if graph.raised is None:
        return
    group = root
    while group.children and group.children[-1].kind == "step":
        group = group.children[-1]
    lanes = group.children
    if not lanes or any(lane.kind != "lane" for lane in lanes):
        return
    for phase, words in _unreached(graph).items():
        if all(lane.phase != phase for lane in lanes):
            after = [at for at, lane in enumerate(lanes) if phase == "optimizer" or lane.phase != "optimizer"]
            lanes.insert(max(after, default=-1) + 1, Box("lane", phase, phase, group, (UNREACHED, words)))


def unreached_words(lane: Box) -> str:
    """The call that the program did not reach: ``"loss.backward()"``; "" for other lanes."""
    return lane.key[1] if isinstance(lane.key, tuple) and lane.key[0] == UNREACHED else ""


def _unreached(graph: Graph) -> dict[Phase, str]:
    """The first call of each phase in the lines that would have run after the error."""
    found: dict[Phase, str] = {}
    raised, place = graph.raised, graph.place
    if raised is None or raised.source is None or place is None:
        return found
    for frame in (raised.source, *raised.callers):
        for line in _following(frame, place, is_cell=graph.is_cell):
            code = line.partition("#")[0].strip()
            for phase, pattern in _CALLS.items():
                if phase not in found and (call := pattern.search(code)):
                    found[phase] = code if len(code) <= MOST_CODE else f"{call[0].lstrip('.')})"
        if _is_in_block(frame, place):
            break  # the others called the block
    return found


def _following(frame: SourceLine, place: SourceLine, *, is_cell: bool) -> Iterator[str]:
    """The lines of a function, of a cell, or of the block at ``place``, from that of ``frame`` to the end."""
    lines = linecache.getlines(frame.file)
    start = _def_around(frame)
    if _is_in_block(frame, place) and not is_cell:
        start = place.line
    outer = _indent(lines[start - 1]) if 0 < start <= len(lines) else -1
    for number in range(frame.line, len(lines) + 1):
        line = lines[number - 1]
        if number > frame.line and line.strip() and _indent(line) <= outer:
            return
        yield line


def _is_in_block(frame: SourceLine, place: SourceLine) -> bool:
    """Whether the line is one of the block's own, not of a function that it calls."""
    after = frame.file == place.file and frame.line > place.line
    return after and _def_around(frame) == _def_around(place)


def _def_around(frame: SourceLine) -> int:
    """The line of the function that ``frame`` is in; 0 if it is not in one."""
    lines = linecache.getlines(frame.file)
    if frame.line > len(lines):
        return 0
    indent = _indent(lines[frame.line - 1])
    for number in range(frame.line - 1, 0, -1):
        line = lines[number - 1]
        if line.strip() and _indent(line) < indent:
            indent = _indent(line)
            if _DEF.match(line):
                return number
    return 0


def _indent(line: str) -> int:
    expanded = line.expandtabs()
    return len(expanded) - len(expanded.lstrip())


def views_behind(value: Value, graph: Graph, box_of: list[Box | None]) -> list[Node]:
    """The chain of hidden views that ``value`` is derived through, first to last."""
    views: list[Node] = []
    while (node := _maker(value, graph)) is not None and box_of[node.index] is None and node.inputs:
        views.append(node)
        value = node.inputs[0]
    return views[::-1]


def _maker(value: Value, graph: Graph) -> Node | None:
    """The node of ``graph`` that creates ``value``, if any."""
    node = value.node
    is_own = node is not None and node.index < len(graph.nodes) and graph.nodes[node.index] is node
    return node if is_own else None


def makers_of(
    box: Box, graph: Graph, box_of: list[Box | None], box_of_value: dict[int, Box]
) -> Iterator[tuple[Value, Value, list[Node], Box | None]]:
    """For each input of the rejected op: the value, its base before hidden views, these views, and the box
    that creates the base.
    """
    rejected = rejected_of(box)
    for value in rejected.inputs if rejected is not None else ():
        views = views_behind(value, graph, box_of)
        source = views[0].inputs[0] if views else value
        node = _maker(source, graph)
        if node is None:
            maker = box_of_value.get(source.id) or _same_storage(source, box_of_value)
        else:
            maker = box_of[node.index]
        yield value, source, views, maker


def _same_storage(value: Value, box_of_value: dict[int, Box]) -> Box | None:
    for box in box_of_value.values():
        if any(each.storage is value.storage for each in box.values):
            return box
    return None


def open_error(box: Box, graph: Graph, box_of: list[Box | None], box_of_value: dict[int, Box]) -> list[Box]:
    """Draw the outside inputs of the rejected op; returns the groups to open so that it is visible."""
    parent = box.parent
    assert parent is not None
    for _, source, _, maker in list(makers_of(box, graph, box_of, box_of_value)):
        if maker is not None or _maker(source, graph) is not None:
            continue
        name = full_name(source.name or source.storage.name) or source.storage.role or "input"
        if parent.name and source.storage.role in ("parameter", "buffer"):
            name = name.rpartition(".")[2]
        given = Box("input", name, box.phase, parent, source.storage.role or "input")
        given.values = (source,)
        given.nbytes = source.nbytes
        box_of_value[source.id] = given
        parent.children.insert(parent.children.index(box), given)
    around: list[Box] = []
    at: Box | None = parent
    while at is not None and at.kind != "root":
        if at.kind != "lane":
            around.append(at)
        at = at.parent
    return around


def error_json(box: Box, message: str) -> dict[str, Any]:
    """The content of the rejected op's card: the shapes of its inputs, with mismatched sizes marked, and the
    reason.

    For each input, ``given`` has the id of its value and the parts of its shape; each part is a text and
    whether it is a mismatched size.
    """
    rejected = rejected_of(box)
    assert rejected is not None
    given = [
        (value.id, _parts(tuple(value.meta.shape), marked))
        for value, marked in zip(rejected.inputs, clashes(rejected), strict=True)
    ]
    shapes = ["".join(text for text, _ in parts) for _, parts in given]
    beside = sum(len(shape) * SHAPE_CHAR + SHAPE_GAP for shape in shapes)  # side by side above the card
    return {
        "op": str(rejected.op),
        "sub": message,
        "through": " · ".join(shapes),
        "given": given,
        "size": [round(min(max(beside, LEAST_WIDTH), MOST_WIDTH)), 64],
    }


def clash_words(graph: Graph, rejected: RejectedOp) -> list[str]:
    """Sentences that say where mismatched inputs come from, and with which settings the layer would accept
    them.

    For example ``"64×1152 is from net.pool (line 12), where it is 64×32×6×6"``.
    """
    words = []
    given: tuple[int, ...] = ()  # shape of the layer's input
    for value, marked in zip(rejected.inputs, clashes(rejected), strict=True):
        if not marked:
            continue
        source = _before_views(value, graph)
        made = _given_out(value, source, graph)
        shape, there = (_shape_text(tuple(each.meta.shape)) for each in (value, made))
        text = f"{shape} is from {_origin(source, graph)}"
        words.append(text if shape == there else f"{text}, where it is {there}")
        if source.storage.role != "parameter":
            given = tuple(value.meta.shape)
    return words + _would_fit(rejected, given)


def _before_views(value: Value, graph: Graph) -> Value:
    """The base that ``value`` is a view of, or ``value`` itself."""
    while (node := _own_maker(value, graph)) is not None and node.op.is_view and node.inputs:
        value = node.inputs[0]
    return value


def _given_out(value: Value, source: Value, graph: Graph) -> Value:
    """``value``'s base ``source`` as its module returned it: possibly a view created in that module."""
    maker = _own_maker(source, graph)
    path = module_path(maker) if maker is not None else ""
    found = source
    while path and value is not source and (view := _own_maker(value, graph)) is not None:
        if module_path(view) == path:
            found = value
            break
        value = view.inputs[0]
    return found


def _own_maker(value: Value, graph: Graph) -> Node | None:
    node = value.node
    own = node is not None and node.index < len(graph.nodes) and graph.nodes[node.index] is node
    return node if own else None


def _origin(value: Value, graph: Graph) -> str:
    """Where ``value`` was created: ``"net.pool (line 12)"``, ``"net.fc.weight"``, ``"x"``."""
    name = full_name(value.storage.name or value.name)
    node = _own_maker(value, graph)
    if node is None or value.storage.role in ("parameter", "buffer"):
        return name or value.storage.role or "outside"
    made = name or module_path(node) or op_name(node)
    return f"{made} (line {node.source.line})" if node.source is not None else made


def _would_fit(rejected: RejectedOp, given: tuple[int, ...]) -> list[str]:
    """The settings with which PyTorch's layer would accept the given shape."""
    path = module_path(rejected)
    base = root_parts(rejected.root)[:1]
    inside = path[len(base[0]) + 1 :] if base else ""
    facts = facts_of(rejected.root, inside)
    if facts is None or not given or "groups" in facts.settings:
        return []
    if facts.kind in ("Linear", "LazyLinear"):
        setting, found, size = "in_features", re.match(r"in_features=(\d+)", facts.settings), given[-1]
    elif re.fullmatch(r"(Lazy)?Conv\d[dD]", facts.kind) and len(given) > 1:
        setting, found, size = "in_channels", re.match(r"(\d+)", facts.settings), given[1]
    else:
        return []
    if found is None or int(found[1]) == size:
        return []
    return [f"{path} would take it with {setting}={size} instead of {found[1]}"]


def _shape_text(shape: tuple[int, ...]) -> str:
    return "".join(text for text, _ in _parts(shape, set()))


def _parts(sizes: tuple[int, ...], marked: set[int]) -> list[tuple[str, bool]]:
    """A shape as parts, each with whether it is marked: ``((4, 16), {1})`` -> 4, ×, and 16 marked."""
    parts = [("scalar", False)] if not sizes else []
    for dim, size in enumerate(sizes):
        parts += [("×", False)] if dim else []
        parts.append((str(size), dim in marked))
    return parts
