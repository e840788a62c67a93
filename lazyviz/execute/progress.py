"""How far a run has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of ``total`` ops after ``seconds``; ``label`` names where the run is.

    ``allocated_bytes`` are in the tensors that the run holds at this moment.
    """

    done: int
    total: int
    seconds: float
    label: str
    allocated_bytes: int = 0

    @property
    def seconds_left(self) -> float | None:
        """Estimated from the ops done so far; None before the first."""
        return self.seconds * (self.total - self.done) / self.done if self.done else None
