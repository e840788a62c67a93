"""Comparison of two plans: two curves in one chart, and tables of differences."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...graph.ir import Node, SourceLine
from ...graph.modules import ModuleNames, has_variable, root_of, root_parts
from ...plan.liveness.live_set_and_categories import Allocation
from ...plan.node_formatting import category_text
from ...plan.plan import Plan
from ...plan.result_tables import Table, Tabular
from ...plan.runtime.gpu_timeline import duration
from ...plan.units import format_bytes, format_change, format_deviation
from ..scene.scene import Scene, plural
from .line_matching import names_of_lines
from .side_by_side_pictures import side_by_side

MOST_ROWS = 12
_FITS = {True: "fits", False: "too big", None: "unknown"}
# The chart, in its own coordinate system.
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 180, 70, 10, 26
POINTS = 400
BEFORE, AFTER = "#77839a", "#3f74f0"  # AFTER stands out; both are visible on white and on black

Sizes = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Comparison(Tabular):
    """Two plans, ``before`` and ``after``; every pair of numbers is in this order.

    ``figures`` has totals in bytes (``"peak"``, ``"needed"``, ``"peak in eager PyTorch"`` where it differs,
    ``"reserved"`` on a GPU) and the number of ``"ops"``.  ``by_category``, ``by_module`` and ``by_line``
    have all bytes alive at each plan's own peak, whether or not they differ.  The key of a module is its
    path, with the model's variable if several models have that path; the key of a line has its file,
    number, and text.  Lines of two cells or files are matched by their text:
    ``"cell [2], line 5 → cell [3], line 6: y = net(x)"``.
    """

    before: Plan
    after: Plan
    names: tuple[str, str] = ("before", "after")
    ops: tuple[int, int] = (0, 0)
    theme: str | None = None  # theme of the pictures; None: that of the page
    figures: Sizes = field(init=False)
    by_category: Sizes = field(init=False)
    by_module: Sizes = field(init=False)
    by_line: Sizes = field(init=False)

    def __post_init__(self) -> None:
        a, b = self.before, self.after
        figures = {"peak": (a.peak_bytes, b.peak_bytes), "needed": (a.needed_bytes, b.needed_bytes)}
        if (a.eager_peak_bytes, b.eager_peak_bytes) != figures["peak"]:  # lazyviz's own run may need less
            figures["peak in eager PyTorch"] = a.eager_peak_bytes, b.eager_peak_bytes
        if a.reserved_bytes is not None and b.reserved_bytes is not None:
            figures["reserved"] = a.reserved_bytes, b.reserved_bytes
        figures["ops"] = self.ops
        name = ModuleNames(
            *([(root_of(each.module), each.module) for each in plan.alive_at_peak] for plan in (a, b))
        )
        keys: dict[str, Callable[[Allocation], str]] = {
            "by_category": lambda each: each.category,
            "by_module": lambda each: name(root_of(each.module), each.module) or "(outside of modules)",
        }
        object.__setattr__(self, "figures", figures)
        for field_name, key in keys.items():
            object.__setattr__(self, field_name, _paired(a.alive_at_peak, b.alive_at_peak, key, key))
        object.__setattr__(self, "by_line", self._by_line())

    def _by_line(self) -> Sizes:
        alive = self.before.alive_at_peak, self.after.alive_at_peak
        names = names_of_lines(_lines(self.before), _lines(self.after))

        def key(of: Mapping[SourceLine, str]) -> Callable[[Allocation], str]:
            return lambda each: of[each.source] if each.source else "(made before)"

        return _paired(*alive, key(names[0]), key(names[1]))

    def __repr__(self) -> str:
        peak = self.figures["peak"]
        return f"<Comparison: peak {format_bytes(peak[0])} -> {format_bytes(peak[1])}>"

    def table(self) -> Table:
        """A table of the differences: totals, then categories and modules, the largest difference first."""
        rows = [_row(name, pair, name != "ops") for name, pair in self.figures.items()]
        rows += self._of_devices()
        rows += [_row(category_text(name), pair, True) for name, pair in changed(self.by_category)]
        model = _model(self.before, self.after)
        for name, pair in changed(self.by_module):
            outside = not model or name.startswith("(") or name == model
            rows.append(_row(name if outside else f"{model}.{name}", pair, True))
        title = f"{self.names[0]} -> {self.names[1]}"
        return Table(title, (*self.names, "change", "what"), rows, 3)

    def _of_devices(self) -> list[Sequence[str]]:
        """Rows for device memory, whether the plans fit, and projected time, where these differ."""
        a, b = self.before, self.after
        rows: list[Sequence[str]] = []
        if a.device != b.device and a.capacity_bytes is not None and b.capacity_bytes is not None:
            rows.append(_row("memory of the device", (a.capacity_bytes, b.capacity_bytes), True))
        if a.fits != b.fits:
            rows.append((*(_FITS[plan.fits] for plan in (a, b)), "", "whether it fits"))
        if a.seconds and b.seconds and duration(a.seconds) != duration(b.seconds):
            times = duration(a.seconds), duration(b.seconds)
            sign = "+" if b.seconds > a.seconds else "-"
            share = format_deviation(b.seconds / a.seconds - 1)
            rows.append((*times, f"{sign}{duration(abs(b.seconds - a.seconds))} ({share})", "projected time"))
        return rows

    def lines(self) -> Table:
        """A table of the differences by line of code."""
        rows = [_row(name, pair, True) for name, pair in changed(self.by_line)]
        return Table("Lines, at the peak", (*self.names, "change", "line"), rows, 3)

    def _repr_html_(self) -> str:
        lines = self.lines().html() if changed(self.by_line) else ""
        return f"<div>{chart(self)}{self.table().html()}{lines}{self._pictures()}</div>"

    def _pictures(self) -> str:
        """Both graphs side by side, or stacked on a narrow page, with differences in color."""
        before, after = self.before, self.after
        first = Scene(before.ir, before)
        second = Scene(after.ir, after, drawn=first.hierarchy)
        addresses = side_by_side(first, second, self.names, self.theme)
        images = [
            f'<img src="{address}" alt="{html.escape(f"The graph of {name}")}" '
            'style="flex:1 1 480px;min-width:0;max-width:900px">'
            for address, name in zip(addresses, self.names, strict=True)
        ]
        row = "display:flex;flex-wrap:wrap;gap:8px;align-items:flex-start;margin-top:8px"
        rules = "" if self.theme else _SCHEMES
        return f'<div class="lazyviz-compared" style="{row}">{rules}{"".join(images)}</div>'


# Images follow the CSS color scheme of their element, which the themes of these notebook hosts do not set.
_DARK_HOSTS = (
    '[data-jp-theme-light="false"]', ".vscode-dark", ".vscode-high-contrast", 'html[theme="dark"]'
)  # fmt: skip
_LIGHT_HOSTS = (
    '[data-jp-theme-light="true"]',
    ".vscode-light",
    ".vscode-high-contrast-light",
    'html[theme="light"]',
)


def _rule(hosts: Sequence[str], scheme: str) -> str:
    return f"{','.join(f'{host} .lazyviz-compared img' for host in hosts)}{{color-scheme:{scheme}}}"


_SCHEMES = f"<style>{_rule(_DARK_HOSTS, 'dark')}{_rule(_LIGHT_HOSTS, 'light')}</style>"


def _model(before: Plan, after: Plan) -> str:
    """The variable of the model if both plans have a single model with the same variable, else ``""``."""
    found = {
        root_parts(node.root)[0] if has_variable(node.root) else ""
        for plan in (before, after)
        for node in plan.ir.nodes
        if node.root
    }
    return found.pop() if len(found) == 1 else ""


def names_of(before: Plan, after: Plan) -> tuple[str, str]:
    """Names by which two plans differ: device, batch, pieces; ``("before", "after")`` if these are equal."""
    told: list[tuple[str, str]] = []
    if before.device != after.device:
        told.append((before.device, after.device))
    if before.batch_size != after.batch_size and None not in (before.batch_size, after.batch_size):
        told.append((f"batch {before.batch_size:,}", f"batch {after.batch_size:,}"))
    if before.split.pieces != after.split.pieces:
        told.append((plural(before.split.pieces, "piece"), plural(after.split.pieces, "piece")))
    if not told:
        return "before", "after"
    first, second = (", ".join(words) for words in zip(*told, strict=True))
    return first, second


def changed(sizes: Sizes) -> list[tuple[str, tuple[int, int]]]:
    """The entries that differ, largest difference first; at most :data:`MOST_ROWS`."""
    found = [(name, pair) for name, pair in sizes.items() if pair[0] != pair[1]]
    return sorted(found, key=lambda item: -abs(item[1][1] - item[1][0]))[:MOST_ROWS]


def _lines(plan: Plan) -> list[SourceLine]:
    """The lines that ran ops or allocated memory alive at the peak, in order of their first op."""
    found: list[Node | Allocation] = [*plan.ir.nodes, *plan.alive_at_peak]
    return list(dict.fromkeys(each.source for each in found if each.source))


def _paired(
    a: Sequence[Allocation],
    b: Sequence[Allocation],
    key_of_a: Callable[[Allocation], str],
    key_of_b: Callable[[Allocation], str],
) -> Sizes:
    totals: list[dict[str, int]] = [{}, {}]
    for found, total, key in zip((a, b), totals, (key_of_a, key_of_b)):
        for each in found:
            name = key(each)
            total[name] = total.get(name, 0) + each.nbytes
    before, after = totals
    return {name: (before.get(name, 0), after.get(name, 0)) for name in {**before, **after}}


def _row(name: str, pair: tuple[int, int], as_bytes: bool) -> Sequence[str]:
    before, after = pair
    show: Callable[[int], str] = format_bytes if as_bytes else "{:,}".format
    return show(before), show(after), format_change(before, after, show), name


def chart(comparison: Comparison) -> str:
    """An SVG chart of both memory timelines, each stretched to the full width, on one scale of bytes."""
    plans = (comparison.before, comparison.after)
    top = max(max((size for _, size in plan.timeline), default=0) for plan in plans) or 1
    lines = [
        _curve(plan, top, color, dashed) for plan, color, dashed in zip(plans, (BEFORE, AFTER), (True, False))
    ]
    marks = [
        f'<text x="{LEFT - 6}" y="{TOP + share * (HEIGHT - TOP - BOTTOM) + 4:.0f}" text-anchor="end">'
        f"{format_bytes(round(top * (1 - share)))}</text>"
        for share in (0.0, 0.5, 1.0)
    ]
    legend = [
        f'<text x="{LEFT + 180 * at}" y="{HEIGHT - 6}"><tspan fill="{color}">{sign}</tspan> '
        f"{html.escape(name)}, peak {format_bytes(plan.peak_bytes)}</text>"
        for at, (plan, name, color, sign) in enumerate(
            zip(plans, comparison.names, (BEFORE, AFTER), ("- -", "—"))
        )
    ]
    words = f"Memory over both runs: {comparison!r}"[:-1].replace("<", "")
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" style="max-width:100%" role="img"'
        f' aria-label="{html.escape(words)}" font-family="sans-serif" font-size="11" fill="currentColor">'
        f"{''.join(marks)}{''.join(lines)}{''.join(legend)}</svg>"
    )


def chart_points(comparison: Comparison) -> tuple[int, list[list[int]]]:
    """The maximum bytes over both runs, and the points of their curves."""
    curves = [_highest(plan) for plan in (comparison.before, comparison.after)]
    return max((size for curve in curves for size in curve), default=0) or 1, curves


def _highest(plan: Plan) -> list[int]:
    """The timeline downsampled to :data:`POINTS` points, each the maximum of its range to preserve peaks."""
    sizes = [size for _, size in plan.timeline]
    step = max(len(sizes) / POINTS, 1.0)
    starts = [int(at * step) for at in range(int(len(sizes) / step))]
    return [max(sizes[start : int(start + step) + 1], default=0) for start in starts]


def _curve(plan: Plan, top: int, color: str, dashed: bool) -> str:
    highest = _highest(plan)
    wide, high = WIDTH - LEFT, HEIGHT - TOP - BOTTOM
    points = " ".join(
        f"{LEFT + wide * at / max(len(highest) - 1, 1):.1f},{TOP + high * (1 - size / top):.1f}"
        for at, size in enumerate(highest)
    )
    dash = ' stroke-dasharray="5 3"' if dashed else ""
    return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6"{dash}/>'
