"""PyTorch's Lazy Tensor Core with the TorchScript backend, for comparison."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from .timing import Turn, settle

WARM_UP = 4  # steps until nothing more is compiled


class Unavailable(RuntimeError):
    """A peer cannot be measured; the message says why."""


def start(device: str) -> None:
    """Load the backend; only once per process.

    Raises:
        Unavailable: this PyTorch has none.
    """
    if device.startswith("cuda"):
        os.environ["LTC_TS_CUDA"] = "1"
    try:
        import torch._lazy.ts_backend

        torch._lazy.ts_backend.init()
    except (ImportError, AttributeError, RuntimeError) as error:
        raise Unavailable(f"Lazy Tensor Core does not start: {error}") from error


def counters() -> dict[str, int]:
    """Operators that ran outside the lazy graph, and compilations, so far."""
    from torch._lazy import metrics

    names = [
        name for name in metrics.counter_names() if name.startswith("aten::") or name == "UncachedCompile"
    ]
    return {name: metrics.counter_value(name) for name in names}


def lazily(step: Callable[[], Any], name: str = "LTC") -> Turn:
    """A turn that records ``step`` on lazy tensors and runs it: times ``record``, ``run``, ``total``.

    Raises:
        Unavailable: it cannot run the step, or not as one graph that is compiled once.
    """
    from torch._lazy import mark_step

    def once() -> None:
        step()
        mark_step(wait=True)

    try:
        for _ in range(WARM_UP):
            once()
        before = counters()
        once()
    except RuntimeError as error:
        raise Unavailable(f"LTC: {str(error).splitlines()[0]}") from error
    new = sorted(key for key, value in counters().items() if value != before.get(key, 0))
    if new:
        raise Unavailable(f"LTC: not one compiled graph in its steady state: {', '.join(new)}")

    def turn() -> dict[str, float]:
        settle()
        begin = time.perf_counter()
        result = step()
        recorded = time.perf_counter()
        mark_step(wait=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        done = time.perf_counter()
        del result
        return {
            f"{name} record": recorded - begin,
            f"{name} run": done - recorded,
            f"{name} total": done - begin,
        }

    return turn
