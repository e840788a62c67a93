"""Helpers for pages of the site: a graph's interactive page in a frame, and small pictures in lists of pages.

Outside a build (in a notebook of one's own) graphs are written into the current folder.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from IPython.display import HTML

import lazyviz
from lazyviz.view.colors import darkened

ITEM = re.compile(r'<li><p><a class="reference internal" href="(?P<name>\w+)\.html">')


def interactive(graph: lazyviz.LazyGraph, name: str, height: int = 640) -> HTML:
    """Save ``graph`` as an interactive page, and show it in a frame.

    A small picture of it is saved as well, for :func:`with_pictures`.

    ``name`` is that of the page's file; ``height`` is in pixels.
    """
    folder = Path(os.environ.get("LAZYVIZ_DOCS_GRAPHS", "."))
    graph.save(folder / f"{name}.html")
    light = folder / f"{name}.svg"
    graph.save(light, show=("forward", "backward"), legend=False, theme="light")
    (folder / f"{name}-dark.svg").write_text(darkened(light.read_text(encoding="utf-8")), encoding="utf-8")
    # Pages with cells stand one folder below the site's root, but the first one.
    up = "" if name == "index" else "../"
    return HTML(
        f'<iframe class="lazyviz-page" src="{up}graphs/{name}.html" title="The graph of {name}, interactive"'
        f' loading="lazy" style="height: {height}px"></iframe>'
        f'<p class="lazyviz-open"><a href="{up}graphs/{name}.html">Open it in a page of its own</a></p>'
    )


def with_pictures(body: str, graphs: Path) -> str:
    """The body of a page with a list of pages, each with the picture of its graph, if there is one."""

    def pictured(found: re.Match[str]) -> str:
        name = found["name"]
        if not (graphs / f"{name}.svg").exists():  # `make test` executes a few of the pages
            return found[0]
        return found[0] + "".join(
            f'<img class="lazyviz-{theme}" src="../graphs/{name}{suffix}.svg" alt="" loading="lazy">'
            for theme, suffix in (("on-light", ""), ("on-dark", "-dark"))
        )

    listed = ITEM.sub(pictured, body)
    return listed.replace("<ul", '<ul id="lazyviz-gallery"', 1) if listed != body else body
