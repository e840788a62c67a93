"""Reserved memory: what a graph needs on a GPU beyond tensors (allocator, libraries, context).

The allocator is simulated event by event (:mod:`lazyviz.plan.allocator.simulate_events`), with the workspaces
of :mod:`lazyviz.plan.workspace.cublas`.  The CUDA context is an estimate.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ...graph.ir import Node, Storage
from ..devices import cuda_context
from ..devices.device_lookup import Device, DeviceProfile
from ..liveness.lifetimes import Lifetime, events
from ..workspace.cublas import cublas_workspaces
from .initial_state import Segment, Start, start
from .simulate_events import AllocationFailure, AllocatorConfig, simulate
from .simulate_events_compiled import CompiledReplay, Replayed, compiled_replay

Call = tuple[int, Hashable, int]
"""(Position, name, bytes) of an allocation, or of a free if the bytes are not above 0."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Bytes of a GPU that one run needs.

    ``reserved_bytes`` is the peak of the caching allocator's reserved memory, reached before the node
    ``node`` (``None``: outside of any); ``workspace_bytes`` of it are cuBLAS's.  It assumes free memory to
    spare; if the run fits only because cached memory is returned to the driver ``retries`` times, it is the
    peak with that.  ``allocated_bytes`` is the peak of blocks in use: tensors rounded up as the allocator
    does, and libraries' workspaces. ``context_bytes`` is an estimate of the additional CUDA context; 0 if
    this process already has one. ``failure`` is the allocation that would fail; ``None`` if all fit, or the
    capacity is unknown. ``foreign_bytes`` are in existing blocks that do not belong to the run: other tensors
    of this process.
    """

    reserved_bytes: int
    node: Node | None
    workspace_bytes: int
    context_bytes: int
    failure: AllocationFailure | None
    foreign_bytes: int = 0
    retries: int = 0
    allocated_bytes: int = 0
    _calls: Callable[[], Sequence[Call]] = field(repr=False, compare=False, default=tuple)

    @property
    def calls(self) -> Sequence[Call]:
        """The run's own allocations and frees in time order, including those of existing storages."""
        return self._calls()


def reserve(
    nodes: Sequence[Node],
    spans: Sequence[Lifetime],
    target: Device | DeviceProfile,
    room: int | None,
    *,
    eager: bool = False,
    segments: Sequence[Segment] = (),
) -> Reservation | None:
    """The memory that running ``nodes`` would reserve on ``target``, of which ``room`` bytes are available.

    ``segments`` are the allocator's existing segments, fragments included; ``room`` includes them.
    ``None`` if PyTorch is set to use CUDA's asynchronous allocator, which is not simulated.

    Raises ``ValueError`` for a ``PYTORCH_CUDA_ALLOC_CONF`` that PyTorch would also reject.
    """

    def calls() -> list[Call]:
        return [(event.position, event.storage, event.nbytes) for event in events(spans, eager=eager)]

    run = _Run(nodes, spans, target, eager, segments)
    if run.config.backend != "native":
        return None
    return run.reservation(lambda: run.timed(calls()), room, run.compiled())


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
    run = _Run(nodes, spans, target, eager, segments)
    if run.config.backend != "native":
        return None
    timed = run.timed(calls)
    return run.reservation(lambda: timed, room)


class _Run:
    """A run on ``target`` by its arguments: see :func:`reserve`."""

    def __init__(
        self,
        nodes: Sequence[Node],
        spans: Sequence[Lifetime],
        target: Device | DeviceProfile,
        eager: bool,
        segments: Sequence[Segment],
    ) -> None:
        self.nodes, self.spans, self.target, self.eager, self.segments = nodes, spans, target, eager, segments
        self.config = AllocatorConfig.from_environment(os.environ)

    @cached_property
    def workspaces(self) -> list[tuple[str, int, int]]:
        """Names, positions, and bytes of cuBLAS's workspaces."""
        found = cublas_workspaces(self.nodes, self.target, eager=self.eager)
        return [(f"workspace {number}", position, size) for number, (position, size) in enumerate(found)]

    def timed(self, calls: Sequence[Call]) -> list[Call]:
        """``calls`` and workspaces in time order; at one position, frees come before allocations."""
        timed: list[Call] = [*calls, *((position, name, size) for name, position, size in self.workspaces)]
        timed.sort(key=lambda call: (call[0], call[2] > 0))
        return timed

    @property
    def context_bytes(self) -> int:
        if isinstance(self.target, DeviceProfile):
            return self.target.context_bytes
        return 0 if cuda_context.exists() else cuda_context.CONTEXT_BYTES

    def compiled(self) -> CompiledReplay | None:
        """The replay of the run's own calls in compiled code; ``None`` if Python has to do it."""
        if self.segments:
            return None
        placed = [(position, nbytes) for _, position, nbytes in self.workspaces]
        count, total = len(self.nodes), self.target.total_bytes
        return compiled_replay(self.spans, placed, count, self.config, total, self.eager)

    def reservation(
        self, calls: Callable[[], Sequence[Call]], room: int | None, compiled: CompiledReplay | None = None
    ) -> Reservation:
        there = start(self.segments, self.spans, [(name, size) for name, _, size in self.workspaces])
        play = compiled.play if compiled is not None else self._player(calls(), there)
        context = self.context_bytes
        free, failure = play(None), None
        if room is not None and free.reserved_peak + context > room:
            tight = play(max(room - context, 0))
            failure = tight.failure
            if failure is None:
                free = tight
        at = free.reserved_at
        return Reservation(
            reserved_bytes=free.reserved_peak,
            node=self.nodes[at] if 0 <= at < len(self.nodes) else None,
            workspace_bytes=sum(size for _, _, size in self.workspaces),
            context_bytes=context,
            failure=failure,
            foreign_bytes=there.foreign_bytes,
            retries=free.retries,
            allocated_bytes=free.allocated_peak,
            _calls=calls,
        )

    def _player(self, timed: Sequence[Call], there: Start) -> Callable[[int | None], Replayed]:
        played = _replayed(timed, there) if self.segments else timed
        asked = [(key, nbytes) for _, key, nbytes in played]
        total = self.target.total_bytes

        def play(capacity: int | None) -> Replayed:
            run = simulate(asked, self.config, total=total, capacity=capacity, segments=there.segments)
            at = played[run.reserved_at][0] if run.reserved_at >= 0 else -1
            return Replayed(run.reserved_peak, at, run.allocated_peak, run.retries, run.failure)

        return play


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
