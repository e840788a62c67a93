"""Event replay in the simulated allocator: what allocations and frees would reserve on a GPU.

Whether a GPU run fits depends on the bytes that PyTorch's caching allocator takes from CUDA, not on the bytes
of the tensors: sizes are rounded and packed into segments, and freed memory stays cached in pieces.
:func:`simulate` does the same arithmetic on plain numbers, so neither a GPU nor a CUDA build of PyTorch is
needed::

    outcome = simulate([("a", 3_000_000), ("b", 500), ("a", 0)], capacity=24 * 2**30)
    outcome.reserved_peak, outcome.failure

It does not include memory outside the allocator: the CUDA context, and memory that libraries take from CUDA
directly.  All sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .alloc_conf_and_rounding import AllocatorConfig
from .caching_allocator import CachingAllocator

__all__ = ["AllocationFailure", "AllocatorConfig", "CachingAllocator", "Simulation", "simulate"]


@dataclass(frozen=True, slots=True)
class AllocationFailure:
    """The allocation that ran out of memory, and why: sizes after everything possible was released.

    ``nbytes`` were requested by the event at ``index``; ``segment`` is the size that PyTorch's message names.
    Of ``reserved`` bytes ``allocated`` were in use and ``fragmented`` were free,
    in pieces of at most ``largest_free`` that neither satisfied the request nor could be released.
    """

    index: int
    key: Hashable
    nbytes: int
    segment: int
    reserved: int
    allocated: int
    largest_free: int

    @property
    def fragmented(self) -> int:
        return self.reserved - self.allocated


@dataclass(frozen=True, slots=True)
class Simulation:
    """The effect of a list of events on the allocator; sizes in bytes, positions count events from 0.

    ``allocated_peak`` corresponds to ``torch.cuda.max_memory_allocated()``, ``reserved_peak`` to
    ``max_memory_reserved()``, and ``requested_peak`` is the allocated peak without rounding.  Names with
    ``_at`` are the events that reached the peaks, -1 for the initial state.  The timelines, if requested,
    have the sums after each event.  ``failure``: the event at which the run stopped, if any; ``retries``: how
    often all cached memory had to be released, which waits for the GPU.
    """

    allocated_peak: int
    allocated_at: int
    requested_peak: int
    reserved_peak: int
    reserved_at: int
    retries: int
    failure: AllocationFailure | None
    allocated: Sequence[int] = field(repr=False)
    reserved: Sequence[int] = field(repr=False)


def simulate(
    events: Iterable[tuple[Hashable, int]],
    config: AllocatorConfig | None = None,
    *,
    capacity: int | None = None,
    total: int | None = None,
    memory_fraction: float | None = None,
    segments: Iterable[Mapping[str, Any]] = (),
    timeline: bool = False,
) -> Simulation:
    """Simulate ``events``, pairs of a name and a size, until the end or the first failure.

    A size above 0 allocates that many bytes under the name, any other size frees the memory of the name.
    Names can be of any hashable type; the other arguments are those of :class:`CachingAllocator`.
    """
    state = CachingAllocator(
        config, capacity=capacity, total=total, memory_fraction=memory_fraction, segments=segments
    )
    allocated: list[int] = []
    reserved: list[int] = []
    allocated_at = reserved_at = -1
    allocated_peak, reserved_peak = state.allocated_peak, state.reserved_peak
    failure = None
    allocate, free = state.allocate, state.free
    for index, (key, nbytes) in enumerate(events):
        if nbytes <= 0:
            free(key)
        elif not allocate(key, nbytes):
            segment = state.config.segment(state.config.rounded(nbytes))
            failure = AllocationFailure(
                index, key, nbytes, segment, state.reserved, state.allocated, state.largest_free()
            )
            break
        else:
            if state.allocated_peak > allocated_peak:
                allocated_peak, allocated_at = state.allocated_peak, index
            if state.reserved_peak > reserved_peak:
                reserved_peak, reserved_at = state.reserved_peak, index
        if timeline:
            allocated.append(state.allocated)
            reserved.append(state.reserved)
    return Simulation(
        allocated_peak=state.allocated_peak,
        allocated_at=allocated_at,
        requested_peak=state.requested_peak,
        reserved_peak=state.reserved_peak,
        reserved_at=reserved_at,
        retries=state.retries,
        failure=failure,
        allocated=allocated,
        reserved=reserved,
    )
