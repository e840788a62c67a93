"""Numbers and bars in the boxes of static pictures, as in ``js/src/graph/colors.ts``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...plan.runtime.gpu_timeline import duration
from ...plan.units import format_bytes, format_flops
from ..scene.box_numbers import COUNTED, NOTE, number_text, span_text
from ..scene.boxes import Box
from ..scene.scene import Scene
from .publication_figure import CHOICES

ABOVE, BELOW, AMOUNT = "#1769c2", "#c2571a", "#1976d2"

GREW, SHRANK, ALONE = "#b42318", "#0b6b45", "#1d2733"

Part = tuple[str, float]  # a category or color, and its fraction of the bar's length


@dataclass(frozen=True, slots=True)
class Compared:
    """Differences from another graph.

    ``boxes`` has, by box id, the bytes at the peaks of the first and the second graph, and whether the box is
    only in this graph. A full bar is ``most`` bytes.
    """

    boxes: Mapping[str, tuple[int, int, bool]]
    most: int


class ShownNumbers:
    """The number that the boxes of a picture show.

    ``by`` is a key of :data:`CHOICES`, or ``"note:NAME"``; default: the newest annotation, if there is one,
    otherwise the scene's choice.
    """

    def __init__(self, scene: Scene, by: str = "", compared: Compared | None = None) -> None:
        self._scene = scene
        self._compared = compared
        newest = scene.numbers.newest
        known = by in CHOICES or by.removeprefix(NOTE) in scene.numbers.annotations
        if compared is not None:
            by, known = "peak", True
        self.by = by if by and known else NOTE + newest if newest is not None else scene.by or "peak"
        self.note = scene.numbers.annotations.get(self.by.removeprefix(NOTE)) if self.is_note else None
        self._most: float | None = None

    @property
    def is_note(self) -> bool:
        return self.by.startswith(NOTE)

    def text(self, box: Box) -> str:
        """The number of ``box`` as text, with its meaning."""
        if self.note is not None:
            span = self._scene.numbers.spans(self.note.name).get(box)
            return f"{span_text(span)} {self.note.name}" if span is not None else ""
        if self.by == "peak":
            before, after, _ = self._pair(box)
            if before != after:
                return f"{format_bytes(before)} → {format_bytes(after)} at peak"
            return f"{format_bytes(round(self._amount(box)))} at peak"
        if self.by == "memory":
            return f"{format_bytes(round(self._amount(box)))} allocated"
        if self.by == "flops":
            return format_flops(round(self._amount(box)))
        if self.by == "time":
            return self._time(box)
        coloring = self._scene.coloring(box)
        return str(coloring.get(self.by, ""))

    def tells(self, box: Box) -> bool:
        """Whether the number of ``box`` was chosen explicitly, and has priority if there is little room."""
        before, after, _ = self._pair(box)
        return self.by != "peak" or before != after

    def short(self, box: Box) -> str:
        """The number without its meaning, for the row of an op."""
        text = self.text(box)
        for end in (" at peak", " allocated", f" {self.note.name}" if self.note is not None else "\0"):
            text = text.removesuffix(end)
        return text

    def bar(self, box: Box) -> list[Part]:
        """The parts of the box's bar, on a linear scale."""
        if self.by in ("dtype", "module"):
            return []
        if self.by == "peak":
            most = max(self._compared.most if self._compared else self._scene.plan.peak_bytes, 1)
            return [(name, size / most) for name, size in self._scene.held().get(box, {}).items()]
        if self.note is not None:
            note = self._noted(box)
            return [note] if note is not None else []
        return [(AMOUNT, self._amount(box) / self._longest())]

    def outline(self, box: Box, usual: str) -> tuple[str, str]:
        """The outline color of a box by its difference from the other graph, and further attributes."""
        before, after, alone = self._pair(box)
        if alone:
            return ALONE, ' stroke-dasharray="4 3"'
        if before == after:
            return usual, ""
        return GREW if after > before else SHRANK, ' stroke-width="1.6"'

    def _pair(self, box: Box) -> tuple[int, int, bool]:
        same = (0, 0, False)
        return self._compared.boxes.get(box.id, same) if self._compared is not None else same

    def tint(self, box: Box) -> Part | None:
        """Color and opacity of a box's edge by its number; ``None``: the color of its kind of layer."""
        note = self._noted(box) if self.note is not None else None
        return (note[0], note[1] * 0.8) if note is not None else None

    def scale(self) -> str:
        """A sentence that explains the bars; "" if there are none."""
        if self.by in ("dtype", "module"):
            return ""
        if self.note is not None:
            end = number_text(max(abs(self.note.least), abs(self.note.most)))
            below = "; orange is below zero" if self.note.least < 0 else ""
            return f"Bars: {self.note.name}; the full length is {end}, linear{below}"
        if self.by == "peak":
            most = format_bytes(self._scene.plan.peak_bytes)
            return f"Bars: bytes held at the peak, by category; the full length is {most}, linear"
        longest = self._longest()
        words = (
            duration(longest)
            if self.by == "time"
            else format_flops(round(longest))
            if self.by == "flops"
            else format_bytes(round(longest))
        )
        return f"Bars: {CHOICES[self.by]}; the full length is {words}, linear"

    def _noted(self, box: Box) -> Part | None:
        assert self.note is not None
        span = self._scene.numbers.spans(self.note.name).get(box)
        if span is None:
            return None
        most = max(abs(self.note.least), abs(self.note.most))
        below = -span[0] > span[1]
        return BELOW if below else ABOVE, abs(span[0] if below else span[1]) / most if most else 0.0

    def _time(self, box: Box) -> str:
        measured = self._measured(box)
        if measured is not None:
            return duration(measured)
        projected = self._scene.numbers.sums("time", self._scene.plan).get(box)
        return f"{duration(projected)} projected" if projected is not None else "not run"

    def _measured(self, box: Box) -> float | None:
        """The seconds of a box whose ops have all run."""
        summary = self._scene.states.of(box)
        return summary[1] if summary is not None and summary[0] == "done" else None

    def _amount(self, box: Box) -> int | float:
        scene = self._scene
        if self.by == "peak":
            return sum(scene.held().get(box, {}).values())
        if self.by == "memory":
            return box.nbytes or sum(value.nbytes for value in box.values)
        if self.by == "time" and (measured := self._measured(box)) is not None:
            return measured
        return scene.numbers.sums(self.by, scene.plan).get(box, 0) if self.by in COUNTED else 0

    def _longest(self) -> float:
        if self._most is None:
            boxes = self._scene.hierarchy.boxes.values()
            self._most = max((self._amount(box) for box in boxes if box.kind in ("module", "op")), default=0)
        return self._most or 1
