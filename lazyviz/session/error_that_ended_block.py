"""The error that ended a block, stored in its graph for pictures."""

from __future__ import annotations

from ..graph.ir import Graph, RaisedError
from ..record.tape import tape


def note_raised(graph: Graph, error: BaseException) -> None:
    """Store in ``graph``, which is still recording, the message of the ``error`` that ended its block."""
    if not isinstance(error, Exception):
        return
    rejected = graph.rejected if graph.rejected is not None and graph.rejected.error == id(error) else None
    source = rejected.source if rejected is not None else None
    traceback = error.__traceback__
    while source is None and traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if source is None and traceback is not None:
        source = tape.scopes.sources.find(traceback.tb_frame)[0]
    graph.raised = RaisedError(f"{type(error).__name__}: {error}".rstrip(": "), source, rejected)
