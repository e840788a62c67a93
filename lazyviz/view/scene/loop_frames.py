"""Loop frames: the iterations of a loop are drawn in one frame, labeled with the loop's statement."""

from __future__ import annotations

import functools
import itertools
import linecache
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from ...graph.ir import Graph, Node, SourceLine
from .boxes import Box
from .repeat_folding import count, fold_equal, fold_repeats, fold_rest

Place = tuple[str, int]  # a loop's statement: file and line
MOST_CHARS = 60
ROUND = "round"  # of an outer loop
CARD_CHARS = 32  # characters that fit on a closed card
_LOOP = re.compile(r"\s*((?:async\s+)?for\s.+|while\s.+)")
_OUTSIDE = re.compile(r"\s*(?:async\s+)?(?:def|class)\s")


def name_loops(root: Box, graph: Graph) -> None:
    """Label folds of steps with the loops around their lines: ``"for i in range(12)"`` or, for nested loops,
    ``"for epoch in range(3) › for x in data"``.

    Different steps of one loop are in one frame: for example, the first step of an optimizer and the others,
    or every tenth step, which prints.  The label of a single step has its number, too.
    """
    outside: Sequence[Place] = _loops_around(graph.place) if graph.place is not None else ()
    loops: dict[Box, tuple[Place, ...]] = {}  # around steps, innermost first
    root.children = _single_rounds(root, outside)
    root.children = _framed(root, outside, loops)
    stack = [root]
    while stack:
        box = stack.pop()
        if (box.kind == "step" or _is_line(box)) and box not in loops:
            _name_steps(box, outside, loops)
        if box.kind == "step" and box.repeats == 1 and box.children[0].kind == "step":
            box.children = _framed(box, loops[box], loops)
        stack.extend(box.children)


def group_rounds(root: Box) -> None:
    """Put the training steps of each round of an outer loop, such as an epoch, into one box.

    A step with ops of the outer loop before or after the inner one, such as drawing a permutation or a
    validation, begins or ends a round.  Otherwise equal steps would be folded across rounds.
    """
    steps = root.children
    inner = _loops_of(steps[0], ()) if len(steps) > 2 and steps[0].kind == "step" else ()
    if len(inner) < 2 or any(step.kind != "step" or _loops_of(step, ()) != inner for step in steps):
        return
    rounds: list[list[Box]] = []
    ended = True
    for step in steps:
        nodes = sorted(_nodes(step), key=lambda node: node.index)
        if ended or _is_between(nodes[0], inner):
            rounds.append([])
        rounds[-1].append(step)
        ended = _is_between(nodes[-1], inner)
    if 1 < len(rounds) < len(steps):
        root.children = [_one_round(root, n, members, inner[1:]) for n, members in enumerate(rounds, 1)]


def _is_between(node: Node, loops: Sequence[Place]) -> bool:
    """Whether ``node`` runs between two runs of the innermost of ``loops``, in a round of the next one."""
    around = {place for line in _lines(node, own=True) for place in _loops_around(line)}
    return loops[0] not in around and loops[1] in around


def _one_round(root: Box, number: int, steps: list[Box], loops: tuple[Place, ...]) -> Box:
    box = Box("step", f"step {number}", steps[0].phase, root, (ROUND, number, loops))
    box.children = steps
    for step in steps:
        step.parent = box
    box.shape_hash = hash(tuple(step.shape_hash for step in steps))
    box.children = fold_repeats(box)
    count(box)
    return box


def _name_steps(box: Box, outside: Sequence[Place], loops: dict[Box, tuple[Place, ...]]) -> None:
    """Store the loops around a step, which may be inside another step or a lane, and label it if it
    represents several iterations.
    """
    around = box.parent
    if around is not None and around.repeats > 1 and around in loops:  # an iteration of that loop
        loops[box] = loops[around]
        return
    while around is not None and around.kind != "step":
        around = around.parent
    known: Sequence[Place] = loops.get(around, ()) if around is not None else outside
    inside = _is_in_module(box)
    loops[box] = tuple(known) if inside else _loops_of(box, known)
    if box.repeats > 1 and (text := _within_module(box) if inside else _title(loops[box], known, CARD_CHARS)):
        box.label = text


def _single_rounds(group: Box, outside: Sequence[Place]) -> list[Box]:
    """The children of ``group``; a folded sequence of several steps is replaced by its single steps if these
    are the loop's iterations: those of the first repeat as boxes, the others as one box.
    """
    result: list[Box] = []
    for box in group.children:
        if box.repeats < 2 or any(part.kind != "step" for each in box.children for part in each.children):
            result.append(box)
            continue
        steps = [_members(each) for each in box.children]
        own = _loops_of(steps[0][0], outside)
        middle = _common_loops(_lines(node, own=True) for node in _nodes(box.children[len(steps) // 2]))
        if not own or own[:1] != middle[:1] or own[0] in outside:
            result.append(box)  # iterations of an outer loop
            continue
        result += fold_equal(group, steps[0])
        result.append(fold_rest(group, list(itertools.chain.from_iterable(steps[1:]))))
    return result


def _members(step: Box) -> list[Box]:
    """The single steps in ``step``."""
    inside = [step]
    while any(each.children[0].kind == "step" for each in inside):
        inside = [
            part for each in inside for part in (each.children if each.children[0].kind == "step" else [each])
        ]
    return inside


def _framed(group: Box, outside: Sequence[Place], loops: dict[Box, tuple[Place, ...]]) -> list[Box]:
    """The children of ``group``, with the steps of each loop in one frame."""
    for step in group.children:
        if step.kind == "step":
            loops[step] = _loops_of(step, outside)
    result: list[Box] = []
    for own, run in itertools.groupby(group.children, key=lambda step: loops.get(step, ())):
        steps = list(run)
        text = _title(own, outside)
        if text and len(steps) > 1:
            frame = Box("step", text, steps[0].phase, group, ("loop", own))
            frame.children, frame.repeats = steps, sum(step.repeats for step in steps)
            for step in steps:
                step.parent = frame
            count(frame)
            loops[frame] = own
            steps = [frame]
        elif text:
            steps[0].label = text if steps[0].repeats > 1 else f"{steps[0].label} · {text}"
        result += steps
    return result


def _loops_of(step: Box, known: Sequence[Place]) -> tuple[Place, ...]:
    """The loops that contain all ops of a step or, for several steps, of the first and the last; ``known``
    if there are none.
    """
    if step.repeats > 1 and step.children[0].kind == "step":
        first, last = (_loops_of(step.children[at], known) for at in (0, -1))
        return tuple(place for place in first if place in last)
    if isinstance(step.key, tuple) and step.key[0] == ROUND:
        loops: tuple[Place, ...] = step.key[2]
        return loops
    # The first and last step may also have ops before and after the loop, but only in other lanes.
    lanes = [child for child in step.children if child.kind == "lane"]
    lane = next((lane for lane in lanes if lane.phase == "backward"), step)
    return _common_loops(_lines(node, own=bool(lanes)) for node in _nodes(lane)) or tuple(known)


def _common_loops(chains: Iterable[Sequence[SourceLine]]) -> tuple[Place, ...]:
    """The loops that every call chain passes through, innermost first; empty chains are ignored."""
    common: dict[Place, None] | None = None
    for chain in dict.fromkeys(tuple(chain) for chain in chains if chain):
        loops = dict.fromkeys(place for line in chain for place in _loops_around(line))
        common = loops if common is None else {place: None for place in common if place in loops}
        if not common:
            break
    return tuple(common or ())


def _title(loops: Sequence[Place], known: Collection[Place], most: int = MOST_CHARS) -> str:
    """The statements of the loops that are not ``known``, outermost first; outer ones are omitted if the
    text is longer than ``most``.
    """
    inner, *outer = [
        words
        for file, line in loops
        if (file, line) not in known and (words := _words(linecache.getline(file, line)))
    ] or [""]
    for words in outer:
        if len(inner) + len(words) + 3 > most:
            return f"… › {inner}"
        inner = f"{words} › {inner}"
    return inner


def _is_line(box: Box) -> bool:
    """Whether ``box`` is a fold of several iterations of a single source line."""
    return box.repeats > 1 and isinstance(box.key, tuple) and box.key[0] == "line"


def _is_in_module(box: Box) -> bool:
    while box.parent is not None and not box.name:
        box = box.parent
    return bool(box.name)


def _within_module(fold: Box) -> str:
    """The innermost loop in the surrounding module's code with all ops of the fold's first member."""
    outer = fold.parent
    if outer is None or outer.kind != "module" or not outer.name:
        return ""
    called = _common_end([_lines(node) for node in _nodes(outer)])
    chains = [lines[: len(lines) - called] for node in _nodes(fold.children[0]) if (lines := _lines(node))]
    common = _common_loops(chains) if all(chains) else ()
    return _words(linecache.getline(*common[0])) if common else ""


def _lines(node: Node, *, own: bool = False) -> list[SourceLine]:
    """The op's source line and its callers, innermost first; for a backward op those of its forward op,
    unless ``own``.
    """
    of = node.forward if node.phase == "backward" and node.forward is not None and not own else node
    return [*([of.source] if of.source is not None else []), *of.callers]


def _common_end(chains: Sequence[Sequence[SourceLine]]) -> int:
    """The length of the longest common suffix of all chains."""
    count = 0
    for same in zip(*(reversed(chain) for chain in chains)):
        if any(line != same[0] for line in same):
            break
        count += 1
    return count


@functools.lru_cache(maxsize=1000)
def _loops_around(line: SourceLine) -> tuple[Place, ...]:
    """The loops around the line within its function, innermost first."""
    text = linecache.getlines(line.file)
    if line.line > len(text):
        return ()
    found = []
    indent = _indent(text[line.line - 1])
    for at in range(line.line - 1, 0, -1):
        above = text[at - 1]
        if not above.strip() or _indent(above) >= indent or above.lstrip().startswith("#"):
            continue
        indent = _indent(above)
        if _OUTSIDE.match(above):
            break
        if _LOOP.match(above):
            found.append((line.file, at))
    return tuple(found)


def _words(line: str) -> str:
    """A loop statement without its colon; "" for any other line."""
    found = _LOOP.match(line)
    words = re.sub(r":\s*(#.*)?$", "", found[1].strip()) if found else ""
    return words if len(words) <= MOST_CHARS else f"{words[: MOST_CHARS - 1]}…"


def _nodes(box: Box) -> Iterator[Node]:
    stack = [box]
    while stack:
        current = stack.pop()
        stack.extend(current.children)
        if current.node is not None:
            yield current.node


def _indent(line: str) -> int:
    expanded = line.expandtabs()
    return len(expanded) - len(expanded.lstrip())
