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

from ..graph.ir import Graph, SourceLine
from ..plan.devices import memory_in_use
from ..plan.lifetimes import lifetimes, main_device
from ..plan.units import format_bytes
from .batch import batch_json
from .boxes import Box, chain
from .details import describe, describe_moment, find, source_json
from .scene import PlanLike, Scene, plural

STATIC = Path(__file__).parent.parent / "static"
PROGRESS_INTERVAL = 0.1  # seconds between two progress messages
FIRST_BYTES = 40_000  # about how much JSON the first picture may take, chart not counted
EXPANDED_BOXES = 2000  # boxes that "Expand all" opens at most
MAX_QUERY = 200

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


class Controller(Protocol):
    """What the widget shows and drives: a recorded graph that can be planned and run."""

    @property
    def graph(self) -> Graph: ...
    @property
    def title(self) -> str: ...
    @property
    def state(self) -> str:
        """``pending``, ``running``, ``done``, ``failed`` or ``interrupted``."""

    @property
    def split(self) -> int | str:
        """What ``evaluate`` is to do about the batch: ``"off"``, ``"auto"`` or a number of pieces."""

    @split.setter
    def split(self, split: int | str) -> None: ...

    def plan(self) -> PlanLike: ...

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

    def __init__(self, controller: Controller, *, static_id: str = "") -> None:
        self._controller = controller
        self._plan = controller.plan()  # of the batch as recorded
        self._scene = Scene(controller.graph, self._plan)  # whose plan may be of another size
        self._views = False
        self._cancel = threading.Event()
        self._worker: threading.Thread | None = None
        self._start = threading.Lock()
        self.exception: BaseException | None = None  # of the last run
        super().__init__(
            _esm=_bundle("widget.js"),
            _css=_bundle("widget.css"),
            scene=self._first(),
            state=controller.state,
            summary=self._scene.summary(),
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

    # --- what is sent -------------------------------------------------------------

    def _first(self) -> dict[str, Any]:
        """The first picture: what is open, and of the groups below what fits in a small message."""
        scene = self._scene
        opened = scene.opened()
        groups = [scene.group(box) for box in opened]
        size = sum(_size(group) for group in groups)
        queue = [child for box in opened for child in box.children if child.is_group and child not in opened]
        for box in queue:  # grows while it is read
            group = scene.group(box)
            size += _size(group)
            if size > FIRST_BYTES:
                break
            groups.append(group)
            queue += [child for child in box.children if child.is_group]
        return {
            "title": self._controller.title,
            "root": scene.hierarchy.root.id,
            "opened": [box.id for box in opened],
            "groups": groups,
            "memory": scene.memory() if scene.graph.nodes else None,
            "batch": self._batch() if scene.graph.nodes else None,
            "views": self._views,
        }

    def _batch(self) -> dict[str, Any] | None:
        return batch_json(self._scene, self._plan.batch_size or 0, self._controller.split)

    def _hear(self, _: Any, content: Any, buffers: Any) -> None:
        if not isinstance(content, dict):
            return
        action, id = content.get("action"), content.get("id")
        handler = self._handlers.get(action) if isinstance(action, str) else None
        if handler is None:
            _log.warning("lazyviz: ignored a message with the unknown action %.40r", action)
            return
        handler(self, id if isinstance(id, str) else "")

    def _evaluate(self, _: str) -> None:
        self.run()

    def _cancelled(self, _: str) -> None:
        self.cancel()

    def _open(self, id: str) -> None:
        box = self._scene.hierarchy.boxes.get(id)
        if box is not None and box.is_group:
            self._send_groups([box])

    def _open_all(self, _: str) -> None:
        groups: list[Box] = []
        drawn, note = 0, ""
        queue = [self._scene.hierarchy.root]
        for box in queue:  # grows while it is read
            drawn += len(box.children)
            if drawn > EXPANDED_BOXES and groups:
                note = f"too many boxes to open all: {EXPANDED_BOXES:,} are shown, open others by a click"
                break
            groups.append(box)
            queue += [child for child in box.children if child.is_group]
        self._send_groups(groups, note)

    def _send_groups(self, groups: list[Box], note: str = "") -> None:
        self.send({"kind": "groups", "groups": [self._scene.group(box) for box in groups], "note": note})

    def _select(self, id: str) -> None:
        box = self._scene.hierarchy.boxes.get(id)
        if box is not None:
            self.send({"kind": "details", "details": describe(self._scene, box)})

    def _moment(self, id: str) -> None:
        """What is alive at the position ``id`` of the plan's timeline."""
        if id.isascii() and id.isdigit() and int(id) < len(self._scene.plan.timeline):
            self.send({"kind": "moment", "moment": describe_moment(self._scene, int(id))})

    def _largest(self, _: str) -> None:
        """The largest batch that fits, and the plan that is shown: a page opened later has the first."""
        plan = self._plan
        if plan.batch_size is None:
            return
        most = plan.replan(split=self._controller.split).max_batch_size
        note = ""
        if most is None:
            try:
                plan.replan(2 * plan.batch_size)
            except ValueError as error:
                note = str(error)
        self._show_plan(most=most, fixed=bool(note), note=note)

    def _resize(self, id: str) -> None:
        """Plan for another number of samples."""
        if self._plan.batch_size is not None and re.fullmatch(r"[0-9]{1,13}", id) and int(id):
            self._replan(int(id))

    def _cut(self, id: str) -> None:
        """What Evaluate is to do about the batch: off, auto, or a number of pieces."""
        if self._plan.batch_size is None or not re.fullmatch(r"off|auto|[1-9][0-9]{0,8}", id):
            return
        self._controller.split = id if id in ("off", "auto") else int(id)
        begun = getattr(self._controller, "split_run", None) is not None
        note = "the interrupted run goes on in the pieces that it was begun in" if begun else ""
        self._replan(self._scene.plan.batch_size or 1, note)

    def _replan(self, size: int, note: str = "") -> None:
        """The page waits for the answer: whatever happens, it gets one."""
        try:
            own = size == self._plan.batch_size
            self._scene.plan = self._plan.replan(None if own else size, self._controller.split)
        except ValueError as error:
            note = str(error)
        except Exception as error:
            self._show_plan(note=f"{type(error).__name__}: {error}")
            raise
        self._show_plan(note=note)

    def _show_plan(self, **more: Any) -> None:
        self.send({"kind": "plan", "memory": self._scene.memory(), "batch": self._batch(), **more})

    def _reveal(self, id: str) -> None:
        box = self._scene.hierarchy.boxes.get(id)
        if box is None:
            return
        path = chain(box)
        groups = [self._scene.group(self._scene.hierarchy.boxes[each]) for each in path[:-1]]
        self.send({"kind": "reveal", "groups": groups, "chain": path})

    def _search(self, query: str) -> None:
        hits, total = find(self._scene, query[:MAX_QUERY])
        self.send({"kind": "found", "query": query, "hits": hits, "total": total})

    def _toggle_views(self, _: str) -> None:
        self._views = not self._views
        self._scene = Scene(self._controller.graph, self._scene.plan, views=self._views)
        self.scene = self._first()

    _handlers = {  # noqa: RUF012 (constant)
        "evaluate": _evaluate,
        "cancel": _cancelled,
        "open": _open,
        "open-all": _open_all,
        "select": _select,
        "moment": _moment,
        "largest": _largest,
        "batch-size": _resize,
        "split": _cut,
        "reveal": _reveal,
        "search": _search,
        "views": _toggle_views,
    }

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
            self.summary = self._scene.summary()
            self.state = state

    def _failed_node(self) -> Any:
        return next((node for node in self._controller.graph.nodes if node.state == "failed"), None)

    def _failure(self, error: BaseException) -> dict[str, Any]:
        node = self._failed_node()
        source: SourceLine | None = node.source if node is not None else None
        box = self._scene.hierarchy.box_of[node.index] if node is not None else None
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
            self.summary = self._scene.summary()
            self.state = controller.state


def static_id_of(bundle: dict[str, str]) -> str:
    """The id of the picture in a static bundle, for ``LazyWidget(static_id=...)``."""
    found = re.search(r'\bid="([\w-]+)"', bundle.get("text/html", ""))
    return found.group(1) if found else ""


def _size(group: dict[str, Any]) -> int:
    """About how many bytes of JSON a group is."""
    return 170 * len(group["boxes"]) + 45 * len(group.get("edges", ()))


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
