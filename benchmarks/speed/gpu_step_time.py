"""GPU time of a step, measured with CUDA events, without gaps in which the GPU waits for the CPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

WARM_UPS = 3  # as in PyTorch's documentation
REPEATS = 5


def captured(step: Callable[[], Any]) -> Callable[[], None]:
    """The whole step as one CUDA Graph, captured as in PyTorch's documentation.

    Raises:
        RuntimeError: CUDA cannot capture it.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()

    def replay(kept: Any = kept) -> None:  # the result is in the graph's memory, and lives as long
        graph.replay()

    return replay


def seconds_between_events(launch: Callable[[], Any]) -> float:
    """The median GPU time of the work that ``launch`` launches, between two CUDA events."""
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)


def device_seconds(step: Callable[[], Any]) -> tuple[float, str]:
    """The time that a GPU takes for the kernels of a step, and how that was measured.

    Small kernels that are launched one by one leave the GPU idle in between; a graph of the whole step does
    not.  If the step cannot be captured, the result is the sum of its kernels' times in the profiler.  Call
    this last, because a failed capture may leave the process unable to draw random numbers.
    """
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    kernels = sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6
    try:
        return seconds_between_events(captured(step)), "CUDA events around a CUDA Graph of the step"
    except RuntimeError:
        return kernels, "the profiler's sum of kernels"
