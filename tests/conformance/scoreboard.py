"""Counts of what the conformance suites ran, and the table made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import exceptions

EQUAL = "equal"  # the same bits as eager
NONDETERMINISTIC = "nondeterministic"  # eager differs from itself: only metadata could be compared
FAILING = "failing"  # anything else, expected or not
_WORST_LAST = (EQUAL, NONDETERMINISTIC, FAILING)

# Suites in the order of the table; others follow as they come.
SUITES = (
    *(f"op forward {dtype}" for dtype in ("float32", "float64", "int64", "bool", "complex64", "bfloat16")),
    "op backward float32",
    "op in place",
    "op out=",
    "custom_op_db, autograd_function_db",
    "hop_db",
    "module_db",
    "optim_db",
    "transformers",
)

# The same databases on the peers, counted before this project began: the bar to clear.
PEERS = (
    "Lazy Tensor Core: of 672 op entries 252 lazy, 364 right only by falling back to eager, 21 failing;",
    "                  12 of 120 module cases failing.",
    "Koila: of the same op entries 89 lazy, 68 failing.",
)

_PREFACE = """# Conformance with eager PyTorch

Made by `make test-all` from what it ran: every entry of PyTorch's own databases, twice in eager mode and
once lazily. Bit-equal means values, shapes, strides, dtypes, written inputs, shared memory and the state of
the generator. "Differ in eager" are entries that return uninitialized memory: eager differs from itself, and
only metadata is compared. Fully deferred means that nothing ran before `evaluate()`; each of the others is
listed below with its reason.
"""


@dataclass
class Score:
    """What is known of one entry of a suite."""

    outcome: str = EQUAL
    samples: int = 0
    syncs: set[str] = field(default_factory=set)


class Scoreboard:
    """Outcomes by suite and entry.  Call :meth:`add` before asserting, so that failures count too."""

    def __init__(self) -> None:
        self.suites: dict[str, dict[str, Score]] = {}

    def add(self, suite: str, entry: str, outcome: str, samples: int = 1, syncs: Iterable[str] = ()) -> None:
        """Note that ``samples`` of ``entry`` ran with ``outcome``, and the causes of their sync points.

        An entry may be added many times: its samples sum up, and its worst outcome counts.
        """
        assert outcome in _WORST_LAST, outcome
        score = self.suites.setdefault(suite, {}).setdefault(entry, Score())
        score.outcome = max(score.outcome, outcome, key=_WORST_LAST.index)
        score.samples += samples
        score.syncs.update(syncs)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            suite: {
                name: {"outcome": score.outcome, "samples": score.samples, "syncs": sorted(score.syncs)}
                for name, score in sorted(entries.items())
            }
            for suite, entries in self.suites.items()
        }

    def merge(self, data: dict[str, Any]) -> None:
        """Add what :meth:`to_json` of another scoreboard gave."""
        for suite, entries in data.items():
            for name, score in entries.items():
                self.add(suite, name, score["outcome"], score["samples"], score["syncs"])

    def rows(self) -> list[tuple[str, ...]]:
        """The table, headings first."""
        rows: list[tuple[str, ...]] = [
            (
                "suite",
                "entries",
                "samples",
                "bit-equal",
                "differ in eager",
                "failing",
                "fully deferred",
                "with a sync point",
            )
        ]
        known = [suite for suite in SUITES if suite in self.suites]
        for suite in (*known, *(name for name in self.suites if name not in SUITES)):
            scores = list(self.suites[suite].values())
            counts = [sum(score.outcome == outcome for score in scores) for outcome in _WORST_LAST]
            synced = sum(bool(score.syncs) for score in scores)
            numbers = (
                len(scores),
                sum(score.samples for score in scores),
                *counts,
                len(scores) - synced,
                synced,
            )
            rows.append((suite, *(f"{number:,}" for number in numbers)))
        return rows

    def text(self) -> str:
        """The table for a terminal."""
        rows = self.rows()
        widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if not at else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(row, widths))
            )
            for row in rows
        ]
        return "\n".join([*lines, "", *PEERS])

    def markdown(self) -> str:
        """The table for the documentation."""
        head, *body = ["| " + " | ".join(row) + " |" for row in self.rows()]
        rule = "|---|" + "---:|" * (len(self.rows()[0]) - 1)
        peers = " ".join(line.strip() for line in PEERS)
        return "\n".join([head, rule, *body, "", f"On the same databases: {peers}", ""])

    def document(self) -> str:
        """A page with the table and the reasons of the exceptions."""
        lists = [
            ("Operators with a sync point", exceptions.FORWARD),
            ("More, for their gradients", exceptions.BACKWARD),
            ("More, with `out=`", exceptions.OUT),
            ("More, in place", exceptions.IN_PLACE),
            ("Custom and higher-order operators with a sync point", exceptions.OTHER),
        ]
        parts = [_PREFACE, self.markdown()]
        for title, reasons in lists:
            if reasons:
                rows = [f"| `{name}` | {reason} |" for name, reason in sorted(reasons.items())]
                parts.append("\n".join([f"## {title}\n", "| entry | reason |", "|---|---|", *rows, ""]))
        return "\n".join(parts)

    def write(self, path: Path) -> None:
        """A page as ``.md``, or everything as ``.json``."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = self.document() if path.suffix == ".md" else json.dumps(self.to_json(), indent=1) + "\n"
        path.write_text(content)
