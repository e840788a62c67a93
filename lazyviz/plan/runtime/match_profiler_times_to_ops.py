"""Projected and measured time of each op, from a run or from a PyTorch profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

from ...graph.ir import Node, SourceLine
from ...graph.modules import ModuleNames
from ..result_tables import Table, Tabular
from ..units import format_deviation
from .gpu_timeline import Projection, duration
from .op_classes import short_name

DEAREST = 10
ALIKE = 0.9
LARGE_OP = 2e-4
"""Seconds of an op whose kernel takes nearly all of its time."""
LARGE_RUN = 0.05
"""Seconds of large ops that are enough to judge a calibration by."""
MISFIT = 2.0
"""A calibration that is wrong by this factor is of another state of the machine."""
LOOK_AHEAD = 400
"""Events of a profile among which the next op of the record is looked for."""


class Pair(NamedTuple):
    """Seconds of some ops: as projected, and as measured."""

    projected: float
    measured: float


@dataclass(frozen=True)
class TimesCompared(Tabular):
    """Projected and measured seconds of the same ops.

    Attributes:
        device: the device of the projection.
        ops: the pair of each op for which both are known, in program order.
        left_out: measured seconds of ops without a projection, and projected seconds of unmeasured ops.
    """

    device: str
    ops: Mapping[Node, Pair] = field(repr=False)
    left_out: float = 0.0

    @property
    def projected(self) -> float:
        return sum(pair.projected for pair in self.ops.values())

    @property
    def measured(self) -> float:
        return sum(pair.measured for pair in self.ops.values())

    @property
    def error(self) -> float | None:
        """Relative error: projected over measured, minus 1; ``None`` if there is no op."""
        return self.projected / self.measured - 1 if self.measured else None

    @property
    def misfit(self) -> float | None:
        """Projected divided by measured time of large CPU kernels, if it shows that the calibration no longer
        fits the machine; otherwise ``None``.
        """
        large = [
            pair for pair in self.ops.values() if min(pair) >= LARGE_OP / MISFIT and max(pair) >= LARGE_OP
        ]
        projected, measured = sum(pair.projected for pair in large), sum(pair.measured for pair in large)
        if self.device != "cpu" or max(projected, measured) < LARGE_RUN:
            return None
        ratio = projected / measured
        return ratio if not 1 / MISFIT < ratio < MISFIT else None

    @property
    def by_op(self) -> dict[str, Pair]:
        """By operator, slowest (measured) first."""
        return self._grouped(lambda node: short_name(node.op))

    @property
    def by_module(self) -> dict[str, Pair]:
        """By innermost module, including the backward pass; ``""``: outside of modules."""
        name = ModuleNames((node.root, node.module) for node in self.ops)
        return self._grouped(lambda node: name((node.forward or node).root, (node.forward or node).module))

    @property
    def by_line(self) -> dict[SourceLine | None, Pair]:
        """By line of the user's code, backward pass included."""
        return self._grouped(lambda node: (node.forward or node).source)

    @property
    def order(self) -> tuple[int, int]:
        """How many pairs of the ten slowest modules are in the projected order, and the number of pairs.

        Pairs whose measured times differ by less than a tenth are not counted.
        """
        dearest = list(self.by_module.values())[:DEAREST]
        pairs = [(a, b) for a, b in combinations(dearest, 2) if b.measured < ALIKE * a.measured]
        return sum(a.projected > b.projected for a, b in pairs), len(pairs)

    def _grouped(self, key: Callable[[Node], Any]) -> dict[Any, Pair]:
        found: dict[Any, Pair] = {}
        for node, pair in self.ops.items():
            before = found.get(group := key(node), Pair(0.0, 0.0))
            found[group] = Pair(before.projected + pair.projected, before.measured + pair.measured)
        return dict(sorted(found.items(), key=lambda item: -item[1].measured))

    def table(self) -> Table:
        """The slowest operators."""
        error = f" ({format_deviation(self.error)})" if self.error is not None else ""
        title = f"Projected on {self.device}: {duration(self.projected)}, measured "
        title += f"{duration(self.measured)}{error}, {len(self.ops):,} op{'' if len(self.ops) == 1 else 's'}"
        rows = [
            (
                duration(pair.projected),
                duration(pair.measured),
                format_deviation(pair.projected / pair.measured - 1) if pair.measured else "",
                name,
            )
            for name, pair in list(self.by_op.items())[:DEAREST]
        ]
        return Table(title, ("projected", "measured", "off", "operator"), rows, 3)

    def __str__(self) -> str:
        return self.table().text()


def compared(projection: Projection, measured: Mapping[Node, float]) -> TimesCompared:
    """Compare ``projection`` with the ``measured`` seconds of some of its ops.

    On a CPU, without the time that an op waits for Python, which is not part of a measured op.
    """
    on_host = projection.device == "cpu"
    projected = {each.node: each.seconds - (each.waiting if on_host else 0.0) for each in projection.ops}
    pairs = {node: Pair(seconds, measured[node]) for node, seconds in projected.items() if node in measured}
    missing = sum(seconds for node, seconds in projected.items() if node not in pairs)
    extra = sum(seconds for node, seconds in measured.items() if node not in pairs)
    return TimesCompared(projection.device, pairs, missing + extra)


def compare_with_profile(projection: Projection, profile: Any) -> TimesCompared:
    """Compare ``projection`` with a profile of the same program by :class:`torch.profiler.profile`.

    Events are matched in order by operator name, for a run in eager mode or by lazyviz; nested events count
    for the outer one.  On a GPU, the time of kernels is used.

    Raises:
        ValueError: the profile contains none of the ops, or is still recording.
    """
    try:
        events = sorted(profile.events() or (), key=lambda event: event.time_range.start)
    except (AssertionError, RuntimeError, AttributeError):
        raise ValueError(
            "the profile has no events: pass a torch.profiler.profile after its `with` block has ended"
        ) from None
    on_gpu = projection.device != "cpu" and any(_device_time(event) for event in events)
    measured = _matched([each.node for each in projection.ops], events, on_gpu)
    if not measured:
        raise ValueError("the profile contains none of the recorded ops: is it of the same program?")
    return compared(projection, measured)


def _matched(nodes: Iterable[Node], events: Sequence[Any], on_gpu: bool) -> dict[Node, float]:
    found: dict[Node, float] = {}
    at = 0
    for node in nodes:
        name = node.op._schema.name
        for ahead in range(at, min(at + LOOK_AHEAD, len(events))):
            event = events[ahead]
            if event.name != name:
                continue
            found[node] = (_device_time(event) if on_gpu else event.cpu_time_total) / 1e6
            at = ahead + 1
            while at < len(events) and events[at].time_range.start < event.time_range.end:
                at += 1
            break
    return found


def _device_time(event: Any) -> float:
    return float(getattr(event, "device_time_total", 0.0) or 0.0)
