"""What all widgets of a graph share: how it is to be run, and what has been seen of its runs.

A part of :mod:`lazyviz.session.lazy_graph`.  Whoever shows a graph subscribes, and is told when any of it
changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import cast

from ..execute.microbatch.clusters import is_cluster
from ..execute.progress import Run
from ..execute.registry import EXTRAS, backend_names, find_backend, is_loaded, missing, offered
from ..execute.report import NonFinite
from ..execute.value_stats import readable, summarize_now
from ..graph.ir import Graph, Node
from ..process.tracebacks import report_ignored
from ..record.storage import TrackedNode
from .named_batch import NamedBatch
from .option_checks import CLUSTER_NEEDS_BATCH, validate
from .recompute_options import Recompute

Listener = Callable[[], None]


class Choices:
    """How a graph is to be evaluated unless it is said otherwise, its state, and who follows both."""

    def __init__(
        self, graph: Graph, backend: str, batch: NamedBatch | None, split: int | str, recompute: Recompute
    ) -> None:
        self.ir = graph
        self.backend = backend
        self.batch = batch
        self.split = split
        self.recompute = recompute
        self.summaries = False
        self.live: Run | None = None  # the run that is under way, if somebody watches
        self._measured: list[tuple[int, int]] = []
        self._timelines: list[Sequence[tuple[int, int]]] = []  # of runs, to be added to it
        self.nonfinite: dict[str, NonFinite] = {}  # by kind, the first in program order of all runs
        self.run_state: str | None = None  # running, failed or interrupted; else told by the nodes
        self._listeners: list[Listener] = []

    @property
    def measured(self) -> list[tuple[int, int]]:
        """Positions of nodes in the order in which they ran, each with the most bytes held while it did.

        Of a run in pieces, as in the plan's timeline, the first two.
        """
        while self._timelines:
            self._measured += self._timelines.pop(0)
        return self._measured

    def note_timeline(self, timeline: Sequence[tuple[int, int]]) -> None:
        """A run has measured this."""
        self._timelines.append(timeline)

    def own(self, nodes: Sequence[Node]) -> list[TrackedNode]:
        """``nodes`` as they are in this graph.

        Raises ``ValueError`` for one of another graph.
        """
        mine = self.ir.nodes
        for node in nodes:
            if not (0 <= node.index < len(mine) and mine[node.index] is node):
                raise ValueError(f"{node!r} is not a node of this graph")
        return cast("list[TrackedNode]", list(nodes))

    def note_nonfinite(self, found: Mapping[str, NonFinite]) -> None:
        """A run has found NaN or infinities."""
        for kind, first in found.items():
            known, mine, at = self.nonfinite.get(kind), self.ir.nodes, first.node.index
            if at < len(mine) and mine[at] is first.node and (known is None or at < known.node.index):
                self.nonfinite[kind] = first

    def readable(self, nodes: Sequence[Node]) -> bool:
        """Whether results of any of ``nodes`` have not been summarized and are still there."""
        return self.run_state != "running" and any(
            not any(node.summaries) and readable(node) for node in self.own(nodes)
        )

    def summarize(self, nodes: Sequence[Node]) -> None:
        """Note in ``node.summaries`` what those results of ``nodes`` hold now that are still there."""
        if self.run_state != "running":
            for node in self.own(nodes):
                if readable(node):
                    summarize_now(node)
            self.notify()

    def subscribe(self, callback: Listener) -> None:
        """Have ``callback`` called, on whatever thread, when the state or a choice changes.

        What it raises is reported by ``sys.unraisablehook`` and stops nothing.
        """
        self._listeners.append(callback)

    def unsubscribe(self, callback: Listener) -> None:
        """Call it no more."""
        if callback in self._listeners:
            self._listeners.remove(callback)

    @property
    def watched(self) -> bool:
        """Whether anybody follows."""
        return bool(self._listeners)

    def notify(self) -> None:
        for callback in list(self._listeners):
            try:
                callback()
            except (
                Exception,
                SystemExit,
            ) as error:  # the others, and the run, go on
                report_ignored("a listener of a lazyviz graph", error)

    def changed(self, state: str | None = None) -> None:
        self.run_state = state
        if self._listeners:
            self.notify()

    def choose(
        self, *, backend: str | None = None, split: int | str | None = None, summaries: bool | None = None
    ) -> None:
        """Choose how ``evaluate`` runs the graph where it is not told; everybody who shows it follows.

        Raises:
            ValueError: there is no such backend, it lacks something, or the choices rule each other out.
                Nothing has changed then.
        """
        backend = self.backend if backend is None else backend
        wanted = self.split if split is None else split
        has_batch = self.batch is not None
        validate(split=wanted, recompute=self.recompute, backend=backend, has_batch=has_batch)
        self.backend, self.split = backend, wanted
        if summaries is not None:
            self.summaries = summaries
        self.notify()

    def backends(self) -> list[tuple[str, str]]:
        """The backends there are, each with the reason why it cannot run this graph here, or ""."""
        return [
            (name, self._obstacle(name)) for name in sorted(backend_names(), key=lambda name: name != "eager")
        ]

    def _obstacle(self, name: str) -> str:
        if why := missing(name):
            return why
        if not is_loaded(name) and name not in EXTRAS:  # what it imports is imported once it is chosen
            package = offered().get(name, "").partition(".")[0]
            return f"needs the package {package}" if package and find_spec(package) is None else ""
        if self.batch is None and (name in EXTRAS or is_cluster(find_backend(name))):
            return CLUSTER_NEEDS_BATCH.format(backend=name)
        return ""
