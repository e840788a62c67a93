"""The anywidget widget: sends groups when they are opened, and runs the graph on request.

The page sends messages ``{"action": name, "id": id}``; everything else in them is ignored, and traits that it
sets are reverted.  It receives the first picture and the state as traits, and groups, details, and search
results as messages, so that neither a page nor a saved notebook ever contains the whole graph.  The code for
interactions is sent when a pointer or the focus reaches the picture.  :mod:`lazyviz.view.widget.runner` runs
the graph.
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
from .page_state import Controller, bundle, first_traits, run_traits
from .requests import Answers
from .run_choice import choose, nodes_up_to
from .runner import running_of

MOST_OPEN = 64
"""Widgets that can be used at a time: ipywidgets keeps each until it is closed, and with it its graph."""
LONGEST_ID = 10_000  # characters of what a message is about

_open: dict[int, LazyWidget] = {}  # by id, the one used longest ago first
_lock = threading.RLock()  # the collector may close a widget while another one takes it

_log = logging.getLogger(__name__)


def _shown() -> list[LazyWidget]:
    with _lock:
        return list(_open.values())


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
    choices = traitlets.Dict().tag(sync=True)
    findings: Any = traitlets.List().tag(sync=True)
    error: Any = traitlets.Dict(allow_none=True, default_value=None).tag(sync=True)
    static_id = traitlets.Unicode("").tag(sync=True)

    def __init__(self, controller: Controller, *, static_id: str = "", scene: Scene | None = None) -> None:
        self._controller = controller
        self._answers = Answers(controller, lambda message: self.send(message), self._redraw, scene)
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
        """The plan of what was recorded, and the one that is shown."""
        return self._answers.plans

    @property
    def drawn(self) -> Scene:
        """The picture, under the plan that is shown."""
        return self._answers.scene

    def _used(self) -> None:
        """This one is in use; where too many are open, those used longest ago are closed.

        Their outputs show the static picture, and displaying a graph again makes it another widget.
        """
        with _lock:
            _open.pop(id(self), None)
            _open[id(self)] = self
            spare = [widget for widget in _open.values() if widget is not self and widget.state != "running"]
            old = spare[: max(len(_open) - MOST_OPEN, 0)]
        for widget in old:
            widget.close()

    def set_state(self, sync_data: Any) -> None:
        """What the page sets is not taken, and put back: what it may do it asks for by messages."""
        self.send_state([name for name in self.keys if name in sync_data])

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """The widget alone: where it cannot live, the picture in the output before it says it all."""
        self._used()
        bundle = super()._repr_mimebundle_(**options)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        if data is not None and "text/plain" in data:
            data["text/plain"] = ""
        return bundle

    def send(self, content: Any, buffers: Any = None) -> None:
        super().send(visible_in(content), buffers)

    def get_state(self, *arguments: Any, **options: Any) -> Any:
        return visible_in(super().get_state(*arguments, **options))

    def _redraw(self) -> None:
        self.scene = self._answers.first_picture()

    def _hear(self, _: Any, content: Any, buffers: Any) -> None:
        action, id = (content.get("action"), content.get("id")) if isinstance(content, dict) else (None, None)
        if not isinstance(action, str) or (isinstance(id, str) and len(id) > LONGEST_ID):
            return
        self._used()
        if self._orders(action, id if isinstance(id, str) else ""):
            return
        if not self._answers.answer(action, id if isinstance(id, str) else ""):
            _log.warning("lazyviz: ignored a message with the unknown action %.40r", action)

    # --- running ------------------------------------------------------------------

    def _orders(self, action: str, id: str) -> bool:
        """Do what ``action`` says about running; ``False`` if it is about something else."""
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
        elif action == "second-part":
            self.send({"kind": "second-part", "code": bundle("second.js")})
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
        """Evaluate what is pending, or what ``nodes`` need, on a worker thread, and give it.

        It is the one that runs already, if there is one.
        """
        return self._running.start(nodes)

    def cancel(self) -> None:
        """Ask the run to stop after the op that is running."""
        self._running.cancel()

    @property
    def exception(self) -> BaseException | None:
        """Of the last run."""
        return self._running.exception

    @property
    def _worker(self) -> threading.Thread | None:
        return self._running.worker

    def run_changed(self) -> None:
        """A run has started or ended, or an option of runs was changed."""
        running, answers = self._running, self._answers
        state = running.state
        if state == "running":  # the run is about to begin: no time for more
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
        """``ended`` have run since the last time."""
        self.progress = self._running.progress
        self._answers.scene.states.follow(ended, at_hand)
        self._send_states()

    def _send_states(self, *, look: bool = False) -> None:
        states = self._answers.scene.states
        if look:
            states.look()
        if boxes := states.changes(self._answers.given):
            self.send({"kind": "states", "boxes": boxes})
            # What is displayed again later begins with the first picture: not with old states.
            for group in self.scene["groups"]:
                for box in group["boxes"]:
                    if box["id"] in boxes:
                        box.update(zip(("state", "seconds", "alarm", "share"), boxes[box["id"]]))

    def close(self) -> None:
        with _lock:
            _open.pop(id(self), None)
        self._running.leave(self)
        if self.comm is not None:
            self.layout.close()  # a widget of its own, which ipywidgets would keep
        super().close()
