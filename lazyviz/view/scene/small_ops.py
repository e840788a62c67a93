"""Small ops: runs of ops with small results, and the ops of a dropout, are drawn as one box."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator

from ...graph.ir import Graph, Node, SourceLine
from .boxes import Box, op_name
from .repeat_folding import count

LEAST = 4  # minimum consecutive ops that are folded
SMALL = 1 / 500  # maximum size of a small result, as a fraction of the graph's largest tensor
ASIDE = 1 / 100  # the same for what is computed beside the model, without gradients
NAMES = 3  # minimum named results for which ops with names are folded
KEY = "small"
_DROPOUT = re.compile(r"(empty_like|new_empty) bernoulli_ div_ mul_?")  # the ops of ``F.dropout``


def is_small_ops(box: Box) -> bool:
    """Whether the box stands for a run of small ops."""
    return isinstance(box.key, tuple) and box.key[0] == KEY


def is_dropout(box: Box) -> bool:
    """Whether the box stands for the ops of a dropout that no module called."""
    return isinstance(box.key, tuple) and box.key[0] == "dropout"


def fold_small_ops(root: Box, graph: Graph) -> None:
    """Fold runs of small ops that are next to something larger.

    The children of a group are in topological order, so merging consecutive ones never creates a cycle.
    Losses, failed ops, and ops with a user-defined name are not folded, except for many named constants
    before the model is called, such as the noise schedule of a diffusion model.
    """
    largest = max((storage.nbytes for storage in graph.storages if not storage.external), default=0)
    learned = {node.forward for node in graph.nodes if node.forward is not None}
    stack = [root]
    while stack:
        box = stack.pop()
        stack.extend(box.children)
        if box.kind == "lane" and box.phase == "optimizer":
            _put_counters_away(box)
        if box.kind in ("lane", "module") and box.repeats == 1 and len(box.children) > LEAST:
            box.children = _with_dropouts(box)
            if box.kind == "lane":
                box.children = _with_constants(box, largest * ASIDE, learned)
            box.children = _folded(box, largest * SMALL)


def _put_counters_away(lane: Box) -> None:
    """Move groups that only update an optimizer's step counters into an adjacent group of the same source
    line, as its last child.

    The children of a lane are in topological order, so merging adjacent ones never creates a cycle.
    """
    at = 0
    while at < len(lane.children):
        child = lane.children[at]
        if child.is_group and _counts_steps(child):
            child.label, child.key, child.repeats = "step counters", (KEY, child.first), 1
            lines = _lines(child)
            beside = [*lane.children[max(at - 1, 0) : at], *lane.children[at + 1 : at + 2]]
            same = (box for box in beside if box.is_group and not lines.isdisjoint(_lines(box)))
            updates = next(same, None)
            if updates is not None:
                updates.children, child.parent = [*updates.children, child], updates
                count(updates)
                del lane.children[at]
                continue
        at += 1


def _with_dropouts(parent: Box) -> list[Box]:
    """The children of ``parent``, with the ops of each dropout folded: sample, scale, and apply its mask."""
    children: list[Box] = []
    at = 0
    while at < len(parent.children):  # a lane may have a hundred thousand
        four = parent.children[at : at + 4]
        ops = [child.node for child in four if child.node is not None]
        if len(ops) == 4 and _DROPOUT.fullmatch(" ".join(map(op_name, ops))) and _is_dropout(ops):
            children.append(_group(parent, "dropout", "dropout", four))
            at += 4
        else:
            children.append(four[0])
            at += 1
    return children


def _is_dropout(ops: list[Node]) -> bool:
    """Whether the last of ``ops`` applies the mask that the others create, and none failed or has a name."""
    masks = {storage for node in ops[:3] for storage in (*node.made, *node.writes)}
    masked = len(masks) == 1 and any(value.storage in masks for value in ops[3].inputs)
    return masked and not any(node.state == "failed" or any(v.name for v in node.outputs) for node in ops)


def _nodes(box: Box) -> Iterator[Node]:
    stack = [box]
    while stack:
        current = stack.pop()
        stack.extend(current.children)
        if current.node is not None:
            yield current.node


def _lines(box: Box) -> set[SourceLine]:
    return {node.source for node in _nodes(box) if node.source is not None}


def _counts_steps(box: Box) -> bool:
    """Whether ``box`` only updates step counters of an optimizer."""
    for node in _nodes(box):
        touched = {*node.writes, *node.made}
        if not touched or any(storage.role != "optimizer" or storage.nbytes > 8 for storage in touched):
            return False
    return True


def _folded(parent: Box, limit: float) -> list[Box]:
    result: list[Box] = []
    run: list[Box] = []
    for child in [*parent.children, None]:
        if child is not None and child.node is not None and _is_small(child.node, limit):
            run.append(child)
            continue
        if LEAST <= len(run) < len(parent.children):
            result.append(_fold(parent, run))
        else:
            result += run
        run = []
        if child is not None:
            result.append(child)
    return result


def _with_constants(lane: Box, limit: float, learned: Collection[Node]) -> list[Box]:
    """The children of ``lane``, with runs of small named results before the first module folded.

    The ops in ``learned``, which backward ops differentiate, stay.
    """
    first = next((at for at, child in enumerate(lane.children) if child.name), 0)
    result: list[Box] = []
    for constant, run in itertools.groupby(
        lane.children[:first],
        lambda box: (
            (box.node is not None or is_line(box))
            and not any(node in learned or not _is_small(node, limit, named=True) for node in _nodes(box))
        ),
    ):
        members = list(run)
        made = [node for box in members for node in _nodes(box)]
        names = {value.name for node in made for value in node.outputs if value.name}
        if constant and len(made) >= LEAST and len(names) >= NAMES:
            result.append(_group(lane, f"{len(made)} small ops", KEY, members))
        else:
            result += members
    return result + lane.children[first:]


def is_line(box: Box) -> bool:
    """Whether the box stands for the ops of one line, outside of modules."""
    return isinstance(box.key, tuple) and box.key[0] == "line"


def _is_small(node: Node, limit: float, *, named: bool = False) -> bool:
    """Whether all results of ``node`` are small; those with a user-defined name count if ``named``."""
    if node.state == "failed" or (not named and any(value.name for value in node.outputs)):
        return False
    name = op_name(node)
    if "loss" in name or "cross_entropy" in name:
        return False
    return sum(storage.nbytes for storage in node.made) <= limit and all(
        value.nbytes <= limit for value in node.outputs
    )


def _fold(parent: Box, members: list[Box]) -> Box:
    return _group(parent, f"{len(members)} small ops", KEY, members)


def _group(parent: Box, label: str, key: str, members: list[Box]) -> Box:
    box = Box("module", label, parent.phase, parent)
    box.key = (key, members[0].first)
    box.children = members
    for member in members:
        member.parent = box
    count(box)
    box.shape_hash = hash(tuple(member.shape_hash for member in members))
    return box
