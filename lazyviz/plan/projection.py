"""What running some of a graph's nodes would peak at, to be held against what it did peak at.

A :class:`~.memory.Plan` is of a whole graph.  A run is often of a part: what one tensor
needs, or what is left after a sync point.  Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

import torch

from ..graph.ir import Graph, Node, Storage
from .alive import Category, categorize
from .lifetimes import Lifetime, lifetimes, main_device
from .scratch import scratch


class Peak(NamedTuple):
    """The most that a run held on ``device``, and what for; ``scratch``: what kernels took beside tensors.

    ``total`` is the peak with scratch memory, too, which ``nbytes`` leaves out where no run can count it.
    """

    device: torch.device
    nbytes: int
    by_category: Mapping[Category, int]
    scratch: int = 0
    total: int = 0


class Categories(Mapping[Storage, Category]):
    """What the storages of some lifetimes are for, found out when asked: a peak asks of few."""

    def __init__(self, spans: Mapping[Storage, Lifetime]) -> None:
        self._spans = spans

    def __getitem__(self, storage: Storage) -> Category:
        return categorize(self._spans[storage])

    def __iter__(self) -> Iterator[Storage]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)


Held = tuple[Storage, int, int, int]
"""A storage, its bytes, and the steps of a run from which and before which it is there."""


def project(
    graphs: Sequence[Graph], nodes: Sequence[Node], pending: Collection[Node]
) -> tuple[Peak, Mapping[Storage, Category]]:
    """The peak of running ``nodes`` of ``graphs``, in program order, and what each storage is for.

    ``pending`` are the nodes of any graph that have not run; those beyond ``nodes`` may need, after the
    run, what it works on.  A CPU's peak is of tensors alone, since that is what a run on the CPU can count.
    """
    known = _known(graphs)
    count = len(nodes)
    whole = len(graphs) == 1 and len(graphs[0].nodes) == count
    later: set[Storage] = set()
    inside: set[Node] = set()
    if len(pending) != count or not whole:
        inside = set(nodes)
        later = {value.storage.origin for node in pending if node not in inside for value in node.inputs}
    spans: list[tuple[Lifetime, int, int]] = []
    if whole:  # a position is a node's index
        spans = [
            (span, max(span.start, 0), span.last_use.index + 1)
            for span in known.values()
            if span.last_use is not None
        ]
    else:
        first: dict[Storage, int] = {}
        last: dict[Storage, int] = {}
        for position, node in enumerate(nodes):
            for storage in _touched(node):
                first.setdefault(storage, position)
                last[storage] = position
        for storage, span in known.items():
            if storage in last:
                spans.append((span, first[storage] if span.maker in inside else 0, last[storage] + 1))
    device = main_device([span for span, _, _ in spans])
    held: list[Held] = []
    for span, start, stop in spans:
        storage = span.storage.origin
        if storage.nbytes and storage.device == device:
            held.append((storage, storage.nbytes, start, count if span.kept or storage in later else stop))
    needs = {
        graph.nodes[at]: need.nbytes
        for graph in graphs
        for at, need in scratch(graph, device, device.type).items()
    }
    categories = Categories(known)
    return highest(device, held, [needs.get(node, 0) for node in nodes], categories), categories


def _known(graphs: Sequence[Graph]) -> dict[Storage, Lifetime]:
    if len(graphs) == 1:
        return {span.storage.origin: span for span in lifetimes(graphs[0])}
    known: dict[Storage, Lifetime] = {}
    for graph in graphs:
        own = set(graph.storages)
        for span in lifetimes(graph):
            if span.storage in own:
                known[span.storage.origin] = span
            else:  # of a graph that has run, or that need not run now
                known.setdefault(span.storage.origin, span)
    return known


def parts_of(
    graphs: Sequence[Graph], nodes: Sequence[Node], pending: Iterable[Node]
) -> tuple[list[Lifetime], dict[int, int]]:
    """What running ``nodes`` of ``graphs`` has on its main device, and kernels' scratch memory by position.

    ``kept`` is what stays after the run, for whomever; what other nodes made is from outside.
    """
    inside = set(nodes)
    known = _known(graphs)
    later = {value.storage.origin for node in pending if node not in inside for value in node.inputs}
    touched = {storage for node in nodes for storage in _touched(node)}
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


def _touched(node: Node) -> Iterable[Storage]:
    return {
        *(value.storage.origin for value in node.inputs),
        *(value.storage.origin for value in node.outputs),
        *(storage.origin for storage in node.writes),
    }


def highest(
    device: torch.device,
    held: Sequence[Held],
    extra: Sequence[int],
    categories: Mapping[Storage, Category],
) -> Peak:
    """The peak of a run on ``device`` that holds ``held``, with ``extra`` for kernels in each step."""
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
    return Peak(device, peak, by_category(alive, categories), beside, max(with_scratch, default=0))


def by_category(
    alive: Iterable[tuple[Storage, int]], categories: Mapping[Storage, Category]
) -> dict[Category, int]:
    """The bytes of each category, the empty ones left out; what no category is known of is temporary."""
    sizes: dict[Category, int] = {}
    for storage, nbytes in alive:
        category = categories.get(storage.origin, "temporaries")
        sizes[category] = sizes.get(category, 0) + nbytes
    return {name: size for name, size in sizes.items() if size}
