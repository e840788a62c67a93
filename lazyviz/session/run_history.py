"""Run history of a graph: state, report, measured memory, NaN and infinities, and listeners."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple
from weakref import WeakSet

from ..execute.compute_value_stats import readable, summarize_now
from ..execute.measured_memory import Levels, timeline_of
from ..execute.progress import Run
from ..execute.run_report import NonFinite, Report
from ..graph.ir import Graph
from ..process.tracebacks import report_ignored
from ..record.tracked_storages import TrackedNode

if TYPE_CHECKING:
    from ..execute.microbatch.run_pieces_and_add_gradients import SplitRun

Listener = Callable[[], None]


class OfRead(NamedTuple):
    """What a read ran, and the data that ``timeline_of`` converts to a timeline."""

    nodes: Sequence[TrackedNode]
    held: Sequence[int]


class RunHistory:
    """The current run of a graph, and the results of earlier ones; listeners are notified of changes."""

    with_split_runs: ClassVar[WeakSet[RunHistory]] = WeakSet()
    """Those with an interrupted split run: every read looks these up, so it must not visit all graphs."""

    def __init__(self) -> None:
        self.state: str | None = None  # running, failed, or interrupted; None: derived from the nodes
        self.live: Run | None = None  # the current run, if its progress is followed
        self._split_run: SplitRun | None = None
        self.error: BaseException | None = None
        self.nonfinite: dict[str, NonFinite] = {}  # by kind: the first in program order, over all runs
        # After a read: its nodes, seconds, memory, and cause.
        self._report: Report | tuple[Sequence[TrackedNode], float, Levels, str] | None = None
        self._measured: list[tuple[int, int]] = []
        # Timelines of later runs, appended to it on access.
        self._timelines: list[Sequence[tuple[int, int]] | OfRead] = []
        self._listeners: list[Listener] = []

    @property
    def split_run(self) -> SplitRun | None:
        """An interrupted split run, to be continued."""
        return self._split_run

    @split_run.setter
    def split_run(self, split_run: SplitRun | None) -> None:
        if split_run is not None:
            self.with_split_runs.add(self)  # first, so that an interrupt between the two loses nothing
        self._split_run = split_run
        if split_run is None:
            self.with_split_runs.discard(self)

    @property
    def report(self) -> Report | None:
        """The report of the last run of nodes of this graph."""
        if isinstance(self._report, tuple):
            nodes, seconds, levels, cause = self._report
            timeline = timeline_of(nodes, levels.marks)
            self._report = Report.for_sync_point(len(nodes), seconds, levels.peak, cause, timeline)
        return self._report

    @report.setter
    def report(self, report: Report) -> None:
        self._report = report

    @property
    def measured(self) -> list[tuple[int, int]]:
        """Positions of nodes in the order in which they ran, each with the peak memory while it ran.

        For a split run, only the first two pieces, as in the plan's timeline.
        """
        later, self._timelines = self._timelines, []
        for timeline in later:
            self._measured += timeline_of(*timeline) if isinstance(timeline, OfRead) else timeline
        return self._measured

    @property
    def measured_peak(self) -> int:
        """The most bytes of tensors that a run of nodes of this graph held, also at sync points; 0: none."""
        return max([held for _, held in self.measured], default=0)

    def note_timeline(self, timeline: Sequence[tuple[int, int]]) -> None:
        """Add the measurements of a run."""
        if timeline:
            self._timelines.append(timeline)

    def note_nonfinite(self, graph: Graph, found: Mapping[str, NonFinite]) -> None:
        """Note the NaNs and infinities that a run found in ``graph``."""
        for kind, first in found.items():
            known, mine, at = self.nonfinite.get(kind), graph.nodes, first.node.index
            if at < len(mine) and mine[at] is first.node and (known is None or at < known.node.index):
                self.nonfinite[kind] = first

    def readable(self, nodes: Sequence[TrackedNode]) -> bool:
        """Whether results of any of ``nodes`` have not been summarized and are still there."""
        return self.state != "running" and any(not any(node.summaries) and readable(node) for node in nodes)

    def summarize(self, nodes: Sequence[TrackedNode]) -> None:
        """Store in ``node.summaries`` statistics of the results of ``nodes`` that still exist."""
        if self.state != "running":
            for node in nodes:
                if readable(node):
                    summarize_now(node)
            self.notify()

    # --- listeners --------------------------------------------------------------------

    def subscribe(self, callback: Listener) -> None:
        """Call ``callback``, on any thread, when the state or a choice changes.

        Its exceptions are reported through ``sys.unraisablehook`` and do not stop a run.
        """
        self._listeners.append(callback)

    def unsubscribe(self, callback: Listener) -> None:
        """Stop calling ``callback``."""
        with contextlib.suppress(ValueError):  # removed already, perhaps on another thread
            self._listeners.remove(callback)

    @property
    def has_listeners(self) -> bool:
        return bool(self._listeners)

    def notify(self) -> None:
        for callback in list(self._listeners):
            try:
                callback()
            except (Exception, SystemExit) as error:  # the run and the other listeners continue
                report_ignored("a listener of a lazyviz graph", error)

    def changed(self, state: str | None = None) -> None:
        """Notify the listeners of a change of state."""
        self.state = state
        if self._listeners:
            self.notify()
