"""Peak of one run: projected for the nodes that it runs, for comparison with the measured peak.

A :class:`~lazyviz.plan.plan.Plan` describes a whole graph.  A run is often a part of it: the nodes that one
tensor needs, or the rest after a sync point.  Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from operator import add
from typing import NamedTuple

import torch

from ..graph.ir import Graph, Node, Storage
from .liveness.lifetimes import Lifetime, lifetimes, main_device
from .liveness.live_set_and_categories import Category, categorize
from .workspace.workspace_lookup import scratch


class Peak(NamedTuple):
    """Peak bytes of a run on ``device``, by category; ``scratch``: the kernels' scratch memory.

    ``total`` is the peak including scratch memory, which ``nbytes`` omits where a run cannot measure it.
    """

    device: torch.device
    nbytes: int
    by_category: Mapping[Category, int]
    scratch: int = 0
    total: int = 0


class Categories(Mapping[Storage, Category]):
    """Categories of storages, computed when needed, because a peak needs few of them."""

    def __init__(self, graphs: Sequence[Graph]) -> None:
        self._graphs = graphs

    @cached_property
    def _spans(self) -> Mapping[Storage, Lifetime]:
        return _known(self._graphs)

    def __getitem__(self, storage: Storage) -> Category:
        return categorize(self._spans[storage])

    def __iter__(self) -> Iterator[Storage]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)


class ByCategory(Mapping[Category, int]):
    """The bytes of each category among ``alive`` storages, summed on first access.

    Empty categories are left out; storages without a known category count as temporary.
    """

    def __init__(self, alive: Iterable[tuple[Storage, int]], categories: Mapping[Storage, Category]) -> None:
        self.alive: dict[Storage, int] = {}
        for storage, nbytes in alive:
            origin = storage.origin
            self.alive[origin] = self.alive.get(origin, 0) + nbytes
        self._categories = categories

    @cached_property
    def _sizes(self) -> dict[Category, int]:
        sizes: dict[Category, int] = {}
        for storage, nbytes in self.alive.items():
            category = self._categories.get(storage, "temporaries")
            sizes[category] = sizes.get(category, 0) + nbytes
        return {name: size for name, size in sizes.items() if size}

    def __getitem__(self, category: Category) -> int:
        return self._sizes[category]

    def __iter__(self) -> Iterator[Category]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)


Held = tuple[Storage, int, int, int]
"""A storage, its bytes, and the steps of a run at which it is allocated and freed."""


def project(
    graphs: Sequence[Graph], nodes: Sequence[Node], pending: Collection[Node]
) -> tuple[Peak, Mapping[Storage, Category]]:
    """The peak of running ``nodes`` of ``graphs``, in program order, and the category of each storage.

    ``pending`` are the nodes of any graph that have not run; the ones that are not in ``nodes`` may use the
    run's tensors later.  On a CPU, the peak counts only tensors, because a run cannot measure anything else.
    """
    count = len(nodes)
    if len(pending) == count and len(graphs) == 1 and len(graphs[0].nodes) == count:
        device, held = _held_by_all(graphs[0])
    else:
        device, held = _held_by_part(nodes, pending)
    needs: dict[Node, int] = {}
    for graph in graphs:
        own = nodes if len(graphs) == 1 else [node for node in nodes if _belongs_to(node, graph)]
        found = scratch(graph, device, device.type, own)
        needs.update((graph.nodes[at], need.nbytes) for at, need in found.items())
    categories = Categories(graphs)
    return highest(device, held, [needs.get(node, 0) for node in nodes], categories), categories


def _held_by_all(graph: Graph) -> tuple[torch.device, list[Held]]:
    """The storages held by a run of a whole graph on its main device; positions are node indices."""
    count = len(graph.nodes)
    spans = [span for span in lifetimes(graph) if span.last_use is not None]
    device = main_device(spans)
    held: list[Held] = []
    for span in spans:
        storage = span.storage.origin
        if storage.nbytes and storage.device == device and span.last_use is not None:
            stop = count if span.kept else span.last_use.index + 1
            held.append((storage, storage.nbytes, max(span.start, 0), stop))
    return device, held


def _held_by_part(nodes: Sequence[Node], pending: Collection[Node]) -> tuple[torch.device, list[Held]]:
    """The same for a run of some nodes, in time linear in the nodes to run and the pending ones."""
    count = len(nodes)
    inside = set(nodes)
    kept = {value.storage.origin for node in pending if node not in inside for value in node.inputs}
    first: dict[Storage, int] = {}
    last: dict[Storage, int] = {}
    made: set[Storage] = set()
    for position, node in enumerate(nodes):
        for storage in _names(node):
            origin = storage.origin
            first.setdefault(origin, position)
            last[origin] = position
            if storage.dropped is None or origin.dropped is None:
                kept.add(origin)
        made.update(_allocated(node))
    sizes: dict[torch.device, int] = {}
    for storage in last:
        sizes[storage.device] = sizes.get(storage.device, 0) + storage.nbytes
    device = max(sizes, key=sizes.__getitem__, default=torch.device("cpu"))
    held: list[Held] = []
    for storage, stop in last.items():
        if storage.nbytes and storage.device == device:
            start = first[storage] if storage in made else 0
            held.append((storage, storage.nbytes, start, count if storage in kept else stop + 1))
    return device, held


def _belongs_to(node: Node, graph: Graph) -> bool:
    return node.index < len(graph.nodes) and graph.nodes[node.index] is node


def _known(graphs: Sequence[Graph]) -> dict[Storage, Lifetime]:
    if len(graphs) == 1:
        return {span.storage.origin: span for span in lifetimes(graphs[0])}
    known: dict[Storage, Lifetime] = {}
    for graph in graphs:
        own = set(graph.storages)
        for span in lifetimes(graph):
            if span.storage in own:
                known[span.storage.origin] = span
            else:  # of a graph that has run, or need not run now
                known.setdefault(span.storage.origin, span)
    return known


def parts_of(
    graphs: Sequence[Graph], nodes: Sequence[Node], pending: Iterable[Node]
) -> tuple[list[Lifetime], dict[int, int]]:
    """Lifetimes on the main device of a run of ``nodes``, and kernels' scratch memory by position.

    Storages that remain after the run, for any reason, are ``kept``; storages created by other nodes count as
    outside storages.
    """
    inside = set(nodes)
    known = _known(graphs)
    later = {value.storage.origin for node in pending if node not in inside for value in node.inputs}
    touched = {storage.origin for node in nodes for storage in _names(node)}
    spans = [span for storage, span in known.items() if storage in touched and storage.nbytes]
    device = main_device(spans)
    spans = [
        span._replace(
            kept=span.kept or span.storage.origin in later, maker=span.maker if span.maker in inside else None
        )
        for span in spans
        if span.storage.device == device
    ]
    positions = {node: position for position, node in enumerate(nodes)}
    needs = {
        positions[graph.nodes[at]]: need.nbytes
        for graph in graphs
        for at, need in scratch(graph, device, device.type).items()
        if graph.nodes[at] in positions
    }
    return spans, needs


def _names(node: Node) -> set[Storage]:
    """The storages that a node accesses; memory that was recorded again has several storages."""
    return {
        *[value.storage for value in node.inputs],
        *[value.storage for value in node.outputs],
        *node.writes,
    }


def _allocated(node: Node) -> set[Storage]:
    """The storages that a node allocates, without those of its inputs and those that it writes in place."""
    made = {
        value.storage
        for value in node.outputs
        if value.storage.created == node.index and not value.storage.external
    }
    return made.difference([value.storage for value in node.inputs], node.writes)


def highest(
    device: torch.device,
    held: Sequence[Held],
    extra: Sequence[int],
    categories: Mapping[Storage, Category],
) -> Peak:
    """The peak of a run on ``device`` that holds ``held``, plus ``extra`` scratch bytes in each step."""
    changes = [0] * (len(extra) + 1)
    for _, nbytes, start, stop in held:
        changes[start] += nbytes
        changes[stop] -= nbytes
    del changes[len(extra)]
    tensors = list(accumulate(changes))
    with_scratch = list(map(add, tensors, extra))
    if device.type != "cuda":
        levels, extra = tensors, ()
    else:
        levels = with_scratch
    peak = max(levels, default=0)
    at = levels.index(peak) if peak else 0
    alive = [(storage, nbytes) for storage, nbytes, start, stop in held if start <= at < stop]
    beside = extra[at] if extra else 0
    return Peak(device, peak, ByCategory(alive, categories), beside, max(with_scratch, default=0))
