"""A fake GPU: its name, memory, and compute capability."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """The properties of the planned GPU that a cell may query.

    ``capability`` is its CUDA compute capability, ``count`` the number of such GPUs; ``total_bytes`` is the
    memory of one, ``None`` if unknown; ``planned`` is its name in plans; ``current`` is the number of the
    current device at first. A cell may also use other GPUs by number. ``release`` is the planned PyTorch
    release, if it is not the installed one.
    """

    name: str
    total_bytes: int | None
    capability: tuple[int, int]
    planned: str
    count: int = 1
    current: int = 0
    release: tuple[int, int] | None = None
