"""The widget, Python's side: sends groups as they are opened, runs the graph when asked.

The page sends messages ``{"action": name, "id": id}``; everything else in them is ignored.
It is sent the first picture and the state as traits, and groups, details and search hits as
messages, so that neither a page nor a saved notebook ever holds the whole graph.

Evaluate starts one worker thread and returns, so that the kernel goes on hearing Cancel.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import anywidget
import traitlets

from ..graph.ir import SourceLine
from ..plan.devices import memory_in_use
from ..plan.lifetimes import lifetimes, main_device
from ..plan.units import format_bytes
from .answers import Answers, Pictured
from .boxes import chain
from .details import source_json
from .scene import Scene, plural

STATIC = Path(__file__).parent.parent / "static"
PROGRESS_INTERVAL = 0.1  # seconds between two progress messages

_log = logging.getLogger(__name__)


class ProgressLike(Protocol):
    """Where a run is: ``done`` of ``total`` ops after ``seconds``, now at ``label``, and what it holds.

    In pieces, also at which of them, from 1; 0 in what runs once.
    """

    done: int
    total: int
    seconds: float
    label: str
    allocated_bytes: int
    piece: int
    pieces: int


class Controller(Pictured, Protocol):
    """What the widget shows and drives: a recorded graph that can be planned and run."""

    @property
    def state(self) -> str:
        """``pending``, ``running``, ``done``, ``failed`` or ``interrupted``."""

    def evaluate(
        self, *, progress: Callable[[Any], None] | None = None, cancel: threading.Event | None = None
    ) -> Any:
        """Run what is pending; the report has ops_run, seconds, peak_bytes, backend and pieces."""

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called, on whatever thread, when the state changes."""


@functools.cache
def _bundle(name: str) -> str:
    path = STATIC / name
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RuntimeError(
            f"lazyviz/static/{name} is missing: the widget's JavaScript has not been built. In a source "
            "checkout run `pip install -e .` again, or `npm --prefix js ci && npm --prefix js run build`."
        ) from None


class LazyWidget(anywidget.AnyWidget):
    """The interactive picture of one recorded graph.

    Args:
        controller: the graph with its plan, its state and the means to run it.
        static_id: id of the ``<img>`` in the output before this one, hidden while this is live.
        scene: of the graph under its plan, where there is one already.

    Raises:
        RuntimeError: the JavaScript bundle is missing; the message says how to build it.
    """

    _esm = traitlets.Unicode().tag(sync=True)
    _css = traitlets.Unicode().tag(sync=True)
    scene = traitlets.Dict().tag(sync=True)
    state = traitlets.Unicode("pending").tag(sync=True)
    summary = traitlets.Unicode("").tag(sync=True)
    progress: Any = traitlets.Dict(allow_none=True, default_value=None).tag(sync=True)
    report = traitlets.Unicode("").tag(sync=True)
    error: Any = traitlets.Dict(allow_none=True, default_value=None).tag(sync=True)
    static_id = traitlets.Unicode("").tag(sync=True)

    def __init__(self, controller: Controller, *, static_id: str = "", scene: Scene | None = None) -> None:
        self._controller = controller
        self._answers = Answers(controller, lambda message: self.send(message), self._redraw, scene)
        self._cancel = threading.Event()
        self._worker: threading.Thread | None = None
        self._start = threading.Lock()
        self.exception: BaseException | None = None  # of the last run
        super().__init__(
            _esm=_bundle("widget.js"),
            _css=_bundle("widget.css"),
            scene=self._answers.first_picture(),
            state=controller.state,
            summary=self._answers.scene.summary(),
            report=_report_text(controller),
            static_id=static_id,
        )
        self.on_msg(self._hear)
        controller.subscribe(self._changed)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """The widget alone: where it cannot live, the picture in the output before it says it all."""
        bundle = super()._repr_mimebundle_(**options)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        if data is not None and "text/plain" in data:
            data["text/plain"] = ""
        return bundle

    def _redraw(self) -> None:
        self.scene = self._answers.first_picture()

    def _hear(self, _: Any, content: Any, buffers: Any) -> None:
        if not isinstance(content, dict):
            return
        action, id = str(content.get("action")), content.get("id")
        if action == "evaluate":
            self.run()
        elif action == "cancel":
            self.cancel()
        elif not self._answers.answer(action, id if isinstance(id, str) else ""):
            _log.warning("lazyviz: ignored a message with the unknown action %.40r", action)

    # --- running ------------------------------------------------------------------

    def run(self) -> threading.Thread:
        """Evaluate what is pending on a worker thread; the one that runs already, if there is one."""
        with self._start:
            if self._worker is not None and self._worker.is_alive():
                return self._worker
            self._cancel.clear()
            self.exception = None
            with self.hold_sync():
                self.error = None
                self.progress = None
                self.state = "running"
            # The worker sees the caller's context (autocast, output routing) as a plain call would.
            context = contextvars.copy_context()
            self._worker = threading.Thread(
                target=context.run, args=(self._work,), name="lazyviz-evaluate", daemon=True
            )
            self._worker.start()
            return self._worker

    def cancel(self) -> None:
        """Ask the run to stop after the op that is running."""
        self._cancel.set()

    def _work(self) -> None:
        last = 0.0
        device = main_device(lifetimes(self._controller.graph))

        def show(progress: ProgressLike) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= PROGRESS_INTERVAL:
                last = now
                self.progress = {
                    "done": progress.done,
                    "total": progress.total,
                    "seconds": progress.seconds,
                    "label": progress.label,
                    "memory": _memory_text(progress.allocated_bytes, in_use()),
                    "piece": progress.piece,
                    "pieces": progress.pieces,
                }

        report: Any = None
        try:
            with memory_in_use(device) as in_use:
                report = self._controller.evaluate(progress=show, cancel=self._cancel)
        except BaseException as error:
            # Everything is shown in the widget; a thread has nobody to raise to.
            self.exception = error
        self._finish(report)

    def _finish(self, report: Any) -> None:
        error = self.exception
        pending = any(node.state != "done" for node in self._controller.graph.nodes)
        stopped = self._cancel.is_set() and pending
        if isinstance(error, KeyboardInterrupt) or (stopped and not self._failed_node()):
            state = "interrupted"
        elif error is not None:
            state = "failed"
        else:
            state = self._controller.state
        with self.hold_sync():
            if error is not None and state == "failed":
                self.error = self._failure(error)
            self.report = _report_text(self._controller, report)
            self.summary = self._answers.scene.summary()
            self.state = state

    def _failed_node(self) -> Any:
        return next((node for node in self._controller.graph.nodes if node.state == "failed"), None)

    def _failure(self, error: BaseException) -> dict[str, Any]:
        node = self._failed_node()
        source: SourceLine | None = node.source if node is not None else None
        box = self._answers.scene.hierarchy.box_of[node.index] if node is not None else None
        notes = [str(note) for note in getattr(error, "__notes__", ())]
        message = "\n".join([f"{type(error).__name__}: {error}".rstrip(": "), *notes])
        return {
            "message": message,
            "source": source_json(source),
            "chain": chain(box) if box is not None else [],
        }

    def _changed(self) -> None:
        """The state changed elsewhere: a sync point ran the graph, or ``evaluate()`` was called."""
        if self._worker is not None and self._worker.is_alive():
            return  # the worker reports by itself
        controller = self._controller
        error = getattr(controller, "error", None)
        with self.hold_sync():
            if controller.state == "failed" and isinstance(error, BaseException):
                self.error = self._failure(error)
            elif controller.state in ("running", "done"):
                self.error = None
            self.report = _report_text(controller)
            self.summary = self._answers.scene.summary()
            self.state = controller.state


def static_id_of(bundle: dict[str, str]) -> str:
    """The id of the picture in a static bundle, for ``LazyWidget(static_id=...)``."""
    found = re.search(r'\bid="([\w-]+)"', bundle.get("text/html", ""))
    return found.group(1) if found else ""


def _memory_text(held: int, in_use: tuple[int, int] | None) -> str:
    """What the run holds now, and the whole device with all its processes."""
    text = f"{format_bytes(held)} held"
    return (
        text if in_use is None else f"{text}, {format_bytes(in_use[0])} of {format_bytes(in_use[1])} in use"
    )


def _report_text(controller: Controller, report: Any = None) -> str:
    """What the last run did; while ops are pending that was a sync point's part, which says little."""
    report = report if report is not None else getattr(controller, "report", None)
    if report is None or controller.state == "pending":
        return ""
    text = f"ran {plural(report.ops_run, 'op')} in {report.seconds:.3g} s"
    if report.peak_bytes is not None:
        text += f", measured peak {format_bytes(report.peak_bytes)}"
        if comparison := getattr(report, "comparison", ""):
            text += f" ({comparison})"
    if getattr(report, "pieces", 1) > 1:
        text += f", in {report.pieces} pieces"
    backend = getattr(report, "backend", "eager")
    return text if backend == "eager" else f"{text}, with {backend}"
