"""Cost per operator in large blocks: recording, planning, evaluating, memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator

import psutil
import torch

import lazyviz

from .figures import Figure, Settings, say
from .timing import now

COUNTS = (1_000, 10_000, 100_000, 1_000_000)
ALLOWED = 1.5  # maximum ratio of costs per operator between block lengths: linear, except for caches
REPEATS = {1_000: 7, 10_000: 5, 100_000: 3}
AGAIN_UP_TO = 100_000


def block(count: int, device: str, size: int) -> dict[str, float]:
    """Seconds for each stage of a block of ``count`` small operators, and the memory of its record in bytes.

    Another tensor ``size`` makes the block a new program.
    """
    x = torch.ones(size, device=device)
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    begin = time.perf_counter()
    with lazyviz.lazy() as graph:
        for _ in range(count // 3):
            x = torch.relu(x * 0.5 + 1.0)
        for _ in range(count % 3):
            x = x + 1.0
    recorded = time.perf_counter()
    assert len(graph.nodes) == count
    resident = process.memory_info().rss - before
    planning = time.perf_counter()
    graph.plan()
    planned = time.perf_counter()
    graph.evaluate()
    done = now()
    return {
        "record": recorded - begin,
        "plan": planned - planning,
        "evaluate, at first": done - planned,
        "bytes": resident,
    }


def measure(settings: Settings) -> Iterator[Figure]:
    counts = settings.pick(COUNTS, COUNTS[:3])
    block(counts[0], settings.device, 3)
    costs: dict[str, dict[int, float]] = {"record": {}, "plan": {}, "evaluate, at first": {}}
    again: dict[int, float] = {}
    taken: dict[int, float] = {}
    for count in counts:
        say(f"     {count:,} operators")
        repeats = settings.pick(REPEATS.get(count, 1), 1)
        runs = [block(count, settings.device, 4 + number) for number in range(repeats)]
        for stage, per_count in costs.items():
            per_count[count] = 1e6 * statistics.median(run[stage] for run in runs) / count
        if count <= AGAIN_UP_TO:
            # A program that ran twice is cached the third time.
            runs = [block(count, settings.device, 4) for _ in range(2 + repeats)][2:]
            again[count] = 1e6 * statistics.median(run["evaluate, at first"] for run in runs) / count
        taken[count] = runs[0]["bytes"] / count
        lazyviz.session.lazy_graph.reset()
    for stage, per_count in {**costs, "evaluate, again": again}.items():
        last = max(per_count)
        yield Figure(
            f"an operator among {last:,} / among {counts[0]:,}",
            stage,
            per_count[last] / per_count[counts[0]],
            f"<= {ALLOWED}",
            detail={"per op": per_count, "unit": "us"},
        )
    yield Figure("memory of a recorded operator", f"among {counts[-1]:,}", taken[counts[-1]], unit="bytes")
