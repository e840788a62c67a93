"""IPython display formatters for lists of plans, reports, moments, and remedies: one table each.

Other lists are shown as before, by the formatter that was registered, which is restored when the extension is
unloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..execute.run_report import Report
from ..plan.liveness.live_set_and_categories import Moment
from ..plan.node_formatting import where
from ..plan.plan import Plan
from ..plan.remedies.remedy import Remedies, Remedy
from ..plan.result_tables import Table, Tabular
from ..plan.units import format_bytes

_TYPES: tuple[type, ...] = (list, tuple)
Undo = Callable[[], None]


def table_of(items: Sequence[Any]) -> Table | None:
    """The HTML table of a list if all its items have one; ``None`` for any other list."""
    if not items or not all(isinstance(item, Tabular) for item in items):
        return None
    if all(isinstance(item, Remedy) for item in items):
        return Remedies(items).table()
    kinds = {type(item) for item in items}
    kind = kinds.pop() if len(kinds) == 1 else None
    columns, numbers, row = _COLUMNS.get(kind, _SUMMARY)
    title = f"{len(items)} {'object' if kind is None else kind.__name__}{'s' * (len(items) > 1)}"
    rows = [(str(at), *row(item)) for at, item in enumerate(items)]
    return Table(title, ("index", *columns), rows, 1 + numbers)


def _of_plan(plan: Plan) -> Sequence[str]:
    fits = {True: "yes", False: "no", None: "unknown"}[plan.fits]
    during = where(plan.peak_node) if plan.peak_node is not None else ""
    return format_bytes(plan.peak_bytes), format_bytes(plan.needed_bytes), str(plan.device), fits, during


def _of_report(report: Report) -> Sequence[str]:
    peak = "" if report.peak_bytes is None else format_bytes(report.peak_bytes)
    return peak, f"{report.seconds:.3f}", f"{report.ops_run:,}", report.backend, report.cause


def _of_moment(moment: Moment) -> Sequence[str]:
    return format_bytes(moment.nbytes), f"{len(moment.alive):,}", where(moment.node)


# By class: the columns of its list, the number of them with numbers, and a row's cells.
_Columns = tuple[Sequence[str], int, Callable[[Any], Sequence[str]]]
_COLUMNS: Mapping[type | None, _Columns] = {
    Plan: (("peak", "needed", "device", "fits", "peak during"), 2, _of_plan),
    Report: (("peak", "seconds", "ops run", "backend", "evaluated"), 3, _of_report),
    Moment: (("bytes", "tensors", "during"), 2, _of_moment),
}
_SUMMARY: _Columns = ("summary",), 0, lambda item: [item.table().title.splitlines()[0]]


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
