"""Path redaction: a graph without the user's code and directory names."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...graph.ir import Graph, Node, SourceLine
from ..widget.run_thread_and_displays import running_of


class WithoutPaths:
    """A recorded graph as the saved page queries it, without code and with its own plan."""

    def __init__(self, pictured: Any, redactions: Redactions) -> None:
        self._pictured = pictured
        self._running = copy.copy(running_of(pictured))  # without registering as a listener of its runs
        if (error := self._running.exception) is not None:
            kind = type(type(error).__name__, (Exception,), {})
            self._running.exception = kind(redactions.text(str(error)))
        self.code = ""
        self.shown_plans: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pictured, name)


class Redactions:
    """Replacements of source lines, and of text that contains them."""

    def __init__(self) -> None:
        self._lines: dict[SourceLine, SourceLine] = {}
        self._folders = {os.getcwd(), str(Path.home())}
        self._texts: set[str] = set()

    def line(self, line: SourceLine) -> SourceLine:
        """``line`` without its text and the directory of its file."""
        found = self._lines.get(line)
        if found is None:
            file = line.short.rpartition(":")[0]
            if line.in_cell:
                file = f"<{os.path.basename(line.file).strip('<>')}>"
            elif os.path.isabs(line.file):
                self._folders.add(os.path.dirname(line.file))
            self._texts.add(line.text.strip())
            found = self._lines[line] = replace(line, file=file, text="")
        return found

    def text(self, text: str) -> str:
        """An error message without directories and code."""
        for folder in sorted(self._folders, key=len, reverse=True):
            if len(folder) > 1:
                text = text.replace(folder + os.sep, "").replace(folder, "")
        for code in sorted(self._texts, key=len, reverse=True):
            if len(code) > 3:
                text = text.replace(code, "…")
        return text


@contextmanager
def without_paths(graph: Graph) -> Iterator[Redactions]:
    """Inside the context, ``graph`` and the nodes of other graphs that it needs have no code and no
    directories; nor do plans and pictures that are created inside.
    """
    redactions = Redactions()
    nodes: dict[int, Node] = {}
    queue = [*graph.nodes, *(value.node for value in graph.inputs if value.node is not None)]
    for node in queue:  # grows while it is read
        if id(node) not in nodes:
            nodes[id(node)] = node
            if node.forward is not None:
                queue.append(node.forward)
    before = [(node, node.source, node.callers, node.error) for node in nodes.values()]
    points, place = graph.sync_points, graph.place
    try:
        for node, source, callers, _ in before:
            node.source = redactions.line(source) if source is not None else None
            node.callers = tuple([redactions.line(line) for line in callers])
        for node, _, _, error in before:
            node.error = redactions.text(error) if error is not None else None
        graph.sync_points = [
            replace(
                point,
                source=redactions.line(point.source) if point.source is not None else None,
                reader=redactions.line(point.reader) if point.reader is not None else None,
            )
            for point in points
        ]
        graph.place = redactions.line(place) if place is not None else None
        yield redactions
    finally:
        graph.sync_points, graph.place = points, place
        for node, source, callers, error in before:
            node.source, node.callers, node.error = source, callers, error
