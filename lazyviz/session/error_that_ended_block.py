"""The error that ended a block, stored in its graph for pictures."""

from __future__ import annotations

from ..graph.ir import Graph, RaisedError, SourceLine
from ..record.tape import tape


def note_raised(graph: Graph, error: BaseException) -> None:
    """Store in ``graph``, which is still recording, the message of the ``error`` that ended its block."""
    if not isinstance(error, Exception):
        return
    rejected = graph.rejected if graph.rejected is not None and graph.rejected.error == id(error) else None
    lines: list[SourceLine] = []  # the user's, the outermost first
    traceback = error.__traceback__
    while traceback is not None:
        line = tape.scopes.sources.raised_at(traceback)
        lines += [line] if line is not None else []
        traceback = traceback.tb_next
    source = rejected.source if rejected is not None else None
    if source is None and lines:
        source = lines[-1]
    callers = dict.fromkeys(line for line in reversed(lines) if line != source)
    graph.raised = RaisedError(
        f"{type(error).__name__}: {error}".rstrip(": "), source, rejected, tuple(callers)
    )
