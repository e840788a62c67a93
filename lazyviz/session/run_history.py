"""Run history of a graph: state, report, measured memory, NaN and infinities, and listeners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..execute.progress import Run
from ..execute.report import NonFinite, Report
from ..execute.value_stats import readable, summarize_now
from ..graph.ir import Graph
from ..process.tracebacks import report_ignored
from ..record.storage import TrackedNode

if TYPE_CHECKING:
    from ..execute.microbatch.run import SplitRun

Listener = Callable[[], None]


class RunHistory:
    """The run of a graph that is under way, and what earlier ones left; its listeners hear of changes."""

    def __init__(self) -> None:
        self.state: str | None = None  # running, failed or interrupted; else told by the nodes
        self.live: Run | None = None  # the current run, if its progress is followed
        self.split_run: SplitRun | None = None  # one that was interrupted, to be gone on with
        self.error: BaseException | None = None
        self.nonfinite: dict[str, NonFinite] = {}  # by kind, the first in program order of all runs
        self._report: Report | tuple[Any, ...] | None = None
        self._measured: list[tuple[int, int]] = []
        self._timelines: list[Sequence[tuple[int, int]]] = []  # of runs, to be added to it
        self._listeners: list[Listener] = []

    @property
    def report(self) -> Report | None:
        """What the last run of nodes of this graph did."""
        if isinstance(self._report, tuple):
            self._report = Report.for_sync_point(*self._report)
        return self._report

    @report.setter
    def report(self, report: Report) -> None:
        self._report = report

    def note_read(self, *report: Any) -> None:
        """Store the arguments of :meth:`.Report.for_sync_point` for the last run; the report is created on
        demand.
        """
        self._report = report

    @property
    def measured(self) -> list[tuple[int, int]]:
        """Positions of nodes in the order in which they ran, each with the most bytes held while it did.

        Of a run in pieces, as in the plan's timeline, the first two.
        """
        while self._timelines:
            self._measured += self._timelines.pop(0)
        return self._measured

    def note_timeline(self, timeline: Sequence[tuple[int, int]]) -> None:
        """Add what a run has measured."""
        self._timelines.append(timeline)

    def note_nonfinite(self, graph: Graph, found: Mapping[str, NonFinite]) -> None:
        """A run has found NaN or infinities, of which those in ``graph`` are noted."""
        for kind, first in found.items():
            known, mine, at = self.nonfinite.get(kind), graph.nodes, first.node.index
            if at < len(mine) and mine[at] is first.node and (known is None or at < known.node.index):
                self.nonfinite[kind] = first

    def readable(self, nodes: Sequence[TrackedNode]) -> bool:
        """Whether results of any of ``nodes`` have not been summarized and are still there."""
        return self.state != "running" and any(not any(node.summaries) and readable(node) for node in nodes)

    def summarize(self, nodes: Sequence[TrackedNode]) -> None:
        """Note in ``node.summaries`` what those results of ``nodes`` hold now that are still there."""
        if self.state != "running":
            for node in nodes:
                if readable(node):
                    summarize_now(node)
            self.notify()

    # --- listeners --------------------------------------------------------------------

    def subscribe(self, callback: Listener) -> None:
        """Have ``callback`` called, on whatever thread, when the state or a choice changes.

        What it raises is reported by ``sys.unraisablehook`` and stops nothing.
        """
        self._listeners.append(callback)

    def unsubscribe(self, callback: Listener) -> None:
        """Stop calling ``callback``."""
        if callback in self._listeners:
            self._listeners.remove(callback)

    @property
    def has_listeners(self) -> bool:
        return bool(self._listeners)

    def notify(self) -> None:
        for callback in list(self._listeners):
            try:
                callback()
            except (Exception, SystemExit) as error:  # the others, and the run, go on
                report_ignored("a listener of a lazyviz graph", error)

    def changed(self, state: str | None = None) -> None:
        """The state is another one now."""
        self.state = state
        if self._listeners:
            self.notify()
