"""What running some of a graph's nodes would peak at, to be held against what it did peak at.

A :class:`~.memory.Plan` is of a whole graph.  A run is often of a part: what one tensor
needs, or what is left after a sync point.  Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from ..graph.ir import Graph, Node, Storage
from .alive import Category, categorize
from .lifetimes import Lifetime, lifetimes, main_device
from .scratch import scratch


class Peak(NamedTuple):
    """The most that a run held on ``device``, and what for; ``scratch``: what kernels took beside tensors."""

    device: torch.device
    nbytes: int
    by_category: Mapping[Category, int]
    scratch: int = 0


def project(
    graphs: Sequence[Graph], nodes: Sequence[Node], pending: Iterable[Node]
) -> tuple[Peak, Mapping[Storage, Category]]:
    """The peak of running ``nodes`` of ``graphs``, in program order, and what each storage is for.

    ``pending`` are the nodes of any graph that have not run; those beyond ``nodes`` may need, after the
    run, what it works on.  A CPU's peak is of tensors alone, since that is what a run on the CPU can count.
    """
    known = _known(graphs)
    categories = {storage: categorize(span) for storage, span in known.items()}
    first: dict[Storage, int] = {}
    last: dict[Storage, int] = {}
    for position, node in enumerate(nodes):
        for storage in _touched(node):
            first.setdefault(storage, position)
            last[storage] = position
    spans = [span for storage, span in known.items() if storage in last and storage.nbytes]
    device = main_device(spans)
    spans = [span for span in spans if span.storage.device == device]
    changes: list[list[tuple[Storage, int]]] = [[] for _ in range(len(nodes) + 1)]
    inside = set(nodes)
    later = {value.storage.origin for node in pending if node not in inside for value in node.inputs}
    for span in spans:
        storage = span.storage.origin
        made_here = span.maker in inside
        changes[first[storage] if made_here else 0].append((storage, storage.nbytes))
        if not span.kept and storage not in later:
            changes[last[storage] + 1].append((storage, -storage.nbytes))
    extra = [0] * len(nodes)
    if device.type == "cuda":
        needs = {
            graph.nodes[at]: need.nbytes
            for graph in graphs
            for at, need in scratch(graph, device, device.type).items()
        }
        extra = [needs.get(node, 0) for node in nodes]
    return highest(device, changes[: len(nodes)], categories, extra), categories


def _known(graphs: Sequence[Graph]) -> dict[Storage, Lifetime]:
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
    changes: Sequence[Sequence[tuple[Storage, int]]],
    categories: Mapping[Storage, Category],
    extra: Sequence[int] = (),
) -> Peak:
    """The peak of a run that allocates (above 0) and frees before each step, with ``extra`` during it."""
    now = peak = at = 0
    for position, step in enumerate(changes):
        now += sum(nbytes for _, nbytes in step)
        level = now + (extra[position] if extra else 0)
        if level > peak:
            peak, at = level, position
    sizes: dict[Category, int] = {}
    for step in changes[: at + 1]:
        for storage, nbytes in step:
            category = categories.get(storage.origin, "temporaries")
            sizes[category] = sizes.get(category, 0) + nbytes
    return Peak(device, peak, {name: size for name, size in sizes.items() if size}, extra[at] if extra else 0)
