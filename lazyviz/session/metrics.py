"""Metrics: counters and timings of this process, by name."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_KEPT = 1000  # timings kept per name for the percentiles


class _Timing:
    """All timings of one name: their number and sum, and the recent ones."""

    __slots__ = ("count", "recent", "total")

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=_KEPT)
        self.count = 0
        self.total = 0.0


class Metrics:
    """Named counters, and named timings in seconds."""

    def __init__(self) -> None:
        self.counters: defaultdict[str, int] = defaultdict(int)
        self._timings: dict[str, _Timing] = {}

    def count(self, name: str, by: int = 1) -> None:
        self.counters[name] += by

    def add(self, name: str, seconds: float) -> None:
        timing = self._timings.get(name)
        if timing is None:
            timing = self._timings[name] = _Timing()
        timing.recent.append(seconds)
        timing.count += 1
        timing.total += seconds

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def summary(self) -> dict[str, Any]:
        """Counters as numbers; timings as ``{"count", "total", "p50", "p90", "p99"}``."""
        result: dict[str, Any] = dict(self.counters)
        for name, timing in self._timings.items():
            ordered = sorted(timing.recent)
            result[name] = {"count": timing.count, "total": timing.total} | {
                f"p{percent}": ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
                for percent in (50, 90, 99)
            }
        return result
