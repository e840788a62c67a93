"""Lookups for the page: code lines, search hits, table rows.

A part of :class:`lazyviz.view.widget.page_messages.Answers`, which documents the protocol.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ...graph.ir import Graph
from ..scene.boxes import Box, around
from ..scene.scene import Scene
from ..scene.time_track import ASKED, projected
from .search import MOST_LIT, Index
from .source_view import Code
from .table import Request, Table

MAX_QUERY = 200
CODE_CHARS = 20_000  # bytes of a cell's code in the first picture; longer code is requested separately


class Lookups:
    """Answers lookups for one graph; ``scene`` returns the picture that is currently shown."""

    def __init__(
        self, graph: Graph, code: str, scene: Callable[[], Scene], send: Callable[[dict[str, Any]], None]
    ) -> None:
        self._scene = scene
        self._send = send
        self._code = Code(graph, code)
        # Created on first use, because most pictures are never searched.
        self._known: tuple[Scene, Index] | None = None
        self._listed: tuple[Scene, Table] | None = None

    def answer(self, action: str, id: str) -> bool:
        """Answer one request; False if the action is unknown."""
        handler = self._handlers.get(action)
        if handler is not None:
            handler(self, id)
        return handler is not None

    def first_code(self) -> dict[str, Any] | None:
        """The code that is sent with the first picture; ``None`` if it is long."""
        return self._code_json() if self._code.size <= CODE_CHARS else None

    def lines_of(self, box: Box) -> list[str]:
        """Ids of the source lines of a box's ops."""
        return self._code.ids_of(self._scene().hierarchy.nodes_in(box))

    def index(self) -> Index:
        scene = self._scene()
        if self._known is None or self._known[0] is not scene:
            self._known = scene, Index(scene)
        return self._known[1]

    def _code_json(self) -> dict[str, Any]:
        return {"sections": self._code.text_json(), "facts": self._facts_json()}

    def _facts_json(self) -> dict[str, Any]:
        scene = self._scene()
        return self._code.facts_json(scene.plan, projected(scene) if ASKED in scene.numbers.asked else None)

    def _lines(self, id: str) -> None:
        """Send the code; with "facts", only the numbers of its lines, which change with plan and run."""
        code = {"facts": self._facts_json()} if id == "facts" else self._code_json()
        self._send({"kind": "code", "code": code})

    def _line(self, id: str) -> None:
        key = self._code.key(id)
        if key is not None:
            details, boxes = self._code.describe(self._scene(), key)
            self._send({"kind": "line", "line": id, "details": details, "lit": around(boxes, MOST_LIT)})

    def _search(self, query: str) -> None:
        self._send({"kind": "found", **self.index().page(query[:MAX_QUERY])})

    def _search_on(self, id: str) -> None:
        """Send a further page of hits: ``"50 relu"`` requests hits from number 50 on."""
        start, _, query = id.partition(" ")
        if re.fullmatch(r"[0-9]{1,9}", start):
            self._send({"kind": "found", **self.index().page(query[:MAX_QUERY], int(start))})

    def _table(self, id: str) -> None:
        scene = self._scene()
        if self._listed is None or self._listed[0] is not scene:
            self._listed = scene, Table(scene, self._code, self.index)
        request = Request.parse(id)
        if request is not None:
            self._send({"kind": "table", "table": self._listed[1].page(request)})

    _handlers = {  # noqa: RUF012 (constant)
        "code": _lines,
        "line": _line,
        "search": _search,
        "search-on": _search_on,
        "table": _table,
    }
