"""Reserved memory: what a graph needs on a GPU beyond tensors (allocator, libraries, context).

The allocator is simulated event by event (:mod:`lazyviz.plan.allocator.event_replay`), with the workspaces of
:mod:`lazyviz.plan.workspace.cublas`.  The CUDA context is an estimate.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from ...graph.ir import Node, Storage
from ..devices import cuda_context
from ..devices.device_lookup import Device, DeviceProfile
from ..liveness.lifetimes import Lifetime, events
from ..workspace.cublas import cublas_workspaces
from .event_replay import AllocationFailure, AllocatorConfig, simulate
from .initial_state import Segment, Start, start

Call = tuple[int, Hashable, int]
"""(Position, name, bytes) of an allocation, or of a free if the bytes are not above 0."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Bytes of a GPU that one run needs.

    ``reserved_bytes`` is the peak of what the caching allocator holds with memory to spare, reached
    before the node ``node`` (``None``: outside of any); ``workspace_bytes`` of it are cuBLAS's.  Where there
    is none to spare and the run fits all the same, since what is cached is given back to the driver
    ``retries`` times, it is what the allocator holds then.  ``allocated_bytes`` is the peak of blocks in use:
    tensors rounded up as the allocator does, and libraries' workspaces.
    ``context_bytes`` comes on top, an estimate; 0 where this process has a CUDA context already.
    ``failure`` is the allocation that would not be served; ``None`` if all fit, or room is unknown.
    ``calls`` are the run's own allocations, of what was there already, too.  ``foreign_bytes`` are in
    blocks that are there and that the run does not count: other tensors of this process.
    """

    reserved_bytes: int
    node: Node | None
    workspace_bytes: int
    context_bytes: int
    failure: AllocationFailure | None
    calls: Sequence[Call] = field(repr=False, default=())
    foreign_bytes: int = 0
    retries: int = 0
    allocated_bytes: int = 0


def reserve(
    nodes: Sequence[Node],
    spans: Sequence[Lifetime],
    target: Device | DeviceProfile,
    room: int | None,
    *,
    eager: bool = False,
    segments: Sequence[Segment] = (),
) -> Reservation | None:
    """What running ``nodes`` would reserve on ``target``, of which ``room`` bytes are available.

    ``segments`` are what the allocator holds there already, fragments included; ``room`` counts them, too.
    ``None`` if PyTorch is set to use CUDA's asynchronous allocator, which is not simulated.

    Raises ``ValueError`` for a ``PYTORCH_CUDA_ALLOC_CONF`` that PyTorch would refuse, too.
    """
    calls = [(event.position, event.storage, event.nbytes) for event in events(spans, eager=eager)]
    return reserve_calls(nodes, calls, spans, target, room, eager=eager, segments=segments)


def reserve_calls(
    nodes: Sequence[Node],
    calls: Sequence[Call],
    spans: Sequence[Lifetime],
    target: Device | DeviceProfile,
    room: int | None,
    *,
    eager: bool = False,
    segments: Sequence[Segment] = (),
) -> Reservation | None:
    """The same for the ``calls`` that running ``nodes`` would make; ``spans`` are the recorded storages."""
    config = AllocatorConfig.from_environment(os.environ)
    if config.backend != "native":
        return None
    workspaces = cublas_workspaces(nodes, target, eager=eager)
    named = [(f"workspace {number}", position, size) for number, (position, size) in enumerate(workspaces)]
    timed: list[Call] = [*calls, *((position, name, size) for name, position, size in named)]
    timed.sort(key=lambda call: (call[0], call[2] > 0))
    there = start(segments, spans, [(name, size) for name, _, size in named])
    played = _replayed(timed, there) if segments else timed
    asked = [(key, nbytes) for _, key, nbytes in played]
    if isinstance(target, DeviceProfile):
        context = target.context_bytes
    else:
        context = 0 if cuda_context.exists() else cuda_context.CONTEXT_BYTES
    total = target.total_bytes
    free = simulate(asked, config, total=total, segments=there.segments)
    failure = None
    if room is not None and free.reserved_peak + context > room:
        limit = max(room - context, 0)
        tight = simulate(asked, config, total=total, capacity=limit, segments=there.segments)
        failure = tight.failure
        if failure is None:
            free = tight
    at = played[free.reserved_at][0] if free.reserved_at >= 0 else -1
    return Reservation(
        reserved_bytes=free.reserved_peak,
        node=nodes[at] if 0 <= at < len(nodes) else None,
        workspace_bytes=sum(size for _, size in workspaces),
        context_bytes=context,
        failure=failure,
        calls=timed,
        foreign_bytes=there.foreign_bytes,
        retries=free.retries,
        allocated_bytes=free.allocated_peak,
    )


def _replayed(calls: Sequence[Call], there: Start) -> list[Call]:
    """``calls`` without allocations that exist already; these are freed by their address.

    Storages that a changed program has in another size are freed first, and allocated in the new size.
    """
    blocks = dict(there.blocks)
    again = list(there.again)
    for _, key, nbytes in calls:
        if nbytes > 0 and isinstance(key, Storage) and key in blocks and nbytes != key.nbytes:
            again.append(blocks.pop(key))
    return [
        *((-1, address, 0) for address in again),
        *(
            (position, blocks.get(key, key), nbytes)
            for position, key, nbytes in calls
            if nbytes <= 0 or key not in blocks
        ),
    ]
