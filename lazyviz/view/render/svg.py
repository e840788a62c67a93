"""SVG renderer: one self-contained picture, for saved notebooks, exports, and previews.

A saved notebook shows it wherever the widget cannot run, so it has an opaque background and looks the same on
dark and light pages.  It has no scripts, links, or fonts to load; every string from the user's program is
escaped.
"""

from __future__ import annotations

import base64
import html
import itertools
import uuid
from collections.abc import Callable
from typing import Any

from ...graph.ir import Graph
from ...graph.sync_point_groups import sites
from ...plan.units import format_bytes
from ..colors import LAYER_ICONS, LAYER_INKS, LAYER_TINTS, adapted, darkened
from ..layout.coordinates import Arrangement, Frame, Line, arrange, curve
from ..layout.text_width import cut
from ..layout.wrapped_rows import folded
from ..printable_text import visible
from ..scene.batch_text import batch_lines
from ..scene.boxes import LANE_TITLES, Box, module_facts, name_of
from ..scene.memory_chart import memory_json
from ..scene.plan_protocol import PlanLike
from ..scene.rejected_op_box import error_json
from ..scene.scene import Scene, plural
from ..scene.small_ops import is_small_ops
from .box_bars import Compared, ShownNumbers
from .publication_figure import PARTS, Drawing, Figure
from .saved_activation_bands import PILL, Band, saved_activation_bands
from .text import render_text

WIDTH = 900.0
MARGIN = 20.0
FLATTEST = 1.9  # aspect ratio of a figure whose data flows to the right: about that of a slide
CHART_HEIGHT = 230.0
LEAST_WIDTH, LEAST_CHART = 520.0, 700.0  # of a figure: for the scale of its bars, for the memory chart
MIN_SCALE = 0.85  # lanes that would be scaled below this are placed in a second row
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
STATIC_CLASS = "lazyviz-static"

CATEGORY_COLORS = {
    "parameters": "#2f63e0",
    "gradients": "#d62957",
    "optimizer": "#4d2187",
    "activations": "#14a07a",
    "kv_cache": "#b46cc0",
    "inputs": "#184c62",
    "buffers": "#605400",
    "temporaries": "#d67c05",
    "held": "#787890",
}
PHASE_COLORS = {"forward": "#2466ab", "backward": "#a84f12", "optimizer": "#7048a8", "other": "#5f6b7a"}
ROLE_COLORS = {
    "parameter": "#2f63e0",
    "gradient": "#d62957",
    "optimizer": "#4d2187",
    "buffer": "#605400",
    "input": "#184c62",
    "kv_cache": "#b46cc0",
}
_VERDICT_COLORS = {"fits": "#1a7f4b", "too-big": "#c0352b", "unknown": "#5f6b7a"}
_INK, _MUTED, _FAINT, _CARD, _LINE = "#1d2733", "#5c6874", "#e3e8ee", "#ffffff", "#98a4b1"

_HALO = f' paint-order="stroke" stroke="{_CARD}" stroke-width="4" stroke-linejoin="round"'  # drawn over lines


def char_width(size: float, *, mono: bool = False, bold: bool = False) -> float:
    """Average width of a character in pixels, for the widest of the fonts that may be installed."""
    return size * (0.605 if mono else 0.66 if bold else 0.58)


def shorten(text: str, room: float, size: float, *, mono: bool = False, bold: bool = False) -> str:
    """``text``, truncated if it is wider than ``room`` pixels."""
    return cut(text, int(room / char_width(size, mono=mono, bold=bold)))


def _escape(text: object) -> str:
    # Characters that XML 1.0 does not allow would make the whole picture invalid.
    return html.escape(visible(str(text)), quote=True)


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: float = 12,
    fill: str = _INK,
    weight: int = 400,
    anchor: str = "start",
    mono: bool = False,
    extra: str = "",
    beside: str = "",
) -> str:
    """``beside`` follows in gray, for example the class after a name."""
    family = f' font-family="{MONO}"' if mono else ""
    bold = f' font-weight="{weight}"' if weight != 400 else ""
    where = f' text-anchor="{anchor}"' if anchor != "start" else ""
    grey = f'<tspan dx="6" font-weight="400" fill="{_MUTED}">'
    more = f"{grey}{_escape(beside)}</tspan>" if beside else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{fill}"{family}{bold}{where}{extra}>'
        f"{_escape(text)}{more}</text>"
    )


def _rect(
    x: float,
    y: float,
    w: float,
    h: float,
    *,
    fill: str,
    stroke: str = "none",
    radius: float = 6,
    extra: str = "",
) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="{radius:g}" '
        f'fill="{fill}" stroke="{stroke}"{extra}/>'
    )


def render_svg(
    graph: Graph,
    plan: PlanLike,
    *,
    title: str = "lazyviz",
    state: str = "pending",
    report: Any = None,
    scene: Scene | None = None,
    figure: Figure | None = None,
    drawing: Drawing | None = None,
    theme: str = "light",
    compared: Compared | None = None,
) -> str:
    """The picture of ``graph``: lanes of modules, memory, verdict and legend, as SVG text.

    A ``figure`` has its own title and theme, and neither state nor verdict.  ``drawing``: the open groups,
    and the number that boxes show. ``compared``: differences from another graph, shown as colored outlines.

    ``state`` is one of pending, running, done, failed, interrupted; ``report``, if there is one, has
    ``ops_run``, ``seconds``, and ``peak_bytes``. ``scene``: the existing scene of ``graph`` and ``plan``, if
    there is one.
    """
    scene = scene or Scene(graph, plan)
    parts, top = _header(scene, title, state, report) if figure is None else _figure_title(figure)
    wide = WIDTH
    if graph.nodes:
        body, top, wide = _body(scene, top, figure, drawing, compared)
        parts += body
    else:
        parts.append(
            _text(MARGIN, top + 14, "Nothing was recorded: no PyTorch op ran.", fill=_MUTED, size=13)
        )
        top += 30
    height = top + 12
    described = _escape(f"{title}: {scene.summary()}" if figure is None else figure.title or title)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {height:.0f}" width="{wide:g}" '
        f'height="{height:.0f}" role="img" aria-label="{described}" font-family="{_escape(FONT)}">'
        f"<title>{described}</title>"
        + _rect(0.5, 0.5, wide - 1, height - 1, fill=_CARD, stroke="#cfd6de", radius=10)
        + "".join(parts)
        + "</svg>"
    )
    chosen = theme if figure is None else figure.theme
    return darkened(svg) if chosen == "dark" else adapted(svg) if chosen is None else svg


def _body(
    scene: Scene, top: float, asked: Figure | None, drawing: Drawing | None, compared: Compared | None
) -> tuple[list[str], float, float]:
    """Draw the lanes with the scale of their bars, and the memory chart; returns their bottom and width."""
    parts: list[str] = []
    figure = asked or Figure("", PARTS, legend=True)
    wide = WIDTH
    if figure.lanes:
        opened = {box.id for box in scene.opened()}
        if drawing is not None and drawing.opened <= scene.hierarchy.boxes.keys():
            opened = {*drawing.opened, *(lane.id for lane in scene.hierarchy.lanes())}
        lanes = None if figure.lanes >= set(PARTS) - {"memory"} else figure.lanes
        across = figure.direction == "LR"
        room = WIDTH / MIN_SCALE
        picture = arrange(scene, opened, room=room, lanes=lanes, across=across, matching=True)
        if across:  # not scaled
            picture = folded(picture, FLATTEST, CHART_HEIGHT if "memory" in figure.show else 0.0)
            wide = max(WIDTH, round(picture.width + 2 * MARGIN))
        elif asked is not None:
            wide = min(WIDTH, max(picture.width + 2 * MARGIN, _least_width(asked)))
        scale = min(1.0, (wide - 2 * MARGIN) / picture.width)
        left = (wide - picture.width * scale) / 2
        parts.append(f'<g transform="translate({left:.1f},{top:.1f}) scale({scale:.4f})">')
        numbers = ShownNumbers(scene, drawing.by if drawing is not None else "", compared)
        parts += [*_picture(picture, scene, numbers), "</g>"]
        top += picture.height * scale + 22
        if figure.legend and (words := numbers.scale()):
            parts.append(_text(MARGIN, top - 4, words, size=11, fill=_MUTED))
            top += 22
    if "memory" in figure.show:
        memory = memory_json(scene)
        if asked is not None:
            memory["capacity"] = None  # a figure has no details of this machine
        chart, top = _chart(memory, top, wide)
        parts += chart
    return parts, top, wide


def _least_width(figure: Figure) -> float:
    """The width that a figure needs for its texts: the narrower it is, the larger is its type in a column."""
    title = len(figure.title) * char_width(17, bold=True) + 2 * MARGIN
    return round(max(title, LEAST_WIDTH, LEAST_CHART if "memory" in figure.show else 0.0))


def _figure_title(figure: Figure) -> tuple[list[str], float]:
    if not figure.title:
        return [], 16.0
    title = shorten(figure.title, WIDTH - 2 * MARGIN, 17, bold=True)
    return [_text(MARGIN, 33, title, size=17, weight=650)], 50.0


def _header(scene: Scene, title: str, state: str, report: Any) -> tuple[list[str], float]:
    memory = memory_json(scene)
    color = _VERDICT_COLORS[memory["verdict"]]
    chip = shorten(memory["verdictText"], 600, 12, bold=True)
    wide = len(chip) * char_width(12, bold=True) + 40
    parts = [
        _text(MARGIN, 33, shorten(title, WIDTH - wide - 70, 17, bold=True), size=17, weight=650),
        _rect(WIDTH - MARGIN - wide, 16, wide, 25, fill=color, radius=12.5, extra=' fill-opacity="0.12"'),
        f'<circle cx="{WIDTH - MARGIN - wide + 14:.1f}" cy="28.5" r="4.5" fill="{color}"/>',
        _text(WIDTH - MARGIN - wide + 25, 33, chip, fill=color, weight=600, size=12),
    ]
    words = {
        "pending": "partly run" if any(node.state == "done" for node in scene.graph.nodes) else "not run yet",
        "running": "running",
        "done": "evaluated",
        "failed": "failed",
        "interrupted": "interrupted",
    }
    line = words.get(state, state)
    # Otherwise, it is the report of a sync point, which covers only a part.
    if report is not None and state != "pending":
        line += f" · ran {plural(report.ops_run, 'op')} in {report.seconds:.3g} s"
        if getattr(report, "peak_bytes", None) is not None:
            line += f", measured peak {format_bytes(report.peak_bytes)}"
        if getattr(report, "pieces", 1) > 1:
            line += f", in {report.pieces} pieces"
    line += f" · {scene.summary()}"
    parts.append(_text(MARGIN, 56, shorten(line, WIDTH - 2 * MARGIN, 12.5), fill=_MUTED, size=12.5))
    top = 74.0
    for line in batch_lines(scene.plan):
        color = _MUTED if not scene.plan.split.blocked_by else _VERDICT_COLORS["too-big"]
        parts.append(_text(MARGIN, top, shorten(line, WIDTH - 2 * MARGIN, 12.5), fill=color, size=12.5))
        top += 18
    syncs = sites(scene.graph.sync_points)
    for site in syncs[:4]:
        where = f": {site.text}" if site.text else ""
        text = shorten(f"sync point: {site}{where}", WIDTH - 2 * MARGIN - 14, 12)
        parts.append(f'<circle cx="{MARGIN + 4:.1f}" cy="{top - 4:.1f}" r="4" fill="#c0352b"/>')
        parts.append(_text(MARGIN + 14, top, text, size=12, fill="#9b2c22"))
        top += 17
    if len(syncs) > 4:
        parts.append(_text(MARGIN + 14, top, f"and at {len(syncs) - 4} more lines", fill=_MUTED))
        top += 17
    return parts, top + 4


def _picture(picture: Arrangement, scene: Scene, numbers: ShownNumbers) -> list[str]:
    opened = [frame for frame in picture.frames if frame.open]
    parts = [_frame(frame) for frame in opened]
    for line in picture.lines:
        parts += _line(line, picture.across)
    for band in saved_activation_bands(scene, picture):  # drawn later, because its text is above the lines
        parts += _band(band)
    for line in picture.lines:
        if line.at is not None:
            parts.append(_text(*line.at, size=11, fill=_MUTED, anchor="middle", extra=_HALO))
    parts += [_frame_title(frame, scene, numbers, picture.across) for frame in opened]
    parts += [_closed(frame, scene, picture, numbers) for frame in picture.frames if not frame.open]
    return parts


def _band(band: Band) -> list[str]:
    """A band of saved activations: a width in proportion to bytes, a dashed line, and a label."""
    (x, y), (end, last) = band.start, band.end
    middle = (x + end) / 2
    path = f"M{x:.1f},{y:.1f}C{middle:.1f},{y:.1f} {middle:.1f},{last:.1f} {end:.1f},{last:.1f}"
    color = CATEGORY_COLORS["activations"]
    line = f'<path d="{path}" fill="none" stroke="{color}"'
    parts = [
        f'{line} stroke-width="{band.width:.1f}" stroke-opacity="0.2"/>',
        f'{line} stroke-width="1.5" stroke-dasharray="4 3"/>',
    ]
    if band.pill is not None:
        left, top, wide = band.pill
        parts.append(_rect(left, top, wide, PILL, fill=_CARD, stroke=color, radius=PILL / 2))
        parts.append(_text(left + wide / 2, top + 14, band.text, size=11, anchor="middle"))
    return parts


def _line(line: Line, across: bool) -> list[str]:
    """An edge and its arrowhead, for data that flows up or down; ``across``: transposed."""

    def turned(x: float, y: float) -> str:
        return f"{y:.1f},{x:.1f}" if across else f"{x:.1f},{y:.1f}"

    points = [(y, x) for x, y in line.points] if across else line.points
    x, y = points[-1]
    tip = 5.0 if points[-2][1] < y else -5.0
    path = curve([*points[:-1], (x, y - tip) if line.tip else (x, y)], across=across)
    parts = [f'<path d="{path}" fill="none" stroke="{_LINE}" stroke-width="{line.width:g}"/>']
    if line.tip:
        size = 3.4 + 0.6 * line.width
        back = y - tip * 0.35 * size
        corners = f"M{turned(x - size, back)}L{turned(x, y)}L{turned(x + size, back)}Z"
        parts.append(f'<path d="{corners}" fill="{_LINE}"/>')
    return parts


def _frame(frame: Frame) -> str:
    lane = frame.box.kind == "lane"
    return _rect(
        frame.x,
        frame.y,
        frame.width,
        frame.height,
        fill=_INK,
        stroke=_FAINT if lane and frame.box.children else "#cfd6df",
        radius=10,
        extra=f' fill-opacity="{0.012 if lane else 0.04}"'
        + ("" if frame.box.children else ' stroke-dasharray="4 4"'),
    )


def _frame_title(frame: Frame, scene: Scene, numbers: ShownNumbers, across: bool) -> str:
    """The title of an open group, drawn over the edges into it."""
    box = frame.box
    if box.kind == "lane":
        arrow = {"forward": " →" if across else " ↓", "backward": " ←" if across else " ↑"}.get(box.phase, "")
        title = box.label.capitalize() + arrow
        subtitle = shorten(scene.subtitle(box), frame.width - 24, 11.5)
        color = PHASE_COLORS[box.phase]
        return _text(frame.x + 16, frame.y + 25, title, size=14, weight=650, fill=color) + _text(
            frame.x + 16, frame.y + 43, subtitle, size=11.5, fill=_MUTED
        )
    name = name_of(box)
    label = shorten(name, frame.width - 24, 12.5, bold=True)
    facts = module_facts(box)
    room = frame.width - 30 - len(label) * char_width(12.5, bold=True)
    beside = facts.kind if facts is not None and room > len(facts.kind) * char_width(12.5) else ""
    note = numbers.text(box) if numbers.is_note else ""
    if note and room > (len(beside) + len(note) + 3) * char_width(12.5):
        beside = " · ".join(part for part in (beside, note) if part)
    at = frame.x + 14, frame.y + 23
    return _text(*at, label, size=12.5, weight=600, beside=beside, extra=_HALO)


def _sync(frame: Frame, subtitle: str, picture: Arrangement) -> str:
    """A sync point: a barrier across its lane; the ops below it, or to its right, run later."""
    box, x, y, w, h = frame.box, frame.x, frame.y, frame.width, frame.height
    parts = []
    for lane in picture.frames:  # wrapped lanes have one frame per row
        if (
            lane.box is box.parent
            and lane.x <= x < lane.x + lane.width
            and lane.y <= y < lane.y + lane.height
        ):
            start = (
                f"{x + w / 2:.1f},{lane.y + 6:.1f}" if picture.across else f"{lane.x + 6:.1f},{y + h / 2:.1f}"
            )
            run = f"v{lane.height - 12:.1f}" if picture.across else f"h{lane.width - 12:.1f}"
            parts.append(
                f'<path d="M{start}{run}" stroke="#c0352b" stroke-width="2.5" stroke-dasharray="7 4"/>'
            )
    parts.append(_rect(x, y, w, h, fill="#fdecea", stroke="#c0352b"))
    label = shorten(box.label, w - 20, 11.5, bold=True)
    parts.append(_text(x + 11, y + 18, label, size=11.5, fill="#9b2c22", weight=600))
    parts.append(_text(x + 11, y + 33, shorten(subtitle, w - 20, 11), size=11, fill="#9b2c22"))
    return "".join(parts)


def _closed(frame: Frame, scene: Scene, picture: Arrangement, numbers: ShownNumbers) -> str:
    box, x, y, w, h = frame.box, frame.x, frame.y, frame.width, frame.height
    subtitle = scene.subtitle(box)
    parts = []
    if box.kind == "sync":
        return _sync(frame, subtitle, picture)
    if box.kind == "error":
        shapes = error_json(box, subtitle)["through"]
        parts.append(_rect(x, y, w, h, fill="#fdecea", stroke="#b42318"))
        for n, (text, weight) in enumerate(((f"{box.label} failed", 600), (shapes, 400), (subtitle, 400))):
            words = shorten(text, w - 20, 11, bold=weight > 400)
            parts.append(_text(x + 11, y + 18 + 16 * n, words, size=11, fill="#9b2c22", weight=weight))
        return "".join(parts)
    if box.kind in ("input", "output"):
        parts.append(_tensor_card(box, x, y, w, h))
        return "".join([*parts, *_one_row(box, x + 28, y, w - 42, h, subtitle)])
    if box.kind == "op":
        stroke, dash = numbers.outline(box, "#b9c3cd")
        parts.append(_rect(x, y, w, h, fill=_CARD, stroke=stroke, extra=dash))
        parts += _one_row(box, x + 11, y, w - 21, h - 4, numbers.short(box))
        return "".join([*parts, *_bar(numbers, box, x + 10, y + h - 5, w - 22, 3)])
    if is_small_ops(box):
        return "".join(
            [_rect(x, y, w, h, fill=_CARD, stroke="#b9c3cd"), *_one_row(box, x + 11, y, w - 21, h, "")]
        )
    return "".join([*parts, *_module_card(scene, box, x, y, w, h, numbers)])


def _one_row(box: Box, x: float, y: float, room: float, h: float, aside: str) -> list[str]:
    """The name, with further text at the end."""
    mono = box.kind == "op"
    taken = len(aside) * char_width(11) + 8
    label = shorten(box.label, max(room - taken, room * 0.55), 12, mono=mono, bold=not mono)
    left = room - len(label) * char_width(12, mono=mono, bold=not mono) - 6
    base = y + h / 2 + 4.3
    return [
        _text(x, base, label, size=12, mono=mono, weight=400 if mono else 600),
        _text(
            x + room,
            base,
            _fitting(aside, left, aside.partition(" · ")[0]),
            size=11,
            fill=_MUTED,
            anchor="end",
        ),
    ]


def _fitting(text: str, room: float, short: str) -> str:
    """``text``, or ``short`` if there is not enough room."""
    return shorten(short if len(text) * char_width(11) > room else text, max(room, 0), 11)


def _module_card(
    scene: Scene, box: Box, x: float, y: float, w: float, h: float, numbers: ShownNumbers
) -> list[str]:
    """The card of a module: an edge tinted by the kind of layer, name and class, shapes, parameters, bytes,
    and a bar.
    """
    card = scene.card(box)
    edge = 24.0 if h < 40 else 32.0
    badge = f"{box.calls} calls" if box.calls > 1 else f"×{box.repeats}" if box.repeats > 1 else ""
    wide = len(badge) * 6.6 + 14 if badge else 0.0
    parts = [_rect(x + by, y + by, w, h, fill=_CARD, stroke="#cfd6df") for by in (6, 3) if box.repeats > 1]
    stroke, dash = numbers.outline(box, "#cfd6df")
    parts.append(_rect(x, y, w, h, fill=_CARD, stroke=stroke, extra=dash))
    noted = numbers.tint(box)
    tint, opacity = LAYER_TINTS[card["layer"]], ""
    if noted is not None:
        tint, opacity = noted[0], f' fill-opacity="{noted[1]:.2f}"'
    parts.append(_rect(x + 0.5, y + 0.5, edge, h - 1, fill=tint, radius=5.5, extra=opacity))
    icon_at = f"translate({x + edge / 2 - 8:.1f},{y + (h / 2 - 8 if h < 40 else 12):.1f})"
    ink = LAYER_INKS[card["layer"]]
    parts.append(
        f'<path transform="{icon_at}" d="{LAYER_ICONS[card["layer"]]}" fill="none" stroke="{ink}" '
        'stroke-width="1.4" stroke-linecap="round" stroke-linejoin="round"/>'
    )
    left, room = x + edge + 8, w - edge - 18 - (wide + 4 if badge else 0)
    base = y + (h / 2 + 4.5 if h < 40 else h / 2 - 2 if h < 60 else 20)
    name = shorten(box.label, room, 13, bold=True)
    used = len(name) * char_width(13, bold=True) + 6
    facts = module_facts(box)
    kind = facts.kind if facts is not None and room - used > len(facts.kind) * char_width(13) else ""
    parts.append(_text(left, base, name, size=13, weight=600, beside=kind))
    if badge:
        parts.append(_rect(x + w - 10 - wide, base - 13, wide, 17, fill="#e8f0fc", radius=8.5))
        middle = x + w - 10 - wide / 2
        parts.append(_text(middle, base - 1, badge, size=11, weight=600, fill="#1b5fcc", anchor="middle"))
    number = numbers.text(box)
    through = card.get("through", "")
    ops = card.get("params") or scene.subtitle(box).partition(" · ")[0]
    short = [number, through] if numbers.tells(box) else [through, number]
    rows = [short] if h < 60 else [[through], [ops, number]]
    for at, row in enumerate(rows if h >= 40 else ()):
        words = " · ".join(filter(None, row))
        if row is short and row[0] and len(words) * char_width(11) > w - edge - 16:
            words = row[0]  # the number only if it was chosen explicitly: on a small card, the text is small
        words = _fitting(words, w - edge - 16, row[-1])
        parts.append(_text(left, base + 15 + 14 * at, words, size=11, fill=_MUTED))
    return parts + (_bar(numbers, box, left, y + h - 9, w - edge - 20, 4) if h > 60 else [])


def _bar(numbers: ShownNumbers, box: Box, x: float, y: float, width: float, height: float) -> list[str]:
    """The bar of the box's number; bytes are divided by category."""
    parts = [_rect(x, y, width, height, fill=_FAINT, radius=height / 2)]
    at = x
    for kind, share in numbers.bar(box):
        part = min(share * width, x + width - at)
        if part > 0.05:
            parts.append(_rect(at, y, part, height, fill=CATEGORY_COLORS.get(kind, kind), radius=0))
            at += part
    return parts


def _tensor_card(box: Box, x: float, y: float, w: float, h: float) -> str:
    """An external tensor or a result: a rounded box; parameters and buffers have cut corners."""
    role = str(box.key) if box.kind == "input" else "output"
    if role in ("input", "output"):
        card = _rect(x, y, w, h, fill="#ffffff", stroke="#b9c3cd", radius=h / 2)
    else:
        card = (
            f'<path d="M{x + 9:.1f},{y:.1f}h{w - 18:.1f}l9,9v{h - 18:.1f}l-9,9h{18 - w:.1f}l-9,-9'
            f'v{18 - h:.1f}Z" fill="#ffffff" stroke="#b9c3cd"/>'
        )
    shape = {
        "parameter": "M12,10.5h9v9h-9Z",
        "buffer": "M16.5,9l6,6l-6,6l-6,-6Z",
        "optimizer": "M16.5,9.5l6,10h-12Z",
    }.get(role, "M12,15a4.5,4.5 0 1 0 9,0a4.5,4.5 0 1 0 -9,0")
    color = ROLE_COLORS.get(role, _MUTED)
    ink = f'fill="{color}"' if role != "output" else f'fill="none" stroke="{_INK}" stroke-width="1.6"'
    return f'{card}<path transform="translate({x:.1f},{y:.1f})" d="{shape}" {ink}/>'


def _chart(memory: dict[str, Any], top: float, wide: float) -> tuple[list[str], float]:
    """Draw the memory chart and its legend; returns their bottom edge."""
    left, right, tall = MARGIN + 66, wide - MARGIN, 130.0
    parts = [_text(MARGIN, top + 4, "Projected memory", size=13, weight=650)]
    note = f"peak {memory['peakText']} at {memory['peakName']}" if memory["peakName"] else ""
    note += f" · plain eager PyTorch: {memory['eagerText']}"
    parts.append(
        _text(MARGIN + 160, top + 4, shorten(note, wide - 2 * MARGIN - 160, 11.5), size=11.5, fill=_MUTED)
    )
    top += 18 if not memory["pieces"] else 32
    bottom = top + tall
    drawn = memory["points"]
    points = len(drawn["at"])
    near = memory["capacity"] is not None and memory["capacity"] < 2 * memory["peak"]
    most = max(memory["peak"], memory["capacity"] if near else 0, 1) * 1.08
    step = (right - left) / max(points, 1)

    def y_of(nbytes: float) -> float:
        return bottom - nbytes / most * tall

    parts.append(_rect(left, top, right - left, tall, fill="#f6f8fa", radius=0))
    shares = (0, 0.5, 1)
    for share in shares:
        y = y_of(memory["peak"] * share)
        parts.append(f'<path d="M{left:.1f},{y:.1f}H{right:.1f}" stroke="{_FAINT}"/>')
        label = format_bytes(round(memory["peak"] * share))
        parts.append(_text(left - 7, y + 4, label, size=11, fill=_MUTED, anchor="end"))
    parts += _areas(memory, left, step, y_of)
    if memory["peakAt"] is not None and memory["peakAt"] in drawn["at"]:
        x = left + (drawn["at"].index(memory["peakAt"]) + 0.5) * step
        y = y_of(memory["peak"])
        parts.append(f'<path d="M{x:.1f},{top:.1f}V{bottom:.1f}" stroke="{_INK}" stroke-dasharray="3 3"/>')
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{_CARD}" stroke="{_INK}" stroke-width="1.6"/>'
        )
    if near:
        y = y_of(memory["capacity"])
        parts.append(f'<path d="M{left:.1f},{y:.1f}H{right:.1f}" stroke="#c0352b" stroke-width="1.5"/>')
        words = f"{memory['device']}: {memory['capacityText']}"
        halo = f' paint-order="stroke" stroke="{_CARD}" stroke-width="3"'
        parts.append(_text(right - 4, y - 4, words, size=11, fill="#9b2c22", anchor="end", extra=halo))
    parts += _pieces(memory, left, right, top, bottom)
    parts += _phases(memory, left, right, bottom)
    legend, bottom = _legend(memory, left, right, bottom + 40)
    return parts + legend, bottom + 8


def _areas(memory: dict[str, Any], left: float, step: float, y_of: Callable[[float], float]) -> list[str]:
    """The bytes of each category over the run, as a stacked chart."""
    points = len(memory["points"]["at"])
    parts: list[str] = []
    below = [0] * points
    for category, sizes in zip(memory["categories"], memory["points"]["bytes"], strict=True):
        above = [low + size for low, size in zip(below, sizes, strict=True)]
        path = [f"M{left:.1f},{y_of(above[0]):.1f}"]
        path += [f"V{y_of(above[i]):.1f}H{left + (i + 1) * step:.1f}" for i in range(points)]
        path += [f"V{y_of(below[i]):.1f}H{left + i * step:.1f}" for i in reversed(range(points))]
        color = CATEGORY_COLORS.get(category["name"], _MUTED)
        parts.append(f'<path d="{"".join(path)}Z" fill="{color}"/>')
        below = above
    return parts


def _phases(memory: dict[str, Any], left: float, right: float, bottom: float) -> list[str]:
    """The chart's axis: forward, backward, optimizer."""
    parts: list[str] = []
    starts = memory["phases"]
    for (phase, first), following in itertools.zip_longest(starts, starts[1:]):
        last = following[1] if following else memory["count"]
        x0 = left + (right - left) * first / max(memory["count"], 1)
        x1 = left + (right - left) * last / max(memory["count"], 1)
        color = PHASE_COLORS[phase]
        parts.append(_rect(x0, bottom + 3, max(x1 - x0 - 1, 1), 4, fill=color, radius=1))
        if x1 - x0 > max(70, 7 * len(LANE_TITLES[phase])):
            parts.append(
                _text(
                    (x0 + x1) / 2,
                    bottom + 19,
                    LANE_TITLES[phase].lower(),
                    size=11,
                    fill=color,
                    anchor="middle",
                )
            )
    return parts


def _legend(memory: dict[str, Any], left: float, right: float, bottom: float) -> tuple[list[str], float]:
    """The categories with their bytes at the peak, and the position of the last line."""
    parts: list[str] = []
    x = left
    for category in memory["categories"]:
        label = f"{category['label']} {format_bytes(category['peak'])}"
        wide = 16 + len(label) * char_width(11) + 16
        if x + wide > right:
            x, bottom = left, bottom + 18
        color = CATEGORY_COLORS.get(category["name"], _MUTED)
        parts.append(_rect(x, bottom - 9, 10, 10, fill=color, radius=2))
        parts.append(_text(x + 15, bottom, label, size=11, fill=_MUTED))
        x += wide
    return parts, bottom


def _pieces(memory: dict[str, Any], left: float, right: float, top: float, bottom: float) -> list[str]:
    """Markers for the start of each piece of a split run, labeled if there is room."""
    parts = []
    starts = memory["pieces"]
    for (first, name), following in itertools.zip_longest(starts, starts[1:]):
        last = following[0] if following else memory["count"]
        x0 = left + (right - left) * first / max(memory["count"], 1)
        x1 = left + (right - left) * last / max(memory["count"], 1)
        if first:
            parts.append(f'<path d="M{x0:.1f},{top:.1f}V{bottom:.1f}" stroke="{_MUTED}" stroke-width="0.8"/>')
        # In full if there is room, otherwise only the piece: "piece 2, and 6 more like it".
        for text in (name, name.partition(",")[0]):
            if text and len(text) * char_width(11) + 8 < x1 - x0:
                parts.append(_text(x0 + 4, top - 4, text, size=11, fill=_MUTED))
                break
    return parts


def static_bundle(
    graph: Graph,
    plan: PlanLike,
    *,
    title: str = "lazyviz",
    state: str = "pending",
    report: Any = None,
    scene: Scene | None = None,
    theme: str = "light",
) -> dict[str, str]:
    """The separate output that saved notebooks keep: MIME type -> data.

    ``text/html`` is one ``<img>`` element with the picture; a live widget hides it by its id (``static_id``).
    """
    scene = scene or Scene(graph, plan)
    svg = render_svg(graph, plan, title=title, state=state, report=report, scene=scene, theme=theme)
    data = base64.b64encode(svg.encode()).decode()
    alt = _escape(f"{title}: the recorded graph and its projected memory")
    image = (
        f'<img class="{STATIC_CLASS}" id="{STATIC_CLASS}-{uuid.uuid4().hex[:12]}" alt="{alt}" '
        f'style="max-width:100%;height:auto" src="data:image/svg+xml;base64,{data}">'
    )
    return {"text/html": image, "text/plain": render_text(graph, plan, scene=scene)}
