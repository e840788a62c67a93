"""Schedule of a split run: passes over the pieces, and whole nodes between the passes.

A spread node runs once per piece.  Spread values that whole nodes or the user need are *collected* in a pass,
by summing or concatenating.  A whole node that needs a collected value runs after that pass, a spread node
that needs it runs in the next pass.  For example, a mean over all words of the batch needs their number
before the gradient of any piece: one pass computes only that number, and another one runs forward and
backward.  If a later pass needs values of an earlier one, they are recomputed.

Levels count passes: whole nodes of level ``k`` run before pass ``k``, and values collected in pass ``k`` are
available at level ``k + 1``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...graph.ir import Node, Storage, Value
from .batch_dim_propagation import BatchAnalysis, Blocker, draws_nothing, is_view, separable
from .batch_placement import Local, Partial
from .batch_rule import base_name

MOST_PASSES = 6
"""More passes would repeat the forward pass too often, for example for batch statistics in every layer."""


@dataclass(frozen=True, slots=True)
class Collected:
    """A spread value that is made whole in a pass, once its node at position ``after`` has run.

    ``alone``: computed from the node's other arguments; the node itself does not run for it.
    """

    value: Value
    after: Node
    alone: bool = False


@dataclass(slots=True)
class Pass:
    """One pass over all pieces: the nodes that each piece runs, in program order, and what is collected."""

    nodes: list[Node] = field(default_factory=list)
    collected: list[Collected] = field(default_factory=list)


@dataclass(slots=True)
class Schedule:
    """The order of a split run.

    Attributes:
        whole: per level, the nodes that run before the pass with that number; one level more than passes.
        passes: over the pieces.
        idle: spread nodes whose results are not needed, so that they need not run.
        views: spread nodes that also run on whole tensors, as views of collected values.
        again: repeated runs of nodes per piece, summed over the passes.
    """

    whole: list[list[Node]]
    passes: list[Pass]
    idle: list[Node]
    views: set[Node]
    again: int


class Unschedulable(Exception):
    """There is no order in which the pieces can run; ``blockers`` are the nodes that prevent it."""

    def __init__(self, blockers: list[Blocker]) -> None:
        super().__init__(blockers[0].reason)
        self.blockers = blockers


def schedule(nodes: Sequence[Node], analysis: BatchAnalysis, kept: Callable[[Value], bool]) -> Schedule:
    """Order ``nodes`` (given in program order), whose batch dimensions are known.

    Args:
        kept: whether the user still refers to a value.

    Raises:
        Unschedulable: too many passes would be needed.
    """
    floors: dict[Node, int] = {}
    while True:
        scheduler = _Scheduler(nodes, analysis, kept, floors)
        found = scheduler.run()
        if not scheduler.early:
            return found
        floors.update(scheduler.early)


class _Scheduler:
    """One attempt; ``floors`` are minimum levels of nodes that ran too early in previous attempts.

    ``early`` are such nodes found in this attempt: they write a value that a later pass still reads. For
    example, AdamW's weight decay writes weights before it needs any gradient.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        analysis: BatchAnalysis,
        kept: Callable[[Value], bool],
        floors: Mapping[Node, int],
    ) -> None:
        self.nodes, self.analysis, self.kept, self.floors = nodes, analysis, kept, floors
        self.early: dict[Node, int] = {}
        self.spread = analysis.calls
        self.level: dict[Node, int] = {}
        self.place = {node: position for position, node in enumerate(nodes)}
        self.ready: dict[Value, int] = {}  # the level at which a collected value is whole
        self.views: set[Node] = set()
        self.wanted: dict[Value, Collected] = {}
        self.latest: dict[Value, int] = {}  # the last pass that may collect it
        self.writers: dict[Storage, list[Node]] = {}  # spread nodes that write it
        self.deadline: dict[Node, int] = {}  # the last pass in which it may run

    def run(self) -> Schedule:
        for node in self.nodes:
            self.level[node] = self.earliest_level(node)
            if self.level[node] > MOST_PASSES:
                reason = "it is one of too many successive ops that need the whole batch"
                raise Unschedulable(self.chain(reason) or [Blocker(node, reason)])
            if node in self.spread:
                for storage in node.writes:
                    self.writers.setdefault(storage, []).append(node)
        for node in self.spread:
            if node in self.place:
                for value in node.outputs:
                    if self.kept(value) and value in self.analysis.placements:
                        self.collect(value, len(self.nodes))
        for node in self.nodes:
            for earlier in self.predecessors(node):
                if node not in self.spread and earlier in self.spread and not _order_of_draws(earlier, node):
                    self.deadline[earlier] = min(
                        self.deadline.get(earlier, MOST_PASSES), self.level[node] - 1
                    )
        return self.build_schedule()

    # --- the earliest level of each node ------------------------------------------------

    def earliest_level(self, node: Node) -> int:
        call = self.spread.get(node)
        level = self.floors.get(node, 0)
        unread = self.analysis.unread.get(node, ())
        for value in dict.fromkeys(node.inputs):
            maker = value.node
            if value in unread or maker is None or maker not in self.place:
                continue
            if maker in self.spread and (call is None or self.reads_whole(node, value)):
                level = max(level, self.collect(value, self.place[node]))
            else:
                level = max(level, self.level[maker])
        for earlier in self.predecessors(node):
            if earlier in self.place and not _order_of_draws(earlier, node):
                level = max(level, self.level[earlier] + (earlier in self.spread and call is None))
        return level

    def predecessors(self, node: Node) -> Sequence[Node]:
        """The nodes that must run before it in the order of reads and writes: none, if it only uses a
        shape.
        """
        return () if node in self.analysis.unread and not node.writes else node.after

    def reads_whole(self, node: Node, value: Value) -> bool:
        """Whether a spread node reads a spread node's value as a whole, or a part of the whole."""
        call = self.spread[node]
        return value in call.whole or value in self.analysis.gathers.get(node, ())

    def collect(self, value: Value, position: int) -> int:
        """Collect ``value`` for the node at ``position``; returns the level from which on it is available."""
        if value in self.ready:
            self.check_not_overwritten(value, position)
            return self.ready[value]
        node = value.node
        assert node is not None
        if node not in self.spread:
            return self.level.get(node, 0)
        if is_view(node):
            level = self.collect_base(node, position)
            self.views.add(node)
            self.ready.update(dict.fromkeys(node.outputs, level))
            return level
        writers = [each for each in self.writers.get(value.storage, ()) if self.place[each] < position]
        placement = self.analysis.placements[value]
        if isinstance(placement, Local):
            raise Unschedulable([Blocker(node, "internal state of its kernel is needed for the whole batch")])
        last = writers[-1] if writers else node
        alone = base_name(node.op) in ("nll_loss_forward", "nll_loss2d_forward") and value.index == 1
        if isinstance(placement, Partial) and placement.mean_of is not None:
            divisor = next(each for each in node.outputs if each.index == placement.mean_of)
            self.collect(divisor, position)
        level = (self.weight_sum_level(node) if alone else max(self.level[each] for each in (last, node))) + 1
        self.wanted[value] = Collected(value, last, alone)
        self.ready[value] = level
        return level

    def check_not_overwritten(self, value: Value, position: int) -> None:
        """Check that no piece has written the value since it was collected."""
        base = self.base(value)
        if base in self.wanted:
            since = self.place[self.wanted[base].after]
            for writer in self.writers.get(base.storage, ()):
                if since < self.place[writer] < position:
                    raise Unschedulable(
                        [Blocker(writer, "it writes to a tensor that was concatenated before")]
                    )

    def collect_base(self, view: Node, position: int) -> int:
        base = view.inputs[0]
        if base.node in self.spread and base.node in self.place:
            return self.collect(base, position)
        return self.level[view]

    def weight_sum_level(self, node: Node) -> int:
        """The pass in which the weights of a loss can be summed, without its scores."""
        level = 0
        for value in node.inputs[1:]:
            if value.node is not None and value.node in self.place:
                level = max(level, self.level[value.node])
        return level

    def chain(self, reason: str) -> list[Blocker]:
        """The reason for several passes: the values that pieces have to wait for."""
        found = dict.fromkeys(each.after for each in self.wanted.values() if self.ready[each.value] > 1)
        return [Blocker(node, reason) for node in found]

    # --- assigning nodes to passes ------------------------------------------------------

    def build_schedule(self) -> Schedule:
        levels = [self.ready[value] for value in self.wanted]
        count = max([0, *levels, *(self.level[node] for node in self.nodes if node not in self.spread)])
        passes = [Pass() for _ in range(count)]
        running: list[set[Node]] = [set() for _ in range(count)]
        last_passes = self.last_passes(count)
        flexible: list[Collected] = []
        for each in self.wanted.values():
            earliest = self.ready[each.value] - 1
            if each.alone or last_passes[each.value] == earliest:
                passes[earliest].collected.append(each)
                running[earliest].update(self.nodes_needed_for(each, running[earliest]))
            else:
                flexible.append(each)
        for each in flexible:  # in the pass that already runs most of its dependencies
            best, least = self.ready[each.value] - 1, len(self.nodes) + 1
            extra = self.nodes_needed_for(each, running[best])
            for number in range(self.ready[each.value] - 1, last_passes[each.value] + 1):
                more = self.nodes_needed_for(each, running[number])
                if any(self.deadline.get(node, count) < number for node in more):
                    break
                if len(more) < least or (len(more) == least and number > best):
                    best, least, extra = number, len(more), more
            passes[best].collected.append(each)
            running[best].update(extra)
        for number, members in enumerate(running):
            late = {node for node in members if self.deadline.get(node, count) < number}
            for node in self.nodes if late else ():
                if node not in self.spread and self.level[node] <= number and not late.isdisjoint(node.after):
                    self.early[node] = number + 1
        everywhere: set[Node] = set().union(*running) if running else set()
        again = sum(len(nodes) for nodes in running) - len(everywhere)
        for each_pass, members in zip(passes, running):
            each_pass.nodes = sorted(members, key=self.place.__getitem__)
            each_pass.collected.sort(key=lambda each: self.place[each.after])
        chosen = {each.value: number for number, work in enumerate(passes) for each in work.collected}
        whole: list[list[Node]] = [[] for _ in range(count + 1)]
        for node in self.nodes:
            if node not in self.spread:
                whole[self.level[node]].append(node)
            elif node in self.views:
                base = self.base(node.outputs[0])
                whole[
                    chosen.get(base, self.ready[base] - 1) + 1 if base in self.ready else self.level[node]
                ].append(node)
        idle = [node for node in self.nodes if node in self.spread and node not in everywhere]
        return Schedule(whole, passes, [node for node in idle if node not in self.views], self.views, again)

    def last_passes(self, count: int) -> dict[Value, int]:
        """The last pass in which each value may be collected: before the first node that needs it whole."""
        result = dict.fromkeys(self.wanted, count - 1)
        for node in self.nodes:
            unread = self.analysis.unread.get(node, ())
            for value in node.inputs:
                if value in self.ready and value not in unread:
                    base = self.base(value)
                    if base in result and (node not in self.spread or self.reads_whole(node, value)):
                        result[base] = min(result[base], self.level[node] - 1)
        return result

    def base(self, value: Value) -> Value:
        while value.node is not None and value.node in self.views:
            value = value.node.inputs[0]
        return value

    def nodes_needed_for(self, collected: Collected, running: set[Node]) -> set[Node]:
        """The spread nodes that a piece has to run for it, besides those in ``running``."""
        found: set[Node] = set()
        start = collected.after
        stack: list[Node] = []
        if collected.alone:
            stack += [value.node for value in start.inputs[1:] if value.node is not None]
        else:
            stack += [start]
            if collected.value.node is not None:
                stack.append(collected.value.node)
        while stack:
            node = stack.pop()
            if node in found or node in running or node not in self.spread:
                continue
            if node not in self.place:
                continue
            found.add(node)
            call = self.spread[node]
            whole = set(self.analysis.gathers.get(node, ()))
            storages = set()
            for value in node.inputs:
                if value in call.whole or value in whole or value.node is None:
                    continue
                stack.append(value.node)
                storages.add(value.storage)
            stack += [each for each in node.after if not storages.isdisjoint(each.writes)]
        return found


def _order_of_draws(earlier: Node, node: Node) -> bool:
    """Whether ``earlier`` has to run first only because it draws first, which drawing in advance makes
    unnecessary.
    """
    if torch.Tag.nondeterministic_seeded not in earlier.op.tags:
        return False
    if torch.Tag.nondeterministic_seeded not in node.op.tags:
        return False
    if earlier.inputs and not separable(earlier) and not draws_nothing(earlier):
        return False
    touched = {value.storage for value in (*node.inputs, *node.outputs)}
    own = {value.storage for value in (*earlier.inputs, *earlier.outputs)}
    return touched.isdisjoint(own)
