"""GPU timeline: a graph's kernels in sequence, launched by one Python thread; its projected run time.

A kernel starts when the previous one has finished, the host has launched it, and its inputs have arrived over
the links.  If the device waits for the host, that time counts for the op, whose bound is ``"launch"``; if it
waits for a collective, the time counts for the collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...graph.collective_info import kind_of
from ...graph.ir import Bound, Node, SourceLine
from ...graph.modules import ModuleNames
from ..devices.gpu_rates import Known
from ..result_tables import Table, Tabular
from ..units import format_bytes, format_flops
from .bytes_and_launches import NOTHING, Work, added, is_view, work_of
from .cuda_streams import CollectiveInFlight, Streams, gpus_among, nodes_on_other_streams
from .flop_count import least_flops
from .gpu_kernel_times import CALIBRATED, Gpu, Kernel, kernel_time, times_on

RANGE: dict[Known, float] = {"measured": 0.10, "rule": 0.20, "power-limited": 0.35, "calibrated": 0.30}
"""Relative uncertainty of the time, by the source of the GPU's rate."""
UNCOVERED = 0.5
"""The same for kernels without measurements in the calibration."""


@dataclass(frozen=True, slots=True)
class OpTime:
    """Projected time of one op: ``seconds``, including ``waiting`` for the launch by the host.

    For a collective, ``seconds`` is the time that kernels wait for it, and ``hidden`` the time that overlaps
    with kernels.
    """

    node: Node
    seconds: float
    waiting: float
    bound: Bound
    work: Work
    hidden: float = 0.0


@dataclass(frozen=True)
class Projection(Tabular):
    """Projected run time of a graph on one device.

    Attributes:
        device: the name of the device.
        seconds: run time of the whole graph in eager PyTorch, summed over ops.
        ops: the time of each op, in program order.
        known: source of the matmul rate: ``"measured"``; ``"rule"``, estimated from the data sheet;
            ``"power-limited"``, which varies from GPU to GPU and over time; or ``"calibrated"`` on this
            machine's CPU.
        coverage: the share of the time in classes of kernels that have measurements.
        unknown: ops of unknown duration, which ``seconds`` does not include.
    """

    device: str
    seconds: float
    ops: Sequence[OpTime] = field(repr=False)
    known: Known
    coverage: float
    unknown: Sequence[Node] = field(default=(), repr=False)
    peak_flops: float | None = None

    @property
    def margin(self) -> float:
        """Expected relative error."""
        known = RANGE[self.known]
        return known + (1 - self.coverage) * UNCOVERED if self.coverage < 0.9 else known

    @property
    def seconds_range(self) -> tuple[float, float]:
        """Lowest and highest expected ``seconds``."""
        return self.seconds / (1 + self.margin), self.seconds * (1 + self.margin)

    @cached_property
    def work(self) -> Work:
        """The total work of all ops, also those of unknown duration."""
        return added((*(each.work for each in self.ops), *map(work_of, self.unknown)))

    @property
    def flops(self) -> int:
        return self.work.flops

    @cached_property
    def waiting(self) -> float:
        """Seconds in which kernels wait for the host, which launches them."""
        return sum(each.waiting for each in self.ops)

    @property
    def mfu(self) -> float | None:
        """FLOPs of the ops in ``seconds`` divided by the devices' peak FLOPs in that time (MFU as defined by
        PaLM).
        """
        if not self.peak_flops or not self.seconds:
            return None
        return sum(each.work.executed for each in self.ops) / self.seconds / self.peak_flops

    @property
    def hidden(self) -> float:
        """Time of collectives that overlaps with kernels; not included in ``seconds``."""
        return sum(each.hidden for each in self._collectives)

    @property
    def exposed(self) -> float:
        """The part of ``seconds`` during which kernels wait for collectives."""
        return sum(each.seconds for each in self._collectives)

    @cached_property
    def _collectives(self) -> list[OpTime]:
        return [each for each in self.ops if (each.seconds or each.hidden) and kind_of(each.node) is not None]

    @cached_property
    def by_bound(self) -> dict[Bound, float]:
        """Seconds by bound; they add up to ``seconds``."""
        found: dict[Bound, float] = {"compute": 0.0, "memory": 0.0, "launch": 0.0}
        for each in self.ops:
            found["launch"] += each.waiting
            found[each.bound] += each.seconds - each.waiting
        return found

    @property
    def by_phase(self) -> dict[str, tuple[float, int, int]]:
        """``(seconds, flops, bytes moved)`` of forward, backward, optimizer, and other ops."""
        return {
            str(name): (seconds, work.flops, work.bytes_moved)
            for name, (seconds, work) in self._grouped(lambda node: node.phase).items()
        }

    @property
    def by_module(self) -> dict[str, tuple[float, Work]]:
        """Seconds and work by innermost module, slowest first; ``""``: outside of modules.

        A module is its path in the model, with the model's variable if several models have that path.
        """
        nodes = (*(each.node for each in self.ops), *self.unknown)
        of = ModuleNames((node.root, node.module) for node in nodes)
        return {
            str(name): found for name, found in self._grouped(lambda node: of(node.root, node.module)).items()
        }

    @property
    def by_line(self) -> dict[SourceLine | None, tuple[float, Work]]:
        """Seconds and work by line of user code, including its backward pass, slowest first."""
        found: Mapping[Hashable, tuple[float, Work]] = self._grouped(
            lambda node: (node.forward or node).source
        )
        return {line: each for line, each in found.items() if line is None or isinstance(line, SourceLine)}

    def of_nodes(self, origin: Mapping[Node, Node]) -> Projection:
        """The same times for the nodes that the projected ones are copies of, by copy."""
        ops = [replace(each, node=origin[each.node]) for each in self.ops]
        return replace(self, ops=ops, unknown=[origin[each] for each in self.unknown])

    def of(self, nodes: Iterable[Node]) -> float:
        """Seconds of some nodes of the graph, such as those of a module."""
        return sum(self._by_node[node].seconds for node in nodes if node in self._by_node)

    @cached_property
    def _by_node(self) -> dict[Node, OpTime]:
        return {each.node: each for each in self.ops}

    def _grouped(self, key: Callable[[Node], Hashable]) -> dict[Hashable, tuple[float, Work]]:
        found: dict[Hashable, tuple[float, Work]] = {}
        for each in self.ops:
            seconds, work = found.get(group := key(each.node), (0.0, NOTHING))
            found[group] = seconds + each.seconds, work + each.work
        for node in self.unknown:
            seconds, work = found.get(group := key(node), (0.0, NOTHING))
            found[group] = seconds, work + work_of(node)
        return dict(sorted(found.items(), key=lambda item: -item[1][0]))

    def __repr__(self) -> str:
        low, high = self.seconds_range
        return (
            f"<Projection on {self.device}: {duration(self.seconds)} ({duration(low)} to {duration(high)})>"
        )

    _repr_pretty_ = Tabular._repr_pretty_  # IPython uses it in addition to `__repr__`

    def table(self) -> Table:
        """Seconds by phase, and what bounds them."""
        low, high = self.seconds_range
        title = (
            f"Projected time on {self.device}: {duration(self.seconds)} ({duration(low)} to {duration(high)})"
        )
        rows = [
            (duration(seconds), format_flops(flops), format_bytes(moved), name)
            for name, (seconds, flops, moved) in self.by_phase.items()
        ]
        return Table(title, ("time", "work", "moved", "phase"), rows, 3)


def duration(seconds: float) -> str:
    """``"12.3 ms"``, three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * size:  # 999.6 of the next unit would be shown as 1e+03
            count = seconds / size
            return f"{count:.3g} {unit}" if count < 999.5 else f"{count:,.0f} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def project(nodes: Sequence[Node], gpu: Gpu) -> Projection | None:
    """The time of ``nodes`` on ``gpu``; ``None`` if most of their work is unknown."""
    issue = CALIBRATED["issue_seconds"]
    gpus = gpus_among(nodes)
    gpu = replace(gpu, host_apart=bool(gpus), several=len(gpus) > 1)
    times, peaks = times_on(gpu), Counter[float]()
    issued = covered = 0.0
    beside = nodes_on_other_streams(nodes, gpus)
    streams = Streams(has_collectives=bool(beside))
    unknown: list[Node] = []
    ops: list[OpTime] = []
    sent: dict[int, CollectiveInFlight] = {}  # by position in `ops`
    by_unit: dict[Known, float] = {}
    for node in nodes:
        kernel = kernel_time(node, gpu, times)
        issued += issue["view"] if is_view(node) else issue["op"]
        if kernel is None:
            unknown.append(node)
            continue
        if kernel.unit is not None:
            peaks[gpu.rates.peak(kernel.unit)] += work_of(node).flops
        if node in beside and kernel.seconds:
            sent[len(ops)] = streams.send(node, kernel.seconds, issued, beside[node])
            ops.append(OpTime(node, 0.0, 0.0, kernel.bound, work_of(node)))
            continue
        waiting = streams.run(node, kernel.seconds, issued)
        covered += kernel.seconds if kernel.covered else 0.0
        _note(by_unit, kernel, gpu)
        bound: Bound = "launch" if waiting > kernel.seconds else kernel.bound
        ops.append(OpTime(node, kernel.seconds + waiting, waiting, bound, work_of(node)))
    seconds = streams.finish()
    for at, each in sent.items():
        ops[at] = replace(ops[at], seconds=each.exposed, hidden=each.hidden)
    if not is_enough(ops, unknown):
        return None
    busy = sum(each.seconds - each.waiting for each in ops)
    known = max(by_unit, key=lambda each: by_unit[each], default=gpu.rates.known("float32"))
    # The peak of the units that compute most of the FLOPs, summed over all GPUs.
    peak = peaks.most_common(1)[0][0] * max(len(gpus), 1) if peaks else None
    return Projection(gpu.name, seconds, ops, known, covered / busy if busy else 1.0, unknown, peak)


def is_enough(ops: Sequence[OpTime], unknown: Sequence[Node]) -> bool:
    """Whether the ``ops`` of known duration are at least ten elevenths of the work."""
    work = sum(each.work.flops for each in ops)
    return bool(ops) and not (unknown and (not work or sum(map(least_flops, unknown)) > work / 10))


def _note(by_unit: dict[Known, float], kernel: Kernel, gpu: Gpu) -> None:
    if kernel.unit is not None:
        known = gpu.rates.known(kernel.unit)
        by_unit[known] = by_unit.get(known, 0.0) + kernel.seconds
