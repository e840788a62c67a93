"""Rematerialization selection: which activations to recompute to stay below a budget.

The forward pass is cut into segments at points where little is alive.  Tensors that cross a cut are kept.
Within a segment, the tensors that are cheapest to recompute for their size are dropped first, similar to how
the min-cut partitioner of AOTAutograd weighs recomputation against saved memory.  Every choice is simulated
as a run (:mod:`lazyviz.plan.remat.recompute_candidates`), so its peak is exact, not an estimate.
Sizes are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch.utils.flop_counter import flop_registry

from ...graph.ir import Graph, Node, Storage, Value
from ..device_timeline_and_verdict import MARGIN, DevicePlan, fits_with_margin, plan_device
from ..devices.device_lookup import Device, DeviceProfile
from ..liveness.allocation_trace import Key
from ..liveness.lifetimes import Lifetime
from ..liveness.live_set_and_categories import Category, categorize
from ..liveness.run_order import RunsInside
from ..peak_of_one_run import Held, Peak, highest
from ..units import format_bytes, format_share
from ..workspace.workspace_size import Need
from .recompute_candidates import RecomputeSchedule, Trace

SEGMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""The numbers of segments that are tried for a forward pass."""
TRIED = 4  # of them, simulated
WORTHWHILE = 4096  # allocations that are smaller than the peak by this factor are ignored

FLOPS_PER_BYTE = {torch.float32: 12.5, torch.float16: 200.6, torch.bfloat16: 200.6}
"""Operations that take as long as moving a byte: 19.5 TFLOPS in float32 and 312 TFLOPS in half precision
at 1,555 GB/s (NVIDIA A100 datasheet).  Other types count as float32.  Only the order of operators by cost,
and the share of work that is stated, depend on it.
"""


@dataclass(frozen=True, slots=True)
class RecomputePlan:
    """Which nodes are recomputed to save memory.

    Attributes:
        nodes: the nodes that run again, in that order; empty: nothing is recomputed.
        saves_bytes: reduction of the peak.
        budget_bytes: the budget for the peak (``None``: no budget was requested or needed).
        least_bytes: the lowest peak that was found (``None``: not searched).
        seconds: estimated additional time: how long the nodes took when they ran, if all have run.
        share: estimated additional work, as a share of the work of the whole run, from the bytes and
            operations of each node.
        reason: why the budget is not met; "" if it is.
    """

    nodes: Sequence[Node] = ()
    saves_bytes: int = 0
    budget_bytes: int | None = None
    least_bytes: int | None = None
    seconds: float | None = None
    share: float = 0.0
    reason: str = ""

    @property
    def ops(self) -> int:
        """The number of ops that run again."""
        return len(self.nodes)

    def explain(self) -> str:
        """The choice as text: additional time, and saved memory."""
        if not self.nodes:
            return self.reason or "nothing is recomputed"
        cost = f"about {format_share(self.share)} more work" if self.share >= 0.005 else "under 1 % more work"
        if self.seconds is not None:
            cost += f", about {self.seconds:.3g} s"
        text = (
            f"{self.ops:,} ops recomputed ({cost}), which saves {format_bytes(self.saves_bytes)} at the peak"
        )
        return f"{text}; {self.reason}" if self.reason else text


NOTHING_AGAIN = RecomputePlan()


@dataclass(frozen=True, slots=True)
class Choice:
    """A run with recomputation: ``schedule`` is ``None`` if none is needed; ``peak_bytes`` is its peak."""

    trace: Trace
    schedule: RecomputeSchedule | None
    peak_bytes: int
    plan: RecomputePlan

    def program(self, graph: Graph, needs: Mapping[int, Need]) -> RecomputeProgram:
        """The laid-out run, with ``needs``, the kernels' scratch memory as recorded, by position."""
        schedule, trace = self.schedule, self.trace
        assert schedule is not None
        spans = []
        count = len(schedule.order)
        program = schedule.program
        for key, (start, stop) in program.spans().items():
            duplicate = schedule.duplicates.get(key)
            span = trace.spans[program.storages[key if duplicate is None else duplicate]]
            storage = span.storage
            if duplicate is not None:
                storage = _copy(storage)
            elif key in program.kept:
                stop = count
            spans.append(
                span._replace(
                    storage=storage,
                    start=start,
                    eager_start=start,
                    eager_stop=stop,
                    lazy_stop=stop,
                    kept=duplicate is None and span.kept,
                )
            )
        laid_out = Graph()
        laid_out.nodes = [step.node for step in program.steps]
        laid_out.gpu = graph.gpu
        laid_out.calls = graph.calls
        return RecomputeProgram(
            laid_out, spans, {at: needs[p] for at, p in enumerate(schedule.order) if p in needs}
        )

    def projected(self) -> tuple[Peak, dict[Storage, Category]]:
        """The peak as a run would measure it, and the category of each storage; on a CPU, only
        tensors count.
        """
        schedule, trace = self.schedule, self.trace
        device = next((storage.device for storage in trace.spans), torch.device("cpu"))
        categories = {storage.origin: categorize(span) for storage, span in trace.spans.items()}
        program = trace.program if schedule is None else schedule.program
        held: list[Held] = []
        for key, (start, stop) in program.spans().items():
            duplicate = schedule.duplicates.get(key) if schedule is not None else None
            storage = program.storages[key if duplicate is None else duplicate]
            held.append((storage, program.sizes[key], max(start, 0), stop))
        order = schedule.order if schedule is not None else range(len(program.steps))
        extra = [trace.needs.get(position, 0) for position in order]
        return highest(device, held, extra, categories), categories


@dataclass(frozen=True, slots=True)
class RecomputeProgram:
    """A run that recomputes: its nodes in order, lifetimes and scratch memory by their positions."""

    graph: Graph
    spans: list[Lifetime]
    needs: dict[int, Need]


def _copy(storage: Storage) -> Storage:
    """A copy of the storage, for memory that is allocated again."""
    copy = Storage(storage.nbytes, storage.device, external=False, created=storage.created)
    copy.dropped, copy.role, copy.name, copy.continues = storage.dropped, storage.role, storage.name, storage
    copy.is_data = storage.is_data
    return copy


class Recomputation:
    """The possible savings of recomputation for the run of the nodes of ``trace``."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.whole = trace.peak()

    @cached_property
    def work(self) -> list[float]:
        return [work(node) for node in self.trace.nodes]

    @cached_property
    def _candidates(self) -> list[Key]:
        """The allocations that may be dropped, in order of recomputation cost per byte."""
        trace = self.trace
        big = [key for key in trace.gaps if trace.size[key] * WORTHWHILE >= self.whole]
        return sorted(big, key=lambda key: (round(self._cost(key) / trace.size[key], 3), trace.maker[key]))

    def _cost(self, key: Key) -> float:
        """The work to recompute ``key`` if all other candidates exist."""
        trace, seen, total = self.trace, set[int](), 0.0
        last = trace.gaps[key][0]
        at = trace.gaps[key][1]
        stack = [writer for writer in trace.writers[key] if writer <= last]
        while stack:
            position = stack.pop()
            if position in seen:
                continue
            seen.add(position)
            total += self.work[position]
            for value in trace.nodes[position].inputs:
                other = trace.key(value)
                if other is None or other in trace.fixed or other in trace.gaps:
                    continue
                end = trace.touches[other][-1]
                if end < at and trace.repeats(other, end, at):
                    stack += trace.writers[other]
        return total

    # --- segments -----------------------------------------------------------------------

    @cached_property
    def _ranges(self) -> list[range]:
        """The ranges of nodes before each backward pass."""
        result = []
        start = 0
        nodes = self.trace.nodes
        for position, node in enumerate(nodes):
            if node.phase == "backward":
                if position > start:
                    result.append(range(start, position))
                start = position + 1
        return [span for span in result if any(trace_gap in span for trace_gap in self._made_at)]

    @cached_property
    def _made_at(self) -> dict[int, int]:
        """Bytes that may be dropped, by where they are made."""
        made: dict[int, int] = {}
        for key in self._candidates:
            position = self.trace.maker[key]
            made[position] = made.get(position, 0) + self.trace.size[key]
        return made

    @cached_property
    def _crossing(self) -> list[int]:
        """Bytes made before each position that nodes at or after it, apart from the backward pass, use."""
        trace = self.trace
        changes = [0] * (len(trace.nodes) + 2)
        for key, (start, stop) in self._forward_span.items():
            changes[start + 1] += trace.size[key]
            changes[stop + 1] -= trace.size[key]
        return list(accumulate(changes))

    @cached_property
    def _forward_span(self) -> dict[Key, tuple[int, int]]:
        trace = self.trace
        result = {}
        for key, start in enumerate(trace.maker):
            if start < 0 or trace.nodes[start].phase in ("backward", "optimizer"):
                continue
            stop = start
            for position in trace.touches[key]:
                if trace.nodes[position].phase == "backward":
                    break
                stop = position
            result[key] = (start, stop)
        return result

    def _cuts(self, segments: int) -> list[int]:
        """Positions at which segments begin: about equal bytes apart, where few bytes cross."""
        cuts: list[int] = []
        for span in self._ranges:
            sums = list(accumulate(self._made_at.get(position, 0) for position in span))
            total = sums[-1]
            reach = total / segments / 2
            at = 0
            for index in range(1, segments):
                target = total * index / segments
                while at < len(sums) and sums[at] < target - reach:
                    at += 1
                best = None
                look = at
                while look < len(sums) and sums[look] <= target + reach:
                    position = span[look] + 1
                    rank = (self._crossing[position], abs(sums[look] - target))
                    if best is None or rank < best[0]:
                        best = (rank, position)
                    look += 1
                if best is not None and (not cuts or best[1] > cuts[-1]) and best[1] < span.stop:
                    cuts.append(best[1])
        return cuts

    def _anchors(self, cuts: Sequence[int]) -> set[Key]:
        """The allocations that cross a cut."""
        result = set()
        for key, (start, stop) in self._forward_span.items():
            if any(start < cut <= stop for cut in cuts):
                result.add(key)
        return result

    @cached_property
    def _partitions(self) -> list[_Partition]:
        """The partitions with the lowest expected peaks, lowest first; each drops everything that it can."""
        found: dict[tuple[int, ...], _Partition] = {}
        for segments in SEGMENTS:
            cuts = self._cuts(segments)
            if tuple(cuts) in found:
                continue
            anchors = self._anchors(cuts)
            items = [key for key in self._candidates if key not in anchors]
            kept = sum(self.trace.size[key] for key in anchors)
            sizes: dict[int, int] = {}
            for key in items:
                segment = sum(cut <= self.trace.maker[key] for cut in cuts)
                sizes[segment] = sizes.get(segment, 0) + self.trace.size[key]
            found[tuple(cuts)] = _Partition(cuts, anchors, items, kept + max(sizes.values(), default=0))
        best = sorted(found.values(), key=lambda each: each.estimate)[:TRIED]
        for each in best:
            each.least = self.trace.peak(self.trace.schedule(set(each.items), each.anchors))
        return sorted(best, key=lambda each: each.least)

    @property
    def least(self) -> int:
        """The lowest peak that was found."""
        if not self._candidates:
            return self.whole
        return min(self.whole, self._partitions[0].least)

    # --- choosing -------------------------------------------------------------------------

    def cheapest_within(self, budget: int) -> Choice:
        """The cheapest run found whose peak is within ``budget``; the one with the lowest peak if none is."""
        if self.whole <= budget:
            return Choice(self.trace, None, self.whole, RecomputePlan(budget_bytes=budget))
        if self.least >= self.whole:
            reason = self._not_enough(budget, "no activation can be recomputed to save memory:")
            plan = RecomputePlan(budget_bytes=budget, least_bytes=self.whole, reason=reason)
            return Choice(self.trace, None, self.whole, plan)
        if self.least > budget:
            lowest = self._partitions[0]
            schedule = self.trace.schedule(set(lowest.items), lowest.anchors)
            return self._choice(
                schedule, budget, self._not_enough(budget, "even with all activations recomputed")
            )
        best: tuple[float, RecomputeSchedule] | None = None
        for partition in self._partitions:
            if partition.least <= budget:
                schedule = self._cheapest_subset(partition, budget)
                price = sum(self.work[position] for position in schedule.repeated)
                if best is None or price < best[0]:
                    best = price, schedule
        assert best is not None
        return self._choice(best[1], budget, "")

    def _cheapest_subset(self, partition: _Partition, budget: int) -> RecomputeSchedule:
        """The cheapest part of the partition's candidates that meets the budget."""
        trace, items, anchors = self.trace, partition.items, partition.anchors

        def schedule_if_it_fits(keys: Iterable[Key]) -> RecomputeSchedule | None:
            schedule = trace.schedule(set(keys), anchors)
            return schedule if trace.peak(schedule) <= budget else None

        low, high = 0, len(items)  # `low` candidates are too few
        best = None
        while high - low > 1:
            middle = (low + high) // 2
            schedule = schedule_if_it_fits(items[:middle])
            if schedule is not None:
                high, best = middle, schedule
            else:
                low = middle
        best = best or trace.schedule(set(items[:high]), anchors)
        # Remove what the peak does not need: whole segments, from the last one, which is recomputed first.
        chosen = items[:high]
        starts = [0, *partition.cuts]
        for segment in reversed(range(max(len(starts) - PRUNED, 0), len(starts))):
            stop = starts[segment + 1] if segment + 1 < len(starts) else math.inf
            fewer = [key for key in chosen if not starts[segment] <= trace.maker[key] < stop]
            if fewer and len(fewer) < len(chosen) and (schedule := schedule_if_it_fits(fewer)) is not None:
                chosen, best = fewer, schedule
        return best

    def _choice(self, schedule: RecomputeSchedule, budget: int, reason: str) -> Choice:
        nodes = [self.trace.nodes[position] for position in schedule.repeated]
        peak = self.trace.peak(schedule)
        seconds = [node.measured_seconds for node in nodes]
        plan = RecomputePlan(
            nodes=nodes,
            saves_bytes=self.whole - peak,
            budget_bytes=budget,
            least_bytes=self.least,
            seconds=None if None in seconds else sum(second for second in seconds if second is not None),
            share=sum(self.work[position] for position in schedule.repeated) / (sum(self.work) or 1.0),
            reason=reason,
        )
        return Choice(self.trace, schedule, peak, plan)

    def _not_enough(self, budget: int, why: str) -> str:
        return f"{format_bytes(budget)} are not enough: {why} the peak is {format_bytes(self.least)}"


PRUNED = 8  # segments that are tried without


@dataclass(slots=True)
class _Partition:
    cuts: Sequence[int]
    anchors: set[Key]
    items: list[Key]
    estimate: int
    least: int = field(default=0)


def work(node: Node) -> float:
    """The cost of running ``node``, in bytes moved: those of its operands and results, and its operations.

    Operations are counted by ``torch.utils.flop_counter``; operators that it does not know, which are not
    matrix products, are limited by memory bandwidth.
    """
    moved = 0
    for value in node.inputs:
        moved += value.meta.nbytes
    fresh = False
    for value in node.outputs:
        if value.node is node:
            moved += value.meta.nbytes
            fresh = fresh or all(value.storage is not other.storage for other in node.inputs)
    if not fresh and not node.writes:
        return 0.0  # a view
    count = flop_registry.get(node.op.overloadpacket)
    name = node.op._schema.name
    if count is None and name == "aten::_scaled_dot_product_flash_attention_for_cpu":
        count = flop_registry.get(torch.ops.aten._scaled_dot_product_flash_attention)
    if count is None or not node.outputs:
        return float(moved)
    args = [_shape(item) for item in node.args]
    if name == "aten::_scaled_dot_product_flash_attention_for_cpu":
        args = args[:3]
    try:
        flops = count(*args, out_val=node.outputs[0].shape)
    except (TypeError, AssertionError, ValueError):
        return float(moved)
    return moved + flops / FLOPS_PER_BYTE.get(node.outputs[0].dtype, FLOPS_PER_BYTE[torch.float32])


def _shape(item: object) -> object:
    return item.shape if isinstance(item, Value) else item


# --- a plan --------------------------------------------------------------------------------------


def recomputed(
    graph: Graph,
    spans: Sequence[Lifetime],
    own: DevicePlan,
    target: Device | DeviceProfile,
    budget: int | str,
) -> tuple[DevicePlan, RecomputePlan]:
    """The plan of a device, changed to stay within ``budget``; with ``"auto"``, changed to fit.

    ``own`` is the plan without recomputation, with the same ``spans``.
    """
    auto = budget == "auto"
    if auto and fits_with_margin(own) is not False:
        return own, NOTHING_AGAIN
    needs = {at: need.nbytes for at, need in own.scratch.items()}
    recomputation = Recomputation(Trace(graph.nodes, spans, needs, RunsInside(graph).run_of))
    device = next((span.storage.device for span in spans), torch.device("cpu"))

    def planned(choice: Choice) -> DevicePlan:
        if choice.schedule is None:
            return own
        program = choice.program(graph, own.scratch)
        return plan_device(program.graph, program.spans, device, target, program.needs)

    if not auto:
        assert isinstance(budget, int)
        choice = recomputation.cheapest_within(budget)
        return planned(choice), choice.plan
    assert own.capacity_bytes is not None
    limit = int(own.capacity_bytes * (1 - MARGIN))
    if own.reservation is not None:  # what the allocator adds to the tensors, and the context
        reserved = own.reservation.reserved_bytes + own.reservation.context_bytes
        limit = max(limit - max(reserved - own.peak_bytes, 0), 0)
    choice = recomputation.cheapest_within(limit)
    found = planned(choice)
    for _ in range(ATTEMPTS - 1):
        if choice.plan.reason or fits_with_margin(found) is not False:
            break
        limit = int(limit * 0.95)  # fragmentation: the simulated allocator needs more than the tensors
        choice = recomputation.cheapest_within(limit)
        found = planned(choice)
    if fits_with_margin(found) is False and not choice.plan.reason:
        peak = format_bytes(found.peak_bytes)
        text = f"recomputing activations is not enough: {peak} plus the allocator's overhead"
        return found, replace(choice.plan, reason=text)
    return found, choice.plan


ATTEMPTS = 6  # attempts, because the allocator adds overhead
