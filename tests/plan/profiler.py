"""CPU allocations during a call, from PyTorch's profiler."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def allocated_by(call: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that ``call`` allocates at most, and those that are there while its result is kept."""
    gc.collect()  # memory of earlier tests that is freed during the call would be subtracted
    # One cycle; in torch 2.11 the process's first profiler warns that more would need `acc_events`.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        kept = call()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    del kept
    return peak, now
