"""How far a run has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of ``total`` ops after ``seconds``; ``label`` names where the run is.

    ``allocated_bytes`` are in the tensors that the run holds at this moment.  A run in pieces is at
    ``piece`` (from 1) of ``pieces``, or at 0 while it runs nodes that are not cut.
    """

    done: int
    total: int
    seconds: float
    label: str
    allocated_bytes: int = 0
    piece: int = 0
    pieces: int = 1

    @property
    def seconds_left(self) -> float | None:
        """Estimated from the ops done so far; None before the first."""
        return self.seconds * (self.total - self.done) / self.done if self.done else None
