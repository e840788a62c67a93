"""Memory history: what the caching allocator would do during a run, event by event.

It records the simulator in :mod:`lazyviz.plan.allocator.caching_allocator`, for exports in the format of
``torch.cuda.memory._record_memory_history``.  A plan for the CPU, which has no such allocator, is simulated
in the same way: sizes and times are those of the plan, addresses are fictitious.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ...graph.ir import Storage
from ..liveness.lifetimes import events
from .alloc_conf_and_rounding import AllocatorConfig
from .caching_allocator import Block, CachingAllocator, _Pool, _Range
from .reserved_memory import reserve_calls

if TYPE_CHECKING:
    from ..plan import Plan


class Entry(NamedTuple):
    """One event.  ``action`` is PyTorch's name for it (``alloc``, ``segment_alloc``, ...); ``nbytes`` of an
    allocation are the requested bytes, as in PyTorch's traces; ``key`` is a storage or a name."""

    action: str
    address: int
    nbytes: int
    position: int
    key: Hashable


@dataclass(frozen=True, slots=True)
class Trace:
    """``entries`` in time order, and the final state: ``segments`` of blocks, with their ``owners`` by
    address.
    """

    entries: list[Entry]
    segments: list[list[Block]] = field(repr=False)
    owners: Mapping[int, tuple[Hashable, int]] = field(repr=False)
    reserved_peak: int


class _Recorded(CachingAllocator):
    """Records the memory that it allocates from CUDA and returns."""

    def __init__(self, config: AllocatorConfig | None, total: int | None) -> None:
        self.entries: list[Entry] = []
        self.position = -1
        super().__init__(config, total=total)

    def _grow(self, pool: _Pool, size: int, segment: int) -> Block | None:
        block = super()._grow(pool, size, segment)
        if block is not None and block.range is None:
            self.note("segment_alloc", block.address, block.size)
        return block

    def _release(self, block: Block) -> None:
        self.note("segment_free", block.address, block.size)
        super()._release(block)

    def _map(self, block: Block, nbytes: int) -> bool:
        address, before = block.address, self.reserved
        done = super()._map(block, nbytes)
        if done:
            self.note("segment_map", address, self.reserved - before)
        return done

    def _unmap(self, block: Block, range_: _Range) -> None:
        # The whole pages inside of the block, as in the allocator.
        start = range_.start - (range_.start - block.address) // range_.page * range_.page
        before = self.reserved
        super()._unmap(block, range_)
        if self.reserved < before:
            self.note("segment_unmap", start, before - self.reserved)

    def note(self, action: str, address: int, nbytes: int, key: Hashable = "") -> None:
        self.entries.append(Entry(action, address, nbytes, self.position, key))

    def address(self, key: Hashable) -> int | None:
        block = self._live[key]
        return block.address if block is not None else None


def trace(plan: Plan, *, eager: bool = False) -> Trace:
    """The allocator's events of a lazyviz run, or of eager PyTorch, including cuBLAS's workspaces.

    Memory that the user's code still holds at the end, and memory that PyTorch keeps, is not freed.
    """
    spans = plan._lifetimes.values()
    kept: set[Hashable] = {span.storage for span in spans if span.kept}
    reservation = plan._reservation
    if reservation is not None and not eager:
        calls = reservation.calls
    else:
        calls = [(event.position, event.storage, event.nbytes) for event in events(spans, eager=eager)]
    if eager and reservation is not None:
        whole = reserve_calls(plan.ir.nodes, calls, list(spans), plan._answers.target, None, eager=True)
        calls = whole.calls if whole is not None else calls
    config = AllocatorConfig.from_environment(os.environ) if reservation is not None else None
    allocator = _Recorded(config, plan.capacity_bytes if reservation is not None else None)
    owners: dict[int, tuple[Hashable, int]] = {}
    sizes: dict[Hashable, int] = {}
    for position, key, nbytes in calls:
        allocator.position = position
        if nbytes > 0:
            allocator.allocate(key, nbytes)
            address = allocator.address(key)
            if address is not None:
                sizes[key] = nbytes
                owners[address] = key, position
                allocator.note("alloc", address, nbytes, key)
        elif key not in kept:
            address = allocator.address(key)
            if address is not None:
                allocator.note("free_requested", address, sizes[key], key)
                allocator.note("free_completed", address, sizes[key], key)
                del owners[address]
            allocator.free(key)
    return Trace(allocator.entries, allocator.blocks(), owners, allocator.reserved_peak)


def storage_of(key: Hashable) -> Storage | None:
    return key if isinstance(key, Storage) else None
