"""Helper for pages of the site: embeds a graph's interactive page.

Outside a build (in a notebook of one's own) graphs are written into the current folder.
"""

from __future__ import annotations

import os
from pathlib import Path

from IPython.display import HTML

import lazyviz


def interactive(graph: lazyviz.LazyGraph, name: str, height: int = 640) -> HTML:
    """Save ``graph`` as an interactive page and show it in a frame.

    ``name`` is that of the page's file; ``height`` is in pixels.
    """
    folder = Path(os.environ.get("LAZYVIZ_DOCS_GRAPHS", "."))
    graph.save(folder / f"{name}.html")
    # Pages with cells stand one folder below the site's root, but the first one.
    up = "" if name == "index" else "../"
    return HTML(
        f'<iframe class="lazyviz-page" src="{up}graphs/{name}.html" title="The graph of {name}, interactive"'
        f' loading="lazy" style="height: {height}px"></iframe>'
        f'<p class="lazyviz-open"><a href="{up}graphs/{name}.html">Open it in a page of its own</a></p>'
    )
