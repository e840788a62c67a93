"""Tables of plans: aligned text for terminals."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..plan.node_formatting import category_text
from ..plan.runtime.bottlenecks_and_speedups import MOSTLY
from ..plan.runtime.gpu_timeline import duration
from ..plan.units import format_bytes, format_range, format_share, looks_exact
from ..process.stdio import StandardStreams, is_terminal
from .plan_data import Data, is_incomplete, place_of

_MOST_LINES, _MOST_TENSORS, _MOST_REMEDIES, _MOST_READS = 8, 5, 3, 8
_WIDE = 120


def console(file: TextIO | None = None) -> Console:
    """The console that results are printed to; wide if the width of the output is unknown."""
    file = file or StandardStreams().stdout
    has_width = is_terminal(file) or bool(os.environ.get("COLUMNS"))
    return Console(file=file, width=None if has_width else _WIDE, highlight=False, markup=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 1) -> Table:
    """An aligned table whose first ``numbers`` columns are numbers."""
    made = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for at, column in enumerate(columns):
        made.add_column(
            column,
            justify="right" if at < numbers else "left",
            style="" if at < numbers else None,
            header_style="dim",
            no_wrap=at < numbers,
            overflow="fold",
        )
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def show_plan(data: Data, to: Console) -> None:
    """Print a plan in the form that :func:`lazyviz.cli.plan_data.described` returns."""
    to.print(Text(_heading(data), style="bold"))
    to.print(f"Peak of eager PyTorch: {_peak(data['eager_peak_bytes'], data['eager_peak_range'])}")
    for sentence in data["release"]:
        to.print(sentence)
    if data["peak_at"]:
        to.print(f"  during {data['peak_at']}")
        if data["peak_line"] and data["peak_line"]["text"]:
            to.print(f"    {data['peak_line']['text']}")
    if data["eager_reserved_bytes"] is not None:
        held, context = format_bytes(data["eager_reserved_bytes"]), format_bytes(data["context_bytes"])
        need = format_bytes(data["needed_bytes"])
        to.print(f"PyTorch's CUDA allocator would hold {held}, the CUDA context {context}: {need} in total.")
    to.print(verdict_of(data))
    for sentence in data["notes"]:
        to.print(sentence)
    total = sum(data["by_category"].values())
    rows: list[Sequence[str]]
    rows = [
        (format_bytes(size), _share(size, total), category_text(name))
        for name, size in _largest(data["by_category"])
    ]
    _print(to, table("Alive at the peak", ("bytes", "share", "what"), rows, 2))
    rows = [
        (format_bytes(line["bytes"]), _share(line["bytes"], total), place_of(line), line["text"])
        for line in data["by_line"][:_MOST_LINES]
    ]
    _print(to, table("Lines that allocated it", ("bytes", "share", "line", "code"), rows, 2))
    if total and data["by_line"] and data["by_line"][0]["bytes"] > MOSTLY * total:
        rows = [
            (format_bytes(each["bytes"]), _share(each["bytes"], total), each["module"])
            for each in data["by_module"][:_MOST_LINES]
        ]
        _print(to, table("Modules that hold it", ("bytes", "share", "module"), rows, 2))
    rows = [
        (format_bytes(each["bytes"]), each["what"], each["kept_by"])
        for each in data["largest"][:_MOST_TENSORS]
    ]
    _print(to, table("Largest tensors", ("bytes", "what", "why it is alive"), rows))
    rows = [
        (format_bytes(each["saves_bytes"]), format_bytes(each["peak_bytes"]), each["text"], each["costs"])
        for each in cheapest_of_kinds(data["remedies"])
    ]
    _print(to, table("What would lower the peak", ("saves", "peak then", "change", "cost"), rows, 2))
    if data.get("time"):
        to.print()
        to.print(Text("A step's time", style="bold"))
        for sentence in data["time"]["text"]:
            to.print(_hanging(sentence))
    _print(to, _reads(data["reads"]))
    if (more := len(data["reads"]) - _MOST_READS) > 0:
        to.print(f"and at {more:,} other line{'' if more == 1 else 's'}")
    if data["not_recorded"]:
        to.print(f"Not counted: ops of these threads: {', '.join(data['not_recorded'])}.")


def verdict_of(data: Data) -> str:
    """The verdict as a sentence: whether the plan fits, or so far fits if it is incomplete."""
    text: str = data["verdict"]
    if not is_incomplete(data):
        return text
    return f"So far it {text[3:]}" if text.startswith("It ") else f"So far: {text}"


def _reads(reads: Sequence[Mapping[str, Any]]) -> Table:
    """A table of the places where the script reads values, and of the ops that had to run for that."""
    rows = []
    for each in reads[:_MOST_READS]:
        line, reader = each["line"], each["reader"]
        place = place_of(line) + (f", in {place_of(reader)}" if reader else "")
        what = each["cause"] + (f", {each['times']:,} times" if each["times"] > 1 else "")
        ran = f"{each['ops']:,}", duration(each["seconds"])
        rows.append((*ran, what, place, line["text"] if line else ""))
    return table(
        "Values that the script reads (sync points)",
        ("operators", "time", "read", "line", "code"),
        rows,
        2,
    )


def _hanging(sentence: str) -> Text | Table:
    """A sentence with a hanging indent, for narrow terminals that wrap it."""
    start = re.match(r" *(?:[\d.,]+ \S+ +<?[\d.]+ %  )?", sentence)
    if start is None or not start[0]:
        return Text(sentence)
    made = Table.grid(padding=0)
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    made.add_row(Text(start[0]), Text(sentence[start.end() :]))
    return made


def cheapest_of_kinds(remedies: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The first remedy of each kind, in order of cost; at most :data:`_MOST_REMEDIES`."""
    found: dict[str, Mapping[str, Any]] = {}
    for remedy in remedies:
        found.setdefault(remedy["kind"], remedy)
    return list(found.values())[:_MOST_REMEDIES]


def _heading(data: Data) -> str:
    steps = data.get("steps")
    taken = f", {steps_taken(steps, data)}" if steps is not None else ""
    return f"{data.get('script', 'plan')}: {data['ops']:,} operators{taken}, planned for {data['device']}"


def steps_taken(steps: int, data: Data | None = None) -> str:
    """``"1 optimizer step"``, ``"2 optimizer steps"``; for incomplete plans, ``"1 of 2 optimizer steps"``."""
    if data is not None and is_incomplete(data):
        return f"{steps:,} of {data['steps_wanted']:,} optimizer steps"
    return f"{steps:,} optimizer step{'' if steps == 1 else 's'}"


def _print(to: Console, made: Table) -> None:
    if made.row_count:
        to.print()
        to.print(made)


def _peak(best: int, ends: Sequence[int]) -> str:
    low, high = ends
    return (
        format_bytes(best) if looks_exact(low, high) else f"{format_bytes(best)} ({format_range(low, high)})"
    )


def _share(size: int, total: int) -> str:
    return format_share(size / total) if total else ""


def _largest(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(sizes.items(), key=lambda item: -item[1])
