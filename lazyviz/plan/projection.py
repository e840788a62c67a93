"""What running some of a graph's nodes would peak at, to be held against what it did peak at.

A :class:`~.memory.Plan` is of a whole graph.  A run is often of a part: what one tensor
needs, or what is left after a sync point.  Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
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


def project(graphs: Sequence[Graph], nodes: Sequence[Node]) -> tuple[Peak, Mapping[Storage, Category]]:
    """The peak of running ``nodes`` of ``graphs``, in program order, and what each storage is for.

    A CPU's peak is of tensors alone, since that is what a run on the CPU can count.
    """
    known: dict[Storage, Lifetime] = {}
    for graph in graphs:
        own = set(graph.storages)
        known.update((span.storage, span) for span in lifetimes(graph) if span.storage in own)
    categories = {storage: categorize(span) for storage, span in known.items()}
    first: dict[Storage, int] = {}
    last: dict[Storage, int] = {}
    for position, node in enumerate(nodes):
        for storage in _touched(node):
            first.setdefault(storage, position)
            last[storage] = position
    spans = [span for span in known.values() if span.storage in last and span.storage.nbytes]
    device = main_device(spans)
    spans = [span for span in spans if span.storage.device == device]
    changes: list[list[tuple[Storage, int]]] = [[] for _ in range(len(nodes) + 1)]
    inside = set(nodes)
    for span in spans:
        storage = span.storage
        made_here = span.maker in inside
        changes[first[storage] if made_here else 0].append((storage, storage.nbytes))
        if not _stays(span, inside):
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


def _touched(node: Node) -> Iterable[Storage]:
    return {
        *(value.storage.origin for value in node.inputs),
        *(value.storage.origin for value in node.outputs),
        *(storage.origin for storage in node.writes),
    }


def _stays(span: Lifetime, inside: Set[Node]) -> bool:
    """Whether the user's code, or a node that does not run now, still needs the storage afterwards."""
    last = span.last_use
    return span.kept or (last is not None and last not in inside and last.state != "done")


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
