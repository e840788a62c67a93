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


def project(graph: Graph, nodes: Sequence[Node]) -> tuple[Peak, Mapping[Storage, Category]]:
    """The peak of running ``nodes`` of ``graph``, in program order, and what each storage is for.

    A CPU's peak is of tensors alone, since that is what a run on the CPU can count.
    """
    spans = lifetimes(graph)
    categories = {span.storage: categorize(span) for span in spans}
    first: dict[Storage, int] = {}
    last: dict[Storage, int] = {}
    for position, node in enumerate(nodes):
        for storage in _touched(node):
            first.setdefault(storage, position)
            last[storage] = position
    spans = [span for span in spans if span.storage in last and span.storage.nbytes]
    device = main_device(spans)
    spans = [span for span in spans if span.storage.device == device]
    changes: list[list[tuple[Storage, int]]] = [[] for _ in range(len(nodes) + 1)]
    inside = {node.index for node in nodes}
    for span in spans:
        storage = span.storage
        made_here = span.maker is not None and span.maker.index in inside
        changes[first[storage] if made_here else 0].append((storage, storage.nbytes))
        if not _stays(span, inside):
            changes[last[storage] + 1].append((storage, -storage.nbytes))
    needs = scratch(graph, device, device.type) if device.type == "cuda" else {}
    extra = [needs[node.index].nbytes if node.index in needs else 0 for node in nodes]
    return highest(device, changes[: len(nodes)], categories, extra), categories


def _touched(node: Node) -> Iterable[Storage]:
    return {
        *(value.storage for value in node.inputs),
        *(value.storage for value in node.outputs),
        *node.writes,
    }


def _stays(span: Lifetime, inside: set[int]) -> bool:
    """Whether the user's code, or a node that does not run now, still needs the storage afterwards."""
    needed_later = span.last_use is not None and span.last_use.index not in inside
    return span.kept or (needed_later and span.last_use is not None and span.last_use.state != "done")


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
            category = categories.get(storage, "temporaries")
            sizes[category] = sizes.get(category, 0) + nbytes
    return Peak(device, peak, {name: size for name, size in sizes.items() if size}, extra[at] if extra else 0)
