"""Recent programs: the cached programs that a new one is compared with to find the miss reason.

A block that reads values runs a program per read, and each may be new.  The cost of a miss must not depend on
the number of cached programs.
"""

from __future__ import annotations

from itertools import islice
from typing import Generic, Protocol, TypeVar

from ...graph.ir import SourceLine
from .miss_reason import Sketch
from .program_key import Key

MOST_COMPARED = 16  # recorded at the same line, and of the others
_MOST_VISITED = 4 * MOST_COMPARED  # programs compared to find the others


class HasSketch(Protocol):
    """A cached program."""

    @property
    def key(self) -> Key: ...
    @property
    def sketch(self) -> Sketch: ...


P = TypeVar("P", bound=HasSketch)


class RecentPrograms(Generic[P]):
    """Programs in the order of their last use, and those of each line in the order of their first."""

    def __init__(self) -> None:
        # By id, the latest last: hashing a program's key takes time that is proportional to its length.
        self._used: dict[int, P] = {}
        self._by_line: dict[SourceLine | None, dict[int, P]] = {}

    def add(self, program: P) -> None:
        """Add a new program as the most recently used."""
        self._used[id(program)] = program
        self._by_line.setdefault(program.sketch.line, {})[id(program)] = program

    def use(self, program: P) -> None:
        """Mark ``program`` as the most recently used."""
        self._used.pop(id(program), None)
        self._used[id(program)] = program

    def drop(self, program: P) -> None:
        """Forget ``program``."""
        self._used.pop(id(program), None)
        here = self._by_line.get(program.sketch.line, {})
        here.pop(id(program), None)
        if not here:
            self._by_line.pop(program.sketch.line, None)

    def comparable(self, drawn: Sketch) -> list[tuple[Key, Sketch]]:
        """The most recent programs, latest last: first others, then those of the line of ``drawn``."""
        here = () if drawn.line is None else reversed(self._by_line.get(drawn.line, {}).values())
        latest = islice(reversed(self._used.values()), _MOST_VISITED)
        others = (program for program in latest if not drawn.at_the_line_of(program.sketch))
        chosen = [*islice(here, MOST_COMPARED), *islice(others, MOST_COMPARED)]
        return [(program.key, program.sketch) for program in reversed(chosen)]

    def clear(self) -> None:
        """Forget them all."""
        self._used.clear()
        self._by_line.clear()
