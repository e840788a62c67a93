"""A figure: what was measured, in which case, its criterion, and whether it is met.

It needs only the standard library, because the process that collects figures measures nothing itself.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Settings:
    """The extent of a run.  ``threads`` is the number of PyTorch's threads; 0: PyTorch's default."""

    device: str = "cpu"
    quick: bool = False
    rounds: int = 9
    threads: int = 0

    def pick(self, full: Any, quick: Any) -> Any:
        """The value for a full run, or for a quick run."""
        return quick if self.quick else full


@dataclass(frozen=True)
class Figure:
    """One measured number.  ``criterion`` is text such as ``"<= 1.5"``; "" if there is none.

    ``value`` is a ratio unless ``unit`` says otherwise; ``None`` if it could not be measured, and ``note``
    says why.  ``detail`` has the numbers that it is computed from: medians in seconds, counts, bytes.
    """

    name: str
    case: str
    value: float | None
    criterion: str = ""
    unit: str = ""
    note: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the criterion is met; ``None`` without a criterion or a value."""
        if not self.criterion or self.value is None:
            return None
        sign, _, limit = self.criterion.partition(" ")
        return COMPARE[sign](self.value, float(limit))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Figure:
        return cls(**{name: value for name, value in data.items() if name != "met"})

    def __str__(self) -> str:
        value = (
            "not measured" if self.value is None else f"{number(self.value)}{self.unit and ' '}{self.unit}"
        )
        wanted = f"   {self.criterion}" if self.criterion else ""
        verdict = {True: " met", False: " NOT MET", None: ""}[self.met]
        note = f"   ({self.note})" if self.note else ""
        return f"  {self.name:44s} {self.case:28s} {value:>14s}{wanted}{verdict}{note}"


WORST = "the worst of"  # prefix of a case that represents all others of its figure


def without_the_rest(figures: Sequence[Figure]) -> list[Figure]:
    """The figures without those that are represented by the worst one."""
    summed = {each.name for each in figures if each.case.startswith(WORST)}
    return [each for each in figures if each.name not in summed or each.case.startswith(WORST)]


def number(value: float) -> str:
    """About three significant digits: 0.051, 1.37, 24.1, 1,234; more close to 1, a frequent criterion."""
    size = abs(value)
    if 0 < abs(value - 1) < 0.005:
        return f"{value:.4f}"
    if size >= 100:
        return f"{value:,.0f}"
    digits = 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:.{digits}f}"


def say(text: str) -> None:
    """Print progress to stderr; figures are not printed here."""
    print(text, file=sys.stderr, flush=True)
