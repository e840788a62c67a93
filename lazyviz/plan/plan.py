"""The plan: how much memory a graph needs, when, and for what.

Sizes are those of the tensors' storages, to the byte, and during a node what its kernel takes
beside them (:mod:`lazyviz.plan.workspace.table`).  On a GPU more is needed: what the caching allocator
adds (rounding, fragments) and library workspaces make ``reserved_bytes``, which decides whether
a graph fits, beside the CUDA context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..graph.ir import Graph, Node, Storage, Value
from ..process import gc_pause
from .allocator.reserved_memory import Call, Reservation
from .batch.split import SplitPlan as SplitPlan
from .batch.split import check_split
from .communication import sent
from .device_plan import DevicePlan as DevicePlan
from .device_plan import same_device
from .devices.devices import CONTEXT_BYTES, Device, DeviceLike, DeviceProfile
from .liveness.lifetimes import Lifetime, positions
from .liveness.lifetimes import Run as Run
from .liveness.live_set import CATEGORIES as CATEGORIES
from .liveness.live_set import Allocation as Allocation
from .liveness.live_set import Category as Category
from .liveness.live_set import Moment as Moment
from .liveness.live_set import allocation, moment
from .remat.selection import NOTHING_AGAIN
from .remat.selection import RecomputePlan as RecomputePlan
from .remedies.remedy import Remedy
from .runtime.measured_times import TimesCompared, beside_profile
from .runtime.projection import Projection
from .runtime.work import total
from .tables import Table, Tabular, sizes
from .uncertainty import CONTEXT_RANGE, LEVEL
from .units import format_bytes
from .workspace.size import Need


class Answers(Protocol):
    """What a plan is asked for late: computed by its planner from the record, and kept."""

    @property
    def target(self) -> Device | DeviceProfile: ...
    @property
    def recorded_batch_size(self) -> int | None: ...
    @property
    def max_batch_size(self) -> int | None: ...
    @property
    def by_origin(self) -> Mapping[Storage, Sequence[Lifetime]]: ...
    @property
    def spans(self) -> Sequence[Lifetime]: ...
    def reserved(self, *, eager: bool) -> tuple[int, int, int] | None: ...
    def largest_within(self, seconds: float, split: int | str | None) -> tuple[int | None, bool]: ...
    def replan(self, batch_size: int | None, split: int | str | None, device: DeviceLike | None) -> Plan: ...
    def remedies(self, plan: Plan, kinds: int | None = None) -> Sequence[Remedy]: ...
    @property
    def time(self) -> Projection | None: ...
    def time_of(self, nodes: Sequence[Node]) -> Projection | None: ...
    def explain(self, plan: Plan) -> str: ...
    def verdict(self, plan: Plan) -> str: ...
    @property
    def lazyviz_needed_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Plan(Tabular):
    """What running the graph would need on one device.  Sizes are bytes.

    Made from the record alone; nothing has run.

    Attributes:
        device: what the plan is for: ``"cpu"``, ``"cuda:0"`` or a profile's name.
        recorded_device: the device whose tensors were counted.
        verdict_of: whose run this is a plan of: ``"eager"``, plain PyTorch's, on a card that is absent, where
            nothing else will run; ``"lazyviz"``, an evaluation's, on a device of this machine, and wherever
            the batch is cut or activations are recomputed.  ``peak_bytes``, ``timeline``, ``reserved_bytes``,
            ``needed_bytes``, ``fits``, ``max_batch_size`` and what is alive are all of that run.
        peak_bytes: projected peak of allocated tensor memory.
        peak_node: the node that reaches it (``None`` for an empty graph).
        reserved_bytes: what the CUDA caching allocator would hold at most, cuBLAS's workspace
            included; ``None`` on the CPU, which has none.
        eager_peak_bytes: what plain eager PyTorch would peak at on the same code.
        lazyviz_peak_bytes: what an evaluation by lazyviz would peak at.
        tensor_peak_bytes: the peak of tensors alone, which an evaluation on the CPU reports.
        peak_range, eager_peak_range: the least and the most that the two may be: kernels' scratch
            memory, counted during their nodes, is an estimate where a library decides, as is ``estimated``.
            On the CPU these are bounds; on a card a share of runs, ``range_level``, is expected within, by
            published measurements.
        peak_position: where in ``timeline`` that is.
        timeline: ``(node_index, allocated_bytes)`` during every node; of a run in pieces in the
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
    verdict_of: Run
    lazyviz_peak_bytes: int
    _graph: Graph = field(repr=False, compare=False)
    _lifetimes: dict[Storage, Lifetime] = field(repr=False, compare=False)
    _answers: Answers = field(repr=False, compare=False)
    _profile: DeviceProfile | None = field(repr=False, default=None)
    _reservation: Reservation | None = field(repr=False, compare=False, default=None)
    _recorded_for: str = field(repr=False, compare=False, default="")
    _devices: Mapping[str, DevicePlan] = field(repr=False, compare=False, default_factory=dict)
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

    @property
    def _nodes(self) -> Sequence[Node]:
        return self._graph.nodes

    def __repr__(self) -> str:
        return f"<Plan for {self.device}: peak {format_bytes(self.peak_bytes)}, {_VERDICT[self.fits]}>"

    _repr_pretty_ = Tabular._repr_pretty_  # IPython looks for it beside `__repr__`

    def table(self) -> Table:
        """The peak, the verdict, and what is alive at the peak."""
        title = f"Projected peak on {self.device}: {format_bytes(self.peak_bytes)}. {self.verdict()}"
        named = {str(category): size for category, size in self.by_category.items()}
        return Table(title, ("bytes", "share", "alive at the peak"), sizes(named), 2)

    def lifetime(self, what: Storage | Value | Node) -> range:
        """The positions in ``timeline`` from the first to the last at which our run holds ``what``.

        For a node, what it allocated.  Empty for what allocates nothing on the planned device (an in-place
        operator, a view).
        """
        found = self.held(what)
        return range(found[0].start, max(each.stop for each in found)) if found else range(0)

    def held(self, what: Storage | Value | Node) -> list[range]:
        """The positions in ``timeline`` at which our run holds ``what``: in pieces, a range a piece."""
        return positions(self._answers.by_origin, what)

    @property
    def device_state(self) -> str:
        """What is known of a real device, in words (``"ready"``); of a profile ``""``."""
        target = self._answers.target
        return target.state if isinstance(target, Device) else ""

    @property
    def needed_bytes(self) -> int:
        """What has to fit: on a GPU what is reserved and the CUDA context, else the peak."""
        reservation = self._reservation
        if reservation is None:
            return self.peak_bytes
        return reservation.reserved_bytes + reservation.context_bytes

    @property
    def eager_needed_bytes(self) -> int:
        """What has to fit for plain eager PyTorch: on a GPU what is reserved and the CUDA context."""
        reserved, reservation = self.eager_reserved_bytes, self._reservation
        if reserved is None or reservation is None:
            return self.eager_peak_bytes
        return reserved + reservation.context_bytes

    @property
    def lazyviz_needed_bytes(self) -> int:
        """What has to fit for an evaluation by lazyviz."""
        return self._answers.lazyviz_needed_bytes

    @property
    def eager_fits(self) -> bool | None:
        """Whether plain eager PyTorch would fit; ``None`` if the capacity is not known."""
        if self.verdict_of == "eager":
            return self.fits
        return None if self.capacity_bytes is None else self.eager_needed_bytes <= self.capacity_bytes

    @property
    def torch_version(self) -> str:
        """The PyTorch release whose kernels and optimizers were recorded; others take other memory.

        Of an older one (``lazyviz.lazy(torch_version=)``) what is known to differ was; the rest is the
        installed release's.
        """
        if self._graph.torch_release is not None:
            return ".".join(map(str, self._graph.torch_release))
        return torch.__version__.partition("+")[0]

    @property
    def max_memory_allocated(self) -> int | None:
        """What ``torch.cuda.max_memory_allocated()`` would say: blocks in use, workspaces included.

        ``None`` where no CUDA allocator is planned.
        """
        return self._reservation.allocated_bytes if self._reservation is not None else None

    @property
    def max_memory_allocated_range(self) -> tuple[int, int] | None:
        """The least and the most that :attr:`max_memory_allocated` may be, in ``range_level`` of runs."""
        allocated = self.max_memory_allocated
        if allocated is None:
            return None
        more = allocated - self.peak_bytes  # than tensors: rounding, workspaces
        return self.peak_range[0] + more, self.peak_range[1] + more

    @property
    def range_level(self) -> float:
        """Share of runs that are to be expected within the ranges of a card; on the CPU they are bounds."""
        return LEVEL

    @property
    def _context_range(self) -> tuple[int, int]:
        """Bytes of the CUDA context; a profile of one's own says what it takes."""
        context = self._reservation.context_bytes if self._reservation is not None else 0
        return CONTEXT_RANGE if context == CONTEXT_BYTES else (context, context)

    @property
    def needed_range(self) -> tuple[int, int]:
        """The least and the most that ``needed_bytes`` may be; on a card in ``range_level`` of runs."""
        reservation = self._reservation
        if reservation is None:
            return self.peak_range
        assert self.reserved_range is not None
        (low, high), (least, most) = self.reserved_range, self._context_range
        return low + least, high + most

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
        return moment(position, self._nodes[position], self._answers.spans)

    def made(self, start: int, stop: int) -> list[Allocation]:
        """What our run allocates from position ``start`` to before ``stop``, largest first."""
        made = [
            allocation(span)
            for span in self._lifetimes.values()
            if start <= span.start < stop and span.storage.nbytes
        ]
        return sorted(made, key=lambda each: -each.nbytes)

    @property
    def reserved_range(self) -> tuple[int, int] | None:
        """The least and the most that ``reserved_bytes`` may be, in ``range_level`` of runs."""
        held, reservation = self._answers.reserved(eager=False), self._reservation
        if held is None or reservation is None:
            return None
        most = max(held[1:])
        if reservation.retries and self.capacity_bytes is not None:
            most = self.capacity_bytes - reservation.context_bytes  # the card has no more to give
        return min(held[1], most), min(held[2], most)

    @property
    def eager_reserved_bytes(self) -> int | None:
        """What the CUDA caching allocator would hold at most for plain eager PyTorch."""
        if self.verdict_of == "eager":
            return self.reserved_bytes
        held = self._answers.reserved(eager=True)
        return held[0] if held is not None else None

    @property
    def eager_reserved_range(self) -> tuple[int, int] | None:
        """The least and the most that ``eager_reserved_bytes`` may be."""
        if self.verdict_of == "eager":
            return self.reserved_range
        held = self._answers.reserved(eager=True)
        return held[1:] if held is not None else None

    @property
    def eager_driver_range(self) -> tuple[int, int] | None:
        """What the driver may say that eager PyTorch's process takes of the card, at its peak.

        At least what is allocated; at most what the allocator would hold and the CUDA context, of
        which a part is there from the start and a part comes with the kernels that are loaded.
        """
        held, reservation = self._answers.reserved(eager=True), self._reservation
        if held is None or reservation is None:
            return None
        return self.eager_peak_range[0], held[2] + self._context_range[1]

    @property
    def world_size(self) -> int:
        """The number of ranks of which one was recorded; 1 of a program that runs on one device."""
        return self._graph.world_size

    @property
    def communication_bytes(self) -> int:
        """Bytes that this rank sends to the others in what was recorded, by the ring algorithm.

        See :mod:`lazyviz.plan.communication`, and :attr:`communication` for each kind of collective.
        """
        return sum(self.communication.values())

    @property
    def communication(self) -> dict[str, int]:
        """Bytes that this rank sends, by kind of collective (``"all_gather"``), largest first."""
        if self.batch_size == self.recorded_batch_size:
            return sent(self._graph)
        sizes = {storage.origin: span.storage.nbytes for storage, span in self._lifetimes.items()}

        def scaled(value: Value) -> int:
            storage = value.storage.origin
            return value.nbytes * sizes.get(storage, storage.nbytes) // max(storage.nbytes, 1)

        return sent(self._graph, scaled)

    @property
    def recorded_batch_size(self) -> int | None:
        """Samples of the batch as it was recorded; ``None``: none was named."""
        return self._answers.recorded_batch_size

    @property
    def max_batch_size(self) -> int | None:
        """The largest batch that fits, cut as this plan is: in as many pieces, with ``"auto"`` in any number.

        ``None`` if no batch was named, if the capacity is not known, or how an operator's results grow.
        Found by planning again with other sizes; 0 if not even one sample fits.
        """
        return self._answers.max_batch_size

    @gc_pause.paused()
    def largest_within(self, seconds: float, split: int | str | None = None) -> tuple[int | None, bool]:
        """The largest batch known to fit after about so long, cut as ``split`` says, and whether that is all.

        Asked again it goes on from there, until it is ``replan(split=split).max_batch_size``.
        """
        return self._answers.largest_within(seconds, split)

    @gc_pause.paused()
    def replan(
        self,
        batch_size: int | None = None,
        split: int | str | None = None,
        device: DeviceLike | None = None,
    ) -> Plan:
        """The same record with another number of samples, cut otherwise, or on another device.

        As ``graph.plan(device, batch_size, split)``, but quicker: the record is not read and the batch not
        followed again, and the room on the same device is what it was.  Raises what that raises.
        """
        check_split(split)
        return self._answers.replan(batch_size, split, device)

    @property
    def remedies(self) -> Sequence[Remedy]:
        """What would lower the peak, cheapest first; computed from the record when asked for.

        None beside recomputation: what they would bring is known of the run without it.
        """
        return self._answers.remedies(self)

    def cheapest_remedies(self, kinds: int) -> Sequence[Remedy]:
        """Of ``kinds`` kinds of remedies, the cheapest that bring something: found sooner than all are."""
        return self._answers.remedies(self, kinds)

    @property
    def time(self) -> Projection | None:
        """Projected seconds of the record, run by eager PyTorch; computed when first asked for.

        ``None`` where the device's rates are not known, and for another batch size than was recorded.
        """
        return self._answers.time if self.batch_size == self.recorded_batch_size else None

    def time_of(self, nodes: Sequence[Node]) -> Projection | None:
        """The projected time of some of the record's ops alone, such as of its second step."""
        return self._answers.time_of(nodes)

    def compare_times(self, profile: Any) -> TimesCompared:
        """The projected time of each op beside a profile that ``torch.profiler.profile`` took of the program.

        Of the program as it was recorded, run by plain PyTorch or by lazyviz, on the plan's device.

        Raises:
            ValueError: nothing is known of the device's speed, or the profile has none of the record's ops.
        """
        if self.time is None:
            raise ValueError(
                f"no time is projected on {self.device}: lazyviz.calibrate() is for the CPU of this machine"
            )
        return beside_profile(self.time, profile)

    @property
    def seconds(self) -> float | None:
        """Projected seconds of the step on the plan's device; ``None`` where nothing is known of it."""
        return self.time.seconds if self.time is not None else None

    @property
    def seconds_range(self) -> tuple[float, float] | None:
        """The least and the most that :attr:`seconds` is expected to be."""
        return self.time.seconds_range if self.time is not None else None

    @property
    def flops(self) -> int:
        """FLOPs of the record as ``torch.utils.flop_counter`` counts them."""
        return total(self._nodes).flops

    @property
    def by_phase(self) -> dict[str, tuple[float, int, int]]:
        """``(seconds, flops, bytes moved)`` by phase; empty where no time is known."""
        return self.time.by_phase if self.time is not None else {}

    def explain(self) -> str:
        """The plan as text: the peak, where it is, what is alive there and why, whether it fits."""
        return self._answers.explain(self)

    def verdict(self) -> str:
        """Whether it fits, in one sentence."""
        return self._answers.verdict(self)


_VERDICT = {True: "fits", False: "does not fit", None: "unknown whether it fits"}
