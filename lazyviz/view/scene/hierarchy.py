"""Hierarchy: the graph as a tree of nested boxes, by step, phase and module.

A training step is never laid out flat.  :func:`build_hierarchy` sorts every op into a tree: step, lane (one
per phase), module, op.  The children of every group are in topological order, so the boxes of a group never
form a cycle, whichever groups are open.  View ops are hidden in their consumers, repeats are folded into one
box, and no group has more than :data:`MAX_CHILDREN` children, so that each group can be laid out and sent
separately.

Everything here is iterative and linear in the number of ops (times the nesting depth).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ...graph.ir import Graph, Node, RejectedOp, SyncPoint, Value
from ...graph.modules import full_name, module_path, root_key, root_parts
from ...plan.node_formatting import line_text
from ...process.gc_pause import paused
from .boxes import Box, Hierarchy, Kind, is_of_numbers, op_name
from .dataflow import (
    KEPT,
    Reads,
    crowded_lanes,
    data_flow,
    hidden_views,
    initializations,
    lanes_of,
    step_on,
    steps_of,
    updates,
)
from .display_names import Result, add_results, lane_of, names_by_round, tell_apart
from .loop_frames import group_rounds, name_loops
from .module_calls import Calls, merge_calls
from .rejected_op_box import add_unreached_lanes, find_error, makers_of, open_error
from .repeat_folding import (
    UPDATES,
    chunk,
    count,
    fold_repeats,
    is_gradient_sum,
    is_model,
    join,
    path_label,
    show_one_step,
)
from .small_ops import fold_small_ops, is_small_ops

MAX_CHILDREN = 64  # children of one group; more are divided into runs
MAX_EDGE_VALUES = 512  # values counted on one edge
MAX_ENDS = 8  # tensors stored per box that enter or leave its group
LANE_BOXES = 14  # modules of a lane are replaced by their submodules up to this many boxes
MODEL_BOXES = 40  # the same limit for a dominant module of the forward pass, and its backward counterpart
SHOWN_BOXES = 24  # the same for a dominant submodule, and for a backward counterpart of mostly single ops
BIG = 0.6  # a module with at least this fraction of its group's ops is dominant
ONLY = 0.9  # the same fraction inside a model, so that a decoder beside its encoder is not dominant
_NUMBER = re.compile(r"(?<=[.\[])\d+(?=[.\]]|$)")
_RESULT = re.compile(r"^the result of (?:\w+\.)?(\w+)(?:\.\w+)? depends(?= on data)")
SEPARATE_INPUTS = 2  # outside tensors of one kind drawn one by one for one consumer


@paused()
def build_hierarchy(graph: Graph, *, views: bool = False, drawn: Hierarchy | None = None) -> Hierarchy:
    """The boxes of ``graph``; with ``views``, view ops get boxes of their own.

    ``drawn``, a hierarchy built earlier, is returned if ``graph`` has not changed since.
    """
    failed = tuple(node.index for node in graph.nodes if node.state == "failed")  # these are never hidden
    drawn_of = (id(graph), len(graph.nodes), len(graph.sync_points), failed, views, id(graph.raised))
    if drawn is not None and drawn.drawn_of == drawn_of:
        return drawn
    hidden = [False] * len(graph.nodes) if views else hidden_views(graph)
    if all(hidden):
        hidden = [False] * len(graph.nodes)
    reads, behind = data_flow(graph, hidden)
    root = Box("root", "", "other", None)
    box_of, syncs = _sort_into_boxes(graph, hidden, reads, root)
    for group in [root, *root.children]:  # the optimizer lane is last, even if its state was created first
        if any(each.kind == "lane" for each in group.children):
            group.children.sort(key=lambda each: each.phase == "optimizer")
    _merge_calls(root, reads, box_of)
    _simplify(root)
    name_loops(root, graph)
    _name_updates(root)
    show_one_step(root)
    fold_small_ops(root, graph)
    _join_parameter_groups(root)
    opened, beside = _open_models(root)
    tell_apart(root, opened)
    _name_parts(root, opened, beside)
    box_of_value = _add_outside_tensors(graph, reads, box_of)
    results = add_results(graph, reads, box_of)
    failed_box = find_error(root)
    if failed_box is not None:
        opened += open_error(failed_box, graph, box_of, box_of_value)
    add_unreached_lanes(root, graph)
    _cut_and_number(root)
    hierarchy = Hierarchy(graph, root, {}, box_of, box_of_value, reads, behind, drawn_of)
    _join(hierarchy, results)
    if failed_box is not None:
        for value, source, between, maker in makers_of(failed_box, graph, box_of, box_of_value):
            if maker is not None:
                _connect(maker, failed_box, value, between, source)
    _order_syncs(syncs)
    _name(hierarchy, opened)
    return hierarchy


def _sort_into_boxes(
    graph: Graph, hidden: list[bool], reads: Reads, root: Box
) -> tuple[list[Box | None], list[Box]]:
    """Put every visible node into its group, in topological order."""
    box_of: list[Box | None] = [None] * len(graph.nodes)
    lanes = lanes_of(graph, reads)
    steps = steps_of(graph, lanes, reads)
    many = bool(steps) and steps[-1] > 0
    calls = Calls(graph)
    lines = crowded_lanes(graph, hidden, steps, lanes)
    part_of, initial = updates(graph.nodes, lanes), initializations(graph, lanes)
    latest: dict[tuple[Box, object], Box] = {}  # the last child of a parent with that key
    todo = sorted(graph.sync_points, key=lambda sync: sync.index, reverse=True)
    syncs, lane = list[Box](), root

    def child(parent: Box, step: Step, phase: str, root: str = "") -> Box:
        box = Box(step.kind, step.label, phase, parent, step.key)
        box.name, box.root = step.name, root if step.name else ""
        box.container = bool(step.name) and step.call not in calls.of_modules
        box.position = len(parent.children)
        parent.children.append(box)
        latest[parent, step.key] = box
        return box

    def barrier(sync: SyncPoint, parent: Box) -> None:
        box = child(parent, Step(("sync", len(syncs)), "sync", _short(sync.cause)), parent.phase)
        box.sync = sync
        syncs.append(box)
        for known in [known for known in latest if known[0] is parent]:
            del latest[known]

    for index, node in enumerate(graph.nodes):
        while todo and todo[-1].index <= index and lane is not root:
            barrier(todo.pop(), lane)
        calls.pass_by(index)
        if hidden[index]:
            continue
        entered = calls.taken()
        parent, phase = root, lanes[index]
        keys = [Step(("step", steps[index]), "step", f"step {steps[index] + 1}")] if many else []
        keys += [Step(("lane", phase), "lane", phase), *([INITIAL] if index in initial else [])]
        keys += _path(node, part_of.get(index), (steps[index], phase) in lines)
        producers = [producer for producer, _ in reads[index] if producer is not None]
        sources = [made for producer in producers if (made := box_of[producer]) is not None]
        for step in keys:
            sources = [source for source in sources if source.depth > parent.depth]
            known = latest.get((parent, step.key))
            if known is not None and known.kind not in ("lane", "step"):
                again = phase == "forward" and step.call in entered
                known = known if not again and _may_take(known, parent, phase, sources) else None
            parent = known if known is not None else child(parent, step, phase, node.root)
            if step.kind == "lane":
                lane = parent
        box = Box("op", op_name(node), phase, parent)
        box.node, box.first, box.position = node, index, len(parent.children)
        parent.children.append(box)
        box_of[index] = box
    while todo:
        barrier(todo.pop(), lane)
    _place_rejected(graph, root, steps[-1] if many else None, latest, child)
    return box_of, syncs


def _short(cause: str) -> str:
    """The cause of a sync point, shortened to fit a box: ``"nonzero depends on data"``."""
    return _RESULT.sub(r"\1 depends", cause)


def _place_rejected(
    graph: Graph,
    root: Box,
    step: int | None,
    latest: dict[tuple[Box, object], Box],
    child: Callable[[Box, Step, str, str], Box],
) -> None:
    """Add a box for the op whose error ended the recording, after all others; ``step``: the last training
    step, if there are several.
    """
    rejected = graph.raised.rejected if graph.raised is not None else None
    if rejected is None:
        return
    keys = [Step(("lane", rejected.phase), "lane", rejected.phase), *_path(rejected, None, False)]
    if step is not None:
        keys.insert(0, Step(("step", step), "step", f"step {step + 1}"))
    parent = root
    for key in keys:
        known = latest.get((parent, key.key))
        if known is not None and key.kind == "module" and known is not parent.children[-1]:
            known = None
        parent = known if known is not None else child(parent, key, rejected.phase, rejected.root)
    box = Box("error", rejected.name, rejected.phase, parent, rejected)
    box.position = len(parent.children)
    parent.children.append(box)


def _may_take(known: Box, parent: Box, phase: str, sources: Sequence[Box]) -> bool:
    """Whether a node of ``phase`` may go into ``known``: its inputs must be in that box or before it."""
    if phase == "forward":  # each call of a module has its own box
        return known is parent.children[-1]
    here = [ancestor for source in sources if (ancestor := _below(source, parent)) is not None]
    return all(box.position <= known.position for box in here)


def _below(box: Box, ancestor: Box) -> Box | None:
    """The child of ``ancestor`` that contains ``box``, if any."""
    current: Box | None = box
    while current is not None and current.depth > ancestor.depth + 1:
        current = current.parent
    return current if current is not None and current.parent is ancestor else None


class Step(NamedTuple):
    """One box on the path from the root to an op; ``name`` and ``call`` are set for modules."""

    key: object
    kind: Kind
    label: str
    name: str = ""
    call: tuple[object, str] | None = None


INITIAL = Step(("initial",), "module", "initial values")  # the group of ops that initialize a model


def _path(node: Node | RejectedOp, update: tuple[object, str] | None, by_line: bool) -> list[Step]:
    if update is not None:
        return [Step(("update", update[0]), "module", update[1])]
    steps: list[Step] = []
    outer = root_parts(node.root)
    parts = [*outer, *(node.module.split(".") if node.module else [])]
    key, name = root_key(node.root), ""
    for at, part in enumerate(parts):
        # The name of a module in a ModuleList or Sequential is only its index.
        label = f"{parts[at - 1]}.{part}" if at and part.isdigit() else part
        name = f"{name}.{part}" if name else part
        call = (key, ".".join(parts[len(outer) : at + 1])) if at >= len(outer) - 1 else None
        steps.append(Step(part if at or not outer else (key,), "module", label, name, call))
    if not steps and by_line and node.source is not None:
        source = node.source
        text = source.text.strip() or line_text(source)
        steps.append(Step(("line", source.file, source.line), "module", text))
    return steps


def _bottom_up(root: Box) -> list[Box]:
    """Every box, children before parents."""
    boxes: list[Box] = []
    stack = [root]
    while stack:
        box = stack.pop()
        boxes.append(box)
        stack.extend(box.children)
    return boxes[::-1]


def _simplify(root: Box) -> None:
    """From the leaves up: count ops and bytes, merge a group with its only child, and fold repeats."""
    for box in _bottom_up(root):
        if box.node is not None:
            node = box.node
            box.ops, box.nbytes = 1, sum(storage.nbytes for storage in node.made)
            shapes = tuple((value.meta.shape, value.meta.dtype) for value in node.outputs)
            box.shape_hash = hash((node.op, shapes))
            continue
        if box.sync is not None:
            box.syncs = 1
            box.shape_hash = hash(("sync", box.sync.cause, box.sync.source, box.sync.reader))
            continue
        only = box.children[0] if len(box.children) == 1 and box.children[0].is_group else None
        if (
            box.kind == "module"
            and only is not None
            and not (is_model(box) and only.repeats > 1 and only.name)
        ):
            if only.kind == "module":
                box.label = path_label(box, only)
                box.name, box.root, box.calls = only.name or box.name, only.root or box.root, only.calls
                box.container = only.container
            box.repeats, box.children = only.repeats, only.children
            for grandchild in box.children:
                grandchild.parent = box
        if box.phase == "optimizer":  # the shapes of parameters differ, but not the ops on them
            parts = [child.node.op if child.node is not None else child.shape_hash for child in box.children]
            box.shape_hash = hash(tuple(parts))
        else:
            # Layers of one ModuleList can be equal; two models of one class are not.
            alike = _NUMBER.sub("*", box.name)
            own = (child.shape_hash for child in box.children if not is_gradient_sum(child))
            box.shape_hash = hash((alike, *own))
        if box.kind == "root" and box.children:
            group_rounds(box)
        if box.kind != "root" or all(child.kind == "step" for child in box.children):
            box.children = fold_repeats(box)
        count(box)


def _name_updates(root: Box) -> None:
    """Label folded parameter updates with the user's line: ``optG.step()`` and ``optD.step()``."""
    for box in _bottom_up(root):
        if box.repeats > 1 and box.label == UPDATES:
            box.label = _line_of_call(box) or UPDATES


def _line_of_call(box: Box) -> str:
    """``"opt.step()"`` if all ops of ``box`` are at that line, else ``""``."""
    lines = {node.source for node in _nodes(box)}
    return step_on(lines.pop()) if len(lines) == 1 else ""


def _join_parameter_groups(root: Box) -> None:
    """Draw the parameter groups of one call of an optimizer's ``step()`` as one box.

    The children of a lane are in topological order, so merging adjacent ones never creates a cycle.
    """
    for lane in _bottom_up(root):
        if lane.kind == "lane" and lane.phase == "optimizer" and len(lane.children) > 1:
            calls = itertools.groupby(lane.children, key=_call_of)
            lane.children = [_one_call(lane, list(boxes), call) for call, boxes in calls]


def _call_of(box: Box) -> object:
    """What the groups of one call of ``step()`` have in common: the line, and the lines that called it."""
    node = next(_nodes(box), None)
    return (node.source, node.callers) if node is not None and box.is_group and _line_of_call(box) else box


def _one_call(lane: Box, boxes: list[Box], call: object) -> Box:
    """One box for the parameter groups that one call of ``step()`` updates."""
    if len(boxes) == 1:
        return boxes[0]
    whole = Box("module", _line_of_call(boxes[0]), lane.phase, lane, ("update", call))
    whole.children = boxes
    for box in boxes:
        box.parent = whole
        box.label = UPDATES if box.label == whole.label else box.label
    count(whole)
    whole.shape_hash = hash(tuple(box.shape_hash for box in boxes))
    return whole


def _nodes(box: Box) -> Iterator[Node]:
    return (each.node for each in _bottom_up(box) if each.node is not None)


def _models(lane: Box) -> set[object]:
    """Names of the outermost modules in a lane."""
    return {child.key[0] for child in lane.children if is_model(child) and isinstance(child.key, tuple)}


def _merge_calls(root: Box, reads: Reads, box_of: list[Box | None]) -> None:
    """Merge calls of one module into one box, and likewise their backward passes."""
    for box in _bottom_up(root):
        if box.phase != "optimizer" and box.kind in ("lane", "module") and len(box.children) > 1:
            merge_calls(box, reads, box_of)


def _name_parts(root: Box, opened: Sequence[Box], beside: Mapping[str, str]) -> None:
    """Prefix the labels of submodules that replace their module beside other modules with its label;
    ``beside`` has the labels of such modules by name.
    """
    groups, frames = [root], set(opened)
    for group in groups if beside else ():  # grows while it is read
        groups += [child for child in group.children if child.kind in ("step", "lane") or child in frames]
        for box in group.children:
            outer = min((name for name in _prefixes(box.name) if name in beside), key=len, default=box.name)
            if outer != box.name and group.phase != "optimizer":
                box.label = beside[outer] + box.name[len(outer) :]


def _open_models(root: Box) -> tuple[list[Box], dict[str, str]]:
    """Open models in their lanes as long as the number of boxes stays small.

    Returns the opened groups, and the labels, by name, of modules that were replaced by their submodules
    beside other modules, such as a decoder beside its encoder.

    In the forward lane, a model is drawn as a frame around its submodules; in the backward lane, a single
    model has no frame. Inside a model, the largest modules are replaced by their submodules. The backward
    lane opens the same modules as the forward lane, so that both can be read side by side.
    """
    opened: list[Box] = []
    lanes: list[Box] = []
    stack = [root]
    while stack:
        box = stack.pop()
        if box.kind != "lane":
            stack.extend(child for child in box.children if child.kind in ("step", "lane"))
        elif box.phase not in ("optimizer", "other"):
            lanes.append(box)
    forward: dict[str, bool] = {}  # whether a module's submodules are shown in the forward lane, by name
    beside: dict[str, str] = {}
    for lane in sorted(lanes, key=lambda lane: lane.phase != "forward"):
        opened += _open_lane(lane, forward, beside)
    return opened, beside


def _open_lane(lane: Box, forward: dict[str, bool], beside: dict[str, str]) -> list[Box]:
    frames: list[Box] = []
    alone = len(_models(lane)) == 1
    framed = lane.phase == "forward" or not alone
    total = len(lane.children)
    while True:
        candidates = [
            (child, group)
            for group in [lane, *frames]
            for child in group.children
            if child.kind == "module"
            and child not in frames
            and not is_small_ops(child)
            and (child.repeats == child.calls == 1 or (framed and _is_calls(child, group, lane)))
            and any(grandchild.is_group for grandchild in child.children)
            and total + _shown(child) - 1 <= _most_boxes(lane, child, group, forward)
        ]
        if not candidates:
            break
        chosen, group = max(candidates, key=lambda each: each[0].ops)
        total += _shown(chosen) - 1
        if lane.phase == "forward":
            forward[chosen.name] = True
        if framed and chosen.name and (group is lane or chosen.calls > 1):
            frames += [chosen, *chosen.children[: chosen.calls > 1]]
            continue
        named = chosen.name and not chosen.container
        if lane.phase == "forward" and named and not _is_big(chosen, group, ONLY):
            beside[chosen.name] = chosen.label
        at = group.children.index(chosen)
        taken = {child.label for child in group.children}
        for part in chosen.children:
            part.parent = group
            named = part.kind == "module" and not is_small_ops(part)
            # An index alone does not name its list.
            if named and (part.label in taken or part.label[:1].isdigit() or (group is lane and not alone)):
                part.label = join(chosen.label, part.label)
        group.children[at : at + 1] = chosen.children
    if lane.phase == "forward":
        for child in (child for group in (lane, *frames) for child in group.children):
            if child.kind == "module":
                forward.setdefault(child.name, False)
    return frames


def _is_big(module: Box, group: Box, share: float = BIG) -> bool:
    """Whether ``module`` has at least ``share`` of the ops of the group's modules, counting one call each."""
    inside = sum(child.ops / child.calls for child in group.children if child.kind == "module" and child.name)
    return module.ops >= share * inside * module.calls


def _is_calls(module: Box, group: Box, lane: Box) -> bool:
    """Whether ``module`` represents several calls of the dominant module of a lane or of the only module in
    a group.
    """
    alone = group is lane or len(group.children) == 1
    return alone and module.calls > 1 and module.children[0].kind == "step" and _is_big(module, group)


def _shown(module: Box) -> int:
    """The number of boxes that ``module`` shows when open; of several calls, only the first is open."""
    return len(module.children) + (len(module.children[0].children) if module.calls > 1 else 0)


def _most_boxes(lane: Box, module: Box, group: Box, forward: Mapping[str, bool]) -> int:
    """The maximum number of boxes in a lane after ``module``, a child of ``group``, is opened."""
    if lane.phase == "forward":
        if group is lane:
            return MODEL_BOXES if _is_big(module, lane) else LANE_BOXES
        return SHOWN_BOXES if _is_big(module, group, ONLY) else LANE_BOXES
    known = next((name for name in _prefixes(module.name) if name in forward), None)
    if known is None:  # there is nothing to match
        return LANE_BOXES
    # A ModuleList has no box in the forward lane if its layers are shown there.
    listed = module.container and any(name.startswith(f"{module.name}.") for name in forward)
    if not listed and (known != module.name or not forward[known]):
        return 0  # in the forward lane, it is folded with others, closed, or inside a closed module
    # Layers are drawn beside their counterparts in the forward lane; single ops have none.
    layers = sum(part.kind == "module" for part in module.children)
    return MODEL_BOXES if 2 * layers > len(module.children) else SHOWN_BOXES


def _prefixes(name: str) -> Iterator[str]:
    """``name`` and the paths of the modules around it: ``a.b``, ``a`` for ``a.b``."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _add_outside_tensors(graph: Graph, reads: Reads, box_of: list[Box | None]) -> dict[int, Box]:
    """Add a box for each outside tensor before its first reader; returns boxes by value id."""
    box_of_value: dict[int, Box] = {}
    first: dict[int, tuple[Box, Value]] = {}
    wanted: dict[tuple[Box, Box, str], list[Value]] = {}  # (group, consumer in it, role) -> values
    for index, found in enumerate(reads):
        consumer = box_of[index]
        if consumer is None:
            continue
        for producer, value in found:
            if producer is None and value.id not in first:
                first[value.id] = consumer, value
                role: str = value.storage.role or "input"
                group = consumer.parent
                if (
                    role == "input"
                    and value.meta.shape
                    and value.nbytes
                    and consumer.phase in ("forward", "other")
                ):
                    while group is not None and group.kind != "lane":
                        group = group.parent
                assert group is not None  # every op is in a lane
                at = consumer
                while at.parent is not group:
                    assert at.parent is not None
                    at = at.parent
                wanted.setdefault((group, at, role), []).append(value)
    before: dict[Box, dict[Box, list[Box]]] = {}
    variables = names_by_round(graph, reads, box_of)
    # Results computed before a sync point are outside tensors after it: unnamed ones are named after the op
    # that created them.
    ran = [node for node in graph.nodes if node.state == "done"] if graph.sync_points else []
    maker_of = {storage.id: op_name(node) for node in ran for storage in node.made}
    for (group, at, role), values in wanted.items():
        parts = [[value] for value in values] if len(values) <= SEPARATE_INPUTS else [values]
        for part in parts:
            label: str = full_name(
                part[0].name or variables.get(part[0].id) or part[0].storage.name
            ) or maker_of.get(part[0].storage.origin.id, role)
            if group.name and role in ("parameter", "buffer"):
                label = label.rpartition(".")[2]  # the module's own name is in the box around it
            label = label if len(part) == 1 else f"{len(part)} {_plural(role)}"
            box = Box("input", label, group.phase, group)
            box.key = role
            box.values = part
            box.nbytes = sum(value.nbytes for value in part)
            for value in part:
                box_of_value[value.id] = box
            before.setdefault(group, {}).setdefault(at, []).append(box)
    for group, additions in before.items():
        group.children = [box for old in group.children for box in (*additions.get(old, ()), old)]
    return box_of_value


def _plural(role: str) -> str:
    return {"optimizer": "optimizer states", "input": "inputs"}.get(role, role + "s")


def _cut_and_number(root: Box) -> None:
    """Divide groups that are too long, then set parents, positions and depths again."""
    stack = [root]
    while stack:
        box = stack.pop()
        if len(box.children) > MAX_CHILDREN:
            box.children = chunk(box, MAX_CHILDREN)
        for position, child in enumerate(box.children):
            child.parent, child.position, child.depth = box, position, box.depth + 1
        stack.extend(box.children)


def _join(hierarchy: Hierarchy, results: Mapping[int, Result]) -> None:
    """Add an edge for each value, between children of the innermost group that contains both its ends."""
    makers = _made_before_syncs(hierarchy)
    for index, found in enumerate(hierarchy.reads):
        reader = hierarchy.box_of[index]
        if reader is None:
            continue
        for producer, value in found:
            if producer is None:
                _note_saved(makers.get(value.storage.origin.id), reader, value)
                maker = hierarchy.box_of_value.get(value.id)
                if (
                    maker is not None
                    and maker.key in ("parameter", "buffer")
                    and not _within(reader, maker.parent)
                ):
                    # A weight that every iteration of a loop reads is drawn in the first one, without edges
                    # to the others, because it does not flow from one iteration to the next.
                    continue
            else:
                maker = hierarchy.box_of[producer]
                result = results.get(value.id)
                if result is not None and result.is_read_by(reader):
                    maker = result.box  # its readers are connected to the box of the variable
            if maker is not None and maker is not reader:
                _connect(maker, reader, value, hierarchy.behind.get(index, ()))
    for result in results.values():
        _connect(result.maker, result.box, result.box.values[0])


def _made_before_syncs(hierarchy: Hierarchy) -> dict[int, Box]:
    """The boxes that created the values that ops after a sync point read as outside tensors, by the id of
    the original storage.
    """
    graph = hierarchy.graph
    if not graph.sync_points:
        return {}
    makers = {
        storage.id: box
        for node in graph.nodes
        if node.state == "done" and (box := hierarchy.box_of[node.index]) is not None
        for storage in node.made
    }
    for box in dict.fromkeys(hierarchy.box_of_value.values()):
        for value in box.values if box.key == "input" else ():
            makers.setdefault(value.storage.origin.id, box)
    return makers


def _within(box: Box | None, group: Box | None) -> bool:
    while box is not None and box is not group:
        box = box.parent
    return box is not None


def _connect(
    maker: Box, reader: Box, value: Value, views: Sequence[Node] = (), source: Value | None = None
) -> None:
    """Add an edge for ``value``; hidden ``views`` derive it from ``source`` (default: ``value`` itself)."""
    a, b = maker, reader
    state = value.storage.role in KEPT  # a module's state, which is neither an input nor an output
    left: list[Box] = []
    entered: list[Box] = []
    while a.parent is not b.parent:
        if a.depth >= b.depth:
            assert a.parent is not None
            left.append(a)
            a = a.parent
        else:
            assert b.parent is not None
            entered.append(b)
            b = b.parent
    group = a.parent
    if a is b or group is None or (state and a.phase == "forward" and group.calls > 1):
        return
    if a.kind != "lane":
        for box in left:
            box.exit = True
            _note_end(box, value, leaving=True)
        for box in entered:
            box.entry = True
            _note_end(box, value, leaving=False)
        if not state and (maker.kind != "input" or maker.key == "input"):
            source = value if source is None else source
            seen = [view for view in views if view.outputs[0].storage is source.storage]
            _note_flow((*left, a), (*entered, b), source, seen)
    _note_saved(maker, reader, value)
    values = group.edges.setdefault((a, b), [])
    if len(values) < MAX_EDGE_VALUES and value not in values[-8:]:
        values.append(value)


def _note_saved(maker: Box | None, reader: Box, value: Value) -> None:
    """Note that ``value`` is saved for backward if the forward pass of the same step creates it."""
    if maker is None or reader.phase != "backward":
        return
    lane, other = lane_of(maker), lane_of(reader)
    if lane.phase == "forward" and lane.parent is other.parent and lane is not other:
        lane.saves.setdefault(value.storage.origin.id, value)


def _note_end(box: Box, value: Value, *, leaving: bool) -> None:
    """Note that ``value`` enters the group around ``box`` and is read by ``box``, or leaves it from there."""
    assert box.parent is not None
    ends = (box.parent.leaves if leaving else box.parent.enters).setdefault(box, [])
    if len(ends) < MAX_ENDS and value.id not in ends:
        ends.append(value.id)


def _note_flow(left: Sequence[Box], entered: Sequence[Box], value: Value, views: Sequence[Node]) -> None:
    """Note the first tensor that enters each group and the last that leaves it.

    If hidden ``views`` are in between, each group gets the view that it sees.
    """
    if not views:
        for box in left:
            _give(box, value)
        for box in entered:
            _take(box, value)
        return
    paths = [module_path(view) for view in views]
    for box in left:
        given = value
        for view, path in zip(views, paths):
            if path == box.name or path.startswith(f"{box.name}."):
                given = view.outputs[0]
        _give(box, given)
    for box in entered:
        taken = value
        for view, path in zip(views, paths):
            if path == box.name or path.startswith(f"{box.name}."):
                break
            taken = view.outputs[0]
        _take(box, taken)


def _give(box: Box, value: Value) -> None:
    """Set the output of ``box``: the last result or, in a backward lane, the largest gradient.

    The gradient of a block's input is larger than those of its scale and shift.
    """
    known = box.gives
    if known is None or box.phase != "backward" or _weight(value) >= _weight(known):
        box.gives = value


def _weight(value: Value) -> tuple[bool, int]:
    """A sort key: gradients of weights, such as shared ones, rank below all others; then by size."""
    forward = value.node.forward if value.node is not None else None
    weights = [each.shape for each in forward.inputs if each.storage.role == "parameter"] if forward else []
    of_weight = any(sorted(shape) == sorted(value.shape) for shape in weights)  # or of its transpose
    return not of_weight and value.storage.role != "gradient", value.nbytes


def _take(box: Box, value: Value) -> None:
    if box.takes is None:
        box.takes = value
    elif box.takes_data is None and not is_of_numbers(box.takes) and is_of_numbers(value):
        box.takes_data = value


def _order_syncs(syncs: list[Box]) -> None:
    """Order each sync point after everything recorded before it, and before everything recorded after it."""
    for sync in syncs:
        group = sync.parent
        if group is None:
            continue
        for box in group.children:
            if box.position < sync.position:
                group.order.append((box, sync))
            elif box.position > sync.position:
                group.order.append((sync, box))


def _name(hierarchy: Hierarchy, opened: Sequence[Box]) -> None:
    """Assign ids, and open the initially open groups: models and, of several steps, those with most ops."""
    groups = 0
    stack = [hierarchy.root]
    while stack:
        box = stack.pop()
        if box.node is not None:
            box.id = f"n{box.node.index}"
        else:
            box.id = f"g{groups}"
            groups += 1
        hierarchy.boxes[box.id] = box
        stack.extend(reversed(box.children))
    hierarchy.opened.update(box.id for box in opened)
    root = hierarchy.root
    while root.children and root.children[0].kind != "lane":
        root = max(root.children, key=lambda box: box.ops / box.repeats)
        hierarchy.opened.add(root.id)
        root.order += list(itertools.pairwise(root.children))
    for box in [hierarchy.root, *hierarchy.boxes.values()]:
        if not box.order and box.children and box.children[0].kind == "step" and box.kind in ("root", "step"):
            box.order = list(itertools.pairwise(box.children))
