"""Running pending nodes with a registered backend, segment by segment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ..record.recorder import Tape
from ..record.storage import TrackedNode, TrackedValue
from .backend import Backend, Segment
from .eager import Progress, check_interrupts, consumed, deliver, kernel_level, run_node
from .memory import ResidentMemory


def run_with_backend(
    tape: Tape,
    nodes: Sequence[TrackedNode],
    backend: Backend,
    memory: ResidentMemory,
    *,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> int:
    """Run pending ``nodes``, given in program order, with ``backend``.

    Draws of random numbers run eagerly between its segments, so that their values and
    the generators' states stay eager's.

    Returns:
        The number of ops that the backend itself ran; ``memory`` counts what is held between segments.

    Raises:
        Interrupted, KeyboardInterrupt: between two segments; nothing is half done.
        ValueError: the backend gave back another number of tensors than the segment has outputs.
        Exception: whatever the backend raises; the segment stays pending.
    """
    total, done, share = len(nodes), 0, 0
    with kernel_level(tape, nodes) as interrupted:
        for stretch in _stretches(nodes):
            check_interrupts(interrupted, cancelled, f"after {done} of {total} ops")
            torch.set_grad_enabled(stretch[0].grad_mode)
            memory.step(stretch[-1])
            if stretch[0].draws is not None or stretch[0].again:
                run_node(stretch[0], memory)
            else:
                _run_segment(stretch, backend, memory)
                share += len(stretch)
            for node in stretch:
                tape.finished(node)
            done += len(stretch)
            if progress is not None:
                progress(done, total, stretch[-1])
    return share


def _stretches(nodes: Sequence[TrackedNode]) -> Iterator[list[TrackedNode]]:
    """``nodes`` cut into draws, each alone, and the longest runs between them."""
    current: list[TrackedNode] = []
    for node in nodes:
        if node.draws is not None or node.again:
            if current:
                yield current
                current = []
            yield [node]
        else:
            current.append(node)
    if current:
        yield current


def _run_segment(nodes: list[TrackedNode], backend: Backend, memory: ResidentMemory) -> None:
    inside = set(nodes)
    uses: dict[TrackedValue, int] = {}
    for node in nodes:
        for value in node.inputs:
            uses[value] = uses.get(value, 0) + 1
    inputs = [value for value in uses if value.node not in inside]
    own = [value for node in nodes for value in node.outputs if value.node is node]
    outputs = [value for value in own if value.tensor is not None or value.uses > uses.get(value, 0)]
    reals = [value.real for value in inputs if value.real is not None]
    run = backend.compile(Segment(nodes, inputs, outputs), reals)
    results = list(run(*reals))
    if len(results) != len(outputs):
        raise ValueError(
            f"the backend returned {len(results)} tensors for a segment with {len(outputs)} outputs"
        )
    for node in nodes:
        node.state, node.error = "done", None
    deliver(dict(zip(outputs, results)), memory)
    for node in nodes:
        consumed(node, memory)
