"""Metrics: counters and timings of this process, by name."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_KEPT = 1000  # timings kept per name for the percentiles


class Metrics:
    """Named counters, and named timings in seconds."""

    def __init__(self) -> None:
        self.counters: defaultdict[str, int] = defaultdict(int)
        self._timings: dict[str, deque[float]] = {}
        self._totals: dict[str, tuple[int, float]] = {}

    def count(self, name: str, by: int = 1) -> None:
        self.counters[name] += by

    def add(self, name: str, seconds: float) -> None:
        if name not in self._timings:
            self._timings[name] = deque(maxlen=_KEPT)
        self._timings[name].append(seconds)
        number, total = self._totals.get(name, (0, 0.0))
        self._totals[name] = number + 1, total + seconds

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
        for name, recent in self._timings.items():
            ordered = sorted(recent)
            number, total = self._totals[name]
            result[name] = {"count": number, "total": total} | {
                f"p{percent}": ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
                for percent in (50, 90, 99)
            }
        return result
