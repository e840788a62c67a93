"""Rematerialized runs: activations are dropped and recomputed in the backward pass.

The kernels and their order are those of the eager run, except that some nodes run again before others, on the
same inputs, and from the same generator states.  Between two nodes, every value that a pending node reads
either exists or can be recomputed: if a run ends early, nodes whose results were dropped become pending
again, so that the next evaluation recomputes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch

from ..graph.ir import Storage
from ..plan.liveness.allocation_trace import Key
from ..plan.remat.recompute_candidates import RecomputeSchedule, Trace, statistics
from ..process.global_state_transaction import complete
from ..record.tape import Tape
from ..record.tracked_storages import DrawSequence, TrackedNode, TrackedStorage, TrackedValue
from ..torch_internals import private_api
from .eager_backend import call, consumed, recorded_modes
from .kernel_errors import name_line
from .measured_memory import ResidentMemory


class RecomputeRun:
    """Actions between nodes of a run with recomputation; a context that leaves pending nodes consistent."""

    def __init__(self, tape: Tape, trace: Trace, schedule: RecomputeSchedule, memory: ResidentMemory) -> None:
        self.tape, self.trace, self.recomputed, self.memory = tape, trace, schedule, memory
        # The plan refers to recorded objects: nodes and values with their tensors.
        self.nodes = cast("Sequence[TrackedNode]", trace.nodes)
        self.count = 0  # nodes that have run again so far
        self._left = set(schedule.repeated)
        self._values: dict[Key, list[TrackedValue]] = {key: [] for key in schedule.made}
        self._states: dict[TrackedNode, torch.Tensor] = {}
        self._sequences: dict[TrackedNode, DrawSequence] = {}

    def __enter__(self) -> RecomputeRun:
        seen: set[TrackedValue] = set()
        for node in self.nodes:
            for value in (*node.inputs, *node.outputs):
                key = self.trace.key(value)
                if key in self._values and value not in seen:
                    seen.add(value)
                    self._values[key].append(value)
        for at, group in self.recomputed.groups.items():
            for position in group:
                for value in self.nodes[position].inputs:
                    value.uses += 1
                    storage = value.storage
                    storage.uses += 1
                    if storage.external or storage.live:  # nodes that write it have to wait
                        storage.readers.append(self.nodes[at])
        return self

    def before(self, position: int) -> None:
        """Recompute the values that the node at ``position`` needs."""
        group = self.recomputed.groups.get(position)
        if group is not None:
            self._run(group, position)
        node = self.nodes[position]
        if position in self._left and node.draws is not None:
            self._states[node] = node.draws.state

    def after(self, position: int) -> None:
        """Called after the node at ``position`` has run: drop values that are only needed later."""
        node = self.nodes[position]
        if position in self._left:
            node.is_rematerialized = True
            if node.draws is not None:
                self._sequences[node] = node.draws
                node.draws = DrawSequence(node.draws.generator, self._states.pop(node))
        for key in self.recomputed.drops.get(position, ()):
            self._drop(key)

    def finished(self, position: int) -> None:
        """Mark the node as run, permanently or for now."""
        self.tape.pending_ops.finished(self.nodes[position], for_good=position not in self._left)

    def _drop(self, key: Key) -> None:
        for value in self._values[key]:
            value.real = None
        self.memory.freed(self._values[key][0].storage)

    def _run(self, group: Sequence[int], at: int) -> None:
        # By the last node of the group that needs them, the inputs that are kept.
        waiting: dict[int, list[int]] = {}
        node = self.nodes[group[0]]
        try:
            for position in group:
                node = self.nodes[position]
                self.memory.step()
                with recorded_modes(node):
                    complete(partial(self._deliver, node, call(node), set()))
                self.count += 1
                done = waiting.pop(position, [])
                if position in self.recomputed.held:
                    waiting.setdefault(self.recomputed.held[position], []).append(position)
                else:
                    done.append(position)
                for each in done:
                    self._left.discard(each)
                    consumed(self.nodes[each], self.memory)
                    self.tape.pending_ops.finished(self.nodes[each])
        except BaseException as error:
            # If several nodes write recomputed memory, and some have run, all of them start again.
            for each in (each for several in waiting.values() for each in several):
                for value in self.nodes[each].outputs:
                    key = self.trace.key(value)
                    if key is not None and self.recomputed.made.get(key) == at:
                        self._drop(key)
            if isinstance(error, Exception):
                name_line(error, node)
            raise

    def _deliver(self, node: TrackedNode, results: list[Any], given: set[TrackedValue]) -> None:
        """Store the recomputed results. May be called again with the same ``given`` if it was interrupted."""
        beside: dict[Storage, int] = {}  # recomputed memory that also exists already
        for value in node.outputs:
            if value.node is not node or results[value.index] is None or value in given:
                continue
            real = results[value.index]
            fresh = value.storage.created == node.index and value.storage.graph is node.graph
            if value.uses and (value.real is None or value.real is real):
                value.real = real
                if fresh:
                    self.memory.made(value.storage, real)
                given.add(value)
            elif fresh and value.storage not in beside:
                beside[value.storage] = private_api.TensorBase.untyped_storage(real).nbytes()
                self.memory.add_extra(value.storage, beside[value.storage])
        for storage, size in beside.items():
            self.memory.add_extra(storage, -size)

    # --- the end ------------------------------------------------------------------------

    def __exit__(self, *error: object) -> None:
        if not self._left:
            return
        reopened = self._needed()
        for position in reopened:
            self._reopen(self.nodes[position])
        for position in self._left - reopened:
            node = self.nodes[position]
            consumed(node, self.memory)
            if node.state == "done":
                self.tape.pending_ops.finished(node)
        pending = sorted(self.tape.pending, key=lambda node: node.sequence)
        self.tape.pending.clear()
        self.tape.pending.update(dict.fromkeys(pending))

    def _needed(self) -> set[int]:
        """The nodes that must run again so that the nodes that are still pending can run."""
        found: set[int] = set()
        stack = [value for node in self.nodes if node.state != "done" for value in node.inputs]
        while stack:
            value = stack.pop()
            if value.real is not None or value.node is None or value.node.state != "done":
                continue
            key = self.trace.key(value)
            makers = [self.trace.position.get(value.node, -1)]
            if key is not None:
                makers += self.trace.writers[key]
            for position in makers:
                if position in self._left and position not in found and self.nodes[position].state == "done":
                    found.add(position)
                    stack.extend(self.nodes[position].inputs)
        return found

    def _reopen(self, node: TrackedNode) -> None:
        node.state = "pending"
        for value in cast("list[TrackedValue]", statistics(node)):
            if value.storage.writer is node:
                value.storage.writer = None  # they have been updated, permanently
        storages: set[TrackedStorage] = {value.storage for value in node.inputs}
        for storage in storages:
            if node not in storage.readers and storage.writer is not node:
                storage.readers.append(node)
        sequence = self._sequences.get(node)
        if sequence is not None and sequence.last is node:
            sequence.last = None  # it has drawn, so nothing that uses the generator waits for it
        self.tape.pending[node] = None
