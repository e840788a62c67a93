"""Planner: makes a :class:`~lazyviz.plan.plan.Plan` for a device, batch size, and number of pieces."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from operator import attrgetter

import torch

from ..graph.ir import Graph, Node, Storage
from ..process import gc_pause
from .batch.batch_placement import Shard
from .batch.split_plan import (
    BATCH_NEEDED,
    SHOWN,
    Batch,
    SplitPlan,
    check_split,
    lay_out,
    rescaled,
    resized,
    scaled,
    sizes_of,
)
from .device_timeline_and_verdict import (
    MARGIN,
    DevicePlan,
    DevicePlans,
    fits_with_margin,
    is_gpu,
    needed,
    plan_device,
    same_device,
    target_of,
)
from .devices.device_lookup import Device, DeviceLike, DeviceProfile, is_absent, planned, with_context_of
from .explain_memory import explain, verdict
from .largest_fitting_size import TimeIsUp, fewest_pieces, largest_fitting
from .liveness.lifetimes import Lifetime, Run, allocated, by_device, by_origin, device_with_most, lifetimes
from .liveness.live_set_and_categories import CATEGORIES, by_category, moment
from .liveness.run_order import RunsInside
from .plan import Plan
from .remat.recompute_selection import NOTHING_AGAIN, RecomputePlan, recomputed
from .remedies.remedy import Remedies, Remedy
from .remedies.remedy_search import remedies
from .runtime.bytes_and_launches import total
from .runtime.gpu_timeline import Projection
from .runtime.run_time_projection import project_on
from .workspace.workspace_lookup import scratch
from .workspace.workspace_size import Need


@gc_pause.paused()
def make_plan(
    graph: Graph,
    *,
    device: DeviceLike | None = None,
    batch_size: int | None = None,
    split: int | str | None = None,
    backend: str | None = None,
    as_recorded: bool = False,
    recompute: int | str = "off",
    of: Run | None = None,
) -> Plan:
    """Plan ``graph`` for ``device`` without running it.

    ``device`` may be a real device, the name or object of a profile, or ``None`` for the device that holds
    most of the graph's bytes.  If the graph has tensors on the named device, those are counted; otherwise the
    tensors of its main device are counted as if they were on the named one.  ``batch_size`` plans for another
    number of samples, ``split`` for a run in this many pieces, with ``"auto"`` in the fewest that fit.
    ``as_recorded`` treats tensors that were dropped after the last node as referenced to the end, like
    variables of a test.

    ``of`` is the kind of run: eager PyTorch, or an evaluation by lazyviz.  Default: eager PyTorch on an
    absent GPU, because that is what will run there, otherwise lazyviz.  Split runs, and runs that recompute
    activations, are always by lazyviz.

    Raises ``ValueError`` for an unknown device, a batch size or a split where no batch was named, a batch
    size where it is not known how an operator's results grow, or a backend other than ``"eager"``.
    """
    if backend not in (None, "eager"):
        raise ValueError(f"This version plans only runs with 'eager'; the memory of {backend!r} is unknown.")
    check_split(split)
    everywhere = by_device(lifetimes(graph, as_recorded=as_recorded))
    recorded, target = _counted(everywhere, device, graph.torch_release)
    return Planner(graph, everywhere, recorded, target, split, recompute, of).plan(batch_size)


def _counted(
    everywhere: Mapping[torch.device, Sequence[Lifetime]],
    device: DeviceLike | None,
    release: tuple[int, int] | None,
) -> tuple[torch.device, Device | DeviceProfile]:
    """The device whose tensors are counted, and the planned device, for that PyTorch release."""
    recorded = device_with_most(everywhere)
    target = with_context_of(planned(device) if device is not None else target_of(recorded), release)
    if isinstance(target, Device):
        for storage_device in everywhere:
            if same_device(target.name, storage_device):
                recorded = storage_device
                break

    on_gpus = {there: spans for there, spans in everywhere.items() if there.type == "cuda"}
    if is_gpu(target) and recorded.type != "cuda" and on_gpus:  # the host's side of the cell is larger
        recorded = device_with_most(on_gpus)
    return recorded, target


READS_KEEP = (
    "what the reads inside of the block have computed stays for the whole batch; read values after the step, "
    "in a block that is split itself (--split, split=)"
)
MOST_SAMPLES = 2**40  # upper limit of the search for the largest batch


class _NotKnown(Exception):
    """The memory that the program needs for a requested batch size is unknown."""


class Planner:
    """Plans of one graph for one device, for several batch sizes and numbers of pieces."""

    def __init__(
        self,
        graph: Graph,
        everywhere: Mapping[torch.device, Sequence[Lifetime]],
        recorded: torch.device,
        target: Device | DeviceProfile,
        split: int | str | None,
        recompute: int | str = "off",
        of: Run | None = None,
    ) -> None:
        self.graph, self.everywhere, self.recorded, self.target = graph, everywhere, recorded, target
        self.split, self.recompute, self.chosen = split, recompute, of
        self.rerun = False
        self.of: Run = of or ("eager" if is_absent(target) else "lazyviz")
        self.spans = everywhere.get(recorded, ())
        self._batch: Batch | None = None
        self._why_unknown: str | None = None  # found by ``largest``
        self._asked: dict[tuple[object, bool, int], tuple[bool, int]] = {}  # results of ``largest``

    @cached_property
    def recorded_plan(self) -> DevicePlan:
        """The plan of the recorded batch, in one piece."""
        return plan_device(self.graph, self.spans, self.recorded, self.target, of=self.of, order=self._order)

    @cached_property
    def _order(self) -> Sequence[int] | None:
        """The positions of the recorded nodes in the order of an evaluation; ``None``: in program order."""
        return RunsInside(self.graph).order

    def planned(
        self, graph: Graph, spans: Sequence[Lifetime], needs: Mapping[int, Need], of: Run = "lazyviz"
    ) -> DevicePlan:
        """The plan of another batch size or split, with the same capacity as for the recorded batch."""
        room = self.recorded_plan.capacity_bytes
        order = self._order if graph is self.graph else None
        return plan_device(graph, spans, self.recorded, self.target, needs, room, of, order)

    @property
    def _needs(self) -> Mapping[int, Need]:
        return self.recorded_plan.scratch

    def cut(self, split: int | str | None, rerun: bool = False) -> Planner:
        """The same planner with another split; results are shared.

        ``rerun``: for another run of the block with this split, in which reads in the block run pieces, too.
        """
        other = copy.copy(self)
        other.split, other.rerun = split, rerun
        other.__dict__.pop("_kept_at_reads", None)
        return other

    def on(self, device: DeviceLike) -> Planner:
        """The same planner for another device.  Raises the errors of :func:`make_plan`."""
        recorded, target = _counted(self.everywhere, device, self.graph.torch_release)
        kind = self.chosen
        other = Planner(self.graph, self.everywhere, recorded, target, self.split, self.recompute, kind)
        other._batch = self.batch
        return other

    @property
    def batch(self) -> Batch | None:
        """The graph's batch, analyzed on first access; ``None`` if none was named."""
        if self._batch is None and self.graph.batch:
            inside = RunsInside(self.graph)
            roots = {value: Shard(dim) for value, dim in self.graph.batch.items()}
            self._batch = Batch(
                self.graph.nodes,
                roots,
                lambda value: value.storage.dropped is None or inside.is_read_across(value),
                whole=self.graph.whole,
                independent_rng=self.graph.independent_rng,
                handed_out=self.graph.handed_out,
            )
        return self._batch

    def plan(self, batch_size: int | None) -> Plan:
        size = self._size(batch_size)
        spans, again, samples = self.spans, NOTHING_AGAIN, None
        own = self.recorded_plan
        if batch_size is not None and self.batch is not None and batch_size != self.batch.size:
            spans, needs = self.scaled(batch_size)
            own, samples = self.planned(self.graph, spans, needs, self.of), batch_size
        pieces = 1
        if self.split not in (None, "off", 1):
            if self.batch is None:
                raise ValueError(f"a split {BATCH_NEEDED}")
            assert size is not None
            pieces = self.fewest(size, own) if self.split == "auto" else int(self.split or 1)
        split = SplitPlan(1) if self.batch is None else self.batch.split(pieces, size)
        ours = own
        if split.pieces > 1:
            whole = cache(partial(self.by_lazyviz, spans, own))
            ours = self.in_pieces(spans, split.piece_sizes, size or 1, whole)
            if self._kept_at_reads and ours is whole():
                split = SplitPlan(1, [size or 1], why_whole=READS_KEEP)
        if self.recompute != "off" and (split.pieces == 1 or fits_with_margin(ours) is False):
            if split.pieces > 1:  # not even one sample a piece would fit
                split = SplitPlan(1, [size or 1])
            ours, again = self.recomputed(spans, own)
        by_lazyviz = partial(self.by_lazyviz, spans, own)
        devices = DevicePlans(self.everywhere, ours, partial(self.elsewhere, samples=samples, of=ours.of))
        return self._made(own, ours, devices, split, size, again, by_lazyviz)

    def elsewhere(self, device: torch.device, samples: int | None, of: Run) -> DevicePlan:
        """The plan of another device's tensors, with a batch of ``samples`` (``None``: as recorded).

        Other CUDA devices are assumed to be GPUs of the planned kind.
        """
        alike = device.type == "cuda" and isinstance(self.target, DeviceProfile)
        target = self.target if alike else target_of(device)
        spans, needs = self.everywhere[device], None
        if samples is not None:
            assert self.batch is not None
            kind = "cuda" if is_gpu(target) else device.type
            needs = scratch(self.graph, device, kind)
            spans, needs = self._grown(spans, needs, samples, device, kind)
        return plan_device(self.graph, spans, device, target, needs, of=of, order=self._order)

    def by_lazyviz(self, spans: Sequence[Lifetime], whole: DevicePlan) -> DevicePlan:
        """The plan ``whole``, with lifetimes ``spans``, for an evaluation by lazyviz."""
        return whole if whole.of == "lazyviz" else self.planned(self.graph, spans, whole.scratch)

    def recomputed(self, spans: Sequence[Lifetime], whole: DevicePlan) -> tuple[DevicePlan, RecomputePlan]:
        """``whole`` with recomputation to meet the budget; only lazyviz's run can do that."""
        budget = self.recompute
        enough = fits_with_margin(whole) is not False if budget == "auto" else whole.peak_bytes <= int(budget)
        if whole.of == "eager" and enough:
            return whole, NOTHING_AGAIN
        return recomputed(self.graph, spans, self.by_lazyviz(spans, whole), self.target, budget)

    def _size(self, batch_size: int | None) -> int | None:
        if batch_size is None:
            return self.batch.size if self.batch is not None else None
        if self.batch is None:
            raise ValueError(f"planning another batch size {BATCH_NEEDED}")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size must be a number of samples, at least 1, not {batch_size!r}")
        return batch_size

    def in_pieces(
        self,
        spans: Sequence[Lifetime],
        sizes: Sequence[int],
        total: int,
        whole: Callable[[], DevicePlan] | None = None,
    ) -> DevicePlan:
        """The plan of a run in pieces of these sizes; or ``whole()``, lazyviz's plan of the whole batch, if
        sync points keep more of the batch in memory than its pieces need.
        """
        assert self.batch is not None
        program = lay_out(self.graph, spans, self._needs, self.batch, sizes, total)
        made = self.planned(program.graph, program.spans, program.needs)
        if whole is None or not self._kept_at_reads:
            return made
        steps = zip(whole().nodes, whole().timeline)
        kept = [nbytes for node, (_, nbytes) in steps if node in self._kept_at_reads]
        # All steps are laid out as one run, where values kept by several sync points would coexist.
        return made if max(kept) <= made.peak_bytes <= whole().peak_bytes else whole()

    @cached_property
    def _kept_at_reads(self) -> set[Node]:
        if not self.graph.runs_inside or self.batch is None:
            return set()
        inside = RunsInside(self.graph)
        return self.batch.kept_at_reads(inside.run_of_all_pending if self.rerun else inside.run_of)

    def scaled(self, samples: int) -> tuple[list[Lifetime], dict[int, Need]]:
        """Lifetimes and scratch memory with a batch of ``samples``; see :func:`.batch.split_plan.scaled`."""
        kind = "cuda" if is_gpu(self.target) else self.recorded.type
        return self._grown(self.spans, self._needs, samples, self.recorded, kind)

    def _grown(
        self,
        spans: Sequence[Lifetime],
        needs: Mapping[int, Need],
        samples: int,
        device: torch.device,
        kind: str,
    ) -> tuple[list[Lifetime], dict[int, Need]]:
        assert self.batch is not None
        grown, more = scaled(spans, needs, self.batch, samples)
        return grown, more | rescaled(self.graph, device, kind, self.batch, samples)

    def fewest(self, size: int, whole: DevicePlan) -> int:
        """The fewest pieces that fit with a margin; the maximum number if none fit."""
        batch = self.batch
        assert batch is not None
        group = batch.analysis.group
        blocks = size // group
        if fits_with_margin(whole) is not False or batch.schedule is None or blocks <= 1:
            return 1
        spans = self.spans if size == batch.size else scaled(self.spans, {}, batch, size)[0]

        def ask(first: int, second: int) -> tuple[bool, int]:
            plan = self.in_pieces(spans, [first * group, second * group], size)
            return fits_with_margin(plan) is not False, needed(plan)

        room = int((whole.capacity_bytes or 0) * (1 - MARGIN))
        return fewest_pieces(blocks, ask, room, needed(whole))

    def largest(self, deadline: float = math.inf) -> int | None:
        """The largest batch that fits.

        Raises :class:`TimeIsUp` if ``deadline`` (of ``time.monotonic``) passes first.
        Another call continues from there.
        """
        batch = self.batch
        if batch is None or self.why_unknown() is not None:
            return None

        group = batch.analysis.group

        asked, fitting = False, 0

        def ask(blocks: int) -> tuple[bool, int]:
            nonlocal asked, fitting
            key = self.split, self.rerun, blocks
            if key not in self._asked:
                if asked and time.monotonic() > deadline:
                    raise TimeIsUp(fitting * group)
                self._asked[key] = plan(blocks)
                asked = True
            if self._asked[key][0]:
                fitting = max(fitting, blocks)
            return self._asked[key]

        def plan(blocks: int) -> tuple[bool, int]:
            samples = blocks * group
            if (why := batch.unknown_growth(samples)) is not None:
                raise _NotKnown(why)
            spans, needs = self.scaled(samples)
            pieces = self.split if isinstance(self.split, int) else blocks if self.split == "auto" else 1
            if pieces > 1 and batch.schedule is not None:
                whole = cache(partial(self.planned, self.graph, spans, needs))
                made = self.in_pieces(spans, sizes_of(samples, pieces, group, SHOWN), samples, whole)
            else:
                made = self.planned(self.graph, spans, needs, self.of)
                if made.fits is False and self.recompute == "auto":
                    made, _ = self.recomputed(spans, made)
            others = [self.elsewhere(each, samples, self.of) for each in self.other_gpus if made.fits]
            return all(each.fits for each in (made, *others)), max(map(needed, (made, *others)))

        room = self.recorded_plan.capacity_bytes or 0
        try:
            return group * largest_fitting(batch.size // group or 1, MOST_SAMPLES // group, ask, room)
        except _NotKnown as reason:
            self._why_unknown = str(reason)
            return None

    def why_unknown(self) -> str | None:
        """Why the largest batch that fits is not known; ``None`` if it is, or if no batch was named."""
        if self.batch is None or self._why_unknown is not None:
            return self._why_unknown
        if (why := self.batch.unknown_growth(self.batch.size)) is not None:
            return why
        if self.recorded_plan.fits is None:
            return f"{self.target.name} does not report its memory"
        return None

    @property
    def other_gpus(self) -> list[torch.device]:
        """The other absent GPUs of the program, on which the batch has to fit, too."""
        if not isinstance(self.target, DeviceProfile) or self.recorded.type != "cuda":
            return []
        return [device for device in self.everywhere if device.type == "cuda" and device != self.recorded]

    def _made(
        self,
        eager: DevicePlan,
        own: DevicePlan,
        devices: DevicePlans,
        split: SplitPlan,
        size: int | None,
        again: RecomputePlan,
        by_lazyviz: Callable[[], DevicePlan],
    ) -> Plan:
        at, node = own.peak_at, own.peak_node
        at_peak = moment(at, node, own.spans) if node is not None else None
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
                category: allocated(members, len(own.timeline))
                for category, members in by_category(own.spans).items()
            },
            alive_at_peak=[*at_peak.alive] if at_peak is not None else (),
            by_category=at_peak.by_category if at_peak is not None else dict.fromkeys(CATEGORIES, 0),
            capacity_bytes=own.capacity_bytes,
            fits=own.fits,
            split=split,
            peak_position=own.peak_at,
            _graph=own.graph,
            _at=own.nodes,
            _lifetimes=dict(zip(map(attrgetter("storage"), own.spans), own.spans)),
            verdict_of=own.of,
            lazyviz_peak_bytes=own.lazyviz_peak_bytes,
            _answers=LateAnswers(self, eager, own, by_lazyviz, size),
            _profile=self.target if isinstance(self.target, DeviceProfile) else None,
            _reservation=own.reservation,
            _recorded_for=self.graph.gpu,
            _devices=devices,
            tensor_peak_bytes=own.tensor_peak_bytes,
            peak_range=own.peak_range,
            eager_peak_range=eager.eager_peak_range,
            scratch=own.scratch,
            estimated=own.estimated,
            batch_size=size,
            recompute=again,
            _reserve_calls=own.reserve_calls,
        )


class LateAnswers:
    """Parts of a plan that are computed on demand and cached, such as remedies or the largest batch."""

    def __init__(
        self,
        planner: Planner,
        eager: DevicePlan,
        own: DevicePlan,
        by_lazyviz: Callable[[], DevicePlan],
        size: int | None,
    ) -> None:
        self._planner, self._eager, self._own, self._by_lazyviz = planner, eager, own, by_lazyviz
        self._size = size
        self._reserved: dict[bool, tuple[int, int, int] | None] = {}
        self._remedies: dict[int | None, Sequence[Remedy]] = {}  # by requested number of kinds

    @property
    def target(self) -> Device | DeviceProfile:
        return self._planner.target

    @property
    def recorded_batch_size(self) -> int | None:
        batch = self._planner.batch
        return batch.size if batch is not None else None

    @cached_property
    def max_batch_size(self) -> int | None:
        return self._planner.largest()

    @property
    def why_no_largest(self) -> str | None:
        return self._planner.why_unknown() if self.max_batch_size is None else None

    @cached_property
    def by_origin(self) -> dict[Storage, list[Lifetime]]:
        return by_origin(self._own.spans)

    @property
    def spans(self) -> Sequence[Lifetime]:
        return self._own.spans

    def reserved(self, *, eager: bool) -> tuple[int, int, int] | None:
        """Bytes that the allocator would hold, and their range, for eager PyTorch or lazyviz."""
        if eager not in self._reserved:
            self._reserved[eager] = (self._eager if eager else self._own).reserve(eager)
        return self._reserved[eager]

    @cached_property
    def lazyviz_needed_bytes(self) -> int:
        return needed(self._own if self._own.of == "lazyviz" else self._by_lazyviz())

    def largest_within(self, seconds: float, split: int | str | None) -> tuple[int | None, bool]:
        try:
            return self._planner.cut(split).largest(time.monotonic() + seconds), True
        except TimeIsUp as so_far:
            return so_far.samples, False

    def replan(self, batch_size: int | None, split: int | str | None, device: DeviceLike | None) -> Plan:
        planner = self._planner if device is None else self._planner.on(device)
        return planner.cut(split).plan(batch_size)

    def rerun(self, split: int | str) -> Plan:
        return self._planner.cut(split, rerun=True).plan(None)

    def remedies(self, plan: Plan, kinds: int | None = None) -> Sequence[Remedy]:
        found = self._remedies.get(None) or self._remedies.get(kinds)
        if found is None:
            with gc_pause.paused():
                found = Remedies(() if plan.recompute.nodes else remedies(plan, kinds))
            self._remedies[kinds] = found
        return found

    @cached_property
    def time(self) -> Projection | None:
        return self.time_of(self._planner.graph.nodes)

    def time_of(self, nodes: Sequence[Node]) -> Projection | None:
        sized = self.sized(nodes, self._size)
        found = project_on(sized, self.target)
        return found if found is None or sized is nodes else found.of_nodes(dict(zip(sized, nodes)))

    @cached_property
    def flops(self) -> int:
        return total(self.sized(self._planner.graph.nodes, self._size)).flops

    def sized(self, nodes: Sequence[Node], samples: int | None) -> Sequence[Node]:
        """``nodes`` with a batch of ``samples``; ``nodes`` itself for the recorded batch."""
        batch = self._planner.batch
        if batch is None or samples is None or samples == batch.size:
            return nodes
        return resized(nodes, batch, samples)

    def explain(self, plan: Plan) -> str:
        with gc_pause.paused():
            return explain(plan)

    def verdict(self, plan: Plan) -> str:
        return verdict(plan)
