"""Pending ops: nodes in program order, and removal of those whose results are unreachable."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from ..graph.ir import Failure, Graph, NodeError, failure_of
from ..process.deferred_signals import deferring
from . import dead_node_detection
from .dependency_closure import closure
from .forgotten_tensors import refuse_reads
from .interception.observers_of_deferred_writes import MemoryHolders
from .provenance.module_calls_and_phases import Scopes
from .random_draw_order import Generators
from .recording_state import RecordingState
from .shapes.shape_inference_cache import ShapeCache
from .sync_points import PendingRuns, if_free
from .tensor_table import TensorTable
from .tracked_storages import FORGOTTEN, TrackedNode, TrackedStorage, TrackedValue, Unreachable

MOST_LOST_GRAPHS = 16  # graphs that are kept only for a pending write of a known value


class PendingOps:
    """The pending nodes of this process, and what is cleaned up when they are done."""

    def __init__(
        self,
        recording: RecordingState,
        runs: PendingRuns,
        tensors: TensorTable,
        memory_holders: MemoryHolders,
        *,
        scopes: Scopes,
        shapes: ShapeCache,
        generators: Generators,
    ) -> None:
        self._recording, self._runs, self._tensors = recording, runs, tensors
        self._memory_holders = memory_holders
        self._scopes, self._shapes, self._generators = scopes, shapes, generators
        self.nodes: dict[TrackedNode, None] = {}  # in program order
        self.views: list[TrackedNode] = []  # those recorded outside of a block
        self._watched: set[weakref.ref[Graph]] = set()  # graphs whose values have weak references to tensors
        self.reachable: Callable[[], Iterable[Graph]] = tuple  # the graphs that can still be evaluated
        self.unlink_tensors: Callable[[Iterable[Any], Iterable[Any]], None] = unlink_tensors  # or compiled
        # Graphs that can no longer be evaluated: pending writes of known values, such as step counters.
        self.overdue: list[TrackedNode] = []
        self._born = time.perf_counter()
        self._looked_for = 0.0  # seconds

    def finished(self, node: TrackedNode, *, for_good: bool = True) -> None:
        """Called by the evaluator after each node; ``for_good`` is false if the node will run again."""
        self.nodes.pop(node, None)
        if for_good:
            node.after = ()
        if for_good and any(
            value.node is not None and value.node.graph is not node.graph for value in node.inputs
        ):
            node.cut()
        if node.writes and not node.folded:
            for storage in node.writes:
                storage.shadow = None
        if self._recording.graph is not None:
            self._tensors.made_real(value for value in node.outputs if value.node is node)

    def _drop_unseen_views(self) -> None:
        """Drop views that were created outside of blocks and are no longer referenced."""
        for node in self.views:
            if (
                node.state != "done"
                and not any(value.tensor or value.uses for value in node.outputs)
                and (self._runs.background is None or node not in self._runs.background.nodes)
            ):
                node.state = "done"
                self._withdraw(node)
        self.views = [node for node in self.views if node.state != "done"]

    def _withdraw(self, node: TrackedNode) -> None:
        """Remove a node from the pending nodes; it no longer needs its inputs."""
        self.nodes.pop(node, None)
        for value in node.inputs:
            value.uses -= 1
            value.storage.uses -= 1
            if not value.uses:
                value.real = None

    def forget_all(self, error: NodeError = FORGOTTEN) -> None:
        """Drop all pending nodes, unevaluated, permanently; ``error`` is what reading their results says."""
        self._recording.changed()
        with suppress(Exception):  # what it has written is written, so its nodes have run
            self._runs.finish_background()
        if self.nodes:
            refuse_reads()
        graphs = {id(node.graph): node.graph for node in list(self.nodes)}.values()
        reasons = self._reasons(error)
        for node in list(self.nodes):
            node.state, node.error = "failed", reasons.get(node, error)
            self._withdraw(node)
            # Ops that are recorded later on such a tensor fail immediately, and keep no earlier nodes alive.
            node.cut()
            node.after = ()
        dead_node_detection.drop_forgotten_gradients(
            [*self._tensors.outside.values(), *[value for ir in graphs for value in ir.inputs]]
        )
        self._generators.forget()
        self.overdue = []
        self.release_unused()

    def _reasons(self, error: NodeError) -> dict[TrackedNode, NodeError]:
        """``error``, with the original exception, for nodes that have failed or depend on a failed one."""
        found: dict[TrackedNode, NodeError] = {}
        for node in list(self.nodes):
            if failure_of(node.error) is Failure.FORGOTTEN:  # an interrupted call has already handled it
                continue
            if node.state == "failed" and node.error is not None:
                what = node.error.partition("\n")[0]
                found[node] = NodeError(error.failure, f"{error}, after {node.name} had failed: {what}")
            else:
                needed = (*(value.node for value in node.inputs), *node.after)
                failed = next((each for each in needed if each in found), None)
                if failed is not None:
                    found[node] = found[failed]
        return found

    def release_unused(self, ran: Sequence[TrackedNode] | None = None) -> None:
        """After an evaluation: forget real memory that no pending node uses any more.

        ``ran`` are the nodes that were to run. With it, the cost depends on these nodes and not on all
        pending ones.
        """
        tensors, recording = self._tensors, self._recording.graph is not None
        if self.views:
            self._drop_unseen_views()
        if TrackedStorage.unused:
            tensors.forget_unused()
        if not recording:
            tensors.computed.clear()
            tensors.components.clear()
            tensors.results.clear()
            if ran is None:  # the block has ended, so no op that would read them is being recorded
                for value in list(tensors.outside.values()):
                    if not value.uses:
                        value.real = None
        if not self.nodes:
            tensors.release_all(recording=recording)
            if not recording:
                self._scopes.forget_forward()
                self._scopes.sources.forget_old()
                self._unlink_watched()
        elif ran is not None:
            TensorTable.release_after(tensors, ran)
        else:
            tensors.release_unread(self.nodes)
        tensors.forget_dead()

    def watch(self, graph: Graph) -> None:
        """Let the graph's values point to the user's tensors until nothing is recorded or pending."""
        self._watched.add(weakref.ref(graph, self._watched.discard))

    def _unlink_watched(self) -> None:
        """Nothing is recorded or pending: remove all weak references to the user's tensors."""
        graphs = [reference() for reference in tuple(self._watched)]
        self._watched.clear()
        for graph in graphs:
            if graph is not None:
                self.unlink_tensors(graph.nodes, graph.inputs)

    def forget_lost(self) -> None:
        """Drop unreachable ops, if something became unreachable since the last call.

        It visits all pending nodes, so it is limited to a tenth of the total time, after the first moments.
        """
        if self._recording.graph is not None or self._runs.running or self._shapes.inferring:
            return
        with if_free(self._runs.lock) as taken:
            if taken:  # else the nodes to run have already been chosen
                self._forget_lost()

    def _forget_lost(self) -> None:
        start = time.perf_counter()
        if self._looked_for > 0.05 + 0.1 * (start - self._born):
            return
        Unreachable.possible = False
        self.forget_unreachable(self.reachable())
        Unreachable.possible = dead_node_detection.writes_untracked_tensors(self.nodes)
        known = [node for node in list(self.nodes) if node.folded and node.graph.lost]
        self.overdue = known if len({id(node.graph) for node in known}) >= MOST_LOST_GRAPHS else []
        self._looked_for += time.perf_counter() - start

    @deferring  # handlers of signals may run these ops
    def forget_unreachable(self, reachable: Iterable[Graph]) -> None:
        """Drop pending nodes of unreachable graphs without an effect on a tensor, a pending write or a
        pending draw.
        """
        before = list(self.nodes)  # what other threads record from now on is not dropped
        recording = self._recording
        if recording.graph is not None and recording.owner != threading.get_ident():
            return  # another thread is recording: nothing refers yet to the op that it is about to record
        self._drop_unseen_views()
        kept = {id(graph) for graph in reachable}
        if all(id(node.graph) in kept for node in before):
            return
        observable = dead_node_detection.observable_storages(
            self.nodes, self._tensors.outside, self._memory_holders
        )
        wanted = closure(
            node
            for node in list(self.nodes)
            if id(node.graph) in kept or dead_node_detection.is_observable(node, observable)
        )
        for node in self.nodes.keys() & (set(before) - set(wanted)):
            node.state = "done"  # for the storages that still list it as a reader
            node.graph.has_dropped_nodes = True
            self._withdraw(node)
        self._generators.restore_finished()
        self.release_unused()


def unlink_tensors(nodes: Iterable[TrackedNode], given: Iterable[TrackedValue]) -> None:
    """Cut the links between the user's tensors and the results of ``nodes``, and those ``given``."""
    for value in (*given, *[value for node in nodes for value in node.outputs]):
        if value.tensor is not None:
            value.tensor = None
