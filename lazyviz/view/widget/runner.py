"""Runner: runs a graph from its widgets, and follows all its runs.

Evaluate starts one worker thread and returns, so that the kernel still receives Cancel.  The run itself only
counts; another thread reads the counts ten times per second and updates the widgets.  All widgets of one
graph share one runner, so that one widget can stop what another one started.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ...graph.ir import Graph, Node
from ...plan.devices.devices import memory_in_use
from ...plan.units import format_bytes
from ...process.tracebacks import report_ignored

INTERVAL = 0.1  # seconds between two looks at a run
FORESEEN_AFTER = 1.0  # seconds that a run takes before it is said how long it will take
MEMORY_INTERVAL = 0.5  # seconds between two looks at the device's memory

_log = logging.getLogger(__name__)


class ProgressLike(Protocol):
    """Where a run is: ``done`` of ``total`` ops after ``seconds``, now at ``label``, and what it holds.

    In pieces, also at which of them, from 1; 0 in what runs once.
    """

    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def label(self) -> str: ...
    @property
    def allocated_bytes(self) -> int: ...
    @property
    def piece(self) -> int: ...
    @property
    def pieces(self) -> int: ...
    @property
    def compiling(self) -> bool: ...
    @property
    def seconds_left(self) -> float | None: ...


class RunLike(Protocol):
    """A run that is under way: the nodes that have ended so far, the one at hand, and where it is."""

    @property
    def ended(self) -> Sequence[Node]: ...
    @property
    def running(self) -> Node | None: ...
    def now(self, *, foresee: bool = False) -> ProgressLike: ...


class Runnable(Protocol):
    """A graph that can be run."""

    @property
    def graph(self) -> Graph: ...

    @property
    def state(self) -> str:
        """``pending``, ``running``, ``done``, ``failed`` or ``interrupted``."""

    @property
    def live(self) -> RunLike | None:
        """The run that is under way."""

    @property
    def report(self) -> Any:
        """Of the last run: it has ops_run, seconds, peak_bytes, backend and pieces."""

    def evaluate(self, *, cancel: threading.Event | None = None, nodes: Sequence[Node] | None = None) -> Any:
        """Run what is pending, or what ``nodes`` need; returns the report."""

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called, on whatever thread, when the state changes."""


class Follower(Protocol):
    """A widget, as far as it follows runs."""

    def run_changed(self) -> None:
        """State, report or error have changed, or a choice of how to run."""

    def run_goes_on(self, ended: Sequence[Node], running: Node | None) -> None:
        """``ended`` have run since the last time."""


class Running:
    """The runs of one graph."""

    def __init__(self, controller: Runnable) -> None:
        self._controller = controller
        self._followers: list[Follower] = []
        self._lock = threading.RLock()
        self._seen = 0  # of the live run's ended nodes
        self._began = 0.0  # when the live run did
        self._busy = False  # a run that a widget asked for is under way
        self._refused: tuple[object, object] | None = None  # choices that a run was refused for
        self._over = threading.Event()  # for observers of the live run
        self.cancelled = threading.Event()
        self.worker: threading.Thread | None = None
        self.state = controller.state
        self.exception: BaseException | None = getattr(controller, "error", None)  # of the last run
        self.report: Any = None  # of the last run that a widget asked for
        self.progress: dict[str, Any] | None = None
        controller.subscribe(self._changed)

    def follow(self, follower: Follower) -> None:
        self._followers.append(follower)

    def leave(self, follower: Follower) -> None:
        if follower in self._followers:
            self._followers.remove(follower)

    @property
    def failed_node(self) -> Node | None:
        return next((node for node in self._controller.graph.nodes if node.state == "failed"), None)

    # --- starting and stopping --------------------------------------------------------

    def start(self, nodes: Sequence[Node] | None = None) -> threading.Thread:
        """Evaluate what is pending, or what ``nodes`` need; gives the thread that does.

        It is the one that runs already, if there is one.
        """
        with self._lock:
            if self._busy and self.worker is not None and self.worker.is_alive():
                return self.worker
            self._busy = True
            self.cancelled.clear()
            self._begin()
            # The worker sees the caller's context (autocast, output routing) as a plain call would.
            context = contextvars.copy_context()
            self.worker = threading.Thread(
                target=context.run, args=(self._work, nodes), name="lazyviz-evaluate", daemon=True
            )
            self.worker.start()
            return self.worker

    def cancel(self) -> None:
        """Ask the run to stop after the op that is running."""
        self.cancelled.set()

    def _work(self, nodes: Sequence[Node] | None) -> None:
        report, error = None, None
        more: dict[str, Any] = {} if nodes is None else {"nodes": nodes}
        try:
            report = self._controller.evaluate(cancel=self.cancelled, **more)
        except SystemExit:  # the process is exiting: the page gets no more updates
            return
        except BaseException as raised:
            # Everything is shown in the widget; a thread has no caller to raise to.
            error = raised
        pending = any(node.state != "done" for node in self._controller.graph.nodes)
        stopped = self.cancelled.is_set() and pending and self.failed_node is None
        with self._lock:
            self._busy = False
            self.report = report
            if isinstance(error, KeyboardInterrupt) or (stopped and error is not None):
                self._end("interrupted", error)
            elif error is not None and self.failed_node is None and self._controller.state == "pending":
                self._refused = self._chosen()
                self._end("pending", error)  # before anything ran
            else:
                self._end(self._controller.state if error is None else "failed", error)

    # --- following --------------------------------------------------------------------

    def _changed(self) -> None:
        """Something of the graph has changed: a run began or ended, or a choice was made."""
        state = self._controller.state
        with self._lock:
            if state == "running":
                if self.state != "running":
                    self._begin()
                if self._controller.live is not None:
                    self._watch()
            elif self._busy:
                self._tell()  # a choice; its end the worker tells itself
            elif self.state == "running":
                self._end(state, getattr(self._controller, "error", None) if state == "failed" else None)
            else:
                other = self.state == "pending" and self._chosen() != self._refused
                if state == "done" or other:  # what was refused is not what is chosen now
                    self.state, self.exception = state, None
                self._tell()

    def _chosen(self) -> tuple[object, object]:
        return getattr(self._controller, "backend", None), getattr(self._controller, "split", None)

    def _begin(self) -> None:
        self.state, self.exception, self.report, self.progress = "running", None, None, None
        self._tell()

    def _end(self, state: str, error: BaseException | None) -> None:
        self._over.set()
        self.state, self.exception, self.progress = state, error, None
        self._tell()

    def _tell(self) -> None:
        for follower in list(self._followers):
            try:
                follower.run_changed()
            except Exception as error:  # another one, and the run, go on
                report_ignored("a widget that follows a lazyviz graph", error)

    def _watch(self) -> None:
        self._over.set()
        self._over = threading.Event()
        self._began = time.monotonic()
        self._seen = 0
        arguments = (self._look_on, self._over)
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=arguments, name="lazyviz-watch", daemon=True).start()

    def _look_on(self, over: threading.Event) -> None:
        if over.wait(INTERVAL):
            return
        with memory_in_use(_device(self._controller.graph)) as in_use:
            memory, read = None, -MEMORY_INTERVAL
            while True:
                if time.monotonic() - read >= MEMORY_INTERVAL:
                    memory, read = in_use(), time.monotonic()
                with self._lock:
                    if over.is_set():
                        return
                    try:
                        self._look(memory)
                    except Exception:  # a page that has gone: the run is not to feel it
                        _log.exception("lazyviz: progress could not be shown")
                        return
                if over.wait(INTERVAL):
                    return

    def _look(self, in_use: tuple[int, int] | None) -> None:
        """Tell the followers how far the run is."""
        live = self._controller.live
        if live is None:
            return
        now = live.now(foresee=time.monotonic() - self._began > FORESEEN_AFTER)
        seen, self._seen = self._seen, len(live.ended)
        if now.done or now.compiling:
            left = now.seconds_left
            self.progress = {
                "done": now.done,
                "total": now.total,
                "seconds": round(now.seconds, 3),
                "left": None if left is None else round(left, 3),
                "label": now.label,
                "memory": _memory_text(now.allocated_bytes, in_use),
                "piece": now.piece,
                "pieces": now.pieces,
            }
        ended, running = live.ended[seen : self._seen], live.running
        for follower in list(self._followers):
            follower.run_goes_on(ended, running)


def running_of(controller: Runnable) -> Running:
    """The one that all widgets of ``controller`` share."""
    found = controller.__dict__.get("_running")
    if found is None:
        found = controller.__dict__["_running"] = Running(controller)
    assert isinstance(found, Running)
    return found


def _device(graph: Graph) -> torch.device:
    """The device whose memory is looked at during a run: a GPU, if it uses one."""
    device = torch.device("cpu")
    for node in graph.nodes:
        for value in node.outputs:
            if value.device.type != "cpu":
                return value.device
    return device


def _memory_text(held: int, in_use: tuple[int, int] | None) -> str:
    """What the run holds now, and the whole device with all its processes."""
    text = f"{format_bytes(held)} held"
    return (
        text if in_use is None else f"{text}, {format_bytes(in_use[0])} of {format_bytes(in_use[1])} in use"
    )
