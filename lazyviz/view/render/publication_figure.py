"""Publication figures: static pictures for papers and slides, without details of a run or machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PARTS = ("forward", "backward", "optimizer", "other", "memory")
DIRECTIONS = ("TB", "LR")
THEMES = ("light", "dark")
CHOICES = {
    "peak": "bytes held at the peak",
    "memory": "bytes allocated",
    "time": "time",
    "flops": "FLOPs",
    "dtype": "dtype",
    "module": "module",
}
"""The numbers that boxes can show, with their descriptions."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Options of a figure: a ``title`` ("": none), the parts that are shown, and whether there is a legend.

    ``direction`` is the direction of the forward pass, down or to the right.  The theme ``None`` is that of
    the page, for an SVG image in it.
    """

    title: str
    show: tuple[str, ...]
    legend: bool
    direction: str = "TB"
    theme: str | None = "light"

    def __post_init__(self) -> None:
        unknown = [part for part in self.show if part not in PARTS]
        if unknown or not self.show:
            what = f"unknown part {unknown[0]!r} in show" if unknown else "show is empty"
            raise ValueError(f"{what}; these parts can be shown: {', '.join(PARTS)}")
        for name, given, known in (
            ("direction", self.direction, DIRECTIONS),
            ("theme", self.theme, (*THEMES, None)),
        ):
            if given not in known:
                raise ValueError(f"unknown {name} {given!r}; it is one of {', '.join(filter(None, known))}")

    @property
    def lanes(self) -> frozenset[str]:
        """The phases with visible lanes."""
        return frozenset(self.show) - {"memory"}


def figure_of(
    title: str | None,
    show: str | Sequence[str] | None,
    legend: bool | None,
    direction: str | None,
    theme: str | None,
) -> Figure | None:
    """The requested figure; ``None`` without options, for the whole picture.

    Raises:
        ValueError: an unknown part in ``show``, or an unknown direction or theme.
    """
    if all(each is None for each in (title, show, legend, direction, theme)):
        return None
    parts = PARTS if show is None else (show,) if isinstance(show, str) else tuple(show)
    return Figure(title or "", parts, legend is not False, direction or "TB", theme or "light")


@dataclass(frozen=True, slots=True)
class Drawing:
    """The state of a page's picture: ids of open groups, the chosen number, and whether views are drawn."""

    opened: frozenset[str]
    by: str
    views: bool
