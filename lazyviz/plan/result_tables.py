"""Result tables: aligned text in terminals, HTML in notebooks, rich tables where rich prints.

Displaying a table runs nothing, and computes nothing that takes long.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any, NamedTuple

from .units import format_bytes, format_share


class Table(NamedTuple):
    """``title`` is one line; ``rows`` have a cell for each of ``columns``, the first ``numbers`` numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: int = 1

    def text(self) -> str:
        """The table as aligned text; only the title if there are no rows."""
        cells = [list(self.columns), *map(list, self.rows)]
        widths = [max(len(row[at]) for row in cells) for at in range(len(self.columns))]
        lines = [
            "  ".join(
                cell.rjust(width) if at < self.numbers else cell.ljust(width)
                for at, (cell, width) in enumerate(zip(row, widths))
            ).rstrip()
            for row in cells
        ]
        return "\n".join([self.title, *(f"  {line}" for line in lines if self.rows)])

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return self.html()

    def html(self) -> str:
        # Not every host styles tables: marimo renders columns without any space between them.
        styles = [
            f"text-align:{'right;white-space:nowrap' if at < self.numbers else 'left'};padding:2px 10px"
            for at in range(len(self.columns))
        ]

        def cells(tag: str, texts: Sequence[str]) -> str:
            return "".join(
                f'<{tag} style="{style}">{html.escape(text)}</{tag}>' for style, text in zip(styles, texts)
            )

        head = cells("th", self.columns)
        body = "".join(f"<tr>{cells('td', row)}</tr>" for row in self.rows)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if self.rows else ""
        return f"<div><div>{html.escape(self.title)}</div>{table}</div>"


class DisplayedText(str):
    """Text that IPython displays as its lines at the end of a cell; otherwise it is a ``str`` like any."""

    __slots__ = ()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        if len(printer.stack) > 1:
            printer.text(repr(self))
            return
        for number, line in enumerate(self.split("\n")):
            if number:
                printer.break_()
            printer.text(line)


class Tabular:
    """Base class of objects that are displayed as their ``table()``."""

    __slots__ = ()

    def table(self) -> Table:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return self.table().html()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Called by IPython: a table if displayed by itself, one line inside another object."""
        if cycle or len(printer.stack) > 1:
            printer.text(repr(self))
            return
        DisplayedText(self.table().text())._repr_pretty_(printer, cycle)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        found = self.table()
        made = RichTable(box=None, pad_edge=False)
        for at, column in enumerate(found.columns):
            made.add_column(column, justify="right" if at < found.numbers else "left")
        for row in found.rows:
            made.add_row(*map(Text, row))
        # Not the table's own title, which would be wrapped to the table's width.
        return Group(Text(found.title), made) if found.rows else Text(found.title)


def sizes(found: dict[str, int]) -> list[Sequence[str]]:
    """Rows of bytes, share and name, largest first."""
    total = sum(found.values()) or 1
    order = sorted(found.items(), key=lambda item: -item[1])
    return [(format_bytes(size), format_share(size / total), name) for name, size in order if size]
