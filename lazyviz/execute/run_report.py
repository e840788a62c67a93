"""Report of an evaluation: ops run, seconds, peak memory, backend, cache hits, and fallbacks."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, overload

from ..graph.ir import Graph, Node, SourceLine, Value
from ..graph.value_stats_data import Summary, share_text
from ..plan.liveness.live_set_and_categories import CATEGORIES
from ..plan.node_formatting import category_text, line_text
from ..plan.peak_of_one_run import ByCategory, Peak
from ..plan.result_tables import Table, Tabular
from ..plan.units import format_bytes, format_deviation, format_share

if TYPE_CHECKING:
    from ..plan.runtime.gpu_timeline import Projection
    from ..plan.runtime.match_profiler_times_to_ops import TimesCompared


class Timeline(Sequence[tuple[int, int]]):
    """Positions of nodes in the order in which they ran, each with the peak memory while it ran."""

    def __init__(self, positions: Sequence[int], held: Sequence[int]) -> None:
        self._positions, self._held = positions, held

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, at: int) -> tuple[int, int]: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[tuple[int, int]]: ...

    def __getitem__(self, at: int | slice) -> tuple[int, int] | Sequence[tuple[int, int]]:
        if isinstance(at, slice):
            return Timeline(self._positions[at], self._held[at])
        return self._positions[at], self._held[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class NonFinite:
    """The first NaN in program order, or the first infinity that the program does not write itself.

    ``came_in`` names an outside tensor that already contained it; "" if ``node`` produced it.
    """

    node: Node
    output: int
    kind: Literal["nan", "inf"]
    summary: Summary
    came_in: str = ""

    @property
    def value(self) -> Value:
        return self.node.outputs[self.output]

    @property
    def source(self) -> SourceLine | None:
        """The user's line."""
        return self.node.source

    def __str__(self) -> str:
        share = self.summary.nan_share if self.kind == "nan" else self.summary.inf_share
        what = "NaN" if self.kind == "nan" else "infinite"
        node = self.node
        place = [
            part for part in (node.module, line_text(node.source) if node.source is not None else "") if part
        ]
        where = f" ({', '.join(place)})" if place else ""
        count = self.summary.count
        much = f"all {count:,} values" if share == 1 else f"{share_text(share)} of {count:,} values"
        much = much if count > 1 else "its value is"
        text = f"first in {node.name}{where}: {much} {what}"
        return f"{text}; {self.came_in} has it already" if self.came_in else text


def _without_waiting(projection: Projection | None) -> float | None:
    """Seconds of the kernels alone."""
    return projection.seconds - projection.waiting if projection is not None else None


@dataclass(frozen=True)
class Report(Tabular):
    """The result of one evaluation.

    ``seconds`` is wall time.  ``peak_bytes`` is the measured peak of tensor memory (on CUDA the allocator's
    counter; on the CPU the real sizes of the run's storages; for pieces on workers, the memory of this
    process; ``None`` with a compiling backend on the CPU).  ``projected_bytes`` is its projection (``None``
    at sync points, which must be fast), and ``projected_total_bytes`` the same plus the scratch memory of
    kernels, which cannot be measured on the CPU.  ``difference`` has, by category, the bytes by which the
    measured peak is higher; ``"other"`` is memory that the run's own tensors do not explain.  ``share`` is
    the share of ops that the named backend itself ran, ``recomputed`` the number of ops that ran again to
    save memory.  For a compiling backend, ``cache_hit`` is true if nothing had to be compiled; otherwise
    ``cache_miss_reason`` says what was new.  ``fallbacks`` says why ops ran one by one instead.

    ``timeline`` has the position of each node in the evaluated graph, in the order in which they ran, with
    the peak memory of the run's tensors while it ran; for a split run only the first two pieces, as in the
    plan's timeline.

    ``first_nan`` and ``first_inf`` are known if ``summaries`` were requested.  ``left`` lists, for an
    evaluation of everything, ops that had failed before, failed again, and are still pending.
    """

    ops_run: int
    seconds: float
    peak_bytes: int | None
    backend: str
    cause: str
    pieces: int = 1
    recomputed: int = 0
    share: float = 1.0
    cache_hit: bool = False
    cache_miss_reason: str | None = None
    projected_bytes: int | None = None
    projected_total_bytes: int | None = None
    difference: Mapping[str, int] = field(default_factory=dict)
    timeline: Sequence[tuple[int, int]] = field(default=(), repr=False, hash=False)
    fallbacks: tuple[str, ...] = ()
    first_nan: NonFinite | None = None
    first_inf: NonFinite | None = None
    left: tuple[str, ...] = ()
    _record: weakref.ref[Graph] | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_record": None}  # without the graph

    @property
    def projected_seconds(self) -> float | None:
        """Projected time of the run on the CPU, from the calibration of this machine, without the time that
        plain PyTorch takes to issue ops from Python.

        ``None`` without a calibration (:func:`lazyviz.calibrate`), for runs on a GPU, with a compiling
        backend, or in pieces, and when the graph has been deleted.
        """
        return _without_waiting(self._projection())

    @property
    def times(self) -> TimesCompared | None:
        """Projected and measured time of each op; ``None`` if either is unknown."""
        return self._compared(self._projection())

    def _compared(self, projection: Projection | None) -> TimesCompared | None:
        if projection is None:
            return None
        from ..plan.runtime.match_profiler_times_to_ops import compared  # times are projected on access

        nodes = [each.node for each in projection.ops]
        measured = {node: node.measured_seconds for node in nodes if node.measured_seconds is not None}
        return compared(projection, measured) if measured else None

    def _projection(self) -> Projection | None:
        from ..plan.runtime.cpu_op_times import known_rates, project_on_cpu  # as above

        graph = self._record() if self._record is not None else None
        if graph is None or self.backend != "eager" or self.pieces > 1 or self.recomputed:
            return None
        nodes = [graph.nodes[index] for index, _ in self.timeline]
        if len(nodes) != self.ops_run or any(
            value.device.type != "cpu" for node in nodes for value in node.outputs
        ):
            return None
        rates = known_rates()
        return project_on_cpu(nodes, rates) if rates is not None else None

    @classmethod
    def brief(cls, **known: Any) -> Report:
        """A report with only the ``known`` fields, by name; faster than ``__init__``, which sets all of
        them.
        """
        report = cls.__new__(cls)
        fields = report.__dict__
        fields["difference"] = {}
        fields.update(known)  # what is left is an attribute of the class
        return report

    @classmethod
    def for_sync_point(
        cls, ops_run: int, seconds: float, peak_bytes: int, cause: str, timeline: Sequence[tuple[int, int]]
    ) -> Report:
        """:meth:`brief` for a cached subgraph whose values were read."""
        report = cls.__new__(cls)
        fields = report.__dict__
        fields["ops_run"], fields["seconds"], fields["peak_bytes"] = ops_run, seconds, peak_bytes
        fields["backend"], fields["cause"], fields["cache_hit"] = "eager", cause, True
        fields["difference"], fields["timeline"] = {}, timeline
        return report

    def __repr__(self) -> str:
        return f"<Report: {str(self).partition(chr(10))[0]}>"

    _repr_pretty_ = Tabular._repr_pretty_  # IPython uses it in addition to `__repr__`

    def table(self) -> Table:
        """The report as a table, with one row per figure."""
        peak = "" if self.peak_bytes is None else format_bytes(self.peak_bytes)
        projection = self._projection()  # it visits every op
        rows = [
            ("ops run", f"{self.ops_run:,}"),
            ("seconds", f"{self.seconds:.3f}{self._projected_text(projection)}"),
            ("calibration", self._misfit(projection)),
            ("peak", " ".join(filter(None, [peak, f"({self.comparison})" if self.comparison else ""]))),
            (
                "backend",
                self.backend + (f", {format_share(self.share)} of the ops" if self.share < 1 else ""),
            ),
            ("pieces", str(self.pieces) if self.pieces > 1 else ""),
            ("recomputed", f"{self.recomputed:,} ops" if self.recomputed else ""),
            ("new", self.cache_miss_reason or ""),
            *(("fallback", reason) for reason in self.fallbacks),
            ("first NaN", str(self.first_nan) if self.first_nan is not None else ""),
            ("first infinity", str(self.first_inf) if self.first_inf is not None else ""),
            *(("failed again", what) for what in self.left),
        ]
        return Table(f"Evaluated: {self.cause}", ("what", "found"), [row for row in rows if row[1]], 0)

    @property
    def first_nonfinite(self) -> NonFinite | None:
        """The first NaN or infinity in program order; NaN if a node has both."""
        found = [each for each in (self.first_nan, self.first_inf) if each is not None]
        return min(found, key=lambda each: each.node.index, default=None)

    @property
    def error(self) -> float | None:
        """Relative error of the projection: projected over measured peak, minus 1."""
        if self.projected_bytes is None or not self.peak_bytes:
            return None
        return self.projected_bytes / self.peak_bytes - 1

    @property
    def comparison(self) -> str:
        """Text that compares the projected with the measured peak; "" if it was not projected."""
        if self.error is None or self.projected_bytes is None:
            return ""
        with_scratch = ""
        if self._tensors_alone:
            with_scratch = f"; {format_bytes(self.projected_total_bytes or 0)} with kernels' scratch memory"
        if not self.difference:
            return f"as projected{with_scratch}"
        text = f"projected {format_bytes(self.projected_bytes)}, {format_deviation(self.error)}{with_scratch}"
        parts = sorted(self.difference.items(), key=lambda item: -abs(item[1]))
        named = [
            f"{category_text(name)} {'+' if size > 0 else '-'}{format_bytes(abs(size))}"
            for name, size in parts[:3]
            if size
        ]
        return f"{text}: {', '.join(named)}"

    def _projected_text(self, projection: Projection | None) -> str:
        """`` (projected 12.0 ms, +3%)``; "" if no time is known."""
        projected = _without_waiting(projection)
        if projected is None or not self.seconds:
            return ""
        from ..plan.runtime.gpu_timeline import duration

        return f" (projected {duration(projected)}, {format_deviation(projected / self.seconds - 1)})"

    def _misfit(self, projection: Projection | None) -> str:
        """Advice for a calibration that no longer fits this machine."""
        times = self._compared(projection)
        if times is None or times.misfit is None:
            return ""
        return (
            f"projected times of large ops are {times.misfit:.1f} times the measured ones: call "
            "lazyviz.calibrate() again while the machine is idle"
        )

    @property
    def _tensors_alone(self) -> bool:
        """Whether the projection includes memory that a run cannot measure."""
        return (self.projected_total_bytes or 0) > (self.projected_bytes or 0)

    def __str__(self) -> str:
        peak = "" if self.peak_bytes is None else f", peak {format_bytes(self.peak_bytes)}"
        if peak and self._tensors_alone:
            peak += " of tensors"
        if peak and self.comparison:
            peak += f" ({self.comparison})"
        again = f", {self.recomputed} of them recomputed" if self.recomputed else ""
        ops = "1 op" if self.ops_run == 1 else f"{self.ops_run:,} ops"
        text = f"{ops}{again} in {self.seconds:.3f} s with {self.backend}{peak} ({self.cause})"
        return "\n".join([text, *[f"  failed again: {what}" for what in self.left]])


def difference(projected: Peak, measured: Peak, peak_bytes: int) -> dict[str, int]:
    """Bytes per category by which ``measured`` is above ``projected``, where they differ.

    ``peak_bytes`` counts more than the run's tensors on a GPU: rounding, workspaces, other tensors.
    """
    result: dict[str, int] = {}
    seen, foreseen = measured.by_category, projected.by_category
    same = isinstance(seen, ByCategory) and isinstance(foreseen, ByCategory) and seen.alive == foreseen.alive
    for name in () if same else CATEGORIES:
        size = seen.get(name, 0) - foreseen.get(name, 0)
        if size:
            result[name] = size
    other = peak_bytes - measured.nbytes - projected.scratch
    return result | ({"other": other} if other else {})
