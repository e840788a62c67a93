"""Saving a graph to files: pictures, and its projected timeline for other tools."""

from __future__ import annotations

import html
import json
import pickle
import shutil
import subprocess
from pathlib import Path
from typing import Any

from ...graph.ir import Graph
from ...plan.plan import Plan
from ..printable_text import visible, visible_in
from ..render.dot import to_dot
from ..render.pdf_and_png import REMEDY, convert
from ..render.publication_figure import Drawing, Figure
from ..render.svg import render_svg, static_bundle
from ..render.text import render_text
from ..scene.boxes import Hierarchy
from ..scene.plan_protocol import PlanLike
from ..scene.scene import Scene
from ..widget.page_state import Controller
from .atomic_write import write_whole
from .memory_viz_snapshot import memory_snapshot
from .model_explorer import model_explorer
from .saved_html_page import interactive_page
from .trace_events import trace_events

DOT_SECONDS = 60.0
FORMATS = ("svg", "html", "dot", "pdf", "png", "json", "perfetto", "chrome", "model-explorer", "pickle")


def save(
    graph: Graph,
    plan: Plan,
    path: str | Path,
    format: str | None = None,
    *,
    eager: bool = False,
    title: str = "lazyviz",
    state: str = "pending",
    dot_seconds: float = DOT_SECONDS,
    pictured: Controller | None = None,
    drawn: Hierarchy | None = None,
    figure: Figure | None = None,
    drawing: Drawing | None = None,
    theme: str = "light",
    by: str = "",
) -> None:
    """Write ``graph`` to ``path`` as ``format``; by default the suffix of ``path`` says which.

    ``svg`` is the static picture; ``html`` is a self-contained page with everything that the widget of
    ``pictured`` shows, except running (without ``pictured``: the static picture and the text); ``dot`` is
    Graphviz's language. ``pdf`` and ``png`` are the static picture, rendered by CairoSVG or an installed
    browser; without either, Graphviz's ``dot`` program lays out all ops within ``dot_seconds`` seconds.
    ``drawing`` and ``theme`` determine how pictures show the graph; by default, boxes show the number ``by``.
    ``perfetto`` and ``chrome`` (and ``json``) are trace events, ``model-explorer`` is that tool's JSON,
    ``pickle`` is PyTorch's memory snapshot, with ``eager`` of the timeline of eager PyTorch instead of
    lazyviz's run. ``drawn``: boxes created earlier.  A ``figure`` is a picture of a part of the graph, for a
    paper: ``svg``, ``pdf``, or ``png``. An existing file is replaced when the new one is complete, and stays
    unchanged on failure.

    Raises:
        OSError: the file cannot be written.
        ValueError: an unknown format.
        RuntimeError: no program that renders ``pdf`` or ``png`` is installed, or it failed or took too long.
    """
    path = Path(path)
    kind = (format or path.suffix.removeprefix(".")).lower()
    made: str | bytes
    if figure is not None and kind not in ("svg", "pdf", "png"):
        what = "title, show, legend, direction, and theme apply only to figures"
        raise ValueError(f"{what} (.svg, .pdf, .png), not to {kind!r}")
    views = drawing is not None and drawing.views
    shown: dict[str, Any] = {"title": title, "state": state, "figure": figure, "drawing": drawing}
    shown["theme"] = theme
    if kind == "svg":
        made = render_svg(graph, plan, scene=Scene(graph, plan, views=views, drawn=drawn, by=by), **shown)
    elif kind == "html" and pictured is not None:
        made = interactive_page(pictured, Scene(graph, plan, drawn=drawn, by=by))
    elif kind == "html":
        made = _page(graph, plan, title, state)
    elif kind == "dot":
        made = to_dot(graph).source
    elif kind in ("pdf", "png"):
        svg = render_svg(graph, plan, scene=Scene(graph, plan, views=views, drawn=drawn, by=by), **shown)
        made = convert(svg, kind) or _laid_out(graph, kind, dot_seconds)
    elif kind in ("json", "perfetto", "chrome"):
        made = json.dumps(visible_in(trace_events(graph, plan, title=title)))
    elif kind == "model-explorer":
        made = json.dumps(visible_in(model_explorer(graph, plan, title=title)))
    elif kind == "pickle":
        made = pickle.dumps(visible_in(memory_snapshot(plan, eager=eager)), protocol=4)
    else:
        raise ValueError(f"unknown format {kind!r}; these formats work: {', '.join(FORMATS)}")
    write_whole(path, made if isinstance(made, bytes) else made.encode())


def _page(graph: Graph, plan: PlanLike, title: str, state: str) -> str:
    image = static_bundle(graph, plan, title=title, state=state)["text/html"]
    text, title = html.escape(render_text(graph, plan)), visible(title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width"><style>'
        "body{font-family:system-ui,sans-serif;max-width:940px;margin:2rem auto;padding:0 1rem;"
        "color-scheme:light dark}pre{overflow-x:auto}</style></head><body>\n"
        f"{image}\n<details><summary>As text</summary><pre>{text}</pre></details>\n</body></html>\n"
    )


def _laid_out(graph: Graph, kind: str, seconds: float) -> bytes:
    program = shutil.which("dot")
    if program is None:
        raise RuntimeError(
            f"saving as {kind} needs a program that is not installed: {REMEDY}; .svg and .html need none"
        )
    try:
        done = subprocess.run(
            [program, f"-T{kind}"],
            input=to_dot(graph).source.encode(),
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"`dot` did not finish {len(graph.nodes):,} ops in {seconds:g} seconds; "
            "save as .svg or .html, which lay out group by group"
        ) from None
    if done.returncode != 0:
        raise RuntimeError(f"`dot` failed: {done.stderr.decode(errors='replace').strip()[:500]}")
    return done.stdout
