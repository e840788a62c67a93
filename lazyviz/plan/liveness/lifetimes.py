"""Lifetimes: when each storage exists, in eager PyTorch and in a lazyviz run.

Time is a graph's program order: position ``i`` is node ``i``.  A storage is alive *during* node ``i`` if
``start <= i < stop``; a node's outputs are alive during it, and a storage with ``stop`` is freed just before
node ``stop`` runs.  Storages from outside the graph start at ``-1``.

Two timelines share these rules and differ in when a storage is freed:

* **eager**: when the user's code (including autograd) dropped its last reference, as seen by the recorder.
  The creation of data loader batches and of ``torch.tensor(data)`` is recorded, even if no op uses them.  The
  creation of other outside storages is not recorded: one that still exists at the end is assumed to have
  existed all the time, one that was dropped while recording to be created at its first use.
* **lazy** (a lazyviz run): after its last use, because the run knows all later uses when it starts; a storage
  that is still referenced stays to the end.  A result that was still referenced (also by autograd) at the
  sync point that ran its node became an ordinary tensor there; it exists at least until the last sync point
  before it was dropped has run.  An outside storage that the user has since dropped is kept alive only by the
  pending graph, so it always exists from the start of the run.

A sync point runs the nodes that it needs, and leaves other earlier nodes pending.  If the execution order
therefore differs from program order, lazy spans in program order are upper bounds, and :func:`as_run` returns
the spans in execution order.

:func:`events` turns either timeline into the allocations and frees that an allocator would see,
:func:`allocated` into the sum that a memory chart shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from ...graph.ir import Graph, Node, Storage, Value
from ...torch_internals import native_module_loader
from ...torch_internals.private_api import OpOverload
from .computed_data import mark_data
from .run_order import RunsInside

Run: TypeAlias = Literal["eager", "lazyviz"]
"""The run that a timeline describes: eager PyTorch, or an evaluation by lazyviz."""


class Lifetime(NamedTuple):
    """The span of positions of one storage on both timelines; ``stop`` is exclusive.

    ``start`` to ``lazy_stop`` is the span in a lazyviz run, ``eager_start`` to ``eager_stop`` in eager mode.

    ``maker`` is the node that allocated it (``None``: from outside); ``first_use`` and ``last_use`` are the
    first and last nodes that use it (``None``: no node does). ``in_backward`` says whether a backward node
    reads it, ``kept`` whether the user's code still referred to it when the lifetimes were computed. ``of``
    is the run that ``start`` to ``lazy_stop`` describes, which :func:`of_eager` changes. ``ran`` is its span
    in the order in which the graph's nodes run, if that is not program order.
    """

    storage: Storage
    start: int
    eager_start: int
    eager_stop: int
    lazy_stop: int
    maker: Node | None
    first_use: Node | None
    last_use: Node | None
    in_backward: bool
    kept: bool
    of: Run = "lazyviz"
    ran: Ran | None = None

    @property
    def held(self) -> bool:
        """Whether only the pending graph keeps this outside storage alive."""
        return self.maker is None and not self.kept and self.of == "lazyviz"

    def alive(self, position: int) -> bool:
        """Whether the planned run holds the storage during node ``position``."""
        return self.start <= position < self.lazy_stop


class Ran(NamedTuple):
    """The span of a storage in a lazyviz run, in steps of that run, and the node that uses it last there."""

    start: int
    stop: int
    last_use: Node | None


class Event(NamedTuple):
    """One allocation (``nbytes > 0``) or free (``nbytes < 0``) before node ``position``."""

    position: int
    nbytes: int
    storage: Storage


def of_eager(span: Lifetime) -> Lifetime:
    """The lifetime in a plan of eager PyTorch's run: its positions are those of the eager timeline."""
    # Faster than `_replace`, for graphs with a hundred thousand storages.
    storage, _, start, stop, _, maker, first_use, last_use, in_backward, kept, _, ran = span
    return Lifetime(
        storage, start, start, stop, stop, maker, first_use, last_use, in_backward, kept, "eager", ran
    )


def all_of_eager(spans: Sequence[Lifetime]) -> list[Lifetime]:
    """:func:`of_eager` of each lifetime."""
    return [of_eager(span) for span in spans] if native is None else native.of_eager(spans)


def as_run(span: Lifetime) -> Lifetime:
    """The lifetime of a lazyviz run in the order in which nodes run: see :mod:`.run_order`."""
    ran = span.ran
    return span if ran is None else span._replace(start=ran.start, lazy_stop=ran.stop, last_use=ran.last_use)


def by_device(spans: Iterable[Lifetime]) -> dict[torch.device, list[Lifetime]]:
    """The lifetimes of each device's storages, in order."""
    if native is not None:
        return native.by_device(spans)
    found: dict[torch.device, list[Lifetime]] = {}
    device: torch.device | None = None
    own: list[Lifetime] = []
    for span in spans:
        if span.storage.device is not device:  # nearly always the same object
            device = span.storage.device
            own = found.setdefault(device, [])
        own.append(span)
    return found


def alive_at(position: int, spans: Iterable[Lifetime]) -> list[Lifetime]:
    """The lifetimes of the storages that the planned run holds during the node at ``position``."""
    if native is not None:
        return native.alive(spans, position)
    return [span for span in spans if span.start <= position < span.lazy_stop]


def nodes_with(nodes: Sequence[Node], is_wanted: Callable[[OpOverload], bool]) -> list[Node]:
    """The nodes whose operator is wanted; ``is_wanted`` is called about once for each operator."""
    if native is not None:
        return native.nodes_with(nodes, is_wanted)
    known: dict[int, bool] = {}  # by id: an operator's own hash is slow
    found = []
    for node in nodes:
        wanted = known.get(id(node.op))
        if wanted is None:
            wanted = known[id(node.op)] = is_wanted(node.op)
        if wanted:
            found.append(node)
    return found


def main_device(spans: Iterable[Lifetime]) -> torch.device:
    """The device that holds most of the bytes; the CPU if there are none."""
    return device_with_most(by_device(spans))


def device_with_most(found: Mapping[torch.device, Sequence[Lifetime]]) -> torch.device:
    """:func:`main_device` of the result of :func:`by_device`."""
    if len(found) < 2:
        return next(iter(found), torch.device("cpu"))
    return max(found, key=lambda device: sum([span.storage.nbytes for span in found[device]]))


def lifetimes(graph: Graph, *, as_recorded: bool = False) -> list[Lifetime]:
    """The lifetime of every storage that the graph created or uses, on any device.

    ``as_recorded``: storages that were dropped after the last node count as referenced, as they were then.

    A graph may use storages of an earlier one, which are from outside for it. Their ``dropped`` refers to the
    other graph's nodes, so their last use here replaces it. Linear in the number of nodes and their inputs.
    """
    nodes = graph.nodes
    mark_data(graph)
    find, make = (_uses, _spans_of) if native is None else (native.uses, native.spans_of)
    first, last, backward = find(nodes)
    inside = RunsInside(graph)
    result: list[Lifetime] = []
    continued = resized = False
    for storages, foreign, uses in (
        (graph.storages, False, last),
        (graph.arrivals, False, {}),
        (last, True, last),  # those that remain: other graphs' storages
    ):
        made, continues, resizes, arrived = make(
            nodes, list(storages), foreign, as_recorded, first, uses, backward, inside
        )
        for at in arrived:
            made[at] = _arrived(made[at], inside)
        result = result + made if result else made
        continued, resized = continued or continues, resized or resizes
    _write_in_place(nodes, result)
    if continued:
        result = _joined(result)
    if resized and any(span.storage.resized for span in result):
        return [part for span in result for part in _parts(graph, span)]
    if inside.order is not None:
        return [span._replace(ran=_ran(span, inside, len(nodes))) for span in result]
    return result


def _spans_of(
    nodes: Sequence[Node],
    storages: Sequence[Storage],
    foreign: bool,
    as_recorded: bool,
    first: Mapping[Storage, Node],
    last: dict[Storage, Node],
    backward: set[Storage],
    inside: RunsInside,
) -> tuple[list[Lifetime], bool, bool, list[int]]:
    """The lifetimes of some storages, the last use of each of which is removed from ``last``.

    ``foreign`` storages are those of other graphs. Returns the lifetimes, whether a storage continues another
    one, whether one was resized, and the places of those that have arrived.
    """
    count = len(nodes)
    continued = resized = False
    result: list[Lifetime] = []
    arrived: list[int] = []
    for storage in storages:
        last_use = last.pop(storage, None)
        continued = continued or storage.continues is not None
        resized = resized or bool(storage.resized)
        if storage.arrived >= 0:
            arrived.append(len(result))
        start = -1 if foreign or storage.external else storage.created
        maker = nodes[start] if 0 <= start < count else None
        # A node's own output is alive during the node, even if it is dropped immediately.
        earliest = start + 1
        eager_start = start
        first_use = first.get(storage)
        if first_use is None and last_use is not None:
            first_use = nodes[storage.created]
        dropped = storage.dropped
        if dropped is not None and as_recorded and dropped >= count and not foreign:
            dropped = None
        if dropped is None:
            eager_stop = lazy_stop = count
        else:
            lazy_stop = max(last_use.index + 1 if last_use is not None else earliest, earliest)
            eager_stop = lazy_stop if foreign else max(dropped, earliest)
            if inside.ran:
                lazy_stop = max(lazy_stop, inside.last_need(maker, storage))
                if maker is not None:
                    lazy_stop = max(lazy_stop, inside.last_with(maker, storage, dropped))
            if start < 0 and storage.role is None and first_use is not None:
                eager_start = first_use.index
                eager_stop = max(eager_stop, eager_start + 1)
                if not foreign:
                    start = inside.end_before(first_use.index)
        result.append(
            Lifetime(
                storage,
                start,
                eager_start,
                eager_stop,
                lazy_stop,
                maker,
                first_use,
                last_use,
                storage in backward,
                dropped is None,
            )
        )
    return result, continued, resized, arrived


def _arrived(span: Lifetime, inside: RunsInside) -> Lifetime:
    """The lifetime of an outside storage whose creation was recorded."""
    at, dropped = span.storage.arrived, span.storage.dropped
    start, stop = inside.end_before(at), span.lazy_stop
    if span.first_use is None and not span.kept and dropped is not None:
        stop = inside.end_before(dropped)
    return span._replace(
        start=start, eager_start=at, eager_stop=max(span.eager_stop, at), lazy_stop=max(stop, start)
    )


def _ran(span: Lifetime, inside: RunsInside, count: int) -> Ran:
    """The lifetime in steps of a lazyviz run of ``count`` steps."""
    if span.maker is not None:
        start = inside.step_of[span.maker.index]
    elif span.start < 0:
        start = -1
    else:  # from outside, created after the run began
        start = inside.steps_before(span.eager_start) or -1
    last = inside.last_use(span.storage)
    if span.kept:
        return Ran(start, count, last)
    stop = start + 1 if last is None else max(start, inside.step_of[last.index]) + 1
    return Ran(start, max(stop, inside.steps_with(span.storage, span.eager_stop)), last)


_aten = torch.ops.aten
_IN_PLACE: dict[Any, frozenset[Any]] = {
    _aten.binary_cross_entropy.default: frozenset({_aten.mul.Tensor}),
    _aten.binary_cross_entropy_with_logits.default: frozenset({_aten.sub.Tensor, _aten.mul.Tensor}),
    _aten.clamp.Tensor: frozenset({_aten.logical_and.default, _aten.logical_or.default}),
}
"""By forward operator: what its backward formula computes in place, unless tensors are subclass-like."""


def _write_in_place(nodes: Sequence[Node], spans: list[Lifetime]) -> None:
    """On the eager timeline, let results that a formula computes in place reuse their operand's memory.

    ``binary_cross_entropy_target_backward``, ``binary_cross_entropy_with_logits_backward`` and
    ``clamp_backward`` (FunctionsManual.cpp) write into their own intermediate results, unless tensors are
    subclass-like, as they are under a dispatch mode.  ``-self * grad`` is written as such, however.
    """
    if not nodes_with(nodes, _IN_PLACE.__contains__):
        return
    at = {span.storage: index for index, span in enumerate(spans)}
    for node in nodes:
        forward = node.forward
        if forward is None or node.op not in _IN_PLACE.get(forward.op, ()):
            continue
        operand, result = node.inputs[0], node.outputs[0]
        span = spans[at[operand.storage]]
        maker = span.maker
        if maker is None or maker.forward is not forward or maker.op is _aten.neg.default:
            continue
        if (operand.meta.shape, operand.meta.dtype) != (result.meta.shape, result.meta.dtype):
            continue
        if span.eager_stop <= formula_end(nodes, node.index):  # not saved for a second backward pass
            spans[at[operand.storage]] = span._replace(eager_stop=node.index)


def formula_end(nodes: Sequence[Node], position: int) -> int:
    """The end of the backward formula that the node at ``position`` belongs to."""
    end = position + 1
    while end < len(nodes) and nodes[end].forward is nodes[position].forward:
        end += 1
    return end


def _parts(graph: Graph, span: Lifetime) -> Iterable[Lifetime]:
    """A storage; if it was resized, one lifetime for each period in which it had memory.

    The last use in each period is not recorded, so a lazyviz run frees it when eager PyTorch does.
    """
    storage, count = span.storage, len(graph.nodes)
    if not storage.resized:
        yield span
        return
    sizes: list[tuple[int, int]] = []  # start position and bytes of each period
    before = storage.nbytes
    for resize in storage.resized:
        if resize.graph == id(graph):
            sizes.append((resize.position, resize.nbytes))
        elif not sizes:  # its own size, or the size after an earlier graph
            before = resize.nbytes
    sizes.insert(0, (span.start, before))
    for (start, nbytes), (stop, _) in zip(sizes, [*sizes[1:], (count, 0)]):
        last = stop >= count
        eager_stop = min(span.eager_stop, stop)
        lazy_stop = min(span.lazy_stop, stop)
        if not nbytes or start >= count or eager_stop <= start:
            continue
        part = Storage(nbytes, storage.device, external=storage.external, created=start)
        part.role, part.name, part.variables = storage.role, storage.name, storage.variables
        part.is_data = storage.is_data
        part.dropped, part.continues = storage.dropped, storage
        first = start == span.start
        yield span._replace(
            storage=part,
            start=start,
            eager_start=span.eager_start if first else start,
            eager_stop=eager_stop,
            lazy_stop=max(lazy_stop, start + 1),
            maker=span.maker if first else graph.nodes[start],
            kept=span.kept and last,
        )


def _uses(nodes: Sequence[Node]) -> tuple[dict[Storage, Node], dict[Storage, Node], set[Storage]]:
    """The first and the last node that uses each storage, and the storages that the backward pass reads.

    The first node is omitted if it is the node that creates the storage, as in most cases.
    """
    first: dict[Storage, Node] = {}
    last: dict[Storage, Node] = {}
    backward: set[Storage] = set()
    for node in nodes:
        for value in node.inputs:
            storage = value.storage
            if storage not in last:
                first[storage] = node
            last[storage] = node
        if node.phase == "backward":
            # Storages that the node reads, but does not create.
            backward.update([value.storage for value in node.inputs])
        for value in node.outputs:
            storage = value.storage
            if storage not in last and storage.created != node.index:
                first[storage] = node
            last[storage] = node
        for storage in node.writes:
            if storage not in last:
                first[storage] = node
            last[storage] = node
    return first, last, backward


def _joined(spans: list[Lifetime]) -> list[Lifetime]:
    """Merge storages that share memory because of sync points into the first of them."""
    merged: dict[Storage, Lifetime] = {}
    for span in spans:  # the first name takes precedence
        root = span.storage.origin
        before = merged.get(root)
        if before is None:
            merged[root] = span
            continue
        uses = [node for node in (before.last_use, span.last_use) if node is not None]
        merged[root] = before._replace(
            eager_stop=max(before.eager_stop, span.eager_stop),
            lazy_stop=max(before.lazy_stop, span.lazy_stop),
            first_use=before.first_use or span.first_use,
            last_use=max(uses, key=lambda node: node.index) if uses else None,
            in_backward=before.in_backward or span.in_backward,
            kept=before.kept or span.kept,
        )
    return list(merged.values())


def by_origin(spans: Iterable[Lifetime]) -> dict[Storage, list[Lifetime]]:
    """The lifetimes of each recorded storage: in a run in pieces, it has one per piece."""
    found: dict[Storage, list[Lifetime]] = {}
    for span in spans:
        found.setdefault(span.storage.origin, []).append(span)
    return found


def positions(spans: Mapping[Storage, Sequence[Lifetime]], what: Storage | Value | Node) -> list[range]:
    """When a lazyviz run holds ``what`` (for a node, its allocations), in order; ``spans`` by their
    origins.
    """
    if isinstance(what, Node):
        made = dict.fromkeys(value.storage.origin for value in what.outputs)
        own = [span for storage in made for span in spans.get(storage, ()) if span.maker is what]
    else:
        own = list(spans.get((what.storage if isinstance(what, Value) else what).origin, ()))
    ranges = [range(max(span.start, 0), span.lazy_stop) for span in own]
    return sorted(ranges, key=lambda each: each.start)


def events(spans: Iterable[Lifetime], *, eager: bool = False) -> list[Event]:
    """Allocations and frees in time order; at one position frees come before allocations.

    Storages of 0 bytes are omitted. Storages that exist at the end are freed at the position after the last
    node. ``eager`` selects the eager timeline instead of the lazyviz run's.
    """
    result = []
    for span in spans:
        storage = span.storage
        if not storage.nbytes:
            continue
        start, stop = (span.eager_start, span.eager_stop) if eager else (span.start, span.lazy_stop)
        result.append(Event(start, storage.nbytes, storage))
        result.append(Event(stop, -storage.nbytes, storage))
    result.sort(key=_time)
    return result


def _time(event: Event) -> int:
    return 2 * event.position + (event.nbytes > 0)


def allocated(spans: Sequence[Lifetime], count: int, *, eager: bool = False) -> list[int]:
    """Bytes allocated during each of ``count`` nodes: the running sum of :func:`events`.

    The events are not created, because they would be two objects per storage.
    """
    if not spans:
        return [0] * count
    if native is not None and (found := native.allocated(spans, count, eager)) is not None:
        return found
    changes = [0] * (count + 1)
    for span in spans:
        nbytes = span.storage.nbytes
        start, stop = (span.eager_start, span.eager_stop) if eager else (span.start, span.lazy_stop)
        changes[start if start > 0 else 0] += nbytes
        changes[stop] -= nbytes
    del changes[count]
    return list(accumulate(changes))


native: Any = native_module_loader.load("plan_passes.pyx")
"""The compiled passes; ``None``: the code above does everything, with the same results."""
if native is not None:
    native.connect(Lifetime, Node, Value, Storage)
