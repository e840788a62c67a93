"""Run order: the execution order of a graph's nodes, some of which run at sync points during recording.

A sync point runs the nodes that the read value needs, and leaves others pending: the loss of a step does not
need the step's backward pass.  Nodes that are still pending at the end run then.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

from ...graph.ir import Graph, Node, Storage, Value


class RunsInside:
    """The runs at sync points during recording, and their effect on lifetimes in a lazyviz run."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        # By position of each node that ran during recording: the number of nodes recorded by then.
        self.ran = {position: run.recorded for run in graph.runs_inside for position in run.ran}
        self._gone = {storage for run in graph.runs_inside for storage in run.gone}
        ends = [(run.recorded, run.ran[-1] + 1) for run in graph.runs_inside]
        for node in graph.nodes:
            if node.at_once:
                self.ran[node.index] = node.index + 1
                ends.append((node.index + 1, node.index + 1))
        ends.sort()
        self._at = [index for index, _ in ends]
        self._ends = list(accumulate([end for _, end in ends], max))
        self._needed = self._last_runs(graph.nodes) if self.ran else {}

    def _last_runs(self, nodes: Sequence[Node]) -> dict[Storage, int]:
        """The number of the last run in which each storage is used."""
        found: dict[Storage, int] = {}
        for node in nodes:
            run = self.run_of(node)
            for value in (*node.inputs, *node.outputs):
                found[value.storage] = max(run, found.get(value.storage, 0))
        return found

    def run_of(self, node: Node) -> int:
        """The number of the run that executes a node; pending nodes are in the last run."""
        ran = self.ran.get(node.index)
        return len(self._at) if ran is None else bisect_left(self._at, ran)

    def run_of_all_pending(self, node: Node) -> int:
        """The number of the run of a node if each sync point runs all pending nodes, as in split blocks."""
        return bisect_right(self._reads, node.index)

    @cached_property
    def _reads(self) -> list[int]:
        return sorted(run.recorded for run in self._graph.runs_inside)

    def is_read_across(self, value: Value) -> bool:
        """Whether there was a sync point between the creation of ``value`` and the last use of its memory."""
        if not self._reads or value.node is None:
            return False
        before = bisect_right(self._reads, value.node.index)
        last = self._last_recorded.get(value.storage.origin, 0)
        return before < len(self._reads) and self._reads[before] <= last

    @cached_property
    def _last_recorded(self) -> dict[Storage, int]:
        """The position of the last node that uses each memory, by its first storage."""
        return {value.storage.origin: node.index for node in self._graph.nodes for value in node.inputs}

    def end_before(self, position: int) -> int:
        """End position of the last run that was complete when ``position`` was recorded; -1 if there is none.

        An outside tensor that nothing used until then may not have existed yet: a data loader's next batch.
        """
        before = bisect_right(self._at, position)
        return self._ends[before - 1] if before else -1

    def last_need(self, maker: Node | None, storage: Storage) -> int:
        """End position of the run before the last use of ``storage``; 0 if it does not live that long.

        Nodes whose values were not read stay pending, such as a backward pass if only the loss is read. Their
        inputs exist while later nodes run.
        """
        last = self._needed.get(storage, 0)
        return self._ends[last - 1] if last and (maker is None or self.run_of(maker) < last) else 0

    def last_with(self, maker: Node, storage: Storage, dropped: int) -> int:
        """End position of the last run during which ``storage``, a result of ``maker``, belonged to an
        ordinary tensor; 0 if there is none.

        Later runs start after their nodes have been recorded, when the tensor no longer exists.
        """
        ran = self.ran.get(maker.index)
        if ran is None:
            return 0
        before = (bisect_left if storage in self._gone else bisect_right)(self._at, dropped)
        return self._ends[before - 1] if before and self._at[before - 1] >= ran else 0

    @cached_property
    def order(self) -> Sequence[int] | None:
        """The positions of the nodes in the order in which they run; ``None``: in program order."""
        if not self.ran or all(step == position for step, position in enumerate(self._steps[0])):
            return None
        return self._steps[0]

    @cached_property
    def _steps(self) -> tuple[list[int], list[int], list[int]]:
        """The positions of the nodes in the order in which they run; for each run, how many nodes had been
        recorded before it, and how many had run after it.
        """
        nodes = self._graph.nodes
        # An op that runs immediately runs before any later sync point.
        runs: list[tuple[int, int, Sequence[int]]] = [
            (node.index + 1, 0, (node.index,)) for node in nodes if node.at_once
        ]
        runs += [(run.recorded, 1, run.ran) for run in self._graph.runs_inside]
        runs.sort(key=lambda run: run[:2])
        order: dict[int, None] = {}
        recorded, ended = [], []
        for count, _, ran in runs:
            order.update(dict.fromkeys(ran))
            recorded.append(count)
            ended.append(len(order))
        order.update(dict.fromkeys(range(len(nodes))))
        return list(order), recorded, ended

    @cached_property
    def step_of(self) -> Sequence[int]:
        """The step in which the node at each position runs."""
        steps = [0] * len(self._graph.nodes)
        for step, position in enumerate(self._steps[0]):
            steps[position] = step
        return steps

    @cached_property
    def _used(self) -> dict[Storage, int]:
        """The last step that uses each memory, by its first storage."""
        found: dict[Storage, int] = {}
        for step, position in enumerate(self._steps[0]):
            node = self._graph.nodes[position]
            for value in (*node.inputs, *node.outputs):
                found[value.storage.origin] = step
            for storage in node.writes:
                found[storage.origin] = step
        return found

    def last_use(self, storage: Storage) -> Node | None:
        """The node that uses the memory of ``storage`` in the last step that does."""
        step = self._used.get(storage.origin)
        return None if step is None else self._graph.nodes[self._steps[0][step]]

    def steps_before(self, position: int) -> int:
        """How many nodes had run when the one at ``position`` was recorded."""
        _, recorded, ended = self._steps
        before = bisect_right(recorded, position)
        return ended[before - 1] if before else 0

    def steps_with(self, storage: Storage, dropped: int) -> int:
        """How many nodes had run after the last run during which the user's code referred to ``storage``."""
        _, recorded, ended = self._steps
        before = (bisect_left if storage in self._gone else bisect_right)(recorded, dropped)
        return ended[before - 1] if before else 0
