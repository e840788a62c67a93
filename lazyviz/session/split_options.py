"""Split options: a number of pieces or ``"auto"``, and the resulting split run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

from ..execute.microbatch.ray_and_ipyparallel import Cluster
from ..graph.ir import Value
from ..plan.batch.batch_placement import Shard
from ..plan.batch.split_plan import BATCH_NEEDED, Batch, describe, sizes_of
from ..record.tape import Tape
from ..record.tracked_storages import TrackedNode, TrackedValue
from .recorded_graph_interface import RecordedGraph

if TYPE_CHECKING:
    from ..execute.microbatch.run_pieces_and_add_gradients import SplitRun


class SplitError(RuntimeError):
    """The batch cannot be split; the message names the nodes that prevent it, and possible changes."""


def split_run(
    tape: Tape,
    graph: RecordedGraph,
    nodes: Sequence[TrackedNode],
    split: int | str,
    cluster: Cluster | None = None,
) -> SplitRun | None:
    """The run of ``nodes`` in that many pieces; ``None``: unsplit, for ``"auto"`` if that fits.

    With a ``cluster``, ``"auto"`` uses at least one piece per worker.

    Raises:
        SplitError: the batch cannot be split, or is not used.
        ValueError: no batch was named.
    """
    if not nodes or (split in (None, "off", 1) and cluster is None):
        return None
    roots = _roots(tape, graph, nodes)
    if not roots:
        return None
    pieces = split
    if split == "auto":
        plan = graph.plan(split="auto")
        alone = plan.split.pieces == 1 and (plan.fits is not False or not plan.split.blocked_by)
        if alone and cluster is None:
            return None
        pieces = plan.split.pieces if not plan.split.blocked_by else 2
        if cluster is not None:
            cuda = any(value.device.type == "cuda" for node in nodes for value in node.outputs)
            pieces = max(pieces, len(cluster.workers(cuda)))
    assert isinstance(pieces, int)
    own = set(nodes)
    later = {value for node in list(tape.pending) if node not in own for value in node.inputs}
    batch = Batch(
        nodes,
        roots,
        lambda value: value in later or cast(TrackedValue, value).tensor is not None,
        whole=graph.ir.whole,
        independent_rng=graph.ir.independent_rng,
    )
    if batch.blocked:
        raise SplitError(refusal(batch))
    found = batch.schedule
    if found is None or not found.passes:
        return None  # one sample, or no node depends on the batch
    from ..execute.microbatch.run_pieces_and_add_gradients import SplitRun  # imported by the first split run

    return SplitRun(tape, nodes, batch.analysis, found, sizes_of(batch.size, pieces, batch.analysis.group))


def refusal(batch: Batch, most: int = 5) -> str:
    """Why the batch cannot be split, node by node."""
    lines = [describe(blocker) for blocker in batch.blocked[:most]]
    rest = len(batch.blocked) - most
    if rest > 0:
        lines.append(f"and {rest:,} more")
    return "\n".join(["the batch cannot be split:", *lines])


def _roots(tape: Tape, graph: RecordedGraph, nodes: Iterable[TrackedNode]) -> dict[Value, Shard]:
    """The values of the batch that ``nodes`` use.

    Raises the errors of :func:`split_run`.
    """
    if graph.choices.batch is None:
        raise ValueError(f"a split {BATCH_NEEDED}")
    if not graph.ir.batch and tape.recording.graph is not graph.ir:
        raise SplitError("no op of this block uses the tensors named as batch")
    used = {value for node in nodes for value in node.inputs}
    roots: dict[Value, Shard] = {value: Shard(dim) for value, dim in graph.ir.batch.items() if value in used}
    sizes = sorted({value.shape[shard.dim] for value, shard in roots.items()})
    if len(sizes) > 1:
        raise SplitError(
            f"the tensors of the batch differ in their number of samples: {' and '.join(map(str, sizes))}"
        )
    return roots
