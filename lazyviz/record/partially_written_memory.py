"""Partial writes: memory that a failed kernel or segment left partially written, and how it becomes valid.

A node that fails midway never runs again, and tensors that it writes in place cannot be read
(:data:`lazyviz.graph.ir.Failure.PARTIAL_WRITE`) until all of their memory is overwritten by an op that does
not read it.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..graph.ir import Failure, TensorMeta, failure_of
from .tracked_storages import TrackedNode, TrackedStorage

OVERWRITES = frozenset(
    {"bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_"}
    | {"random_", "uniform_", "zero_", "_foreach_copy_", "_foreach_zero_"}
)
"""Operators that write their first argument, or each tensor of that list, without reading it."""


def is_partial_write(node: TrackedNode) -> bool:
    return node.state == "failed" and failure_of(node.error) is Failure.PARTIAL_WRITE


def is_all_of(storage: TrackedStorage, meta: TensorMeta) -> bool:
    """Whether a tensor with that metadata covers all of ``storage``."""
    return meta.dense and not meta.offset and meta.storage_nbytes == storage.nbytes


def can_run_after(node: TrackedNode, failed: TrackedNode) -> bool:
    """Whether ``node`` overwrites, or only views, all memory that an earlier node left partially written."""
    if node.op.is_view:
        return all(value.node is not failed for value in node.inputs)
    shared = [value for value in node.inputs if value.storage in failed.writes or value.node is failed]
    if not shared:  # it writes memory that the failed node has read
        return True
    if node.op._schema.name.removeprefix("aten::") not in OVERWRITES:
        return False
    memory = [value.storage for value in node.inputs]
    return all(
        value.node is not failed
        and value.storage in node.writes
        and memory.count(value.storage) == 1  # `a.copy_(a)` reads it
        and is_all_of(value.storage, value.meta)
        for value in shared
    )


def runnable(nodes: Iterable[TrackedNode]) -> list[TrackedNode]:
    """Those of ``nodes``, in program order, that neither failed midway nor depend on one that did."""
    nodes = list(nodes)
    if not any(failure_of(error) is Failure.PARTIAL_WRITE for error in {node.error for node in nodes}):
        return nodes
    stuck: set[TrackedNode] = set()
    found = []
    for node in nodes:
        needed = [*(value.node for value in node.inputs), *node.after]
        if is_partial_write(node) or any(
            other in stuck and not (is_partial_write(other) and can_run_after(node, other))
            for other in needed
            if other is not None
        ):
            stuck.add(node)
        else:
            found.append(node)
    return found


def left(nodes: Iterable[TrackedNode]) -> str | None:
    """Why outside memory cannot be read, if some of ``nodes`` has left it partially written."""
    for node in nodes:
        if is_partial_write(node) and any(each.external and _is_partly_written(each) for each in node.writes):
            return node.error
    return None


def _is_partly_written(storage: TrackedStorage) -> bool:
    return storage.writer is not None and is_partial_write(storage.writer)


def mark_overwritten(storage: TrackedStorage) -> None:
    """All of ``storage`` has been overwritten by an op that was not recorded."""
    if _is_partly_written(storage):
        storage.writer = None
    storage.readers = [node for node in storage.readers if not is_partial_write(node)]
