"""How much memory a graph needs, when, and for what: the :class:`Plan`.

Sizes are those of the tensors' storages, to the byte, and during a node what its kernel takes
beside them (:mod:`lazyviz.plan.scratch`).  On a GPU more is needed: what the caching allocator
adds (rounding, fragments) and library workspaces make ``reserved_bytes``, which decides whether
a graph fits, beside the CUDA context.
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
from .devices import Device, DeviceProfile, resolve
from .events import Need
from .lifetimes import Lifetime, allocated, lifetimes, main_device
from .per_device import DevicePlan as DevicePlan
from .per_device import DevicePlans, is_card, plan_device, same_device, target_of
from .reservation import Call, Reservation
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
            memory, counted during their nodes, is an estimate where a library decides, as is ``estimated``.
        timeline: ``(node_index, allocated_bytes)`` during every node of our run.
        eager_timeline: the same for eager PyTorch.
        category_timeline: per category, the bytes during every node; they add up to ``timeline``.
        alive_at_peak: the storages alive at the peak, largest first.
        by_category: bytes per category at the peak, every category named.
        capacity_bytes: what the peak is compared with: on a real device the memory free now
            plus the counted tensors that are there already (on a GPU all that PyTorch's allocator
            holds there), for a profile the whole card; ``None`` if the driver does not say.
        fits: whether the peak is within the capacity, on a GPU what is reserved and the CUDA
            context; ``None`` if that is not known.
        max_batch_size: largest batch that fits; ``None``: no batch was named.
        split: how the batch is cut; one piece here.
        scratch: per node position, what its kernel allocates and frees within it: best figure
            and range, in bytes; nodes that need nothing are left out.
        estimated: the tensors whose own size is an estimate (what cuDNN keeps for the backward pass).
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
    _profile: DeviceProfile | None = field(repr=False, default=None)
    _reservation: Reservation | None = field(repr=False, compare=False, default=None)
    _recorded_for: str = field(repr=False, compare=False, default="")
    _devices: Mapping[str, DevicePlan] = field(repr=False, compare=False, default_factory=dict)
    _cache: dict[str, Any] = field(repr=False, compare=False, default_factory=dict)  # what is asked for late
    tensor_peak_bytes: int = 0
    peak_range: tuple[int, int] = (0, 0)
    eager_peak_range: tuple[int, int] = (0, 0)
    scratch: Mapping[int, Need] = field(repr=False, compare=False, default_factory=dict)
    estimated: Mapping[Storage, Need] = field(repr=False, compare=False, default_factory=dict)
    _reserve_calls: Callable[[Sequence[Node], Sequence[Call]], Reservation | None] = field(
        repr=False, compare=False, default=lambda nodes, calls: None
    )
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
    def needed_range(self) -> tuple[int, int]:
        """The least and the most that ``needed_bytes`` may be."""
        reservation = self._reservation
        if reservation is None:
            return self.peak_range
        low = high = reservation.reserved_bytes
        exact = not self.estimated and all(need.exact for need in self.scratch.values())
        if not exact and self.reserved_range is not None:
            low, high = self.reserved_range
        return low + reservation.context_bytes, high + reservation.context_bytes

    def straddles(self, limit: int) -> bool:
        """Whether ``limit`` bytes are within ``needed_range``: the best figure decides, but is not sure."""
        low, high = self.needed_range
        return low <= limit < high

    @property
    def borrowed(self) -> bool:
        """Whether the tensors were recorded on another device than the plan's."""
        if self._recorded_for and self.recorded_device.type == "cuda":
            return self._recorded_for != self.device
        return self._profile is not None or not same_device(self.device, self.recorded_device)

    @property
    def devices(self) -> Mapping[str, DevicePlan]:
        """Each device with tensors of the graph by its name (``"cuda:0"``, ``"cpu"``), the plan's first."""
        return self._devices

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
    target = resolve(device) if device is not None else target_of(recorded)
    if isinstance(target, Device):
        for storage_device in {span.storage.device for span in everywhere}:
            if same_device(target.name, storage_device):
                recorded = storage_device
                break

    on_cards = [span for span in everywhere if span.storage.device.type == "cuda"]
    if is_card(target) and recorded.type != "cuda" and on_cards:  # the host's side of the cell is larger
        recorded = main_device(on_cards)

    own = plan_device(
        graph, [span for span in everywhere if span.storage.device == recorded], recorded, target
    )
    count = len(graph.nodes)
    by_purpose: dict[Category, list[Lifetime]] = {category: [] for category in CATEGORIES}
    for span in own.spans:
        by_purpose[categorize(span)].append(span)
    at_peak = moment(own.peak_node.index, own.peak_node, own.spans) if own.peak_node is not None else None
    return Plan(
        device=target.name,
        recorded_device=recorded,
        peak_bytes=own.peak_bytes,
        peak_node=own.peak_node,
        reserved_bytes=own.reserved_bytes,
        eager_peak_bytes=own.eager_peak_bytes,
        timeline=own.timeline,
        eager_timeline=own.eager_timeline,
        category_timeline={category: allocated(members, count) for category, members in by_purpose.items()},
        alive_at_peak=at_peak.alive if at_peak is not None else (),
        by_category=at_peak.by_category if at_peak is not None else dict.fromkeys(CATEGORIES, 0),
        capacity_bytes=own.capacity_bytes,
        fits=own.fits,
        max_batch_size=None,
        split=SplitPlan(pieces=1),
        _graph=graph,
        _lifetimes={span.storage: span for span in own.spans},
        _profile=target if isinstance(target, DeviceProfile) else None,
        _reservation=own.reservation,
        _recorded_for=graph.card,
        _devices=DevicePlans(graph, everywhere, own, target),
        tensor_peak_bytes=own.tensor_peak_bytes,
        peak_range=own.peak_range,
        eager_peak_range=own.eager_peak_range,
        scratch=own.scratch,
        estimated=own.estimated,
        _reserve=own.reserve,
        _reserve_calls=own.reserve_calls,
    )
