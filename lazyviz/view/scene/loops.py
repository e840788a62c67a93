"""Loops: repeated parts are labeled with the user's loop statement."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator, Sequence

from ...graph.ir import Graph, Node, SourceLine
from .boxes import Box

MOST_CHARS = 60
_LOOP = re.compile(r"\s*((?:async\s+)?for\s.+|while\s.+)")
_OUTSIDE = re.compile(r"\s*(?:async\s+)?(?:def|class)\s")


def name_loops(root: Box, graph: Graph) -> None:
    """Name folds of steps after the loop around their lines: ``"for i in range(12)"``."""
    file = graph.place.file if graph.place is not None else ""
    stack = [root]
    while stack:
        box = stack.pop()
        stack.extend(box.children)
        if box.kind == "step" and box.repeats > 1 and (text := _statement(box, file)):
            box.label = text


def _statement(fold: Box, file: str) -> str:
    """The loop around all lines of the fold's first member, without its colon; "" if there is none."""
    first = fold.children[0]
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
        if found := _LOOP.match(line):
            words = re.sub(r":\s*(#.*)?$", "", found[1].strip())
            return words if len(words) <= MOST_CHARS else f"{words[: MOST_CHARS - 1]}…"
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
