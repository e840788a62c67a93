"""Kernel errors: the state of failed nodes, and the source lines in error messages."""

from __future__ import annotations

from ..graph.ir import Failure, NodeError, failure_of
from ..record.tracked_storages import PARTIAL_WRITE, TrackedNode

STAYS = (
    "This op and those that depend on it stay pending. %lazy reset or lazyviz.reset() drops all pending ops."
)


def note_failure(node: TrackedNode, error: BaseException, *, midway: bool) -> None:
    """Record that ``node``'s kernel raised ``error``; ``midway``: after writes that cannot be rolled back."""
    if midway:
        where = f" at {node.source}: {node.source.text}" if node.source is not None else ""
        node.state = "failed"
        text = f"{PARTIAL_WRITE}: {node.name}{where}; it raised {type(error).__name__}: {error}"
        node.error = NodeError(Failure.PARTIAL_WRITE, text)
    elif isinstance(error, Exception):
        node.state, node.error = "failed", str(error)
    if isinstance(error, Exception):
        name_line(error, node)


def name_line(error: Exception, node: TrackedNode) -> None:
    """Add the source line of the op, and the state of the remaining ops, to the error's message."""
    lines = []
    if node.source is not None:
        lines.append(f"{node.op} was recorded at {node.source}: {node.source.text}")
    if node.forward is not None and node.forward.source is not None:
        lines.append(
            f"it is the gradient of {node.forward.op} at {node.forward.source}: {node.forward.source.text}"
        )
    partial = failure_of(node.error) is Failure.PARTIAL_WRITE
    if lines and error.args and isinstance(error.args[0], str) and lines[0] not in error.args[0]:
        message = "\n".join([error.args[0], *lines, PARTIAL_WRITE if partial else STAYS])
        error.args = (message, *error.args[1:])
