"""IPython display formatters for lists of plans, reports, moments, and remedies: one table each.

Other lists are shown as before, by the formatter that was registered, which is restored when the extension is
unloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..plan.remedies.remedy import Remedies, Remedy
from ..plan.result_tables import Table, Tabular

_TYPES: tuple[type, ...] = (list, tuple)
Undo = Callable[[], None]


def table_of(items: Sequence[Any]) -> Table | None:
    """The HTML table of a list if all its items have one; ``None`` for any other list."""
    if not items or not all(isinstance(item, Tabular) for item in items):
        return None
    if all(isinstance(item, Remedy) for item in items):
        return Remedies(items).table()
    names = {type(item).__name__ for item in items}
    name = names.pop() if len(names) == 1 else "object"
    rows = [(str(number), item.table().title.splitlines()[0]) for number, item in enumerate(items)]
    return Table(f"{len(items)} {name}{'s' * (len(items) > 1)}", ("index", "summary"), rows)


def register(ipython: Any, undo: list[Undo]) -> None:
    """Register the formatter in ``ipython``; ``undo`` gets what unregisters it, before each step."""
    formatters = ipython.display_formatter.formatters
    for each in _TYPES:
        for kind, made in (("text/html", _html), ("text/plain", _text)):
            _register(formatters[kind], made, each, undo)


def _register(formatter: Any, make: Callable[[Any], Any], kind: type, undo: list[Undo]) -> None:
    before = formatter.type_printers.get(kind)
    ours = make(before)

    def take_back() -> None:
        if formatter.type_printers.get(kind) is not ours:  # another formatter has been registered since
            return
        if before is None:
            formatter.pop(kind)
        else:
            formatter.for_type(kind, before)

    undo.append(take_back)
    formatter.for_type(kind, ours)


def _html(before: Any) -> Callable[[Sequence[Any]], str | None]:
    def html(items: Sequence[Any]) -> str | None:
        table = table_of(items)
        if table is not None:
            return table.html()
        shown: str | None = before(items) if before is not None else None
        return shown

    return html


def _text(before: Any) -> Callable[[Sequence[Any], Any, bool], None]:
    def text(items: Sequence[Any], printer: Any, cycle: bool) -> None:
        table = None if cycle or len(printer.stack) > 1 else table_of(items)
        if table is None:
            before(items, printer, cycle)
            return
        for number, line in enumerate(table.text().split("\n")):
            if number:
                printer.break_()
            printer.text(line)

    return text
