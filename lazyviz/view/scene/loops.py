"""Loops: repeated parts are labeled with the user's loop statement."""

from __future__ import annotations

import functools
import linecache
import re
from collections.abc import Iterator, Sequence

from ...graph.ir import Graph, Node, SourceLine
from .boxes import Box

MOST_CHARS = 60
_LOOP = re.compile(r"\s*((?:async\s+)?for\s.+|while\s.+)")
_OUTSIDE = re.compile(r"\s*(?:async\s+)?(?:def|class)\s")


def name_loops(root: Box, graph: Graph) -> None:
    """Name folds of steps after the loop around their lines: ``"for i in range(12)"``.

    Its steps that differ, such as the first and the last, have the name in addition to their number.
    """
    file = graph.place.file if graph.place is not None else ""
    for step in root.children:
        if step.kind == "step" and step.repeats == 1:
            # Ops before and after the loop count to its first and last step, but no backward pass does.
            lane = next((child for child in step.children if child.phase == "backward"), step)
            if text := _statement(lane, file):
                step.label = f"{step.label} · {text}"
    stack = [root]
    while stack:
        box = stack.pop()
        stack.extend(box.children)
        if box.kind != "step" or box.repeats == 1:
            continue
        if text := _within_module(box) if _is_in_module(box) else _statement(box.children[0], file):
            box.label = text


def _is_in_module(box: Box) -> bool:
    while box.parent is not None and not box.name:
        box = box.parent
    return bool(box.name)


def _within_module(fold: Box) -> str:
    """The innermost loop of the module around the fold that all ops of the fold's first member are in."""
    outer = fold.parent
    if outer is None or outer.kind != "module" or not outer.name:
        return ""
    called = _common_end([_lines(node) for node in _nodes(outer)])
    common: list[tuple[str, int]] | None = None
    for node in _nodes(fold.children[0]):
        lines = _lines(node)
        loops = [place for line in lines[: len(lines) - called] for place in _loops_around(line)]
        common = loops if common is None else [place for place in common if place in loops]
    return _words(linecache.getline(*common[0])) if common else ""


def _lines(node: Node) -> list[SourceLine]:
    """The op's line and its callers', the innermost first; for a gradient, those of its forward op."""
    of = node.forward if node.phase == "backward" and node.forward is not None else node
    return [*([of.source] if of.source is not None else []), *of.callers]


def _common_end(chains: Sequence[Sequence[SourceLine]]) -> int:
    """How many of their last lines are the same in all chains."""
    count = 0
    for same in zip(*(reversed(chain) for chain in chains)):
        if any(line != same[0] for line in same):
            break
        count += 1
    return count


@functools.lru_cache(maxsize=1000)
def _loops_around(line: SourceLine) -> tuple[tuple[str, int], ...]:
    """The loops of the line's function that it is in, the innermost first, as file and line."""
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
    """A loop's statement without its colon, or ""."""
    found = _LOOP.match(line)
    words = re.sub(r":\s*(#.*)?$", "", found[1].strip()) if found else ""
    return words if len(words) <= MOST_CHARS else f"{words[: MOST_CHARS - 1]}…"


def _statement(first: Box, file: str) -> str:
    """The loop around the first line of a box, without its colon; "" if there is none."""
    lines = [source for node in _nodes(first) if (source := _line_in(node, file)) is not None]
    if not lines:
        return ""
    text = linecache.getlines(file)
    top = min(source.line for source in lines)
    if top > len(text):
        return ""
    indent = _indent(text[top - 1])
    for line in reversed(text[: top - 1]):
        if not line.strip() or _indent(line) >= indent or line.lstrip().startswith("#"):
            continue
        indent = _indent(line)
        if _OUTSIDE.match(line):
            return ""
        if words := _words(line):
            return words
    return ""


def _nodes(box: Box) -> Iterator[Node]:
    stack = [box]
    while stack:
        current = stack.pop()
        stack.extend(current.children)
        if current.node is not None:
            yield current.node


def _line_in(node: Node, file: str) -> SourceLine | None:
    """The line in ``file`` that ran the node: its own, or the outermost caller."""
    sources: Sequence[SourceLine] = [*([node.source] if node.source is not None else []), *node.callers]
    return next((source for source in reversed(sources) if source.file == file), None)


def _indent(line: str) -> int:
    expanded = line.expandtabs()
    return len(expanded) - len(expanded.lstrip())
