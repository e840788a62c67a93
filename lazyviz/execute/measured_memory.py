"""Measured memory of a run: the bytes held, counted from the actual sizes of its tensors."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from ..graph.ir import Storage
from ..plan.liveness.live_set_and_categories import Category
from ..plan.peak_of_one_run import ByCategory, Peak
from ..record.tracked_storages import TrackedNode, TrackedStorage
from ..torch_internals import private_api
from .replay.program_key import Subgraph
from .run_report import Timeline

_storage_of = private_api.TensorBase.untyped_storage
_nbytes_of = torch.UntypedStorage.nbytes

Timelines = Mapping[int, Sequence[tuple[int, int]]]
"""By id of a graph: positions of its nodes in the order in which they ran, each with the most bytes held
during it.
"""


class ResidentMemory:
    """Bytes of the storages that the run holds, on all devices; other memory of kernels is not included."""

    def __init__(self, nodes: Sequence[TrackedNode]) -> None:
        there = dict.fromkeys(
            [value.storage for node in nodes for value in node.inputs if value.real is not None]
        )
        # By origin, so that memory that is used again after a sync point counts once.
        self._sizes: dict[Storage, int] = {}
        # The recorded storages of each origin, if there are others besides itself.
        self._names: dict[Storage, set[Storage]] = {}
        for storage in there:
            origin = storage.origin
            self._sizes[origin] = storage.nbytes
            if origin is not storage:
                self._names.setdefault(origin, {origin} if origin in there else set()).add(storage)
        # Allocations and frees: the storage, the bytes, and where each step begins (including one before the
        # first node). Few containers, because the garbage collector counts them, and visits all that exist.
        self._storages: list[Storage] = list(self._sizes)
        self._bytes: list[int] = list(self._sizes.values())
        self._begins: list[int] = [0]
        self._between: set[int] = set()  # those of these steps that belong to no node
        self._freed: list[Storage] = []  # to be noted with the next step
        self._freed_bytes: list[int] = []
        self.now = sum(self._bytes)
        self.peak = self.now
        self._steps: list[TrackedNode | None] = []  # of the timeline, and the most bytes held during each
        self._marks: list[int] = []
        self._high = self.now

    def step(self, node: TrackedNode | None = None, *, shown: bool = True) -> None:
        """Begin the step of the next node: memory freed before it no longer counts.

        The timeline omits a node that is not ``shown``; without ``node``, the memory counts for the next one.
        """
        self._begins.append(len(self._storages))
        if self._freed:
            self._storages += self._freed
            self._bytes += self._freed_bytes
            self._freed.clear()
            self._freed_bytes.clear()
        if node is None:
            self._between.add(len(self._begins) - 1)
        else:
            if self._steps:
                self._marks.append(self._high)
            self._steps.append(node if shown else None)
            self._high = self.now

    def timeline(self) -> list[tuple[TrackedNode, int]]:
        """The nodes in the order in which they ran, each with the most bytes held during it."""
        marks = zip(self._steps, [*self._marks, self._high])
        return [(node, nbytes) for node, nbytes in marks if node is not None]

    def timelines(self) -> Timelines:
        """The timeline of each graph that the nodes belong to: of the storages that it created or uses."""
        graphs = dict.fromkeys([node.graph for node in self._steps if node is not None])
        if len(graphs) == 1:
            if None not in self._steps:
                positions = [node.index for node in self._steps if node is not None]
                return {id(graph): Timeline(positions, [*self._marks, self._high]) for graph in graphs}
            whole = [(node.index, held) for node, held in self.timeline()]
            return {id(graph): whole for graph in graphs}
        steps = iter(self._steps)
        nodes = [None if at in self._between else next(steps) for at in range(1, len(self._begins))]
        ends = [*self._begins[1:], len(self._storages)]
        return _of_graphs(nodes, self._storages, self._bytes, ends)

    def levels(self, storages: Sequence[TrackedStorage]) -> Levels:
        """The allocations and frees, for another run of the same subgraph, whose storages these are."""
        places: dict[Storage, int] = {}
        for place, storage in enumerate(storages):
            places.setdefault(storage, place)
            places.setdefault(storage.origin, place)
        whose = [places[storage] for storage in self._storages]
        ends = [*self._begins[1:], len(whose)]
        sums = [0, *accumulate(self._bytes)]
        after = []
        for end, stop in pairwise(ends):
            # Memory freed after a node is noted with the next one.
            after.append(sums[end] + sum([nbytes for nbytes in self._bytes[end:stop] if nbytes < 0]))
        after.append(sums[-1] + sum(self._freed_bytes))
        return Levels(whose, list(self._bytes), ends, [*self._marks, self._high], after, self.peak)

    def _note_allocated(self, storage: Storage, nbytes: int) -> None:
        self._storages.append(storage)
        self._bytes.append(nbytes)
        now = self.now = self.now + nbytes
        if now > self._high:
            self._high = now
            if now > self.peak:
                self.peak = now

    def _note_freed(self, storage: Storage, nbytes: int) -> None:
        self._freed.append(storage)
        self._freed_bytes.append(-nbytes)
        self.now -= nbytes

    def add_extra(self, storage: Storage, size: int) -> None:
        """Add (or subtract) ``size`` bytes in addition to ``storage``: for a piece, or for a
        recomputed copy.
        """
        if size > 0:
            self._note_allocated(storage, size)
        else:
            self._note_freed(storage, -size)

    def made(self, storage: Storage, real: torch.Tensor) -> None:
        size = _nbytes_of(_storage_of(real))
        before = self._sizes.get(storage, 0)  # the sum of the pieces exists before it is delivered
        self._sizes[storage] = size
        if self._names:
            self._names.pop(storage, None)
        self._note_allocated(storage, size - before)

    def taken_over(self, storage: Storage, size: int) -> None:
        """Count ``size`` bytes that were added to ``storage`` as its own from now on."""
        before = self._sizes.get(storage, 0)
        self._sizes[storage] = size
        if before:
            self._note_freed(storage, before)

    def resized(self, storage: Storage, real: torch.Tensor) -> None:
        """Update the size of a storage that ``out=`` may have resized."""
        origin = storage.origin
        if (before := self._sizes.get(origin)) is None:
            return
        size = self._sizes[origin] = _nbytes_of(_storage_of(real))
        if size != before:
            self._note_allocated(origin, size - before)

    def freed(self, storage: Storage) -> None:
        origin = storage.origin
        if self._names or origin is not storage:
            names = self._names.get(origin, {origin})
            names.discard(storage)
            if names:
                return
        size = self._sizes.pop(origin, 0)
        if size:
            self._note_freed(origin, size)

    def peak_on(self, device: torch.device, categories: Mapping[Storage, Category]) -> Peak:
        """The peak of one device, and its categories."""
        ends = [*self._begins[1:], len(self._storages)]
        return _highest(device, self._storages, self._bytes, ends, categories)


@dataclass(frozen=True)
class Levels:
    """The memory that a run of a subgraph held, with its storages by number.

    ``places`` are the storages that were allocated and freed, one after another, and ``nbytes`` the bytes.
    ``ends`` are the positions in these lists before the first node, and after each node. ``marks`` are the
    most bytes held during each node, ``after`` those left after it (first: before all nodes), ``peak`` is the
    maximum.
    """

    places: Sequence[int]
    nbytes: Sequence[int]
    ends: Sequence[int]
    marks: Sequence[int]
    after: Sequence[int]
    peak: int

    def with_other_live(self, deaths: Mapping[int, int], freed: Set[int], kept: Set[int]) -> Levels | None:
        """The levels of a run in which storages in ``freed`` are also freed, and those in ``kept`` are not.

        ``deaths`` are the positions of the nodes after which they are freed. ``None`` if one of them is not
        freed as a separate storage.
        """
        places, nbytes = list(self.places), list(self.nbytes)
        ends, marks, after = list(self.ends), list(self.marks), list(self.after)
        for place in (*freed, *kept):
            size = sum([came for each, came in zip(self.places, self.nbytes) if each == place and came > 0])
            death = deaths[place]
            last = death + 1 == len(marks)  # memory freed after the last node belongs to no step
            start = ends[death + 1]
            if place in kept:
                step = range(start, start if last else ends[death + 2])
                found = [at for at in step if (places[at], nbytes[at]) == (place, -size)]
                if not last and len(found) != 1:
                    return None
                for at in found:
                    del places[at], nbytes[at]
            elif not last:
                places.insert(start, place)
                nbytes.insert(start, -size)
            more = size if place in kept else -size
            shift = 0 if last else -1 if place in kept else 1
            ends[death + 2 :] = [end + shift for end in ends[death + 2 :]]
            marks[death + 1 :] = [mark + more for mark in marks[death + 1 :]]
            after[death + 1 :] = [level + more for level in after[death + 1 :]]
        return Levels(places, nbytes, ends, marks, after, max([after[0], *marks]))


_index_of = operator.attrgetter("index")


def timeline_of(nodes: Sequence[TrackedNode], held: Sequence[int]) -> Timeline:
    """The timeline of ``nodes`` of one graph, in program order, with the bytes ``held`` during each."""
    first, count = nodes[0].index, len(nodes)
    in_a_row = nodes[-1].index - first == count - 1
    return Timeline(range(first, first + count) if in_a_row else list(map(_index_of, nodes)), held)


class KnownMemory:
    """The memory of a run whose allocations are all known; same interface as :class:`ResidentMemory`."""

    def __init__(self, levels: Levels, subgraph: Subgraph, held: Peak | None) -> None:
        self._levels, self._subgraph, self._held = levels, subgraph, held
        self._finished = len(subgraph.nodes)
        self.peak = levels.peak
        self.now = levels.after[0]

    def reach(self, count: int) -> None:
        """That many nodes have run."""
        self.now = self._levels.after[count]

    def stop(self, count: int) -> None:
        """At most this many nodes have run; the next one may have been started."""
        self._finished = count + 1
        self.reach(count)
        self.peak = max([self._levels.after[0], *self._levels.marks[: count + 1]])

    def timelines(self) -> Timelines:
        nodes, marks = self._subgraph.nodes[: self._finished], self._levels.marks
        if len(self._subgraph.graphs) == 1:
            return {id(nodes[0].graph): timeline_of(nodes, marks)}
        storages = [self._subgraph.storages[place] for place in self._levels.places]
        return _of_graphs(nodes, storages, self._levels.nbytes, self._levels.ends)

    def peak_on(self, device: torch.device, categories: Mapping[Storage, Category]) -> Peak:
        if self._held is not None:
            return self._held
        levels, storages = self._levels, self._subgraph.storages
        there = [storages[place] for place in levels.places]
        return _highest(device, there, levels.nbytes, levels.ends, categories)


def _of_graphs(
    nodes: Sequence[TrackedNode | None],
    storages: Sequence[Storage],
    sizes: Sequence[int],
    ends: Sequence[int],
) -> dict[int, list[tuple[int, int]]]:
    """The timelines of a run of several graphs, which happens where they share a random number generator.

    Each has the storages that its own nodes use, as its plan has.

    Args:
        nodes: the node of each step; ``None`` for a step whose memory counts for the next node.
        storages: those allocated and freed, one after another, with their ``sizes``.
        ends: positions in these lists, before the first step and after each.
    """
    result: dict[int, list[tuple[int, int]]] = {}
    for graph in dict.fromkeys([node.graph for node in nodes if node is not None]):
        mine = [node for node in nodes if node is not None and node.graph is graph]
        used = {value.storage.origin for node in mine for value in (*node.inputs, *node.outputs)}
        own = [size if storage.origin in used else 0 for storage, size in zip(storages, sizes)]
        now = sum(own[: ends[0]])
        highest = 0
        line = result[id(graph)] = []
        for node, (begin, end) in zip(nodes, pairwise(ends)):
            now += sum([size for size in own[begin:end] if size < 0])  # freed before
            highest = max(highest, now)
            now += sum([size for size in own[begin:end] if size > 0])
            highest = max(highest, now)
            if node is not None:
                if node.graph is graph:
                    line.append((node.index, highest))
                highest = 0
    return result


def _highest(
    device: torch.device,
    storages: Sequence[Storage],
    sizes: Sequence[int],
    ends: Sequence[int],
    categories: Mapping[Storage, Category],
) -> Peak:
    """The maximum of the sum of allocations (positive) and frees on ``device`` at the end of a step, and its
    categories.
    """
    devices = [storage.device for storage in storages]
    if any(each != device for each in {id(each): each for each in devices}.values()):
        sizes = [nbytes if each == device else 0 for nbytes, each in zip(sizes, devices)]
    sums = [0, *accumulate(sizes)]
    levels = [sums[end] for end in ends]
    peak = max(levels, default=0)
    end = ends[levels.index(peak)] if peak else 0
    totals: dict[Storage, int] = {}
    for storage, nbytes in zip(storages[:end], sizes):
        totals[storage] = totals.get(storage, 0) + nbytes
    alive = [(storage, nbytes) for storage, nbytes in totals.items() if nbytes]
    return Peak(device, peak, ByCategory(alive, categories))


Memory = ResidentMemory | KnownMemory
