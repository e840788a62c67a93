"""Assumed values (``--assume``): what a read at a line returns if only an absent GPU could compute it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from ...graph.ir import SourceLine
from ..sync_points import AbsentDeviceError

if TYPE_CHECKING:
    from ..tape import Tape

ANYWHERE = "*"
"""The key for assumed values of all lines without a value of their own."""
_NOTHING = object()


@dataclass(frozen=True, slots=True)
class Answer:
    """An assumed value."""

    value: Any

    def for_dtype(self, dtype: torch.dtype) -> Any:
        """``value`` as a read of an element of ``dtype`` returns it: 1.0 becomes 1 for integer dtypes."""
        exact = dtype.is_floating_point or dtype.is_complex
        if exact or dtype == torch.bool or not isinstance(self.value, float) or self.value % 1:
            return self.value
        return int(self.value)


class AssumedValues:
    """The values that the user gave for reads, by line: a number, a line as text, or :data:`ANYWHERE`."""

    def __init__(self, tape: Tape, by_line: Mapping[int | str, Any]) -> None:
        self._tape = tape
        self._by_line = by_line
        self._rest: dict[int, Iterator[Any]] = {}  # by the id of a list: its values that are not yet read

    def take(self, frame: FrameType, *, one: bool = False) -> Answer | None:
        """The value for a read at the user's line above ``frame``; the next one if there is one per read.

        A list is what a read of several numbers returns. ``one``: a single number is read, so that a list
        has one for each read.

        Raises:
            AbsentDeviceError: the line is read more often than there are values for it.
        """
        line, value = self._find(frame)
        if one and isinstance(value, list):
            value = self._rest.setdefault(id(value), iter(value))
        if isinstance(value, Iterator):
            value = next(value, _NOTHING)
            if value is _NOTHING:
                raise AbsentDeviceError(f"{line} is read more often than the number of values assumed for it")
        return None if value is _NOTHING else Answer(value)

    def is_one_per_read(self, frame: FrameType) -> bool:
        """Whether the user gave several values for the line above ``frame``, one for each read."""
        return isinstance(self._find(frame)[1], (Iterator, list))

    def _find(self, frame: FrameType) -> tuple[SourceLine | None, Any]:
        if not self._by_line:
            return None, _NOTHING
        line = self._tape.scopes.sources.find(frame)[0]
        names: list[int | str] = [line.line, str(line), line.short] if line is not None else []
        for name in (*names, ANYWHERE):
            if name in self._by_line:
                return line, self._by_line[name]
        return line, _NOTHING
