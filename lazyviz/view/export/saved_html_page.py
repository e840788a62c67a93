"""Saved page: a self-contained HTML file with the interactive widget and all its data.

Every request that needs no kernel is answered in advance by a widget in this process. The answers are stored
as parts of gzipped JSON in base64; ``js/src/saved-page/page.ts`` decodes a part on first use. A content
security policy prevents the page from loading anything else.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...process.gc_pause import paused
from ..printable_text import visible, visible_json
from ..render.svg import static_bundle
from ..scene.box_numbers import COUNTED
from ..scene.boxes import Box
from ..scene.scene import Scene
from ..widget.page_messages import Answers
from ..widget.page_state import Controller, bundle, first_traits
from ..widget.search import Index

PART = 500  # ids per part
MOMENTS = 1000  # positions of the timeline with a stored live set, for a timeline up to `LONG`
LONG = 20_000
MOMENTS_PART = 50
# Number of boxes with details, largest groups first; details of all boxes would take minutes and megabytes.
DETAILS = 25_000
# Requests of the page, and how they are answered without Python.
OFFLINE = {
    "deferred-part": "in the page's own script",
    "open": "every group",
    "open-all": "once",
    "select": "every box, as far as there is room",
    "reveal": "from the groups",
    "moment": f"up to {MOMENTS} positions",
    "code": "once",
    "line": "every line with ops",
    "search": "from the index",
    "search-on": "from the index",
    "numbers": "with every box",
    "life": "as the details tell it",
    "track": "once",
}
# Requests that are not answered, and why; their controls are hidden (`HIDDEN`).
NEEDS_PYTHON = {
    "evaluate": "nothing can be run without the notebook",
    "evaluate-to": "likewise",
    "backend": "likewise",
    "summaries": "values are looked at while they are computed",
    "cancel": "nothing runs",
    "summarize": "values are in the notebook",
    "views": "another picture of the whole graph",
    "batch-size": "each size is planned in Python",
    "largest": "as are all sizes that fit",
    "split": "as are pieces of the batch",
    "device": "and devices",
    "shown": "the plan that is shown never changes",
    "graphs": "other graphs are in the notebook",
    "compare": "likewise",
    "drawing": "nothing is saved from here",
    "export": "other files are written in Python",
    "table": "later",
    "alive": "bars tell the peak",
    "range": "the chart zooms into the points that it has",
}
HIDDEN = (
    "evaluate",
    "evaluate-to",
    "cancel",
    "backend",
    "summaries",
    "summarize",
    "views",
    "device",
    "graph",
    "table",
)
NOTE = "Saved page: running, and plans for other batch sizes or devices, need the notebook."
STYLE = """
:root{color-scheme:light dark}
body{margin:0;padding:12px;font:13px/1.5 system-ui,sans-serif;background:Canvas;color:CanvasText}
#lazyviz>img{max-width:100%;height:auto}
#lazyviz .lazyviz{height:min(900px,100vh - 76px)}
footer{margin:8px 4px;opacity:.8}
@media print{body{padding:0}.lz-button-row,.lz-zoom,footer{display:none!important}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""


@paused()
def interactive_page(controller: Controller, scene: Scene) -> str:
    """The HTML page of a recorded graph in its current state, drawn as in ``scene``.  Runs nothing.

    Raises:
        RuntimeError: the JavaScript bundle is missing; the message says how to build it.
    """
    script, style = bundle("page.js"), bundle("widget.css")
    messages: list[dict[str, Any]] = []
    answers = Answers(controller, messages.append, lambda: None, scene)
    shown = answers.scene
    shown.numbers.asked |= set(COUNTED)  # boxes of the page show these numbers from the start

    def ask(action: str, id: str = "") -> list[dict[str, Any]]:
        messages.clear()
        answers.answer(action, id)
        return list(messages)

    parts = dict(_parts(shown, first_traits(controller, answers), ask))
    title = html.escape(visible(controller.title))
    described = html.escape(visible(f"{controller.title}: {shown.summary()}"))
    fallback = static_bundle(
        controller.graph, shown.plan, title=controller.title, state=controller.state, scene=shown
    )["text/html"]
    hidden = ",".join([*(f'[data-action="{action}"]' for action in HIDDEN), "[data-python]"])
    # The text of a <script> element ends at the next "</script", and "<!--" changes how that is parsed.
    script = script.replace("</script", "<\\/script").replace("<!--", "<\\!--")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; "
    policy += "style-src 'unsafe-inline'; img-src data: blob:"
    data = "\n".join(
        f'<script type="text/plain" data-part="{name}">{text}</script>' for name, text in parts.items()
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="description" content="{described}">\n'
        '<meta name="viewport" content="width=device-width"><meta name="generator" content="lazyviz">\n'
        f"<style>{STYLE}{style}{hidden},.lz-batch,.lz-run-row{{display:none!important}}</style></head><body>\n"
        f'<main id="lazyviz">{fallback}</main>\n<footer>{html.escape(NOTE)}</footer>\n'
        f"{data}\n<script>{script}</script>\n</body></html>\n"
    )


def _parts(scene: Scene, traits: Mapping[str, Any], ask: Any) -> Iterator[tuple[str, str]]:
    """The data of the page: names of parts, and their text."""
    boxes = sorted(scene.hierarchy.boxes.values(), key=lambda box: (box.id[0], int(box.id[1:])))
    groups = [box for box in boxes if box.is_group]
    for name, found in _by_id("open", groups, ask):
        yield name, _packed(found)
    told_of = set(sorted(boxes, key=lambda box: -box.ops)[:DETAILS])
    for name, found in _by_id("select", [box for box in boxes if box in told_of], ask):
        yield name, _packed(found)
    count = len(scene.plan.timeline)
    moments = sorted({*_spread(count, MOMENTS * LONG // max(count, LONG)), *_told(traits)})
    for number, first in enumerate(range(0, len(moments), MOMENTS_PART)):
        answers = {str(at): ask("moment", str(at)) for at in moments[first : first + MOMENTS_PART]}
        yield f"moment-{number}", _packed(answers)
    yield "search", _packed(_search(scene))
    yield "parents", _packed({box.id: box.parent.id for box in boxes if box.parent and not box.is_group})
    track = ask("track")
    code = ask("code")
    lines = code[0]["code"]["facts"]["lines"] if code else ()
    yield "line-0", _packed({id: ask("line", id) for id in lines})
    start = {
        "traits": traits,
        "parents": {box.id: box.parent.id for box in groups if box.parent is not None},
        "size": PART,
        "moments": moments,
        "momentsSize": MOMENTS_PART,
        "once": {
            "open-all": {"": ask("open-all")},
            "code": {"": code, "facts": ask("code", "facts")},
            "track": {"": track},
        },
    }
    yield "start", _packed(start)


def _by_id(action: str, boxes: Iterable[Box], ask: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Answers about each of ``boxes``, in parts of consecutive ids."""
    part = ""
    found: dict[str, Any] = {}
    for box in boxes:
        name = f"{action}-{box.id[0]}{int(box.id[1:]) // PART}"
        if name != part:
            if found:
                yield part, found
            part, found = name, {}
        found[box.id] = ask(action, box.id)
    if found:
        yield part, found


def _spread(count: int, most: int) -> Iterable[int]:
    return range(count) if count <= most else {at * (count - 1) // (most - 1) for at in range(most)}


def _told(traits: Mapping[str, Any]) -> list[int]:
    """Positions in the initial chart: its points, and the peak."""
    memory = (traits.get("scene") or {}).get("memory")
    points = [*memory["points"]["at"], memory["peakAt"]] if memory else []
    return [at for at in points if at is not None]


def _search(scene: Scene) -> dict[str, Any]:
    """The index of a search, see ``js/src/saved-page/offline-search.ts``."""
    index = Index(scene)
    at = {box.id: place for place, box in enumerate(index.boxes)}
    texts: dict[str, int] = {}
    chains: dict[str, int] = {}
    above, labels, subs = [], [], []
    classes = [texts.setdefault(name, len(texts)) for name in index.classes]
    for place in range(len(index.boxes)):
        hit = index.hit(place)
        above.append(chains.setdefault(" ".join(hit["chain"][:-1]), len(chains)))
        labels.append(texts.setdefault(hit["label"], len(texts)))
        subs.append(texts.setdefault(hit["sub"], len(texts)))
    return {
        "ids": [box.id for box in index.boxes],
        "parents": [at.get(box.parent.id, -1) if box.parent is not None else -1 for box in index.boxes],
        "chains": list(chains),
        "above": above,
        "texts": list(texts),
        "labels": labels,
        "subs": subs,
        "classes": classes,
        **index.as_json(),
    }


def _packed(value: Any) -> str:
    text = visible_json(value, separators=(",", ":"), default=str)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()
