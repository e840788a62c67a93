"""What an evaluation did."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan.units import format_bytes


@dataclass(frozen=True)
class Report:
    """One evaluation.

    ``seconds`` is wall time; ``peak_bytes`` the measured peak of tensor memory (CUDA: the
    allocator's counter; CPU: the real sizes of the storages the run held).  ``share`` is
    the share of ops that the named backend itself ran.
    """

    ops_run: int
    seconds: float
    peak_bytes: int | None
    backend: str
    cause: str
    pieces: int = 1
    share: float = 1.0
    cache_hit: bool = False
    cache_miss_reason: str | None = None

    def __str__(self) -> str:
        peak = "" if self.peak_bytes is None else f", peak {format_bytes(self.peak_bytes)}"
        return f"{self.ops_run} ops in {self.seconds:.3f} s with {self.backend}{peak} ({self.cause})"
