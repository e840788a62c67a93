"""The cost of an operator when there are many in one block: recording, planning, evaluating, memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import psutil
import torch

import lazyviz

from .figures import Figure, Settings, say
from .timing import now

COUNTS = (1_000, 10_000, 100_000, 1_000_000)
ALLOWED = 1.5  # the dearest operator by the cheapest, of blocks of different length: linear, but for caches
REPEATS = {1_000: 7, 10_000: 5, 100_000: 3}


def block(count: int, device: str) -> dict[str, float]:
    """Seconds for each stage of a block of ``count`` small operators, and the bytes that its record takes."""
    x = torch.ones(4, device=device)
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
        "evaluate": done - planned,
        "bytes": resident,
    }


def measure(settings: Settings) -> Iterator[Figure]:
    counts = settings.pick(COUNTS, COUNTS[:3])
    block(counts[0], settings.device)
    costs: dict[str, dict[int, float]] = {"record": {}, "plan": {}, "evaluate": {}}
    for count in counts:
        say(f"     {count:,} operators")
        runs = [block(count, settings.device) for _ in range(REPEATS.get(count, 1))]
        for stage, per_count in costs.items():
            middle = sorted(run[stage] for run in runs)[len(runs) // 2]
            per_count[count] = 1e6 * middle / count
        taken = runs[0]["bytes"] / count
        lazyviz.session.reset()
    for stage, per_count in costs.items():
        yield Figure(
            f"an operator of {counts[-1]:,} / of {counts[0]:,}",
            stage,
            per_count[counts[-1]] / per_count[counts[0]],
            f"<= {ALLOWED}",
            detail={"per op": per_count, "unit": "us"},
        )
    yield Figure("memory of a recorded operator", f"of {counts[-1]:,}", taken, unit="bytes")
