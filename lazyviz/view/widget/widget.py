"""The anywidget widget: sends groups when they are opened, and runs the graph on request.

The page sends messages ``{"action": name, "id": id}``; everything else in them is ignored, and traits that it
sets are reverted.  It receives the first picture and the state as traits, and groups, details, and search
results as messages, so that neither a page nor a saved notebook ever contains the whole graph.  The code for
interactions is sent when a pointer or the focus reaches the picture.
:mod:`lazyviz.view.widget.run_thread_and_displays` runs the graph.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import anywidget
import traitlets

from ...graph.ir import Node
from ..export.downloads import send_file
from ..printable_text import visible_in
from ..scene.scene import Scene
from .other_graphs import comparison_json, new_token, others_json
from .page_messages import Answers
from .page_state import Controller, bundle, first_traits, run_traits
from .run_settings import choose, nodes_up_to
from .run_thread_and_displays import running_of

MOST_OPEN = 64
"""Maximum number of open widgets; ipywidgets keeps each one, and thereby its graph, until it is closed."""
LONGEST_ID = 10_000  # maximum characters of a message's id

_open: dict[int, LazyWidget] = {}  # by id, least recently used first
# Reentrant: the garbage collector may close a widget while another one holds the lock.
_lock = threading.RLock()

_log = logging.getLogger(__name__)


def _shown() -> list[LazyWidget]:
    with _lock:
        return list(_open.values())


def _with_state(box: dict[str, Any], state: Sequence[Any] | None) -> dict[str, Any]:
    """A copy of ``box`` with this run state; ``box`` itself if ``None``."""
    return box if state is None else box | dict(zip(("state", "seconds", "alarm", "share"), state))


class LazyWidget(anywidget.AnyWidget):
    """The interactive picture of one recorded graph.

    Args:
        controller: the graph with its plan and state, and methods to run it.
        static_id: id of the ``<img>`` element in the previous output, hidden while the widget is live.
        scene: the existing scene of the graph and its plan, if there is one.

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
    choices = traitlets.Dict().tag(sync=True)
    findings: Any = traitlets.List().tag(sync=True)
    error: Any = traitlets.Dict(allow_none=True, default_value=None).tag(sync=True)
    static_id = traitlets.Unicode("").tag(sync=True)

    def __init__(self, controller: Controller, *, static_id: str = "", scene: Scene | None = None) -> None:
        self._controller = controller
        self._answers = self._answers_for(scene)
        self._running = running_of(controller)
        self.token = new_token()
        super().__init__(
            _esm=bundle("widget.js"),
            _css=bundle("widget.css"),
            static_id=static_id,
            **first_traits(controller, self._answers),
        )
        self.on_msg(self._hear)
        self._running.follow(self)
        self._used()

    @property
    def pictured(self) -> Controller:
        return self._controller

    @property
    def plans(self) -> tuple[Any, Any]:
        """The plan for the recorded batch and device, and the shown plan."""
        return self._answers.plans

    @property
    def drawn(self) -> Scene:
        """The picture for the shown plan."""
        return self._answers.scene

    def _used(self) -> None:
        """Mark this widget as used, and close the least recently used ones if too many are open.

        Their outputs show the static picture, and displaying a graph again creates a new widget.
        """
        with _lock:
            _open.pop(id(self), None)
            _open[id(self)] = self
            spare = [widget for widget in _open.values() if widget is not self and widget.state != "running"]
            old = spare[: max(len(_open) - MOST_OPEN, 0)]
        for widget in old:
            widget.close()

    def set_state(self, sync_data: Any) -> None:
        """Revert traits that the page sets, because it may only send requests."""
        self.send_state([name for name in self.keys if name in sync_data])

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """Only the widget: without a front end that supports it, the picture in the previous output is
        complete.
        """
        self._used()
        self._catch_up()
        bundle = super()._repr_mimebundle_(**options)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        if data is not None and "text/plain" in data:
            data["text/plain"] = ""
        return bundle

    def send(self, content: Any, buffers: Any = None) -> None:
        super().send(visible_in(content), buffers)

    def get_state(self, *arguments: Any, **options: Any) -> Any:
        return visible_in(super().get_state(*arguments, **options))

    def _answers_for(self, scene: Scene | None) -> Answers:
        return Answers(self._controller, lambda message: self.send(message), self._redraw, scene)

    def _redraw(self) -> None:
        self.scene = self._answers.first_picture()

    def _catch_up(self) -> None:
        """Redraw the graph if an open block has recorded more ops since it was drawn."""
        if not self._answers.is_complete:
            self._controller.shown_plans = None  # they are plans of the part that was drawn
            self._answers = self._answers_for(None)
            self._redraw()

    def _hear(self, _: Any, content: Any, buffers: Any) -> None:
        action, id = (content.get("action"), content.get("id")) if isinstance(content, dict) else (None, None)
        if not isinstance(action, str) or (isinstance(id, str) and len(id) > LONGEST_ID):
            return
        self._used()
        self._catch_up()
        if self._orders(action, id if isinstance(id, str) else ""):
            return
        if not self._answers.answer(action, id if isinstance(id, str) else ""):
            _log.warning("lazyviz: ignored a message with the unknown action %.40r", action)

    # --- running ------------------------------------------------------------------

    def _orders(self, action: str, id: str) -> bool:
        """Handle an ``action`` that concerns running; ``False`` for other actions."""
        if action == "evaluate":
            self.run()
        elif action == "evaluate-to":
            if nodes := nodes_up_to(self._answers.scene, id):
                self.run(nodes)
        elif action == "cancel":
            self.cancel()
        elif action in ("backend", "summaries"):
            if note := choose(self._controller, action, id):
                self.send({"kind": "refused", "note": note})
        elif action == "deferred-part":
            self.send({"kind": "deferred-part", "code": bundle("deferred.js")})
        elif action == "graphs":
            self.send({**others_json(self, _shown()), "token": self.token})
        elif action == "compare":
            self.send(comparison_json(self, id, _shown()))
        elif action == "export":
            send_file(self._controller, self._answers.scene, id, lambda message: self.send(message))
        else:
            return False
        return True

    def run(self, nodes: Sequence[Node] | None = None) -> threading.Thread:
        """Evaluate the pending ops, or those that ``nodes`` need, on a worker thread, which is returned.

        If a worker is already running, it is returned.
        """
        return self._running.start(nodes)

    def cancel(self) -> None:
        """Request a stop of the run after the current op."""
        self._running.cancel()

    @property
    def exception(self) -> BaseException | None:
        """The exception of the last run, if any."""
        return self._running.exception

    @property
    def _worker(self) -> threading.Thread | None:
        return self._running.worker

    def run_changed(self) -> None:
        """Update the page after a run has started or ended, or a run option has changed."""
        if not self._controller.is_recording:
            self._catch_up()
        running, answers = self._running, self._answers
        state = running.state
        if state == "running":  # the run is about to begin, so nothing else is computed here
            with self.hold_sync():
                self.progress = self.error = None
                self.report, self.state = "", state
            return
        self._send_states(look=True)
        with self.hold_sync():
            self.progress = None
            for name, value in run_traits(self._controller, answers.scene).items():
                setattr(self, name, value)
        answers.follow(self.scene)

    def run_goes_on(self, ended: Sequence[Node], at_hand: Node | None) -> None:
        """Update the page during a run: the nodes in ``ended`` have run since the last call."""
        self.progress = self._running.progress
        self._answers.scene.states.follow(ended, at_hand)
        self._send_states()

    def _send_states(self, *, look: bool = False) -> None:
        states = self._answers.scene.states
        if look:
            states.look()
        if boxes := states.changes(self._answers.given):
            self.send({"kind": "states", "boxes": boxes})
            self._answers.behind = True
            # A page that is displayed again later begins with the first picture, which must not have old
            # states. Boxes are replaced, because the main thread may be sending them meanwhile.
            first = self.scene
            first["groups"] = [
                {**group, "boxes": [_with_state(box, boxes.get(box["id"])) for box in group["boxes"]]}
                for group in first["groups"]
            ]

    def close(self) -> None:
        with _lock:
            _open.pop(id(self), None)
        if "_running" in vars(self):  # else the constructor was interrupted
            self._running.leave(self)
        if self.comm is not None:
            self.layout.close()  # a separate widget, which ipywidgets would keep
        super().close()
