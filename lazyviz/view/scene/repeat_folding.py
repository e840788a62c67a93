"""Repeat folding: repeated modules and ops are drawn as one box, and long lists are divided into runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from .boxes import Box

MOST_SUMS = 2  # consecutive gradient sums that belong to the preceding box
_SUMS = ("aten::add", "aten::add_")
UPDATES = "updates"  # several parameters' updates by an optimizer
MAX_PERIOD = 32  # maximum number of boxes in a repeated sequence


def is_gradient_sum(box: Box) -> bool:
    """Whether autograd adds up two gradients here.

    If several layers read a tensor, only the later ones add to its gradient. These ops are therefore ignored
    when layers, or rounds of a loop, are compared.
    """
    node = box.node
    return node is not None and node.phase == box.phase == "backward" and node.op._schema.name in _SUMS


def fold_repeats(parent: Box) -> list[Box]:
    """The children of ``parent`` with each repeated sequence as one box.

    Two or more consecutive equal groups become one box that represents them (``x 12``). A sequence of several
    boxes, or of single ops, must occur three times, as in a loop. When opened, the box shows its members.
    """
    if parent.repeats > 1:  # already folded
        return parent.children
    parts = _with_sums(parent.children)
    firsts = [part[0] for part in parts]
    hashes = [first.shape_hash for first in firsts]
    result: list[Box] = []
    at = 0
    while at < len(parts):
        period, repeats = _best(hashes, firsts, at)
        if repeats == 1:
            result += parts[at]
            at += 1
            continue
        result.append(_fold(parent, parts[at : at + period * repeats], period, repeats))
        at += period * repeats
    whole = len(result) == 1 and result[0].repeats > 1 and parent.kind == "module"
    if whole and parent.parent is not None and not (is_model(parent) and result[0].name):
        # The whole group is one repetition, so it becomes the fold; a model remains as the frame around it.
        only = result[0]
        parent.repeats = only.repeats
        if only.kind == "module":
            parent.label = path_label(parent, only)
            parent.name, parent.root = only.name or parent.name, only.root or parent.root
        for member in only.children:
            member.parent = parent
        return only.children
    return result


def _with_sums(children: Sequence[Box]) -> list[list[Box]]:
    """Each child together with up to :data:`MOST_SUMS` gradient sums that follow it."""
    parts: list[list[Box]] = []
    sums: list[Box] = []
    for child in [*children, None]:
        if child is not None and is_gradient_sum(child):
            sums.append(child)
            continue
        if parts and len(sums) <= MOST_SUMS:
            parts[-1] += sums
        else:  # many sums can be a repetition of their own
            parts += [[each] for each in sums]
        sums = []
        if child is not None:
            parts.append([child])
    return parts


def show_one_step(root: Box) -> None:
    """Separate the first of a loop's folded steps, which is open initially, from a box with the others."""
    if not any(child.kind == "step" for child in root.children):
        return
    fold = max(root.children, key=lambda box: box.ops / box.repeats)
    if any(member.kind != "step" for member in fold.children):
        return
    if len(fold.children) < fold.repeats:  # a frame around steps that differ
        most = max(fold.children, key=lambda box: box.ops / box.repeats)
        at = fold.children.index(most)
        fold.children[at : at + 1] = _first_and_rest(most, fold)
    else:
        fold.children = _first_and_rest(fold, fold)


def _first_and_rest(fold: Box, parent: Box) -> list[Box]:
    """The first step of a fold, and the others as one box, as children of ``parent``."""
    if fold.repeats < 3 or len(fold.children) < fold.repeats:
        return fold.children if fold is parent else [fold]
    first, *others = fold.children
    rest = Box("step", _range([member.label for member in others]), fold.phase, parent)
    rest.children, rest.repeats, rest.key = others, len(others), ("fold", others[0].key)
    first.parent = parent
    for member in others:
        member.parent = rest
    count(rest)
    rest.shape_hash = fold.shape_hash
    return [first, rest]


def fold_equal(parent: Box, steps: Sequence[Box]) -> list[Box]:
    """``steps`` with each run of equal steps folded; repeated sequences of different steps are not folded."""
    result: list[Box] = []
    for _, run in itertools.groupby(steps, key=lambda step: step.shape_hash):
        parts = [[step] for step in run]
        result += [_fold(parent, parts, 1, len(parts))] if len(parts) > 1 else parts[0]
    for box in result:
        box.parent = parent
    return result


def fold_rest(parent: Box, steps: Sequence[Box]) -> Box:
    """``steps`` of a loop, equal or not, as one box, in which runs of equal ones are folded."""
    rest = Box("step", _range([step.label for step in steps]), steps[0].phase, parent)
    rest.key, rest.repeats = ("fold", steps[0].key), len(steps)
    rest.children = fold_equal(rest, steps)
    count(rest)
    rest.shape_hash = hash(tuple(step.shape_hash for step in steps))
    return rest


def is_model(box: Box) -> bool:
    """Whether it is an outermost module, which the user calls."""
    return box.kind == "module" and isinstance(box.key, tuple) and len(box.key) == 1 and bool(box.name)


def path_label(outer: Box, inner: Box) -> str:
    """The label of a group that is drawn with its only child as one box."""
    if isinstance(outer.key, tuple) and outer.key[0] in ("line", "update", "initial"):
        return outer.label
    return join(outer.label, inner.label)


def join(outer: str, inner: str) -> str:
    """The path of ``inner`` in ``outer``; the label of a list item already has the list's name (``h.0``)."""
    name = outer.rpartition(".")[2]
    if inner.startswith(f"{name}.") and inner[len(name) + 1 :][:1].isdigit():
        return outer[: len(outer) - len(name)] + inner
    return f"{outer}.{inner}"


def _best(hashes: list[int], children: list[Box], at: int) -> tuple[int, int]:
    """The period and number of repeats that cover most boxes from ``at`` on; ``(1, 1)`` if nothing
    repeats.
    """
    best = (1, 1)
    count = len(hashes)
    for period in range(1, min(MAX_PERIOD, (count - at) // 2) + 1):
        if hashes[at] != hashes[at + period]:
            continue
        end = at + period
        while end < count and hashes[end] == hashes[end - period]:
            end += 1
        repeats = (end - at) // period
        alone = period == 1 and children[at].is_group
        enough = repeats >= 2 if alone else repeats >= 3 and period * repeats >= 6
        if enough and period * repeats > best[0] * best[1]:
            best = (period, repeats)
    return best


def _fold(parent: Box, parts: Sequence[list[Box]], period: int, repeats: int) -> Box:
    members = [part[0] for part in parts]
    alone = period == 1 and all(len(part) == 1 for part in parts)
    if alone and members[0].is_group:
        fold = Box(members[0].kind, _range([member.label for member in members]), members[0].phase, parent)
        fold.children = members
        _name_range(fold, members[0], members[-1])
    elif alone:
        fold = Box("module", members[0].label, members[0].phase, parent)
        fold.children = members
    else:
        fold = _fold_sequences(parent, parts, period, repeats)
    for member in fold.children:
        member.parent = fold
    fold.repeats = repeats
    fold.key = ("fold", members[0].key)
    count(fold)
    fold.shape_hash = hash(tuple(member.shape_hash for member in members))
    return fold


def _fold_sequences(parent: Box, parts: Sequence[list[Box]], period: int, repeats: int) -> Box:
    """A box for a repeated sequence, named after its modules if their names differ between repeats."""
    members = [part[0] for part in parts]
    phase = members[0].phase
    fold = Box("step", "step", phase, parent)
    named = [at for at in range(period) if members[at].name and members[at].name != members[at + period].name]
    for number in range(repeats):
        step = Box("step", f"step {number + 1}", phase, fold)
        own = slice(number * period, (number + 1) * period)
        step.children = [box for part in parts[own] for box in part]
        for member in step.children:
            member.parent = step
        if all(member.kind == "step" for member in step.children):
            step.children = fold_repeats(step)  # iterations of an inner loop
        if named:
            step.label = _range([members[own][at].label for at in (named[0], named[-1])])
        count(step)
        fold.children.append(step)
    if named:
        first, last = members[named[0]], members[named[-1] + period * (repeats - 1)]
        fold.kind, fold.label = "module", _range([first.label, last.label])
        _name_range(fold, first, last)
    return fold


def _name_range(box: Box, first: Box, last: Box) -> None:
    """``net.h.0–5`` for boxes that are modules."""
    if first.name and last.name:
        box.name, box.root = _range([first.name, last.name]), first.root


def count(box: Box) -> None:
    """Set the totals of ``box`` from its children."""
    box.ops = sum(child.ops for child in box.children)
    box.nbytes = sum(child.nbytes for child in box.children)
    box.syncs = sum(child.syncs for child in box.children)
    box.first = min((child.first for child in box.children if child.first >= 0), default=-1)


def _range(labels: list[str]) -> str:
    """One label for several boxes: ``["h.0", ..., "h.11"]`` -> ``"h.0–11"``; equal labels are unchanged."""
    first, last = labels[0], labels[-1]
    if first == last:
        return first
    same = next(
        (at for at, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]),
        min(len(first), len(last)),
    )
    common = first[:same]
    cut = max(common.rfind("."), common.rfind(" "), common.rfind("_")) + 1
    tail = last[cut:]
    if first[:cut] == labels[len(labels) // 2][:cut]:
        if first[cut:].isdigit() and tail.isdigit():
            return f"{first}–{tail}"
        if common.startswith("update "):
            return UPDATES
    return f"{first} … {tail}"


def chunk(parent: Box, limit: int) -> list[Box]:
    """The children of ``parent`` as at most ``limit`` consecutive runs.

    If necessary, runs are nested, so that no group has more than ``limit`` children.
    """
    boxes = parent.children
    while len(boxes) > limit:
        size = min(limit, math.isqrt(len(boxes)) + 1)
        runs: list[Box] = []
        for at in range(0, len(boxes), size):
            members = boxes[at : at + size]
            if len(members) == 1:
                runs.append(members[0])
                continue
            run = Box("step" if members[0].kind == "step" else "module", "", members[0].phase, parent)
            run.children = members
            count(run)
            first, last = _edge_label(members[0], 0), _edge_label(members[-1], -1)
            run.label = f"{first} … {last}" if first != last else f"{first} {at + 1}–{at + len(members)}"
            runs.append(run)
        boxes = runs
    return boxes


def _edge_label(box: Box, end: int) -> str:
    label = box.label
    return label.split(" … ")[end] if " … " in label else label
