"""A planned GPU: its name, memory, and compute capability."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Card:
    """What a cell may ask of the card it is planned for.

    ``capability`` is its CUDA compute capability, ``count`` the number of such cards;
    ``total_bytes`` of one, ``None`` if unknown; ``planned`` is what a plan calls it; ``current`` is the
    number of the one in use at first.  A cell may still use further ones by their number.  ``release``: the
    PyTorch release that is planned, where it is not the installed one.
    """

    name: str
    total_bytes: int | None
    capability: tuple[int, int]
    planned: str
    count: int = 1
    current: int = 0
    release: tuple[int, int] | None = None
