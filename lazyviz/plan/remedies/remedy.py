"""A remedy: a change that lowers the projected peak, and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...graph.ir import SourceLine
from ..result_tables import Table, Tabular
from ..units import format_bytes


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a remedy: ``ops`` additional operators (recomputed, or launched one by one),
    ``copied_bytes`` between device and host, and ``numerics`` if results are no longer bit-equal.
    """

    ops: int = 0
    copied_bytes: int = 0
    numerics: bool = False

    def __str__(self) -> str:
        parts = []
        if self.ops:
            parts.append(f"{self.ops:,} more operator{'' if self.ops == 1 else 's'}")
        if self.copied_bytes:
            parts.append(f"{format_bytes(self.copied_bytes)} copied to the host and back")
        if self.numerics:
            parts.append("other precision")
        return ", ".join(parts) or "nothing"


@dataclass(frozen=True, slots=True)
class Remedy(Tabular):
    """A change of the user's code that lowers the projected peak.

    ``kind`` is one of :data:`KINDS`; ``text`` describes the change; ``peak_bytes`` is the peak of lazyviz's
    run with the change, ``saves_bytes`` the reduction; ``source`` is the line to change, if there is one.
    ``estimate``: the replay makes assumptions (for example, about a kernel's allocations); ``at_best``: it
    may save less, never more. ``fits``: whether the changed run would fit the device, on a GPU including
    memory held by the allocator; ``None`` if the device's memory is unknown.
    """

    kind: str
    text: str
    saves_bytes: int
    peak_bytes: int
    cost: Cost
    source: SourceLine | None
    estimate: bool = False
    at_best: bool = False
    fits: bool | None = None

    def __repr__(self) -> str:
        return f"<Remedy: {self}>"

    _repr_pretty_ = Tabular._repr_pretty_  # IPython uses it in addition to `__repr__`

    def table(self) -> Table:
        return Remedies([self]).table()

    def __str__(self) -> str:
        saves, peak = format_bytes(self.saves_bytes), format_bytes(self.peak_bytes)
        if self.at_best:
            saves, peak = f"at most {saves}", f"at least {peak}"
        elif self.estimate:
            saves = f"about {saves}"
        return f"{self.text}: {saves} less, peak {peak}; costs {self.cost}"


class Remedies(tuple[Remedy, ...], Tabular):
    """Several remedies, cheapest first, as a table."""

    __slots__ = ()
    _repr_pretty_ = Tabular._repr_pretty_

    def table(self) -> Table:
        fits = {True: "fits", False: "does not fit", None: ""}
        rows = [
            (
                ("at most " if each.at_best else "about " if each.estimate else "")
                + format_bytes(each.saves_bytes),
                format_bytes(each.peak_bytes),
                each.text,
                str(each.cost),
                fits[each.fits],
            )
            for each in self
        ]
        title = f"{len(self)} remed{'y' if len(self) == 1 else 'ies'}"
        return Table(title, ("less", "peak then", "change", "costs", "then"), rows, 2)


KINDS = (
    "variable",
    "no_grad",
    "zero_grad",
    "inplace",
    "foreach",
    "split",
    "recompute",
    "offload",
    "autocast",
    "bf16",
    "batch",
)
"""Sorted by kind of cost."""


def cheapest(all_of_them: Sequence[Remedy], count: int) -> list[Remedy]:
    """The best remedy of each of the ``count`` cheapest kinds."""
    best: dict[str, Remedy] = {}
    for remedy in all_of_them:
        best.setdefault(remedy.kind, remedy)
    return list(best.values())[:count]
