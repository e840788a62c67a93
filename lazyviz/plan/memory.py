"""How much memory a graph needs, when, and for what: the :class:`Plan`.

Sizes are those of the tensors' storages, to the byte.  On a GPU more is needed: what the
caching allocator adds (rounding, fragments) and library workspaces make ``reserved_bytes``,
which decides whether a graph fits, beside the CUDA context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..graph.ir import Graph, Node, Storage, Value
from .alive import CATEGORIES as CATEGORIES
from .alive import Allocation as Allocation
from .alive import Category as Category
from .alive import Moment as Moment
from .alive import categorize, moment
from .devices import Device, DeviceProfile, capacity, resolve
from .events import Need
from .lifetimes import Lifetime, allocated, lifetimes, main_device
from .reservation import Reservation, reserve
from .scratch import lifetime_of, scratch
from .units import format_bytes

if TYPE_CHECKING:
    from .remedies import Remedy


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """How the batch would be cut: ``pieces`` of ``piece_sizes`` samples; 1 is the whole batch.

    ``blocked_by`` are the nodes that do not allow a cut.
    """

    pieces: int
    piece_sizes: Sequence[int] = ()
    blocked_by: Sequence[Node] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What running the graph would need on one device.  Sizes are bytes.

    Made from the record alone; nothing has run.

    Attributes:
        device: what the plan is for: ``"cpu"``, ``"cuda:0"`` or a profile's name.
        recorded_device: the device whose tensors were counted.
        peak_bytes: projected peak of allocated tensor memory of our run.
        peak_node: the node that reaches it (``None`` for an empty graph).
        reserved_bytes: what the CUDA caching allocator would hold at most, cuBLAS's workspace
            included; ``None`` on the CPU, which has none.
        eager_peak_bytes: what plain eager PyTorch would have peaked at on the same code.
        tensor_peak_bytes: the peak of tensors alone, which an evaluation on the CPU reports.
        peak_range, eager_peak_range: the least and the most that the two may be: kernels' scratch
            memory, counted during their nodes, is an estimate where a library decides.
        timeline: ``(node_index, allocated_bytes)`` during every node of our run.
        eager_timeline: the same for eager PyTorch.
        category_timeline: per category, the bytes during every node; they add up to ``timeline``.
        alive_at_peak: the storages alive at the peak, largest first.
        by_category: bytes per category at the peak, every category named.
        capacity_bytes: what the peak is compared with: on a real device the memory free now
            plus the counted tensors that are there already, for a profile the whole card;
            ``None`` if the driver does not say.
        fits: whether the peak is within the capacity, on a GPU what is reserved and the CUDA
            context; ``None`` if that is not known.
        max_batch_size: largest batch that fits; ``None``: no batch was named.
        split: how the batch is cut; one piece here.
        scratch: per node position, what its kernel allocates and frees within it: best figure
            and range, in bytes; nodes that need nothing are left out.
    """

    device: str
    recorded_device: torch.device
    peak_bytes: int
    peak_node: Node | None
    reserved_bytes: int | None
    eager_peak_bytes: int
    timeline: Sequence[tuple[int, int]]
    eager_timeline: Sequence[tuple[int, int]]
    category_timeline: dict[Category, list[int]]
    alive_at_peak: Sequence[Allocation]
    by_category: dict[Category, int]
    capacity_bytes: int | None
    fits: bool | None
    max_batch_size: int | None
    split: SplitPlan
    _graph: Graph = field(repr=False, compare=False)
    _lifetimes: dict[Storage, Lifetime] = field(repr=False, compare=False)
    _profile: bool = field(repr=False, default=False)
    _reservation: Reservation | None = field(repr=False, compare=False, default=None)
    _cache: dict[str, Any] = field(repr=False, compare=False, default_factory=dict)  # what is asked for late
    tensor_peak_bytes: int = 0
    peak_range: tuple[int, int] = (0, 0)
    eager_peak_range: tuple[int, int] = (0, 0)
    scratch: Mapping[int, Need] = field(repr=False, compare=False, default_factory=dict)
    _reserve: Callable[[bool], tuple[int, int, int] | None] = field(
        repr=False, compare=False, default=lambda eager: None
    )

    @property
    def _nodes(self) -> Sequence[Node]:
        return self._graph.nodes

    def __repr__(self) -> str:
        return f"<Plan for {self.device}: peak {format_bytes(self.peak_bytes)}, {_VERDICT[self.fits]}>"

    def lifetime(self, what: Storage | Value | Node) -> range:
        """The node indices during which our run holds ``what``.

        For a node, from its first to its last moment what it allocated.  Empty for what
        allocates nothing on the planned device (an in-place operator, a view).
        """
        if isinstance(what, Value):
            what = what.storage
        if isinstance(what, Storage):
            span = self._lifetimes.get(what)
            return range(max(span.start, 0), span.lazy_stop) if span is not None else range(0)
        made = [
            span
            for storage in dict.fromkeys(value.storage for value in what.outputs)
            if (span := self._lifetimes.get(storage)) is not None and span.maker is what
        ]
        if not made:
            return range(0)
        return range(made[0].start, max(span.lazy_stop for span in made))

    @property
    def needed_bytes(self) -> int:
        """What has to fit: on a GPU what is reserved and the CUDA context, else the peak."""
        reservation = self._reservation
        if reservation is None:
            return self.peak_bytes
        return reservation.reserved_bytes + reservation.context_bytes

    @property
    def borrowed(self) -> bool:
        """Whether the tensors were recorded on another device than the plan's."""
        return self._profile or not same_device(self.device, self.recorded_device)

    def at(self, position: int) -> Moment:
        """What our run holds during the node at ``position``, from 0.

        Raises ``IndexError`` if the graph has no such node.
        """
        if not 0 <= position < len(self._nodes):
            raise IndexError(f"there is no node {position}: the graph has {len(self._nodes):,}")
        return moment(position, self._nodes[position], self._lifetimes.values())

    @property
    def reserved_range(self) -> tuple[int, int] | None:
        """The least and the most that ``reserved_bytes`` may be, simulated when asked for."""
        held = self._reserved(eager=False)
        return held[1:] if held is not None else None

    @property
    def eager_reserved_bytes(self) -> int | None:
        """What the CUDA caching allocator would hold at most for plain eager PyTorch."""
        held = self._reserved(eager=True)
        return held[0] if held is not None else None

    @property
    def eager_reserved_range(self) -> tuple[int, int] | None:
        """The least and the most that ``eager_reserved_bytes`` may be."""
        held = self._reserved(eager=True)
        return held[1:] if held is not None else None

    @property
    def eager_driver_range(self) -> tuple[int, int] | None:
        """What the driver may say that eager PyTorch's process takes of the card, at its peak.

        At least what is allocated; at most what the allocator would hold and the CUDA context, of
        which a part is there from the start and a part comes with the kernels that are loaded.
        """
        held, reservation = self._reserved(eager=True), self._reservation
        if held is None or reservation is None:
            return None
        return self.eager_peak_range[0], held[2] + reservation.context_bytes

    def _reserved(self, *, eager: bool) -> tuple[int, int, int] | None:
        key = f"reserved {eager}"
        if key not in self._cache:
            self._cache[key] = self._reserve(eager)
        return self._cache[key]

    @property
    def remedies(self) -> Sequence[Remedy]:
        """What would lower the peak, cheapest first; computed from the record when asked for."""
        if "remedies" not in self._cache:
            from .remedies import remedies

            self._cache["remedies"] = remedies(self)
        return self._cache["remedies"]

    def explain(self) -> str:
        """The plan as text: the peak, where it is, what is alive there and why, whether it fits."""
        from .explain import explain

        return explain(self)

    def verdict(self) -> str:
        """Whether it fits, in one sentence."""
        from .explain import verdict

        return verdict(self)


_VERDICT = {True: "fits", False: "does not fit", None: "unknown whether it fits"}


def make_plan(
    graph: Graph,
    *,
    device: str | torch.device | Device | DeviceProfile | None = None,
    batch_size: int | None = None,
    split: int | str | None = None,
    backend: str | None = None,
    as_recorded: bool = False,
) -> Plan:
    """Plan ``graph`` for ``device`` without running it.

    ``device`` may be a real device, the name or object of a profile, or ``None`` for the one
    that holds most of the graph's bytes.  If the graph has tensors on the named device those
    are counted, else those of its main device, as if they lived on the named one.  ``as_recorded``
    counts what was dropped after the last node as referenced to the end, as a test's variables are.

    Raises ``ValueError`` for an unknown device and for what this version does not plan:
    another batch size, a split batch, a backend other than ``"eager"``.
    """
    if batch_size is not None:
        raise ValueError("Planning for another batch size (batch_size) is not available in this version.")
    if split not in (None, "off", 1):
        raise ValueError(f"Splitting the batch (split={split!r}) is not available in this version.")
    if backend not in (None, "eager"):
        raise ValueError(f"The backend {backend!r} is not available in this version, only 'eager'.")

    everywhere = lifetimes(graph, as_recorded=as_recorded)
    recorded = main_device(everywhere)
    target = resolve(device) if device is not None else _target_of(recorded)
    if isinstance(target, Device):
        for storage_device in {span.storage.device for span in everywhere}:
            if same_device(target.name, storage_device):
                recorded = storage_device
                break

    spans = [span for span in everywhere if span.storage.device == recorded]
    count = len(graph.nodes)
    card = target.context_bytes > 0 if isinstance(target, DeviceProfile) else target.name.startswith("cuda")
    needs = scratch(graph, recorded, "cuda" if card else recorded.type)
    tensors = spans
    without = allocated(tensors, count)
    eager_without = allocated(tensors, count, eager=True)
    spans = [*tensors, *(lifetime_of(graph.nodes[at], need.nbytes, recorded) for at, need in needs.items())]
    totals = _raised(without, needs)
    eager_totals = _raised(eager_without, needs)
    by_purpose: dict[Category, list[Lifetime]] = {category: [] for category in CATEGORIES}
    for span in spans:
        by_purpose[categorize(span)].append(span)
    peak_index = totals.index(max(totals)) if totals else None
    peak_bytes = totals[peak_index] if peak_index is not None else 0

    at_peak = moment(peak_index, graph.nodes[peak_index], spans) if peak_index is not None else None
    room = capacity(target, sum(span.storage.nbytes for span in spans if _exists(span)))
    reservation = None
    if card:
        reservation = reserve(graph, spans, target, room)

    def reserved(eager: bool) -> tuple[int, int, int] | None:
        return _reserved(graph, tensors, target, needs, recorded, eager) if card else None

    fits = None if room is None else peak_bytes <= room
    if room is not None and reservation is not None:
        fits = reservation.failure is None
    return Plan(
        device=target.name,
        recorded_device=recorded,
        peak_bytes=peak_bytes,
        peak_node=graph.nodes[peak_index] if peak_index is not None else None,
        reserved_bytes=reservation.reserved_bytes if reservation is not None else None,
        eager_peak_bytes=max(eager_totals, default=0),
        timeline=list(enumerate(totals)),
        eager_timeline=list(enumerate(eager_totals)),
        category_timeline={category: allocated(members, count) for category, members in by_purpose.items()},
        alive_at_peak=at_peak.alive if at_peak is not None else (),
        by_category=at_peak.by_category if at_peak is not None else dict.fromkeys(CATEGORIES, 0),
        capacity_bytes=room,
        fits=fits,
        max_batch_size=None,
        split=SplitPlan(pieces=1),
        _graph=graph,
        _lifetimes={span.storage: span for span in spans},
        _profile=isinstance(target, DeviceProfile),
        _reservation=reservation,
        tensor_peak_bytes=max(without, default=0),
        peak_range=_range(without, needs),
        eager_peak_range=_range(eager_without, needs),
        scratch=needs,
        _reserve=reserved,
    )


def _raised(totals: Sequence[int], needs: Mapping[int, Need]) -> list[int]:
    """The timeline with each node's scratch memory."""
    raised = list(totals)
    for position, need in needs.items():
        raised[position] += need.nbytes
    return raised


def _range(totals: Sequence[int], needs: Mapping[int, Need]) -> tuple[int, int]:
    """The least and the most that the peak may be."""
    low = high = max(totals, default=0)
    for position, need in needs.items():
        low = max(low, totals[position] + need.low)
        high = max(high, totals[position] + need.high)
    return low, high


def _reserved(
    graph: Graph,
    tensors: Sequence[Lifetime],
    target: Device | DeviceProfile,
    needs: Mapping[int, Need],
    device: torch.device,
    eager: bool,
) -> tuple[int, int, int] | None:
    """What the allocator would hold at most: best figure, least, most."""
    found = []
    exact = all(need.exact for need in needs.values())
    for which in range(1 if exact else 3):
        scratched = (lifetime_of(graph.nodes[at], need[which], device) for at, need in needs.items())
        reservation = reserve(graph, [*tensors, *scratched], target, None, eager=eager)
        if reservation is None:
            return None
        found.append(reservation.reserved_bytes)
    # More scratch memory can leave the allocator with fewer fragments.
    return found[0], min(found), max(found)


def _target_of(recorded: torch.device) -> Device | DeviceProfile:
    """The device the graph was recorded on, also one whose memory nobody can tell (``meta``)."""
    try:
        return resolve(recorded)
    except ValueError as error:
        return Device(str(recorded), recorded.type, None, None, None, str(error))


def _exists(span: Lifetime) -> bool:
    """Whether the storage takes up memory at this moment, so that "free" excludes it."""
    if span.maker is not None:
        return span.maker.state == "done" and span.storage.dropped is None
    if not span.storage.external and span.first_use is not None:  # an earlier graph makes it
        makers = [value.node for value in span.first_use.inputs if value.storage is span.storage]
        return all(maker is None or maker.state == "done" for maker in makers)
    if span.storage.dropped is None:
        return True
    return span.last_use is not None and span.last_use.state != "done"


def same_device(name: str, device: torch.device) -> bool:
    """Whether ``name`` is the name of ``device``."""
    if device.type == "cuda" and device.index is None:
        return name in ("cuda", "cuda:0")
    return name == str(device)
