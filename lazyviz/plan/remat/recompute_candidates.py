"""Rematerialization candidates: forward nodes that can run twice, and the memory of such a run.

A tensor that is kept for the backward pass can be dropped after its last use before it, and recomputed just
before its first use in it, by the same kernels from the same inputs, so that the result is bit-equal.
Recomputation needs the inputs.  Each of them is either kept for longer or recomputed as well, and a
recomputed tensor stays until its last use.

Sizes are bytes, positions those of the recorded order; a run with recomputation has its own positions.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch

from ...graph.ir import Node, Storage, Value
from ..liveness.allocation_trace import Key, Program, Step, program_of
from ..liveness.lifetimes import Lifetime

NEVER = math.inf

OWN_STATISTICS = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::_native_batch_norm_legit": ("running_mean", "running_var"),
    "aten::_batch_norm_with_update": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
}
"""Operators that update running statistics in training: their results do not depend on these.

``batch_norm_cpu_template`` (ATen's Normalization.cpp) and cuDNN's ``BatchNormalizationForwardTraining``
compute mean and variance from the batch. When run again, they write to copies of the statistics.
"""

_ADDING_IN_ANY_ORDER = frozenset(
    f"aten::{name}"
    for name in (
        "index_add", "index_copy", "index_put", "put", "scatter_add", "scatter_reduce", "scatter", "cumsum",
        "bincount", "histc", "kthvalue", "median", "nanmedian", "_ctc_loss", "nll_loss2d_forward",
        "_embedding_bag", "grid_sampler_2d", "grid_sampler_3d", "index_reduce", "_unsafe_index_put",
    )
)  # fmt: skip
"""Operators whose CUDA kernels may return different bits each time: those that the documentation of
``torch.use_deterministic_algorithms`` lists, and similar ones.
"""


def repeatable(node: Node) -> bool:
    """Whether running ``node`` again on the same inputs gives the same bits and does nothing else."""
    op = node.op
    if node.at_once or op.namespace not in ("aten", "prims"):
        return False  # side effects of other libraries' operators are unknown
    if torch.Tag.nondeterministic_bitwise in op.tags or (op._schema.is_mutable and not node.writes):
        return False
    devices = {value.device for value in (*node.inputs, *node.outputs) if value.meta.shape}
    if len(devices) > 1:
        return False  # a copy between devices may not have arrived
    name = op._schema.name
    if any(device.type != "cpu" for device in devices) and name.rstrip("_") in _ADDING_IN_ANY_ORDER:
        return False
    moved = {value.storage.origin for value in statistics(node)}
    written = {storage.origin for storage in node.writes} - moved
    # If it writes memory and also returns a result, both would be repeated although only one is needed.
    return not written or (len(written) == 1 and all(value.node is not node for value in node.outputs))


def statistics(node: Node) -> list[Value]:
    """The running statistics that ``node`` updates besides computing its results."""
    names = OWN_STATISTICS.get(node.op._schema.name)
    if names is None or not node.writes:
        return []
    found = []
    for position, argument in enumerate(node.op._schema.arguments):
        if argument.name in names:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            if isinstance(given, Value):
                found.append(given)
    return found


def is_view(node: Node) -> bool:
    """Whether all results of ``node`` are unchanged memory that existed before it."""
    before = {value.storage for value in node.inputs}
    return (
        bool(node.outputs)
        and not node.writes
        and not node.op._schema.is_mutable
        and all(value.node is node and value.storage in before for value in node.outputs)
    )


@dataclass(slots=True)
class RecomputeSchedule:
    """A run in which some nodes run twice.

    Attributes:
        groups: by position of a node, the positions of the nodes that run again just before it, in order.
        drops: by position, the allocations that are dropped once that node has run.
        made: the recomputed allocations, and the node before which each is recomputed.
        held: by position of a repeated node, the repeated node of its group until which its inputs are kept.
        program: the whole run.
        order: the run's steps, by recorded position.
        duplicates: for each allocation that was added to the program, the original one.
    """

    groups: dict[int, list[int]] = field(default_factory=dict)
    drops: dict[int, list[Key]] = field(default_factory=dict)
    made: dict[Key, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    program: Program = field(default_factory=lambda: Program([], [], [], set(), [], {}))
    order: list[int] = field(default_factory=list)
    duplicates: dict[Key, Key] = field(default_factory=dict)

    @property
    def repeated(self) -> list[int]:
        """Positions of the nodes that run again, in that order."""
        return [position for group in self.groups.values() for position in group]


class Trace:
    """The uses and allocations of consecutive nodes on one device, and which of them can be recomputed."""

    def __init__(
        self,
        nodes: Sequence[Node],
        spans: Iterable[Lifetime],
        needs: Mapping[int, int],
        run_of: Callable[[Node], int] = lambda node: 0,
    ) -> None:
        """``spans`` are those of one device; ``needs`` kernels' scratch memory by position.

        ``run_of`` is the number of the run that runs a node: what an earlier one has computed exists already.
        """
        self.nodes = nodes
        self.needs = needs
        self.spans = {span.storage: span for span in spans if span.storage.nbytes}
        program = self.program = program_of(nodes, self.spans.values())
        self.position = {node: position for position, node in enumerate(nodes)}
        self.size = program.sizes
        count = len(program.sizes)
        key: Key | None
        self.maker = [-1] * count
        self.touches: list[list[int]] = [[] for _ in range(count)]
        for position, step in enumerate(program.steps):
            for key in step.makes:
                self.maker[key] = position
            for key in dict.fromkeys((*step.makes, *step.uses)):
                self.touches[key].append(position)
        self._written: dict[Storage, list[int]] = {}
        odd: set[Key] = set()  # they cannot be traced back to the nodes that create them
        for position, node in enumerate(nodes):
            for storage in node.writes:
                self._written.setdefault(storage.origin, []).append(position)
            for value in node.inputs:
                if value.node not in self.position and (key := self.key(value)) is not None:
                    odd.add(key)  # for example, read again after a sync point
            for value in node.outputs:
                key = self.key(value) if value.node is node else None
                if key is None or self.maker[key] == position or (is_view(node) and repeatable(node)):
                    continue
                odd.add(key)  # for example, an operator that changes the shape of its argument
        # The node that creates it, and then the nodes that write it, in order.
        self.writers: list[list[int]] = [
            [self.maker[key], *(at for at in self._written.get(storage.origin, ()) if at != self.maker[key])]
            for key, storage in enumerate(program.storages)
        ]
        self._limits: dict[int, float] = {}
        outside = {key for key in range(count) if self.maker[key] < 0}
        runs = [run_of(node) for node in nodes]
        earlier = {
            key
            for key, touches in enumerate(self.touches)
            if key not in outside and any(runs[at] > runs[self.maker[key]] for at in touches)
        }
        self.fixed = program.kept | odd | outside | earlier
        self.gaps = {key: gap for key in range(count) if (gap := self._gap(key)) is not None}
        self.first_backward = next(
            (p for p, node in enumerate(nodes) if node.phase == "backward"), len(nodes)
        )

    def key(self, value: Value) -> Key | None:
        keys = self.program.keys
        return keys.get(value.storage, keys.get(value.storage.origin))

    def _gap(self, key: Key) -> tuple[int, int] | None:
        """The positions between which it only waits for the backward pass, if it may be dropped."""
        if key in self.fixed or self.program.dtypes[key] is None:
            return None
        if self.nodes[self.maker[key]].phase in ("backward", "optimizer"):
            return None
        before = -1
        for position in self.touches[key]:
            if self.nodes[position].phase == "backward":
                if before >= 0 and position - before > 1 and self.repeats(key, before, position):
                    return before, position
                return None
            before = position
        return None

    def repeats(self, key: Key, last: int, at: int) -> bool:
        """Whether the content of ``key`` after ``last`` can be recomputed just before ``at``."""
        return all(self.limit(writer) >= at for writer in self.writers[key] if writer <= last)

    def limit(self, position: int) -> float:
        """The position before which the node can run again: -1 for never, else until an input is
        overwritten.
        """
        found = self._limits.get(position)
        if found is None:
            node = self.nodes[position]
            if not repeatable(node):
                found = -1
            elif is_view(node):
                found = NEVER
            else:
                own = {storage.origin for storage in node.writes}
                own |= {value.storage.origin for value in statistics(node)}
                found = min(
                    (self._overwritten(value.storage.origin, position) for value in node.inputs
                     if value.storage.origin not in own),
                    default=NEVER,
                )  # fmt: skip
            self._limits[position] = found
        return found

    def _overwritten(self, storage: Storage, after: int) -> float:
        written = self._written.get(storage)
        if not written:
            return NEVER
        at = bisect_right(written, after)
        return written[at] if at < len(written) else NEVER

    # --- a run with repetitions -------------------------------------------------------

    def schedule(self, dropped: Set[Key], anchors: Set[Key]) -> RecomputeSchedule:
        """The run in which each allocation in ``dropped`` (from :attr:`gaps`) does not exist during its gap.

        ``anchors`` are kept rather than recomputed if a recomputed node needs them.
        """
        result = RecomputeSchedule()
        made: set[Value] = set()
        repeated: set[int] = set()
        for position in range(self.first_backward, len(self.nodes)):
            needed = [
                value
                for value in self.nodes[position].inputs
                if (key := self.key(value)) is not None and (key in dropped or key in result.made)
            ]
            if needed:
                group = self._nodes_to_repeat(needed, position, dropped, anchors, result.made, made, repeated)
                if group:
                    result.groups[position] = sorted(group)
        self._lay_out(result)
        return result

    def _nodes_to_repeat(
        self,
        needed: list[Value],
        at: int,
        dropped: Set[Key],
        anchors: Set[Key],
        returned: dict[Key, int],
        made: set[Value],
        repeated: set[int],
    ) -> set[int]:
        """The nodes that must run again before ``at`` so that the values ``needed`` exist."""
        group: set[int] = set()
        stack = list(needed)

        def run(position: int) -> None:
            if position in repeated:
                return
            repeated.add(position)
            group.add(position)
            node = self.nodes[position]
            for value in node.outputs:
                if value.node is node:
                    made.add(value)
                    other = self.key(value)
                    if (
                        other is not None
                        and other not in returned
                        and self._must_recompute(other, at, dropped, anchors)
                    ):
                        recompute_storage(other)
            stack.extend(node.inputs)

        def recompute_storage(key: Key) -> None:
            returned[key] = at
            last = self._last_before(key, at, dropped)
            for writer in self.writers[key]:
                if writer <= last:
                    run(writer)

        while stack:
            value = stack.pop()
            key = self.key(value)
            if key is None or value in made:
                continue
            if key not in returned:
                if not self._must_recompute(key, at, dropped, anchors):
                    continue
                recompute_storage(key)
            maker = self.position.get(value.node) if value.node is not None else None
            if value not in made and maker is not None and maker < returned[key]:
                run(maker)  # a view of recomputed memory
        return group

    def _must_recompute(self, key: Key, at: int, dropped: Set[Key], anchors: Set[Key]) -> bool:
        """Whether ``key`` does not exist at ``at``, and must be recomputed rather than kept until then."""
        if key in self.fixed:
            return False
        if key in dropped:
            return at > self.gaps[key][0]
        last = self.touches[key][-1]
        return last < at and key not in anchors and self.repeats(key, last, at)

    def _last_before(self, key: Key, at: int, dropped: Set[Key]) -> int:
        return self.gaps[key][0] if key in dropped else self.touches[key][-1]

    def _lay_out(self, schedule: RecomputeSchedule) -> None:
        """Compute the fields that follow from the groups."""
        base = self.program
        program = base.copy()
        program.steps = []
        mapping: dict[Key, Key] = {}
        used: set[Key] = set()  # duplicates that are used after the step that creates them
        steps, order = program.steps, schedule.order

        def duplicate(key: Key) -> Key:
            new = program.key(key)
            schedule.duplicates[new] = key
            return new

        for position, step in enumerate(base.steps):
            group = schedule.groups.get(position)
            if group is not None:
                schedule.held.update(
                    self._held(group, {key for key, at in schedule.made.items() if at == position})
                )
                later: dict[int, list[Key]] = {}
                for repeated in group:
                    old = base.steps[repeated]
                    uses = [mapping.get(key, key) for key in old.uses if key not in old.makes]
                    used.update(uses)
                    if repeated in schedule.held:
                        later.setdefault(schedule.held[repeated], []).extend(uses)
                    uses += later.pop(repeated, ())
                    makes = []
                    for key in old.makes:
                        new = duplicate(key)
                        makes.append(new)
                        if schedule.made.get(key) == position:
                            mapping[key] = new
                    steps.append(Step(old.node, tuple(dict.fromkeys((*uses, *makes))), tuple(makes)))
                    order.append(repeated)
            if mapping and any(key in mapping for key in step.uses):
                step = step._replace(uses=tuple(mapping.get(key, key) for key in step.uses))
                used.update(step.uses)
            steps.append(step)
            order.append(position)
        for key, at in list(schedule.made.items()):
            if mapping[key] in used:
                last = next(p for p in reversed(self.touches[key]) if p < at)
                schedule.drops.setdefault(last, []).append(key)
            else:
                del schedule.made[key]  # another result of the same node, which is not needed
        schedule.program = program

    def _held(self, group: Sequence[int], made: Set[Key]) -> dict[int, int]:
        """If several nodes write recomputed memory, all of them keep their inputs until the last one has run.

        If one of them fails, all can start again.
        """
        held: dict[int, int] = {}
        inside = set(group)
        for key in made:
            writers = [writer for writer in self.writers[key] if writer in inside]
            if len(writers) < 2:
                continue
            first, last = min(writers), max(writers)
            for position in group:
                if first <= position < last and key in self.program.steps[position].uses:
                    held[position] = max(held.get(position, 0), last)
        return held

    def levels(self, schedule: RecomputeSchedule | None = None) -> list[int]:
        """Bytes during each step of the run, kernels' scratch memory included."""
        program = self.program if schedule is None else schedule.program
        levels = program.timeline()
        needs = self.needs
        if not needs:
            return levels
        order = range(len(levels)) if schedule is None else schedule.order
        return [level + needs.get(at, 0) for level, at in zip(levels, order)]

    def peak(self, schedule: RecomputeSchedule | None = None) -> int:
        return max(self.levels(schedule), default=0)
