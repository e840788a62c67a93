"""Event replay in compiled code: what the lifetimes of millions of storages would reserve on a GPU.

It does the same as :func:`lazyviz.plan.allocator.simulate_events.simulate`, from lifetimes instead of a list
of events, for an allocator that is empty at the start and has PyTorch's default options.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..liveness import lifetimes
from ..liveness.lifetimes import Lifetime
from .alloc_conf_and_rounding import MIB
from .caching_allocator import CachingAllocator
from .simulate_events import AllocationFailure, AllocatorConfig


class Replayed(NamedTuple):
    """The effect of a run on the allocator: a :class:`~lazyviz.plan.allocator.simulate_events.Simulation`.

    ``reserved_at`` is the position in the program at which ``reserved_peak`` is reached, -1 if outside of it.
    """

    reserved_peak: int
    reserved_at: int
    allocated_peak: int
    retries: int
    failure: AllocationFailure | None


class CompiledReplay:
    """The replay of one run, which can be played with several capacities."""

    def __init__(
        self,
        calls: Any,
        spans: Sequence[Lifetime],
        workspaces: Sequence[tuple[int, int]],
        config: AllocatorConfig,
        total: int | None,
    ) -> None:
        self._calls, self._spans, self._workspaces = calls, spans, workspaces
        self._config, self._total = config, total

    def play(self, capacity: int | None) -> Replayed:
        state = CachingAllocator(self._config, capacity=capacity, total=self._total)
        reserved, at, allocated, retries, failed = self._calls.played(
            state._capacity, state._allowed, self._config.large_segment_size_mb * MIB
        )
        return Replayed(reserved, at, allocated, retries, None if failed is None else self._failure(*failed))

    def _failure(
        self, index: int, item: int, segment: int, reserved: int, allocated: int, largest_free: int
    ) -> AllocationFailure:
        number = item - len(self._spans)
        if number < 0:
            storage = self._spans[item].storage
            return AllocationFailure(
                index, storage, storage.nbytes, segment, reserved, allocated, largest_free
            )
        name, nbytes = f"workspace {number}", self._workspaces[number][1]
        return AllocationFailure(index, name, nbytes, segment, reserved, allocated, largest_free)


def compiled_replay(
    spans: Sequence[Lifetime],
    workspaces: Sequence[tuple[int, int]],
    count: int,
    config: AllocatorConfig,
    total: int | None,
    eager: bool,
) -> CompiledReplay | None:
    """The replay of ``spans``, of a program of ``count`` nodes, and of cuBLAS's ``workspaces``.

    ``None`` if there is no compiled code, or if it does not know an option or a lifetime.
    """
    native = lifetimes.native
    if (
        native is None
        or config.expandable_segments
        or config.max_split_size_mb is not None
        or config.garbage_collection_threshold
        or max(config.roundup_power2_divisions) > 1
    ):
        return None
    calls = native.Calls(list(spans), count, eager, list(workspaces))
    return CompiledReplay(calls, spans, workspaces, config, total) if calls.ordinary else None
