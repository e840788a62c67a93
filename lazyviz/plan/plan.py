"""The plan: how much memory a graph needs, when, and for what.

Sizes are those of the tensors' storages, to the byte, plus the scratch memory of kernels while they run
(:mod:`lazyviz.plan.workspace.workspace_lookup`).  A GPU needs more: ``reserved_bytes`` also includes rounding
and fragmentation by the caching allocator, and library workspaces.  Together with the CUDA context, it
decides whether a graph fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..graph.ir import Graph, Node, Storage, Value
from ..process import gc_pause
from ..process.unpicklable_base_class import Unpicklable
from .allocator.reserved_memory import Call, Reservation
from .batch.split_plan import SplitPlan as SplitPlan
from .batch.split_plan import check_split
from .communication_bytes import sent
from .device_timeline_and_verdict import DevicePlan as DevicePlan
from .device_timeline_and_verdict import same_device
from .devices.cuda_context import range_of
from .devices.device_lookup import Device, DeviceLike, DeviceProfile
from .liveness.lifetimes import Lifetime, positions
from .liveness.lifetimes import Run as Run
from .liveness.live_set_and_categories import CATEGORIES as CATEGORIES
from .liveness.live_set_and_categories import Allocation as Allocation
from .liveness.live_set_and_categories import Category as Category
from .liveness.live_set_and_categories import Moment as Moment
from .liveness.live_set_and_categories import allocation, moment
from .node_formatting import category_text
from .remat.recompute_selection import NOTHING_AGAIN
from .remat.recompute_selection import RecomputePlan as RecomputePlan
from .remedies.remedy import Remedy
from .result_tables import DisplayedText, Table, Tabular, sizes
from .runtime.gpu_timeline import Projection
from .runtime.match_profiler_times_to_ops import TimesCompared, compare_with_profile
from .uncertainty import LEVEL
from .units import format_bytes
from .workspace.workspace_size import Need


class Answers(Protocol):
    """Parts of a plan that its planner computes on demand, and keeps."""

    @property
    def target(self) -> Device | DeviceProfile: ...
    @property
    def recorded_batch_size(self) -> int | None: ...
    @property
    def max_batch_size(self) -> int | None: ...
    @property
    def why_no_largest(self) -> str | None: ...
    @property
    def by_origin(self) -> Mapping[Storage, Sequence[Lifetime]]: ...
    @property
    def spans(self) -> Sequence[Lifetime]: ...
    def reserved(self, *, eager: bool) -> tuple[int, int, int] | None: ...
    def largest_within(self, seconds: float, split: int | str | None) -> tuple[int | None, bool]: ...
    def replan(self, batch_size: int | None, split: int | str | None, device: DeviceLike | None) -> Plan: ...
    def rerun(self, split: int | str) -> Plan: ...
    def remedies(self, plan: Plan, kinds: int | None = None) -> Sequence[Remedy]: ...
    @property
    def time(self) -> Projection | None: ...
    @property
    def flops(self) -> int: ...
    def time_of(self, nodes: Sequence[Node]) -> Projection | None: ...
    def sized(self, nodes: Sequence[Node], samples: int | None) -> Sequence[Node]: ...
    def explain(self, plan: Plan) -> str: ...
    def verdict(self, plan: Plan) -> str: ...
    @property
    def lazyviz_needed_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Plan(Tabular, Unpicklable):
    """The memory that running a graph would need on one device.  Sizes are in bytes.

    Computed from the recorded graph, without running it.

    Attributes:
        device: the planned device: ``"cpu"``, ``"cuda:0"``, or the name of a profile.
        recorded_device: the device whose tensors were counted.
        verdict_of: the kind of run that this plan describes.  ``"eager"``: a run by eager PyTorch, on an
            absent GPU, where lazyviz cannot run.  ``"lazyviz"``: an evaluation, on a device of this machine,
            and whenever the batch is split or activations are recomputed.  ``peak_bytes``, ``timeline``,
            ``reserved_bytes``, ``needed_bytes``, ``fits``, ``max_batch_size``, and live sets are of that run.
        peak_bytes: projected peak of allocated tensor memory.
        peak_node: the node during which the peak is reached (``None`` for an empty graph).
        reserved_bytes: projected peak of memory held by the CUDA caching allocator, including cuBLAS's
            workspace; ``None`` on the CPU.
        eager_peak_bytes: projected peak of eager PyTorch on the same code.
        lazyviz_peak_bytes: projected peak of an evaluation by lazyviz.
        tensor_peak_bytes: peak of tensors without scratch memory, which an evaluation on the CPU reports.
        peak_range, eager_peak_range: lowest and highest expected values of the two peaks.  The scratch memory
            of kernels, counted during their nodes, is an estimate if a library decides it, and so are the
            sizes in ``estimated``.  On the CPU these are bounds, and the upper one includes small tensors
            that are not planned (Python numbers, flags).  Neither includes the copies of generators' states
            that an evaluation by lazyviz keeps, up to three for each generator that draws.  On a GPU, a share
            ``range_level`` of runs is expected to be within them, according to published measurements.
        peak_position: position of the peak in ``timeline``.
        timeline: ``(node_index, allocated_bytes)`` during every node, in the order of the run: sync points
            leave nodes pending that they do not need.  For a split run, the first two pieces of a pass
            represent all.
        eager_timeline: the same for eager PyTorch, in program order.
        category_timeline: per category, the bytes during every node; they add up to ``timeline``.
        alive_at_peak: the storages that are alive at the peak, largest first.
        by_category: bytes per category at the peak; contains every category.
        capacity_bytes: the memory that the plan can use.  On a device of this machine, the free memory plus
            the counted tensors that already exist (on a GPU, plus all memory that PyTorch's allocator holds);
            for a profile, the whole GPU; ``None`` if the driver does not report it.
        fits: whether the run fits in the capacity (on a GPU, including reserved memory and the CUDA context);
            ``None`` if unknown.
        split: how the batch is split, or which nodes prevent it.
        recompute: which ops are recomputed to save memory.
        batch_size: number of samples in the planned batch; ``None`` if no batch was named.
        scratch: by node position, the memory that its kernel allocates and frees: estimate and range, in
            bytes.  Nodes without scratch memory are omitted.
        estimated: tensors whose size is an estimate (those that cuDNN saves for the backward pass).
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
    _at: Sequence[Node] = field(repr=False, compare=False)
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
    def ir(self) -> Graph:
        """The graph of this plan."""
        return self._graph

    @property
    def _nodes(self) -> Sequence[Node]:
        """The node at each position of the timeline."""
        return self._at

    def __repr__(self) -> str:
        return f"<Plan for {self.device}: peak {format_bytes(self.peak_bytes)}, {_VERDICT[self.fits]}>"

    _repr_pretty_ = Tabular._repr_pretty_  # IPython uses it in addition to `__repr__`

    def table(self) -> Table:
        """The peak, the verdict, and what is alive at the peak."""
        title = f"Projected peak on {self.device}: {format_bytes(self.peak_bytes)}. {self.verdict()}"
        named = {category_text(category): size for category, size in self.by_category.items()}
        return Table(title, ("bytes", "share", "alive at the peak"), sizes(named), 2)

    def lifetime(self, what: Storage | Value | Node) -> range:
        """The positions in ``timeline`` from the first to the last at which ``what`` is alive.

        For a node, this is the memory that it allocated.  Empty for nodes that allocate nothing on the
        planned device (in-place operators, views).
        """
        found = self.held(what)
        return range(found[0].start, max(each.stop for each in found)) if found else range(0)

    def held(self, what: Storage | Value | Node) -> list[range]:
        """The positions in ``timeline`` at which ``what`` is alive; in a split run, one range per piece."""
        return positions(self._answers.by_origin, what)

    @property
    def device_state(self) -> str:
        """The state of a real device as text (``"ready"``); ``""`` for a profile."""
        target = self._answers.target
        return target.state if isinstance(target, Device) else ""

    @property
    def needed_bytes(self) -> int:
        """Memory that must fit: on a GPU, reserved memory and the CUDA context; otherwise the peak."""
        reservation = self._reservation
        if reservation is None:
            return self.peak_bytes
        return reservation.reserved_bytes + reservation.context_bytes

    @property
    def eager_needed_bytes(self) -> int:
        """Like ``needed_bytes``, for a run by eager PyTorch."""
        reserved, reservation = self.eager_reserved_bytes, self._reservation
        if reserved is None or reservation is None:
            return self.eager_peak_bytes
        return reserved + reservation.context_bytes

    @property
    def lazyviz_needed_bytes(self) -> int:
        """Like ``needed_bytes``, for an evaluation by lazyviz."""
        return self._answers.lazyviz_needed_bytes

    @property
    def eager_fits(self) -> bool | None:
        """Whether a run by eager PyTorch would fit; ``None`` if the capacity is unknown."""
        if self.verdict_of == "eager":
            return self.fits
        return None if self.capacity_bytes is None else self.eager_needed_bytes <= self.capacity_bytes

    @property
    def torch_version(self) -> str:
        """The PyTorch release that the plan is for; others may use other amounts of memory.

        For an older release (``lazyviz.lazy(torch_version=)``), only the known differences were recorded.
        Everything else is as in the installed release.
        """
        if self._graph.torch_release is not None:
            return ".".join(map(str, self._graph.torch_release))
        return torch.__version__.partition("+")[0]

    @property
    def max_memory_allocated(self) -> int | None:
        """What ``torch.cuda.max_memory_allocated()`` would return: blocks in use, including workspaces.

        ``None`` if the plan has no CUDA allocator.
        """
        return self._reservation.allocated_bytes if self._reservation is not None else None

    @property
    def max_memory_allocated_range(self) -> tuple[int, int] | None:
        """Lowest and highest expected :attr:`max_memory_allocated`, in ``range_level`` of runs."""
        allocated = self.max_memory_allocated
        if allocated is None:
            return None
        more = allocated - self.peak_bytes  # than tensors: rounding, workspaces
        return self.peak_range[0] + more, self.peak_range[1] + more

    @property
    def range_level(self) -> float:
        """Share of runs expected to be within the ranges of a GPU; on the CPU, ranges are bounds."""
        return LEVEL

    @property
    def _context_range(self) -> tuple[int, int]:
        """Bytes of the CUDA context; user-defined profiles specify it themselves."""
        context = self._reservation.context_bytes if self._reservation is not None else 0
        return range_of(context)

    @property
    def needed_range(self) -> tuple[int, int]:
        """Lowest and highest expected ``needed_bytes``; on a GPU, in ``range_level`` of runs."""
        reservation = self._reservation
        if reservation is None:
            return self.peak_range
        assert self.reserved_range is not None
        (low, high), (least, most) = self.reserved_range, self._context_range
        return low + least, high + most

    def straddles(self, limit: int) -> bool:
        """Whether ``limit`` bytes are within ``needed_range``, so that the verdict is uncertain."""
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
        """The live set at ``position`` of the timeline, counted from 0.

        Raises ``IndexError`` if the timeline has no such position.
        """
        if not 0 <= position < len(self._nodes):
            raise IndexError(f"there is no node {position}: the graph has {len(self._nodes):,}")
        return moment(position, self._nodes[position], self._answers.spans)

    def made(self, start: int, stop: int) -> list[Allocation]:
        """The allocations from position ``start`` up to, but not including, ``stop``, largest first."""
        made = [
            allocation(span)
            for span in self._lifetimes.values()
            if start <= span.start < stop and span.storage.nbytes
        ]
        return sorted(made, key=lambda each: -each.nbytes)

    @property
    def reserved_range(self) -> tuple[int, int] | None:
        """Lowest and highest expected ``reserved_bytes``, in ``range_level`` of runs."""
        held, reservation = self._answers.reserved(eager=False), self._reservation
        if held is None or reservation is None:
            return None
        most = max(held[1:])
        if reservation.retries and self.capacity_bytes is not None:
            most = self.capacity_bytes - reservation.context_bytes  # the GPU has no more to give
        return min(held[1], most), min(held[2], most)

    @property
    def eager_reserved_bytes(self) -> int | None:
        """Like ``reserved_bytes``, for a run by eager PyTorch."""
        if self.verdict_of == "eager":
            return self.reserved_bytes
        held = self._answers.reserved(eager=True)
        return held[0] if held is not None else None

    @property
    def eager_reserved_range(self) -> tuple[int, int] | None:
        """Lowest and highest expected ``eager_reserved_bytes``."""
        if self.verdict_of == "eager":
            return self.reserved_range
        held = self._answers.reserved(eager=True)
        return held[1:] if held is not None else None

    @property
    def eager_driver_range(self) -> tuple[int, int] | None:
        """Lowest and highest memory that the driver (NVML) is expected to report for a process of eager
        PyTorch, at its peak: the memory held by the allocator, and the CUDA context.
        """
        held = self.eager_reserved_range
        if held is None:
            return None
        least, most = self._context_range
        return held[0] + least, held[1] + most

    @property
    def world_size(self) -> int:
        """The number of ranks, one of which was recorded; 1 for a program that runs on one device."""
        return self._graph.world_size

    @property
    def communication_bytes(self) -> int:
        """Bytes that this rank sends to the others in the recorded graph, by the ring algorithm.

        See :mod:`lazyviz.plan.communication_bytes`, and :attr:`communication` for each kind of collective.
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
        """Number of samples in the recorded batch; ``None`` if no batch was named."""
        return self._answers.recorded_batch_size

    @property
    def max_batch_size(self) -> int | None:
        """The largest batch that fits, in as many pieces as this plan, or in any number with ``"auto"``.

        ``None`` if no batch was named, or if the capacity or the growth of an operator's results is unknown;
        ``explain()`` says which.  If the program uses several absent GPUs, the batch fits on each of them.
        Found by planning other sizes; 0 if not even one sample fits.
        """
        return self._answers.max_batch_size

    @gc_pause.paused()
    def largest_within(self, seconds: float, split: int | str | None = None) -> tuple[int | None, bool]:
        """The largest batch found to fit within about ``seconds`` of search, and whether the search is
        complete.

        Another call continues the search, until the result is ``replan(split=split).max_batch_size``.
        """
        return self._answers.largest_within(seconds, split)

    @gc_pause.paused()
    def replan(
        self,
        batch_size: int | None = None,
        split: int | str | None = None,
        device: DeviceLike | None = None,
    ) -> Plan:
        """A plan of the same graph with another batch size, another split, or on another device.

        Like ``graph.plan(device, batch_size, split)``, but faster: it does not read the graph or follow the
        batch again, and uses the same free memory for the same device.  Raises the same errors.
        """
        check_split(split)
        return self._answers.replan(batch_size, split, device)

    @property
    def remedies(self) -> Sequence[Remedy]:
        """Changes that would lower the peak, cheapest first; computed on first access.

        Empty for a plan that recomputes activations, because remedies are computed for runs without.
        """
        return self._answers.remedies(self)

    def cheapest_remedies(self, kinds: int) -> Sequence[Remedy]:
        """The cheapest remedies of up to ``kinds`` kinds that save memory; faster than computing all."""
        return self._answers.remedies(self, kinds)

    @property
    def time(self) -> Projection | None:
        """Projected run time of the graph with the plan's batch in eager PyTorch; computed on first access.

        ``None`` if the rates of the device are unknown, or most of the work is of unknown duration.
        """
        return self._answers.time

    def time_of(self, nodes: Sequence[Node]) -> Projection | None:
        """The projected time of some nodes, such as those of the second step, with the plan's batch."""
        return self._answers.time_of(nodes)

    def compare_times(self, profile: Any) -> TimesCompared:
        """Compare the projected time of each op with a profile of the program by ``torch.profiler.profile``.

        The profile must be of the recorded program, run by eager PyTorch or by lazyviz, on the plan's device.

        Raises:
            ValueError: the speed of the device is unknown, or the profile contains none of the recorded ops.
        """
        if self.time is None:
            raise ValueError(
                f"no time is projected on {self.device}: lazyviz.calibrate() is for the CPU of this machine, "
                "and the time of factorizations and of GPUs without published rates is unknown"
            )
        return compare_with_profile(self.time, profile)

    @property
    def seconds(self) -> float | None:
        """Projected run time on the plan's device, in seconds; ``None`` if its speed is unknown."""
        return self.time.seconds if self.time is not None else None

    @property
    def seconds_range(self) -> tuple[float, float] | None:
        """Lowest and highest expected :attr:`seconds`."""
        return self.time.seconds_range if self.time is not None else None

    @property
    def flops(self) -> int:
        """FLOPs of the graph with the plan's batch, as counted by ``torch.utils.flop_counter``."""
        return self._answers.flops

    @property
    def by_phase(self) -> dict[str, tuple[float, int, int]]:
        """``(seconds, flops, bytes moved)`` by phase; empty if no time is known."""
        return self.time.by_phase if self.time is not None else {}

    def explain(self) -> str:
        """The plan as text: the peak and its place, what is alive there and why, and whether it fits."""
        return DisplayedText(self._answers.explain(self))

    def verdict(self) -> str:
        """Whether it fits, in one sentence."""
        return self._answers.verdict(self)


_VERDICT = {True: "fits", False: "does not fit", None: "unknown whether it fits"}
