"""How much memory a graph needs, when, and for what: the :class:`Plan`.

Sizes are those of the tensors' storages, to the byte, and during a node what its kernel takes
beside them (:mod:`lazyviz.plan.scratch`).  On a GPU more is needed: what the caching allocator
adds (rounding, fragments) and library workspaces make ``reserved_bytes``, which decides whether
a graph fits, beside the CUDA context.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ..graph.ir import Graph, Node, Storage, Value
from . import collector
from .alive import CATEGORIES as CATEGORIES
from .alive import Allocation as Allocation
from .alive import Category as Category
from .alive import Moment as Moment
from .alive import categorize, moment
from .devices import Device, DeviceProfile, planned
from .events import Need
from .lifetimes import Lifetime, allocated, by_origin, lifetimes, main_device, positions
from .per_device import MARGIN, DevicePlans, is_card, needed, plan_device, roomy, same_device, target_of
from .per_device import DevicePlan as DevicePlan
from .placement import Shard
from .recompute import NOTHING_AGAIN, recomputed
from .recompute import RecomputePlan as RecomputePlan
from .reservation import Call, Reservation
from .search import fewest_pieces, largest_fitting
from .split import SHOWN, Batch, check_split, lay_out, scaled, sizes_of
from .split import SplitPlan as SplitPlan
from .units import format_bytes

if TYPE_CHECKING:
    from .remedies import Remedy


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
        peak_position: where in ``timeline`` that is.
        timeline: ``(node_index, allocated_bytes)`` during every node of our run; of a run in pieces in the
            order of that run, where the first two pieces of a pass stand for all.
        eager_timeline: the same for eager PyTorch.
        category_timeline: per category, the bytes during every node; they add up to ``timeline``.
        alive_at_peak: the storages alive at the peak, largest first.
        by_category: bytes per category at the peak, every category named.
        capacity_bytes: what the peak is compared with: on a real device the memory free now
            plus the counted tensors that are there already (on a GPU all that PyTorch's allocator
            holds there), for a profile the whole card; ``None`` if the driver does not say.
        fits: whether the peak is within the capacity, on a GPU what is reserved and the CUDA
            context; ``None`` if that is not known.
        split: how the batch is cut, and which nodes forbid that.
        recompute: what is computed again to save memory.
        batch_size: samples of the batch that is planned; ``None``: none was named.
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
    batch_size: int | None = None
    peak_position: int = 0
    recompute: RecomputePlan = NOTHING_AGAIN
    _planner: _Planner | None = field(repr=False, compare=False, default=None)
    _reserve: Callable[[bool], tuple[int, int, int] | None] = field(
        repr=False, compare=False, default=lambda eager: None
    )

    @property
    def _nodes(self) -> Sequence[Node]:
        return self._graph.nodes

    def __repr__(self) -> str:
        return f"<Plan for {self.device}: peak {format_bytes(self.peak_bytes)}, {_VERDICT[self.fits]}>"

    def lifetime(self, what: Storage | Value | Node) -> range:
        """The positions in ``timeline`` from the first to the last at which our run holds ``what``.

        For a node, what it allocated.  Empty for what allocates nothing on the planned device (an in-place
        operator, a view).
        """
        found = self.held(what)
        return range(found[0].start, max(each.stop for each in found)) if found else range(0)

    def held(self, what: Storage | Value | Node) -> list[range]:
        """The positions in ``timeline`` at which our run holds ``what``: in pieces, a range a piece."""
        if "held" not in self._cache:
            self._cache["held"] = by_origin(self._lifetimes.values())
        return positions(self._cache["held"], what)

    @property
    def device_state(self) -> str:
        """What is known of a real device, in words (``"ready"``); of a profile ``""``."""
        target = self._planner.target if self._planner is not None else None
        return target.state if isinstance(target, Device) else ""

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
        if self._profile is not None:
            return self._profile.name != str(
                self.recorded_device
            )  # "cpu:2GiB" is the same device, with a limit
        return not same_device(self.device, self.recorded_device)

    @property
    def devices(self) -> Mapping[str, DevicePlan]:
        """Each device with tensors of the graph by its name (``"cuda:0"``, ``"cpu"``), the plan's first."""
        return self._devices

    def at(self, position: int) -> Moment:
        """What our run holds at ``position`` of the timeline, from 0.

        Raises ``IndexError`` if the timeline has no such position.
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
    def max_batch_size(self) -> int | None:
        """The largest batch that fits, cut as this plan is: in as many pieces, with ``"auto"`` in any number.

        ``None`` if no batch was named, if the capacity is not known, or how an operator's results grow.
        Found by planning again with other sizes; 0 if not even one sample fits.
        """
        if "batch" not in self._cache:
            self._cache["batch"] = self._planner.largest() if self._planner is not None else None
        return self._cache["batch"]

    def replan(self, batch_size: int | None = None, split: int | str | None = None) -> Plan:
        """The same record on the same device with another number of samples, or cut otherwise.

        As ``graph.plan(batch_size=batch_size, split=split)``, but quicker: the batch is not followed again,
        and the room on the device is what it was.  Raises what that raises.
        """
        check_split(split)
        planner = self._planner
        assert planner is not None
        return planner.cut(split).plan(batch_size)

    @property
    def remedies(self) -> Sequence[Remedy]:
        """What would lower the peak, cheapest first; computed from the record when asked for.

        None beside recomputation: what they would bring is known of the run without it.
        """
        if self.recompute.nodes:
            return ()
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


@collector.paused()
def make_plan(
    graph: Graph,
    *,
    device: str | torch.device | Device | DeviceProfile | None = None,
    batch_size: int | None = None,
    split: int | str | None = None,
    backend: str | None = None,
    as_recorded: bool = False,
    recompute: int | str = "off",
) -> Plan:
    """Plan ``graph`` for ``device`` without running it.

    ``device`` may be a real device, the name or object of a profile, or ``None`` for the one
    that holds most of the graph's bytes.  If the graph has tensors on the named device those
    are counted, else those of its main device, as if they lived on the named one.  ``batch_size`` plans
    for another number of samples, ``split`` for a run in so many pieces, with ``"auto"`` in the fewest that
    fit.  ``as_recorded`` counts what was dropped after the last node as referenced to the end, as a
    test's variables are.

    Raises ``ValueError`` for an unknown device, a batch size or a split where no batch was named, a batch
    size where it is not known how an operator's results grow, or a backend other than ``"eager"``.
    """
    if backend not in (None, "eager"):
        raise ValueError(f"The backend {backend!r} is not available in this version, only 'eager'.")
    check_split(split)
    everywhere = lifetimes(graph, as_recorded=as_recorded)
    recorded = main_device(everywhere)
    target = planned(device) if device is not None else target_of(recorded)
    if isinstance(target, Device):
        for storage_device in {span.storage.device for span in everywhere}:
            if same_device(target.name, storage_device):
                recorded = storage_device
                break

    on_cards = [span for span in everywhere if span.storage.device.type == "cuda"]
    if is_card(target) and recorded.type != "cuda" and on_cards:  # the host's side of the cell is larger
        recorded = main_device(on_cards)
    return _Planner(graph, everywhere, recorded, target, split, recompute).plan(batch_size)


MOST_SAMPLES = 2**40  # where the search for the largest batch ends


class _Planner:
    """Plans of one graph for one device: of other batch sizes, in other numbers of pieces."""

    def __init__(
        self,
        graph: Graph,
        everywhere: Sequence[Lifetime],
        recorded: torch.device,
        target: Device | DeviceProfile,
        split: int | str | None,
        recompute: int | str = "off",
    ) -> None:
        self.graph, self.everywhere, self.recorded, self.target = graph, everywhere, recorded, target
        self.split, self.recompute = split, recompute
        self.spans = [span for span in everywhere if span.storage.device == recorded]
        self._batch: Batch | None = None

    @cached_property
    def recorded_plan(self) -> DevicePlan:
        """The plan of the batch as it was recorded, in one piece."""
        return plan_device(self.graph, self.spans, self.recorded, self.target)

    def planned(self, graph: Graph, spans: Sequence[Lifetime], needs: Mapping[int, Need]) -> DevicePlan:
        """The plan of another size or cut, in the room that there was for the batch as recorded."""
        room = self.recorded_plan.capacity_bytes
        return plan_device(graph, spans, self.recorded, self.target, needs, room)

    @property
    def _needs(self) -> Mapping[int, Need]:
        return self.recorded_plan.scratch

    def cut(self, split: int | str | None) -> _Planner:
        """The same with another split; what has been found is shared."""
        other = copy.copy(self)
        other.split = split
        return other

    @property
    def batch(self) -> Batch | None:
        """The graph's batch, followed when first asked for; ``None``: none was named."""
        if self._batch is None and self.graph.batch:
            roots = {value: Shard(dim) for value, dim in self.graph.batch.items()}
            self._batch = Batch(
                self.graph.nodes,
                roots,
                lambda value: value.storage.dropped is None,
                whole=self.graph.whole,
                independent_rng=self.graph.independent_rng,
            )
        return self._batch

    def plan(self, batch_size: int | None) -> Plan:
        size = self._size(batch_size)
        spans, everywhere, again = self.spans, self.everywhere, NOTHING_AGAIN
        own = self.recorded_plan
        if batch_size is not None and self.batch is not None and batch_size != self.batch.size:
            spans, needs = scaled(self.spans, own.scratch, self.batch, batch_size)
            everywhere = [*spans, *(span for span in self.everywhere if span.storage.device != self.recorded)]
            own = self.planned(self.graph, spans, needs)
        pieces = 1
        if self.split not in (None, "off", 1):
            if self.batch is None:
                raise ValueError("a split needs to know the batch: name its tensors (--batch, batch=)")
            assert size is not None
            pieces = self.fewest(size, own) if self.split == "auto" else int(self.split or 1)
        split = SplitPlan(1) if self.batch is None else self.batch.split(pieces, size)
        ours = own if split.pieces == 1 else self.in_pieces(spans, split.piece_sizes, size or 1)
        if self.recompute != "off" and (split.pieces == 1 or roomy(ours) is False):
            if split.pieces > 1:  # not even one sample a piece would fit
                split = SplitPlan(1, [size or 1])
            ours, again = recomputed(self.graph, spans, own, self.target, self.recompute)
        return self._made(own, ours, everywhere, split, size, again)

    def _size(self, batch_size: int | None) -> int | None:
        if batch_size is None:
            return self.batch.size if self.batch is not None else None
        if self.batch is None:
            raise ValueError("another batch size needs to know the batch: name its tensors (--batch, batch=)")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size is a number of samples, at least 1, not {batch_size!r}")
        return batch_size

    def in_pieces(self, spans: Sequence[Lifetime], sizes: Sequence[int], total: int) -> DevicePlan:
        """The plan of a run in pieces of these sizes."""
        assert self.batch is not None
        program = lay_out(self.graph, spans, self._needs, self.batch, sizes, total)
        return self.planned(program.graph, program.spans, program.needs)

    def fewest(self, size: int, whole: DevicePlan) -> int:
        """The fewest pieces that fit with a margin; as many as there can be if none do."""
        batch = self.batch
        assert batch is not None
        group = batch.analysis.group
        blocks = size // group
        if roomy(whole) is not False or batch.schedule is None or blocks <= 1:
            return 1
        spans = self.spans if size == batch.size else scaled(self.spans, {}, batch, size)[0]

        def ask(first: int, second: int) -> tuple[bool, int]:
            plan = self.in_pieces(spans, [first * group, second * group], size)
            return roomy(plan) is not False, needed(plan)

        room = int((whole.capacity_bytes or 0) * (1 - MARGIN))
        return fewest_pieces(blocks, ask, room, needed(whole))

    def largest(self) -> int | None:
        """The largest batch that fits."""
        batch = self.batch
        if batch is None or batch.analysis.unknown:
            return None
        if self.recorded_plan.fits is None:
            return None

        group = batch.analysis.group

        def ask(blocks: int) -> tuple[bool, int]:
            samples = blocks * group
            spans, needs = scaled(self.spans, self._needs, batch, samples)
            pieces = self.split if isinstance(self.split, int) else blocks if self.split == "auto" else 1
            if pieces > 1 and batch.schedule is not None:
                plan = self.in_pieces(spans, sizes_of(samples, pieces, group, SHOWN), samples)
            else:
                plan = self.planned(self.graph, spans, needs)
                if plan.fits is False and self.recompute == "auto":
                    plan, _ = recomputed(self.graph, spans, plan, self.target, "auto")
            return plan.fits is True, needed(plan)

        room = self.recorded_plan.capacity_bytes or 0
        return group * largest_fitting(batch.size // group or 1, MOST_SAMPLES // group, ask, room)

    def _made(
        self,
        eager: DevicePlan,
        own: DevicePlan,
        everywhere: Sequence[Lifetime],
        split: SplitPlan,
        size: int | None,
        again: RecomputePlan,
    ) -> Plan:
        by_purpose: dict[Category, list[Lifetime]] = {category: [] for category in CATEGORIES}
        for span in own.spans:
            by_purpose[categorize(span)].append(span)
        at_peak = moment(own.peak_at, own.peak_node, own.spans) if own.peak_node is not None else None
        return Plan(
            device=self.target.name,
            recorded_device=self.recorded,
            peak_bytes=own.peak_bytes,
            peak_node=own.peak_node,
            reserved_bytes=own.reserved_bytes,
            eager_peak_bytes=eager.eager_peak_bytes,
            timeline=own.timeline,
            eager_timeline=eager.eager_timeline,
            category_timeline={
                category: allocated(members, len(own.timeline)) for category, members in by_purpose.items()
            },
            alive_at_peak=at_peak.alive if at_peak is not None else (),
            by_category=at_peak.by_category if at_peak is not None else dict.fromkeys(CATEGORIES, 0),
            capacity_bytes=own.capacity_bytes,
            fits=own.fits,
            split=split,
            peak_position=own.peak_at,
            _graph=own.graph,
            _lifetimes={span.storage: span for span in own.spans},
            _profile=self.target if isinstance(self.target, DeviceProfile) else None,
            _reservation=own.reservation,
            _recorded_for=self.graph.card,
            _devices=DevicePlans(self.graph, everywhere, own, self.target),
            tensor_peak_bytes=own.tensor_peak_bytes,
            peak_range=own.peak_range,
            eager_peak_range=eager.eager_peak_range,
            scratch=own.scratch,
            estimated=own.estimated,
            batch_size=size,
            recompute=again,
            _reserve_calls=own.reserve_calls,
            _planner=self,
            _reserve=lambda from_eager: (eager if from_eager else own).reserve(from_eager),
        )
