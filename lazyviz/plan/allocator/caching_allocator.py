"""Simulated CUDA caching allocator: its state, block by block.

:mod:`lazyviz.plan.allocator.simulate_events` runs its events on it.  It follows the native backend in
``c10/cuda/CUDACachingAllocator.cpp``; the names in brackets below are those of its functions.  The source was
read as of PyTorch 2.6.  Differences of the compiled libraries of 2.11, 2.13, and 2.15, compared step by step
(``benchmarks/cuda_allocator_reference_traces.py``), are included: a memory fraction of 1 neither limits
memory nor enables garbage collection, and the size of shared segments is an option.

Not simulated: the ``cudaMallocAsync`` backend, private pools (CUDA graphs, ``MemPool``: their memory in a
snapshot counts as used), blocks that wait for another stream (``record_stream``), and the option
``throw_on_cudamalloc_oom``.  Addresses from CUDA are assumed to increase and never to be reused; they only
decide between free blocks of equal size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from .alloc_conf_and_rounding import BLOCK_GRAIN, MIB, SMALL_LIMIT, SMALL_SEGMENT, AllocatorConfig

_FIRST_ADDRESS = 2**40  # the beginning of CUDA's addresses is arbitrary
_UNLIMITED = 2**62


class _Range:
    """The addresses of an expandable segment: from ``start`` on, mapped in pages of ``page`` bytes."""

    __slots__ = ("page", "start")

    def __init__(self, start: int, page: int) -> None:
        self.start, self.page = start, page


class _Pool:
    """The free blocks of one stream, small or large: by (size, address); and unmapped ones by address."""

    __slots__ = ("free", "small", "unmapped")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []


class Block:
    """A piece of a segment: ``size`` bytes at ``address``, between its neighbors there.

    ``used`` for ``requested`` bytes, or free; ``mapped`` is false if it is a part of an expandable segment
    without physical memory.
    """

    __slots__ = ("address", "born", "mapped", "next", "pool", "prev", "range", "requested", "size", "used")

    def __init__(self, pool: _Pool, address: int, size: int, range_: _Range | None = None) -> None:
        self.pool, self.address, self.size, self.range = pool, address, size, range_
        self.requested = 0
        self.used = False
        self.mapped = True
        self.born = 0  # the number of searches of the large pool when it was freed, for garbage collection
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def whole(self) -> bool:
        """Whether it is the only block of its segment."""
        return self.prev is None and self.next is None

    def after(self, size: int) -> Block:
        """Splits the block after its first ``size`` bytes and returns the new second part."""
        rest = Block(self.pool, self.address + size, self.size - size, self.range)
        rest.mapped = self.mapped
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next = rest
        self.size = size
        return rest


def _size(block: Block) -> int:
    return block.size


def _room(block: Block) -> int:
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)


class CachingAllocator:
    """The allocator of one device.

    Args:
        capacity: bytes that this allocator can reserve, including those that it already holds;
            ``None``: unlimited.
        total: the device's memory in bytes, to which expandable segments and the fraction refer;
            default: ``capacity``.
        memory_fraction: the part of ``total`` that may be reserved, as in
            ``torch.cuda.set_per_process_memory_fraction``; default: the configuration's.  Only
            values below 1 limit memory and enable garbage collection.
        segments: the initial state, as listed by ``torch.cuda.memory_snapshot()`` for this device; its
            allocated blocks are named by their addresses.

    ``allocated`` (bytes in blocks), ``requested`` (bytes requested for them), and ``reserved`` (bytes in
    segments) are current sums; names with ``_peak`` are their peaks. ``retries`` counts the allocations from
    CUDA after all cached memory had been released [num_alloc_retries].
    """

    def __init__(
        self,
        config: AllocatorConfig | None = None,
        *,
        capacity: int | None = None,
        total: int | None = None,
        memory_fraction: float | None = None,
        segments: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        self.config = config = config if config is not None else AllocatorConfig()
        total = total if total is not None else capacity
        fraction = memory_fraction if memory_fraction is not None else config.per_process_memory_fraction
        self._capacity = capacity if capacity is not None else _UNLIMITED
        self._allowed = int(fraction * total) if fraction < 1 and total is not None else _UNLIMITED
        self._address_space = total + total // 8 if total is not None else 2**50
        self._max_split = (config.max_split_size_mb or _UNLIMITED // MIB) * MIB
        self._slack = (config.max_non_split_rounding_mb or config.large_segment_size_mb) * MIB
        self._collects = self._allowed < _UNLIMITED and config.garbage_collection_threshold > 0
        self._simple = max(config.roundup_power2_divisions) <= 1
        self._pools: dict[tuple[bool, int], _Pool] = {}
        self._small = self._pools[True, 0] = _Pool(True)
        self._large = self._pools[False, 0] = _Pool(False)
        self._live: dict[Hashable, Block | None] = {}
        self._searches = 0
        self._next_address = _FIRST_ADDRESS
        self.allocated = self.requested = self.reserved = self.retries = 0
        self._load(segments)
        self.allocated_peak, self.requested_peak, self.reserved_peak = (
            self.allocated,
            self.requested,
            self.reserved,
        )

    def allocate(self, key: Hashable, nbytes: int, stream: int = 0) -> bool:
        """Allocates ``nbytes`` under the name ``key``; false if that is an out-of-memory error [malloc].

        For 0 bytes, nothing is allocated.
        """
        if nbytes <= 0:
            self._live[key] = None
            return True
        size = (nbytes + 511) & -512 if self._simple else self.config.rounded(nbytes)
        if stream:
            pool = self._pools.setdefault((size <= SMALL_LIMIT, stream), _Pool(size <= SMALL_LIMIT))
        else:
            pool = self._small if size <= SMALL_LIMIT else self._large
        block = self._find(pool, size) or self._obtain(pool, size)
        if block is None:
            return False
        left = block.size - size
        # [should_split]
        if left and (
            left >= BLOCK_GRAIN
            if pool.small or self.config.expandable_segments
            else left > SMALL_LIMIT and size < self._max_split
        ):
            self._put(block.after(size))
        block.used = True
        block.requested = nbytes
        self._live[key] = block
        self.requested += nbytes
        self.allocated += block.size
        if self.allocated > self.allocated_peak:
            self.allocated_peak = self.allocated
        if self.requested > self.requested_peak:
            self.requested_peak = self.requested
        return True

    def free(self, key: Hashable) -> None:
        """Returns the block of ``key`` to the cache and merges it with free neighbors [free_block]."""
        block = self._live.pop(key)
        if block is None:
            return
        self.allocated -= block.size
        self.requested -= block.requested
        block.used = False
        block.requested = 0
        self._put(self._merge(block))

    def empty_cache(self) -> None:
        """Returns segments or pages that are completely free to CUDA [release_cached_blocks]."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if block.range is not None:
                    self._unmap(block, block.range)
                elif block.whole:
                    self._release(block)

    def largest_free(self) -> int:
        """The largest free block of all pools."""
        return max((pool.free[-1][0] for pool in self._pools.values() if pool.free), default=0)

    def blocks(self) -> list[list[Block]]:
        """The blocks of every segment, in the order of their addresses."""
        known = [block for block in self._live.values() if block is not None]
        for pool in self._pools.values():
            known += [block for _, _, block in pool.free]
            known += [block for _, block in pool.unmapped]
        result: list[list[Block]] = []
        for block in sorted(known, key=lambda block: block.address):
            if block.prev is None:
                result.append([])
            result[-1].append(block)
        return result

    def _put(self, block: Block) -> None:
        block.born = self._searches
        insort(block.pool.free, (block.size, block.address, block))

    def _take(self, block: Block) -> None:
        free = block.pool.free
        del free[bisect_left(free, (block.size, block.address))]

    def _merge(self, block: Block) -> Block:
        """Merges a block, which is on no list, with neighbors that are free, and mapped (or not) like it."""
        mapped = block.mapped
        other = block.prev
        if other is not None and not other.used and other.mapped is mapped:
            self._delist(other)
            block.address = other.address
            block.size += other.size
            block.prev = other.prev
            if other.prev is not None:
                other.prev.next = block
        other = block.next
        if other is not None and not other.used and other.mapped is mapped:
            self._delist(other)
            block.size += other.size
            block.next = other.next
            if other.next is not None:
                other.next.prev = block
        return block

    def _delist(self, block: Block) -> None:
        if block.mapped:
            self._take(block)
        else:
            unmapped = block.pool.unmapped
            del unmapped[bisect_left(unmapped, (block.address,))]

    def _find(self, pool: _Pool, size: int) -> Block | None:
        """The best cached block, removed from its list [get_free_block]."""
        if self._collects and not pool.small:
            self._searches += 1
        free = pool.free
        at = bisect_left(free, (size,))
        if at == len(free):
            return None
        block = free[at][2]
        if block.range is not None:
            if self.config.expandable_segments:
                # A block at the mapped end counts with the space into which it can grow.
                while block.range is not None and at + 1 < len(free):
                    following = free[at + 1][2]
                    if _room(following) >= _room(block):
                        break
                    at, block = at + 1, following
            else:
                while block.range is not None:
                    at += 1
                    if at == len(free):
                        return None
                    block = free[at][2]
        if size < self._max_split:
            if block.size >= self._max_split:
                return None
        elif block.size >= size + self._slack:
            return None
        del free[at]
        return block

    def _obtain(self, pool: _Pool, size: int) -> Block | None:
        """New memory from CUDA; releases cached memory if there is not enough."""
        if self._collects:
            self._collect_garbage()
        segment = self.config.segment(size)
        block = self._grow(pool, size, segment)
        if block is None and self._release_oversize(pool, size):
            block = self._grow(pool, size, segment)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._grow(pool, size, segment)
        return block

    def _grow(self, pool: _Pool, size: int, segment: int) -> Block | None:
        """[alloc_block]"""
        if self.reserved + segment > self._allowed:
            return None
        if self.config.expandable_segments:
            return self._grow_range(pool, size)
        if not self._reserve(segment):
            return None
        block = Block(pool, self._next_address, segment)
        self._next_address += segment
        return block

    def _reserve(self, nbytes: int) -> bool:
        if self.reserved + nbytes > self._capacity:
            return False
        self.reserved += nbytes
        if self.reserved > self.reserved_peak:
            self.reserved_peak = self.reserved
        return True

    def _release(self, block: Block) -> None:
        self._take(block)
        self.reserved -= block.size

    def _release_oversize(self, pool: _Pool, size: int) -> bool:
        """Releases blocks that are too large to be split, just enough for ``size``
        [release_available_cached_blocks].
        """
        limit = self._max_split
        if self.config.max_split_size_mb is None:
            return False
        wanted = max(size, limit)
        blocks = [block for size, _, block in pool.free if size >= limit and block.range is None]
        at = bisect_left(blocks, wanted, key=_size)
        if at < len(blocks):
            self._release(blocks[at])
            return True
        released = 0
        while released < wanted and blocks:
            released += blocks[-1].size
            self._release(blocks.pop())
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Above the threshold, releases large segments that were unused for long
        [garbage_collect_cached_blocks].
        """
        threshold = int(self.config.garbage_collection_threshold * self._allowed)
        target = self.reserved - threshold
        candidates = [
            block
            for (small, _), pool in self._pools.items()
            if not small
            for _, _, block in pool.free
            if block.whole
        ]
        while target > 0 and candidates:
            mean_age = sum(self._searches - block.born for block in candidates) / len(candidates)
            old = [block for block in candidates if self._searches - block.born >= mean_age]
            candidates = [block for block in candidates if self._searches - block.born < mean_age]
            for block in old:
                target -= block.size
                self._release(block)

    # Expandable segments: one address range per pool and stream, with memory mapped where needed.

    def _grow_range(self, pool: _Pool, size: int) -> Block | None:
        """[try_allocate_expandable_block]"""
        block = self._expandable(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following
        self._take(block)
        return block

    def _expandable(self, pool: _Pool, size: int) -> Block:
        """The first free or unmapped range with enough addresses for ``size`` [find_expandable_block]."""
        for _, start in pool.unmapped:
            if start.prev is not None and not start.prev.used:
                start = start.prev
            room = 0
            block: Block | None = start
            while room < size and block is not None and not block.used:
                room += block.size
                block = block.next
            if room >= size:
                return start
        return self._range(pool, self._next_address)

    def _range(self, pool: _Pool, start: int) -> Block:
        """Addresses for 9/8 of the device's memory, with nothing mapped [ExpandableSegment]."""
        page = SMALL_SEGMENT if pool.small else self.config.large_segment_size_mb * MIB
        size = (self._address_space + page - 1) // page * page
        self._next_address = max(self._next_address, start + size)
        block = Block(pool, start, size, _Range(start, page))
        block.mapped = False
        insort(pool.unmapped, (block.address, block))
        return block

    def _map(self, block: Block, nbytes: int) -> bool:
        """Maps whole pages at the beginning of an unmapped block [map_block]."""
        assert block.range is not None
        page = block.range.page
        nbytes = (nbytes + page - 1) // page * page
        if not self._reserve(nbytes):
            return False
        self._delist(block)
        if nbytes < block.size:
            self._cut_unmapped(block, nbytes)
        block.mapped = True
        self._put(self._merge(block))
        return True

    def _unmap(self, block: Block, range_: _Range) -> None:
        """Returns the whole pages inside a free block to CUDA [unmap_block]."""
        page, base = range_.page, range_.start
        start = base + (block.address - base + page - 1) // page * page
        stop = base + (block.address + block.size - base) // page * page
        if start >= stop:
            return
        self._take(block)
        if start > block.address:
            block, before = block.after(start - block.address), block
            self._put(before)
        if stop < block.address + block.size:
            self._put(block.after(stop - block.address))
        block.mapped = False
        self.reserved -= stop - start
        self._merge(block)
        if not block.whole:
            insort(block.pool.unmapped, (block.address, block))

    def _load(self, segments: Iterable[Mapping[str, Any]]) -> None:
        """Creates the blocks of a snapshot; blocks that wait for another stream there count as free."""
        pending = []
        for segment in sorted(segments, key=lambda segment: segment["address"]):
            small = segment["segment_type"] == "small"
            pool = self._pools.setdefault((small, segment["stream"]), _Pool(small))
            block = self._place(pool, segment["address"], segment["total_size"], segment.get("is_expandable"))
            private = tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
            for entry in segment["blocks"]:
                rest = block.after(entry["size"]) if block.size > entry["size"] else block
                if entry["state"] != "inactive":
                    block.requested = entry["requested_size"]
                    self.requested += block.requested
                    self.allocated += block.size
                    if entry["state"] == "active_pending_free":
                        pending.append(block.address)
                if entry["state"] != "inactive" or private:
                    block.used = True
                    self._live[block.address] = block
                else:
                    self._put(block)
                block = rest
        for address in pending:
            self.free(address)

    def _place(self, pool: _Pool, address: int, size: int, expandable: bool | None) -> Block:
        """The block of an existing segment.

        A snapshot does not have the start address of an expandable segment, so the first mapped address is
        used.
        """
        self.reserved += size
        self._next_address = max(self._next_address, address + size)
        if not expandable:
            return Block(pool, address, size)
        block = pool.unmapped[-1][1] if pool.unmapped else None
        if block is None or address >= block.address + block.size:
            block = self._range(pool, address)
        elif address > block.address:
            block = self._cut_unmapped(block, address - block.address)
        self._delist(block)
        if size < block.size:
            self._cut_unmapped(block, size)
        block.mapped = True
        return block

    def _cut_unmapped(self, block: Block, size: int) -> Block:
        rest = block.after(size)
        insort(block.pool.unmapped, (rest.address, rest))
        return rest
