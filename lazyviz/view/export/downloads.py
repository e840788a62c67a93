"""File downloads: files sent to the page in chunks that a notebook server accepts."""

from __future__ import annotations

import base64
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..scene.scene import Scene
from .save import save

KINDS = {"dot": "text/vnd.graphviz", "pdf": "application/pdf", "html": "text/html"}
# Characters of base64 per message; a multiple of 4, so that each piece decodes to whole bytes.
PIECE = 750_000


def send_file(controller: Any, scene: Scene, kind: str, send: Callable[[dict[str, Any]], None]) -> None:
    """Create the file on a separate thread and send it; an unknown ``kind`` is ignored."""
    if kind not in KINDS:
        return

    def work() -> None:
        for message in file_messages(controller, scene, kind):
            send(message)

    threading.Thread(target=work, name="lazyviz-save", daemon=True).start()


def file_messages(controller: Any, scene: Scene, kind: str) -> Iterator[dict[str, Any]]:
    """The file of ``kind`` as messages; the last one has ``more`` false, or ``error`` as text."""
    head = {"kind": "file", "format": kind, "type": KINDS[kind]}
    try:
        with tempfile.TemporaryDirectory(prefix="lazyviz-") as folder:
            path = Path(folder, f"graph.{kind}")
            save(
                controller.graph,
                scene.plan,  # type: ignore[arg-type]
                path,
                title=controller.title,
                state=controller.state,
                pictured=controller,
                drawn=scene.hierarchy,
                drawing=controller.drawing,
            )
            text = base64.b64encode(path.read_bytes()).decode()
    except Exception as error:  # any error, because the page waits for an answer
        yield {**head, "data": "", "more": False, "error": f"{error}"}
        return
    for start in range(0, len(text), PIECE):
        yield {**head, "data": text[start : start + PIECE], "more": start + PIECE < len(text), "error": ""}
