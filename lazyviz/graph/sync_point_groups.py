"""Sync points as text, grouped by cause and line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .ir import SourceLine, SyncPoint, places

MOST_LISTED = 20


@dataclass(frozen=True, slots=True)
class SyncSite:
    """The sync points with the same cause and line; ``ops``, ``seconds``, and ``bytes`` are totals."""

    cause: str
    source: SourceLine | None
    reader: SourceLine | None
    count: int
    ops: int
    seconds: float
    bytes: int

    @property
    def text(self) -> str:
        """The text of the user's line, without indentation; "" if unknown."""
        return self.source.text.strip() if self.source is not None else ""

    def __str__(self) -> str:
        """``"item, train.py:4, in transformers/trainer.py:1893, x 300"``."""
        times = [f"x {self.count:,}"] if self.count > 1 else []
        return ", ".join([self.cause, *places(self.source, self.reader), *times])

    @property
    def cost(self) -> str:
        """``"ran 1,800 ops in 0.06 s"``."""
        return f"ran {self.ops:,} op{'' if self.ops == 1 else 's'} in {self.seconds:.3g} s"


def sites(points: Iterable[SyncPoint]) -> list[SyncSite]:
    """The distinct places of ``points``, in order of first occurrence."""
    found: dict[tuple[str, SourceLine | None, SourceLine | None], list[SyncPoint]] = {}
    for point in points:
        found.setdefault((point.cause, point.source, point.reader), []).append(point)
    return [
        SyncSite(
            *key,
            len(same),
            sum([point.ops for point in same]),
            sum([point.seconds for point in same]),
            sum([point.bytes for point in same]),
        )
        for key, same in found.items()
    ]


def listed(points: Iterable[SyncPoint], most: int = MOST_LISTED, width: int = 0) -> list[str]:
    """A line of text with the cost of each place, for at most ``most`` places, and the number of other
    places.

    In lines wider than ``width`` (0: unlimited), the user's code is truncated.
    """
    found = sites(points)
    lines = []
    for site in found[:most]:
        line, text = f"sync point: {site} ({site.cost})", site.text
        if width and len(line) + 2 + len(text) > width:
            room = width - len(line) - 3
            text = f"{text[:room]}…" if room > 0 else ""
        lines.append(f"{line}: {text}" if text else line)
    if len(found) > most:
        rest = sum(site.count for site in found[most:])
        lines.append(f"and {rest:,} more sync points, at {len(found) - most:,} other lines")
    return lines
