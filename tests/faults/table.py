"""The table of faults in docs/faults.md: what was tried, and what came of it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

KINDS = (
    "error of a kernel",
    "error after it wrote",
    "out of memory",
    "Ctrl-C",
    "another signal",
    "thread switch",
    "exception from a thread",
)
BAD = "lost", "wrong", "left behind", "refused"
HEADING = """# Faults

Made by `pytest tests/faults --all --fault-table=docs/faults.md`; the rows of what is tried are written anew.
A training step with dropout, batch norm, gradient clipping and AdamW is run with something happening in a
kernel, or between two ops, and resumed. Its parameters, buffers, gradients, the optimizer's state and step
counters, the generator and the numbers of the next draw are compared, bit by bit, with those of the step that
was not interrupted (of a split step with those of one that was split; where memory ran out in a piece, pieces
are others, and numbers are compared up to rounding). A point is a fault that came.

*error of a kernel*, *out of memory*: raised in place of a kernel. *error after it wrote*: raised when the
kernel has run; not after elementwise ones in place, which take all memory that they need before they write.
*Ctrl-C*, *another signal*: arrive while a kernel runs, and their handlers raise. *thread switch*: another
thread evaluates everything meanwhile. *exception from a thread*: as by `PyThreadState_SetAsyncExc`, at the
entry of a function of lazyviz or after one of C that it has called; a sample of these points. Columns have
the points tried, and what was *lost* (the step cannot be resumed), *wrong* (bits differ, as where an op has
run twice) or *left behind* (a state, a handler or a setting is not what it was), if any was. *refused*: code
that was compiled for several ops was stopped midway, and may have written a part of the parameters;
evaluating says so in one sentence until they are overwritten or all is forgotten, and nothing runs twice.

"""
ENTRY = """
A block is entered and left, and an exception is raised at one line, or one instruction, that is run
meanwhile, of lazyviz or of PyTorch. PyTorch is plain after each, with every attribute, mode, hook and
threshold as it was:

"""

Row = tuple[str, str]  # step and way


class Table:
    """What came of the points, by step, way and kind; rows of the same file that are not tried now stay."""

    def __init__(self, file: Path | None, rows: list[Row]) -> None:
        self.file, self.order = file, rows
        self.cells: dict[tuple[Row, str], Counter[str]] = {}
        self.kernels: dict[Row, int] = {}
        self.blocks: dict[tuple[str, str], int] = {}
        if file is not None and file.exists():
            self._read(file.read_text())

    def _read(self, text: str) -> None:
        for line in text.splitlines():
            entries = [entry.strip() for entry in line.strip("|").split("|")]
            if len(entries) == len(KINDS) + 3 and (row := (entries[0], entries[1])) in self.order:
                self.kernels[row] = _number(entries[2])
                for kind, entry in zip(KINDS, entries[3:]):
                    if entry:
                        self.cells[row, kind] = _counts(entry)
            elif len(entries) == 3 and re.fullmatch(r"[\d,]+", entries[2]):
                self.blocks[entries[0], entries[1]] = _number(entries[2])

    def add_block(self, name: str, fault: str, points: int) -> None:
        """A block was entered and left with ``fault`` at each of ``points``, and nothing was amiss."""
        self.blocks[name.replace("_", " "), fault] = points
        self.write()

    def write(self) -> None:
        if self.file is not None:
            self.file.write_text(self.text())

    def text(self) -> str:
        lines = [
            f"| step | way to run | kernels | {' | '.join(KINDS)} |",
            "|---|---|---:" + "|---:" * len(KINDS) + "|",
        ]
        for row in self.order:
            if row in self.kernels:
                cells = [_words(self.cells.get((row, kind), Counter())) for kind in KINDS]
                lines.append(f"| {row[0]} | {row[1]} | {self.kernels[row]:,} | {' | '.join(cells)} |")
        entry = ["| block | fault | points tried |", "|---|---|---:|"]
        entry += [f"| {block} | {kind} | {points:,} |" for (block, kind), points in self.blocks.items()]
        total: Counter[str] = sum(self.cells.values(), Counter())
        points = total["points"] + sum(self.blocks.values())
        found = ", ".join(f"{total[name]:,} {name}" for name in BAD)
        summary = f"**{points:,} points: {found}.**\n\n"
        after = [ENTRY + "\n".join(entry) + "\n"] if self.blocks else []
        return "".join([HEADING, summary, "\n".join(lines) + "\n", *after])


def _number(text: str) -> int:
    return int(text.replace(",", "") or 0)


def _counts(text: str) -> Counter[str]:
    """What :func:`_words` says in words."""
    points, _, bad = text.partition(" (")
    found = Counter(points=_number(points))
    for entry in bad.rstrip(")").split("; ") if bad else ():
        number, _, name = entry.partition(" ")
        found[name] = _number(number)
    return found


def _words(counts: Counter[str]) -> str:
    if not counts["points"]:
        return ""
    bad = "; ".join(f"{counts[name]:,} {name}" for name in BAD if counts[name])
    return f"{counts['points']:,}" + (f" ({bad})" if bad else "")
