"""Figures: the static picture for papers and slides, without what belongs to one run or one machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PARTS = ("forward", "backward", "optimizer", "other", "memory")


@dataclass(frozen=True, slots=True)
class Figure:
    """What a figure shows: a ``title`` ("": none), parts of the picture, and whether scales are explained."""

    title: str
    show: tuple[str, ...]
    legend: bool

    def __post_init__(self) -> None:
        unknown = [part for part in self.show if part not in PARTS]
        if unknown or not self.show:
            what = f"unknown part {unknown[0]!r} in show" if unknown else "show is empty"
            raise ValueError(f"{what}; these parts can be shown: {', '.join(PARTS)}")

    @property
    def lanes(self) -> frozenset[str]:
        """The phases whose lanes are drawn."""
        return frozenset(self.show) - {"memory"}


def figure_of(title: str | None, show: str | Sequence[str] | None, legend: bool | None) -> Figure | None:
    """The figure that is asked for; ``None`` where nothing is, and the picture shows all there is.

    Raises:
        ValueError: ``show`` has a part that there is not.
    """
    if title is None and show is None and legend is None:
        return None
    parts = PARTS if show is None else (show,) if isinstance(show, str) else tuple(show)
    return Figure(title or "", parts, legend is not False)
