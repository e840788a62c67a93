"""The table of what came of the programs, for a terminal and for the documentation."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

from .catalog import LIBRARIES
from .harness import Outcome

_PREFACE = """# Programs of other libraries

Made by `make test-all` from what it ran: small programs that use other people's libraries as their
documentation does, unmodified, each from one seed in eager mode and then whole inside `with lazyviz.lazy():`
([tests/libraries](../tests/libraries)). Weights are random and data is made by the program, so that nothing
is downloaded. *Bits* says whether everything that the program leaves is equal to the last bit: results,
parameters, buffers, gradients, optimizer state, logs and the state of PyTorch's, NumPy's and Python's random
generators. *Operators* is how many were recorded. Times are those of the program in the block and of its
evaluation, over eager's: *first* where nothing like it has been recorded in the process, *again* when it
comes again (medians). The programs are tiny, so that almost all of their time is the cost of each operator.
"""

_SYNCS = """## Sync points

Where a program reads a value, or does what cannot be deferred: what for, and the line, the library's or the
program's own, that does it most often.
"""


class Table:
    """Outcomes in the order of their runs."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        """Note one; call it before asserting, so that failures count too."""
        self.outcomes.append(outcome)

    def rows(self) -> list[tuple[str, ...]]:
        """The table, headings first."""
        head = ("library", "program", "bits", "operators", "sync points", "first", "again")
        return [head, *(row(outcome) for outcome in self.outcomes)]

    def text(self) -> str:
        """For a terminal."""
        rows = self.rows()
        widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if at < 3 else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(row, widths))
            )
            for row in rows
        )

    def page(self) -> str:
        """For the documentation."""
        head, *body = ["| " + " | ".join(row) + " |" for row in self.rows()]
        equal = sum(bits(outcome) == "equal" for outcome in self.outcomes)
        count = f"{equal} of {len(self.outcomes)} are equal to the last bit."
        reasons = [
            f"| {outcome.program.library}: {outcome.program.title} | {cause} | {times:,} "
            f"| {outcome.program.syncs.get(cause, '')} | {code(outcome.places[cause].most_common(1)[0][0])} |"
            for outcome in self.outcomes
            for cause, times in outcome.syncs.most_common()
        ]
        parts = [
            _PREFACE,
            "\n".join([head, "|---|---|---|---:|---:|---:|---:|", *body]),
            f"\n{count} {versions()}.\n",
            _SYNCS,
            "\n".join(["| program | sync point | times | why | line |", "|---|---|---:|---|---|", *reasons]),
        ]
        return "\n".join(parts) + "\n"


def row(outcome: Outcome) -> tuple[str, ...]:
    """One program's."""
    return (
        outcome.program.library,
        outcome.program.title,
        bits(outcome),
        f"{outcome.ops:,}",
        f"{sum(outcome.syncs.values()):,}",
        *(times(outcome) if len(outcome.lazy_seconds) > 1 else ("", "")),
    )


def bits(outcome: Outcome) -> str:
    """Whether the bits are eager's, in a word."""
    return "differ" if outcome.differences else "equal"


def times(outcome: Outcome) -> tuple[str, str]:
    """Times over eager's, with three digits."""
    return f"{outcome.first:.3g}", f"{outcome.again:.3g}"


def code(line: str) -> str:
    """A line of code for a cell of the page's table."""
    short = line if len(line) <= 60 else line[:59] + "…"
    return "`" + short.replace("|", "\\|").replace("`", "'") + "`"


def versions() -> str:
    """What was run, with versions."""
    distributions = importlib.metadata.packages_distributions()
    names = sorted({name for packages in LIBRARIES.values() for name in packages})
    found = [
        f"{distributions[name][0]} {importlib.metadata.version(distributions[name][0])}"
        for name in names
        if name in distributions
    ]
    return f"One thread, torch {torch.__version__}, python {platform.python_version()}; {', '.join(found)}"
