"""Runs of a graph, which its widgets start and whose progress all of them show.

Evaluate starts one worker thread and returns, so that the kernel still receives Cancel.  The run itself only
counts; another thread reads the counts ten times per second and updates the widgets.  All widgets of one
graph share one runner, so that one widget can stop what another one started.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ...graph.ir import Graph, Node
from ...plan.devices.device_lookup import memory_in_use
from ...plan.units import format_bytes
from ...process.deferred_signals import deferred
from ...process.tracebacks import report_ignored

INTERVAL = 0.1  # seconds between two updates of a run's progress
FORESEEN_AFTER = 1.0  # seconds of a run before the remaining time is estimated
MEMORY_INTERVAL = 0.5  # seconds between two readings of the device's memory

_log = logging.getLogger(__name__)


class ProgressLike(Protocol):
    """The progress of a run: ``done`` of ``total`` ops after ``seconds``, the current op's ``label``, and
    memory.

    In a split run, also the current piece, from 1; 0 in a part that runs once.
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
    """A run in progress: the nodes that have ended, the current node, and the progress."""

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
        """The state: ``pending``, ``running``, ``done``, ``failed`` or ``interrupted``."""

    @property
    def live(self) -> RunLike | None:
        """The current run."""

    @property
    def report(self) -> Any:
        """The report of the last run, with ops_run, seconds, peak_bytes, backend, and pieces."""

    def evaluate(self, *, cancel: threading.Event | None = None, nodes: Sequence[Node] | None = None) -> Any:
        """Run the pending ops, or those that ``nodes`` need; returns the report."""

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, on any thread, when the state changes."""


class Follower(Protocol):
    """The part of a widget that follows runs."""

    def run_changed(self) -> None:
        """Handle a change of the state, report, error, or a run option."""

    def run_goes_on(self, ended: Sequence[Node], running: Node | None) -> None:
        """Handle progress of a run: the nodes in ``ended`` have run since the last call."""


class Running:
    """The runs of one graph."""

    def __init__(self, controller: Runnable) -> None:
        self._controller = controller
        self._followers: list[Follower] = []
        self._lock = threading.RLock()
        self._seen = 0  # number of ended nodes of the live run that were reported
        self._began = 0.0  # start time of the live run
        self._busy = False  # a run that a widget requested is in progress
        self._refused: tuple[object, object] | None = None  # options that a run was rejected for
        self._over = threading.Event()  # set when the live run has ended
        self.cancelled = threading.Event()
        self.worker: threading.Thread | None = None
        self.state = controller.state
        self.exception: BaseException | None = getattr(controller, "error", None)  # of the last run
        self.report: Any = None  # of the last run that a widget requested
        self.progress: dict[str, Any] | None = None
        controller.subscribe(self._changed)

    def follow(self, follower: Follower) -> None:
        self._followers.append(follower)

    def leave(self, follower: Follower) -> None:
        with contextlib.suppress(ValueError):  # it has left already
            self._followers.remove(follower)

    @property
    def failed_node(self) -> Node | None:
        return next((node for node in self._controller.graph.nodes if node.state == "failed"), None)

    # --- starting and stopping --------------------------------------------------------

    def start(self, nodes: Sequence[Node] | None = None) -> threading.Thread:
        """Evaluate the pending ops, or those that ``nodes`` need; returns the worker thread.

        If a worker is already running, it is returned.
        """
        # An interrupt in between would leave a run that is shown but does not exist.
        with deferred(), self._lock:
            if self._busy and self.worker is not None and self.worker.is_alive():
                return self.worker
            self._busy = True
            self.cancelled.clear()
            self._begin()
            # The worker runs in the caller's context (autocast, output routing), like a direct call.
            context = contextvars.copy_context()
            self.worker = threading.Thread(
                target=context.run, args=(self._work, nodes), name="lazyviz-evaluate", daemon=True
            )
            self.worker.start()
            return self.worker

    def cancel(self) -> None:
        """Request a stop of the run after the current op."""
        self.cancelled.set()

    def _work(self, nodes: Sequence[Node] | None) -> None:
        report, error = None, None
        more: dict[str, Any] = {} if nodes is None else {"nodes": nodes}
        try:
            report = self._controller.evaluate(cancel=self.cancelled, **more)
        except SystemExit:  # the process is exiting: the page gets no more updates
            return
        except BaseException as raised:
            # All errors are shown in the widget, because a thread has no caller.
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
        """Handle a change of the graph: a run began or ended, or an option was set."""
        state = self._controller.state
        with self._lock:
            if state == "running":
                if self.state != "running":
                    self._begin()
                if self._controller.live is not None:
                    self._watch()
            elif self._busy:
                self._notify()  # an option was set; the worker reports the end of its run itself
            elif self.state == "running":
                self._end(state, getattr(self._controller, "error", None) if state == "failed" else None)
            else:
                other = self.state == "pending" and self._chosen() != self._refused
                if state == "done" or other:  # the rejected options are no longer the chosen ones
                    self.state, self.exception = state, None
                self._notify()

    def _chosen(self) -> tuple[object, object]:
        return getattr(self._controller, "backend", None), getattr(self._controller, "split", None)

    def _begin(self) -> None:
        self.state, self.exception, self.report, self.progress = "running", None, None, None
        self._notify()

    def _end(self, state: str, error: BaseException | None) -> None:
        self._over.set()
        self.state, self.exception, self.progress = state, error, None
        self._notify()

    def _notify(self) -> None:
        for follower in list(self._followers):
            try:
                follower.run_changed()
            except Exception as error:  # other followers and the run continue
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
                        self._report_progress(memory)
                    except Exception:  # for example, a closed page, which must not affect the run
                        _log.exception("lazyviz: progress could not be shown")
                        return
                if over.wait(INTERVAL):
                    return

    def _report_progress(self, in_use: tuple[int, int] | None) -> None:
        """Notify the followers of the progress of the run."""
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
    """The runner that all widgets of ``controller`` share."""
    found = controller.__dict__.get("_running")
    if found is None:
        found = controller.__dict__["_running"] = Running(controller)
    assert isinstance(found, Running)
    return found


def _device(graph: Graph) -> torch.device:
    """The device whose memory is monitored during a run: a GPU, if it uses one."""
    device = torch.device("cpu")
    for node in graph.nodes:
        for value in node.outputs:
            if value.device.type != "cpu":
                return value.device
    return device


def _memory_text(held: int, in_use: tuple[int, int] | None) -> str:
    """Current memory of the run, and of the whole device with all processes."""
    text = f"{format_bytes(held)} held"
    return (
        text if in_use is None else f"{text}, {format_bytes(in_use[0])} of {format_bytes(in_use[1])} in use"
    )
