"""Page state: the initial contents of a live or saved page."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Protocol

from ...process.install_paths import PACKAGE
from ..scene.scene import Scene
from .page_messages import Answers, Pictured
from .run_settings import choices_json, failure_json, findings_json, report_text
from .run_thread_and_displays import Runnable, running_of

STATIC = Path(PACKAGE) / "static"


class Controller(Pictured, Runnable, Protocol):
    """The graph that a widget shows and controls: it can be planned and run."""

    @property
    def is_recording(self) -> bool: ...


@functools.cache
def bundle(name: str) -> str:
    """One of the built files, ``"widget.js"``.  ``RuntimeError`` says how to build them."""
    path = STATIC / name
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RuntimeError(
            f"lazyviz/static/{name} is missing: the widget's JavaScript has not been built. In a source "
            "checkout run `pip install -e .` again, or `npm --prefix js ci && npm --prefix js run build`."
        ) from None


SHOWN = (
    "failed",
    "pending",
    "done",
)  # states in which an error is shown; that of a recording also after a run


def run_traits(controller: Controller, scene: Scene) -> dict[str, Any]:
    """The traits that describe runs and run options, by name."""
    running = running_of(controller)
    return {
        "state": running.state,
        "summary": scene.summary(),
        "report": report_text(controller, running),
        "choices": choices_json(controller),
        "findings": findings_json(controller.nonfinite, scene),
        "error": failure_json(running, scene) if running.state in SHOWN else None,
    }


def first_traits(controller: Controller, answers: Answers) -> dict[str, Any]:
    """The traits with the initial contents of a page, by name."""
    return {"scene": answers.first_picture(), **run_traits(controller, answers.scene)}
