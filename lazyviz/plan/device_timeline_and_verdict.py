"""Device timeline and verdict: memory over time, peak, reserved memory, and whether it fits one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import add, attrgetter, sub
from typing import NamedTuple, TypeAlias

import torch

from ..graph.ir import Graph, Node, Storage
from .allocator.initial_state import Segment, exists, nbytes_of, segments_on
from .allocator.reserved_memory import Call, Reservation, reserve, reserve_calls
from .devices.device_lookup import Device, DeviceProfile, capacity, planned
from .liveness.cumprod_gradient import without_zeros
from .liveness.lifetimes import Lifetime, Run, all_of_eager, allocated, as_run
from .uncertainty import ALLOCATED, RESERVED, widened
from .workspace.cudnn_rnn_workspace import unsure
from .workspace.scalar_tensors import of_numbers
from .workspace.workspace_lookup import lifetime_of, scratch
from .workspace.workspace_size import NOTHING, Need


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """One device of a :class:`~lazyviz.plan.plan.Plan`; the fields are the plan's, sizes are bytes.

    ``device`` is the device whose tensors are counted, by its recorded name.  ``of`` is the kind of run that
    the peak, timeline, reserved memory, and ``fits`` describe; ``lazyviz_peak_bytes`` always describes
    lazyviz's.
    """

    device: str
    peak_bytes: int
    peak_node: Node | None
    peak_at: int
    reserved_bytes: int | None
    eager_peak_bytes: int
    timeline: Sequence[tuple[int, int]] = field(repr=False)
    eager_timeline: Sequence[tuple[int, int]] = field(repr=False)
    capacity_bytes: int | None
    fits: bool | None
    reservation: Reservation | None = field(repr=False, compare=False)
    tensor_peak_bytes: int = field(repr=False)
    peak_range: tuple[int, int] = field(repr=False)
    eager_peak_range: tuple[int, int] = field(repr=False)
    scratch: Mapping[int, Need] = field(repr=False, compare=False)
    estimated: Mapping[Storage, Need] = field(repr=False, compare=False)  # tensors of a size that is not sure
    reserve: Callable[[bool], tuple[int, int, int] | None] = field(repr=False, compare=False)
    reserve_calls: Callable[[Sequence[Node], Sequence[Call]], Reservation | None] = field(
        repr=False, compare=False
    )
    spans: Sequence[Lifetime] = field(repr=False, compare=False)  # scratch memory's included
    graph: Graph = field(repr=False, compare=False)
    nodes: Sequence[Node] = field(repr=False, compare=False)  # by position in ``timeline``
    of: Run = "lazyviz"
    lazyviz_peak_bytes: int = field(repr=False, default=0)


def plan_device(
    graph: Graph,
    tensors: Sequence[Lifetime],
    device: torch.device,
    target: Device | DeviceProfile,
    needs: Mapping[int, Need] | None = None,
    room: int | None = None,
    of: Run = "lazyviz",
    order: Sequence[int] | None = None,
) -> DevicePlan:
    """The plan of the storages ``tensors``, all recorded on ``device``, as if they lived on ``target``.

    ``needs`` is the scratch memory by position, if it differs from that of the recorded nodes; ``room`` the
    capacity if another plan has determined it, possibly before some nodes ran; ``of`` the planned kind of
    run. ``order``: the positions of the nodes as a lazyviz run runs them, if that is not program order.
    """
    gpu, eager = is_gpu(target), of == "eager"
    needs = scratch(graph, device, "cuda" if gpu else device.type) if needs is None else needs
    fetching, run = _with_fetches(graph, tensors, needs), _InRunOrder(graph.nodes, tensors, needs, order)
    lazyviz_peak = run.peak_bytes
    by_eager = _ByEager(graph.nodes, tensors, fetching)
    needs, run = (fetching, by_eager.run) if eager else (needs, run)
    tensors, nodes = run.tensors, run.nodes
    estimates = unsure(nodes, tensors) if device.type == "cuda" else []
    without = allocated(tensors, len(nodes))
    spans = [*tensors, *run.scratch(device)]
    totals = _raised(without, run.needs)
    eager_totals = totals if eager else by_eager.totals
    peak_bytes = max(totals, default=0)
    segments = segments_on(target) if gpu else ()
    room = _room(target, spans, segments) if room is None else room
    reservation = reserve(nodes, spans, target, room, eager=eager, segments=segments) if gpu else None

    def reserved(as_eager: bool) -> tuple[int, int, int] | None:
        played = reservation if eager in (True, as_eager) else None
        held = partial(_reserved, target=target, estimates=estimates, device=device, segments=segments)
        return (by_eager if as_eager or eager else run).reserved(held, played)

    at = totals.index(peak_bytes) if totals else 0
    unsure_of = _unsure_of(graph, tensors, estimates, host=device.type == "cpu" and not gpu)
    eager_range = by_eager.range(unsure_of, gpu)
    return DevicePlan(
        device=str(device),
        peak_bytes=peak_bytes,
        peak_node=nodes[at] if totals else None,
        peak_at=at,
        reserved_bytes=reservation.reserved_bytes if reservation is not None else None,
        eager_peak_bytes=max(eager_totals, default=0),
        timeline=list(zip(map(attrgetter("index"), nodes), totals)),
        eager_timeline=list(enumerate(eager_totals)),
        capacity_bytes=room,
        fits=_fits(peak_bytes, room, reservation),
        reservation=reservation,
        tensor_peak_bytes=max(without, default=0),
        peak_range=eager_range if eager else run.range(without, unsure_of, gpu),
        eager_peak_range=eager_range,
        scratch=needs,
        estimated={span.storage: need for span, need in estimates},
        reserve=reserved,
        reserve_calls=partial(_reserve_calls, spans, target, room, eager, segments),
        spans=spans,
        graph=graph,
        nodes=nodes,
        of=of,
        lazyviz_peak_bytes=lazyviz_peak,
    )


class _Unsure(NamedTuple):
    """What a range allows for: sizes of tensors that are estimates, the bytes of small tensors that may be
    alive in addition during each node, and memory that PyTorch's allocator does not count.
    """

    estimates: Sequence[tuple[Lifetime, Need]]
    small: Sequence[int] = ()
    borrowed: Sequence[Lifetime] = ()


def _unsure_of(
    graph: Graph, tensors: Sequence[Lifetime], estimates: Sequence[tuple[Lifetime, Need]], *, host: bool
) -> _Unsure:
    if not host:
        return _Unsure(estimates)
    borrowed = [span for span in tensors if span.storage.origin.borrowed]
    return _Unsure(estimates, of_numbers(graph.nodes), borrowed)


Held: TypeAlias = Callable[..., tuple[int, int, int] | None]
"""What the allocator would hold during a run: :func:`_reserved` for a device."""


class _InRunOrder:
    """Nodes, lifetimes, and scratch memory in the order in which a lazyviz run runs the nodes."""

    def __init__(
        self,
        nodes: Sequence[Node],
        tensors: Sequence[Lifetime],
        needs: Mapping[int, Need],
        order: Sequence[int] | None = None,
    ) -> None:
        self.nodes, self.tensors, self.needs, self._order = nodes, tensors, needs, order
        if order is not None:
            self.nodes = [nodes[position] for position in order]
            self.tensors = [as_run(span) for span in tensors]
            self.needs = {step: needs[at] for step, at in enumerate(order) if at in needs}

    @property
    def peak_bytes(self) -> int:
        """The peak of a lazyviz run."""
        return max(_raised(allocated(self.tensors, len(self.nodes)), self.needs), default=0)

    def scratch(self, device: torch.device) -> list[Lifetime]:
        """The lifetimes of scratch memory."""
        spans = [lifetime_of(at, self.nodes[at], need.nbytes, device) for at, need in self.needs.items()]
        if (order := self._order) is None:
            return spans
        return [
            span._replace(eager_start=order[span.start], eager_stop=order[span.start] + 1) for span in spans
        ]

    def range(self, totals: Sequence[int], unsure_of: _Unsure, gpu: bool) -> tuple[int, int]:
        """The range of lazyviz's peak, which counts memory from any allocation."""
        small, order = unsure_of.small, self._order
        if order is not None and small:
            small = [small[at] for at in order]
        return _range(totals, self.needs, _Unsure(unsure_of.estimates, small), eager=False, gpu=gpu)

    def reserved(self, held: Held, played: Reservation | None) -> tuple[int, int, int] | None:
        """What the allocator would hold: best figure, least, most; ``played`` is the best figure's run."""
        return held(self.nodes, self.tensors, self.needs, eager=False, played=played)


class _ByEager:
    """The run of eager PyTorch: lifetimes and scratch memory, for operands of ``cumprod`` without zeros; only
    the upper end of a range is for operands that have some.
    """

    def __init__(self, nodes: Sequence[Node], tensors: Sequence[Lifetime], needs: Mapping[int, Need]) -> None:
        self._nodes, self._all, self._all_needs = nodes, tensors, needs
        plain = without_zeros(nodes, tensors)
        self.spans, self.needs, self._skips = plain.spans, plain.needs(needs), bool(plain.skipped)

    @property
    def run(self) -> _InRunOrder:
        return _InRunOrder(self._nodes, all_of_eager(self.spans), self.needs)

    @cached_property
    def _without(self) -> list[int]:
        return allocated(self.spans, len(self._nodes), eager=True)

    @property
    def totals(self) -> list[int]:
        return _raised(self._without, self.needs)

    def range(self, unsure_of: _Unsure, gpu: bool) -> tuple[int, int]:
        low, high = _range(self._without, self.needs, unsure_of, eager=True, gpu=gpu)
        if self._skips:
            totals = allocated(self._all, len(self._nodes), eager=True)
            high = max(high, _range(totals, self._all_needs, unsure_of, eager=True, gpu=gpu)[1])
        return low, high

    def reserved(self, held: Held, played: Reservation | None) -> tuple[int, int, int] | None:
        """Like :meth:`_InRunOrder.reserved`."""
        found = held(self._nodes, self.spans, self.needs, eager=True, played=played)
        if found is None or not self._skips:
            return found
        most = held(self._nodes, self._all, self._all_needs, eager=True, played=None)
        return found if most is None else (found[0], min(found[1], most[1]), max(found[2], most[2]))


def _with_fetches(graph: Graph, tensors: Sequence[Lifetime], needs: Mapping[int, Need]) -> Mapping[int, Need]:
    """``needs``, plus the previous batch, which eager PyTorch holds while a data loader creates the next one.

    The loop variable still refers to the previous batch, while the next op's results do not exist yet.
    """
    positions = {fetch.position for fetch in graph.fetches if fetch.beside}
    if not positions:
        return needs
    made: dict[int, int] = dict.fromkeys(positions, 0)
    stops: dict[Storage, tuple[int, int]] = {}
    for span in tensors:
        if span.maker is not None and span.eager_start in made:
            made[span.eager_start] += span.storage.nbytes
        elif span.storage.external:
            stops[span.storage] = span.eager_stop, span.storage.nbytes
    result = dict(needs)
    for position, beside in graph.fetches:
        gone = [stops.get(storage, (-1, 0)) for storage in beside]
        before = sum(nbytes for stop, nbytes in gone if stop == position)
        need = needs.get(position, NOTHING)
        if position < len(graph.nodes) and before:
            more = before - made[position]
            result[position] = Need(*(max(each, more) for each in need))
    return result


def _fits(peak_bytes: int, room: int | None, reservation: Reservation | None) -> bool | None:
    """Whether a run fits in ``room``; ``None`` if that is unknown."""
    if room is None:
        return None
    return peak_bytes <= room if reservation is None else reservation.failure is None


def _reserve_calls(
    spans: Sequence[Lifetime],
    target: Device | DeviceProfile,
    room: int | None,
    eager: bool,
    segments: Sequence[Segment],
    nodes: Sequence[Node],
    calls: Sequence[Call],
) -> Reservation | None:
    """What the ``calls`` of a changed program would reserve."""
    if not is_gpu(target):
        return None
    return reserve_calls(nodes, calls, spans, target, room, eager=eager, segments=segments)


def _room(
    target: Device | DeviceProfile, spans: Sequence[Lifetime], segments: Sequence[Segment]
) -> int | None:
    """The bytes that a plan of ``spans`` may use; ``None`` if unknown."""
    if segments and isinstance(target, Device) and target.free_bytes is not None:
        return target.free_bytes + nbytes_of(segments)
    if isinstance(target, DeviceProfile):
        return capacity(target, 0)  # an empty GPU
    # For another batch size, existing memory is still as recorded.
    return capacity(target, sum(span.storage.origin.nbytes for span in spans if exists(span)))


class DevicePlans(Mapping[str, DevicePlan]):
    """The plans of a graph's devices by name: the plan's own first, the others by ``plan`` on demand."""

    def __init__(
        self, devices: Iterable[torch.device], own: DevicePlan, plan: Callable[[torch.device], DevicePlan]
    ) -> None:
        self._names = dict.fromkeys([own.device, *map(str, devices)])
        self._made = {own.device: own}
        self._plan = plan

    def __getitem__(self, name: str) -> DevicePlan:
        if name not in self._made:
            if name not in self._names:
                raise KeyError(name)
            self._made[name] = self._plan(torch.device(name))
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<DevicePlans of {', '.join(self)}>"


def target_of(recorded: torch.device) -> Device | DeviceProfile:
    """The device that the graph was recorded on, including devices of unknown memory (``meta``)."""
    try:
        return planned(recorded)
    except ValueError as error:
        return Device(str(recorded), recorded.type, None, None, None, str(error))


def is_gpu(target: Device | DeviceProfile) -> bool:
    """Whether PyTorch's CUDA allocator would hold the memory."""
    if isinstance(target, DeviceProfile):
        return target.context_bytes > 0
    return target.name.startswith("cuda")


def same_device(name: str, device: torch.device) -> bool:
    """Whether ``name`` is the name of ``device``."""
    if device.type == "cuda" and device.index is None:
        return name in ("cuda", "cuda:0")
    return name == str(device)


def _raised(totals: Sequence[int], needs: Mapping[int, Need]) -> list[int]:
    """The timeline with each node's scratch memory."""
    raised = list(totals)
    for position, need in needs.items():
        raised[position] += need.nbytes
    return raised


def _range(
    totals: Sequence[int], needs: Mapping[int, Need], unsure_of: _Unsure, *, eager: bool, gpu: bool
) -> tuple[int, int]:
    """Lowest and highest expected peak; on a GPU at the confidence level of :mod:`.uncertainty`."""
    estimates, small, borrowed = unsure_of
    found = []
    for which in (0, 1, 2) if gpu else (1, 2):
        level = [*map(add, totals, small)] if which == 2 and small else totals
        if which == 1 and borrowed:
            level = [*map(sub, level, allocated(borrowed, len(totals), eager=eager))]
        if estimates:
            spans = [(_resized(span, need[which] - need.nbytes)) for span, need in estimates]
            level = [a + b for a, b in zip(level, allocated(spans, len(totals), eager=eager))]
        raised = [level[position] + need[which] for position, need in needs.items()]
        found.append(max(max(level, default=0), max(raised, default=0)))
    return widened(found[0], found[1], found[2], ALLOCATED) if gpu else (found[0], found[1])


def _resized(span: Lifetime, nbytes: int) -> Lifetime:
    """The same moments of another storage of ``nbytes``."""
    old = span.storage
    storage = Storage(nbytes, old.device, external=old.external, created=old.created)
    return span._replace(storage=storage)


def _reserved(
    nodes: Sequence[Node],
    tensors: Sequence[Lifetime],
    needs: Mapping[int, Need],
    *,
    target: Device | DeviceProfile,
    estimates: Sequence[tuple[Lifetime, Need]],
    device: torch.device,
    segments: Sequence[Segment],
    eager: bool,
    played: Reservation | None,
) -> tuple[int, int, int] | None:
    """What the allocator would hold: best figure, least, most; ``played`` is the best figure's run."""
    if not is_gpu(target):
        return None
    found = []
    exact = all(need.exact for need in needs.values()) and not estimates
    if exact and played is not None:
        held = played.reserved_bytes
        return held, *widened(held, held, held, RESERVED)
    of = {span.storage: need for span, need in estimates}
    for which in range(1 if exact else 3):
        scratched = (lifetime_of(at, nodes[at], need[which], device) for at, need in needs.items())
        sized = (
            _resized(span, of[span.storage][which]) if which and span.storage in of else span
            for span in tensors
        )
        reservation = reserve(nodes, [*sized, *scratched], target, None, eager=eager, segments=segments)
        if reservation is None:
            return None
        found.append(reservation.reserved_bytes)
    # More scratch memory can leave the allocator with fewer fragments.
    return found[0], *widened(found[0], min(found), max(found), RESERVED)


MARGIN = 0.05
"""Share of a device's free memory that ``split="auto"`` leaves alone: what is estimated may be more."""


def fits_with_margin(plan: DevicePlan) -> bool | None:
    """Whether the plan fits with :data:`MARGIN` to spare; ``None`` if the room is not known."""
    if plan.capacity_bytes is None:
        return None
    return bool(plan.fits) and needed(plan) <= plan.capacity_bytes * (1 - MARGIN)


def needed(plan: DevicePlan) -> int:
    """Memory that must fit: on a GPU, reserved memory and the CUDA context; otherwise the peak."""
    if plan.reservation is None:
        return plan.peak_bytes
    return plan.reservation.reserved_bytes + plan.reservation.context_bytes
