"""``lazyviz run``: run a script lazily, evaluating after each optimizer step.

Steps of a program that has been recorded often enough run in eager mode, as in ``lazyviz.steps``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..execute.run_report import Report
from ..graph.ir import Node
from ..graph.sync_point_groups import SyncSite, sites
from ..plan.units import format_bytes
from ..process.startup_interrupt import INTERRUPTED
from ..process.stdio import StandardStreams
from ..record.tape import tape
from ..session.asynchronous.unrecorded_steps import Program, Repetition, observers, stop_observing
from ..session.block import LazyBlock
from ..session.lazy_graph import LazyGraph, lazy
from ..torch_internals.after_optimizer_step_callbacks import watched_steps
from .plan_command import FAILED, UsageError, is_silent, loaded
from .plan_data import with_inner_blocks
from .plan_tables import steps_taken
from .record_script_up_to_step import StepCount
from .run_script_as_main import Script, exit_code, show

_MOST_SITES = 5


@dataclass
class RunCounts:
    """Counts of what has been recorded and run so far."""

    begin: float = field(default_factory=time.perf_counter)
    ops: int = 0
    blocks: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    largest: Report | None = None
    eager: int = 0  # optimizer steps that were not recorded
    reads: dict[tuple[Any, ...], list[int]] = field(
        default_factory=dict
    )  # by place: number of reads, number of ops

    def add(self, graph: LazyGraph, report: Report | None) -> None:
        """Count a closed block and its evaluation."""
        self.blocks += 1
        whole = with_inner_blocks(graph)
        self.ops += len(whole.nodes)
        for site in sites(whole.sync_points):
            counted = self.reads.setdefault((site.cause, site.source, site.reader), [0, 0])
            counted[0] += site.count
            counted[1] += site.ops
        if report is not None:
            self.seconds += report.seconds
            if report.peak_bytes is not None and report.peak_bytes > self.peak_bytes:
                self.peak_bytes, self.largest = report.peak_bytes, report
        if graph.runs.measured_peak > self.peak_bytes:  # at a sync point, for which there is no projection
            self.peak_bytes, self.largest = graph.runs.measured_peak, None

    def sentences(self, script: Script, steps: int) -> list[str]:
        """The summary that is printed when the script has ended."""
        took = time.perf_counter() - self.begin
        first = (
            f"lazyviz: {script.name}: {steps_taken(steps)} in {took:.1f} s, "
            f"{self.ops:,} operators recorded, {self.seconds:.1f} s in evaluations after steps"
        )
        if self.eager:
            like = "step like those before it" if self.eager == 1 else "steps like those before them"
            first += f"; {self.eager:,} {like} ran in eager mode"
        if self.peak_bytes:
            first += f"; peak {format_bytes(self.peak_bytes)}"
            if self.largest is not None and self.largest.comparison:
                first += f" ({self.largest.comparison})"
        lines = [f"{first}."]
        order = sorted(self.reads.items(), key=lambda item: -item[1][0])
        for (cause, source, reader), (count, ops) in order[:_MOST_SITES]:
            site = SyncSite(cause, source, reader, count, ops, 0.0, 0)
            ran = f"ran {ops:,} op{'' if ops == 1 else 's'}"
            text = f": {site.text}" if site.text else ""
            where = " of a recorded step" if self.eager else ""
            lines.append(f"  sync point{where}: {site}, {ran}{text}")
        if len(order) > _MOST_SITES:
            rest = len(order) - _MOST_SITES
            lines.append(f"  and {rest:,} other line{'' if rest == 1 else 's'} with sync points")
        return lines


class StepBlocks:
    """A sequence of lazy blocks, each of which ends with an optimizer step and is then evaluated.

    There is no block as long as steps of a known program run in eager mode.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._block: LazyBlock[LazyGraph] | None = None
        self._graph: LazyGraph | None = None
        self._repetition: Repetition | None = None
        self._known: Program | None = None  # of the steps that are not recorded
        self._nodes: Sequence[Node] = ()  # of the last recorded step, if they are not
        self.account = RunCounts()
        self._process = os.getpid()

    def begin(self) -> None:
        self._block = lazy(**self._options)
        self._graph = self._block.__enter__()
        if self._repetition is None:
            self._repetition = Repetition(self._block.options)

    def end(self, error: BaseException | None = None) -> None:
        """Close the open block and, unless the script failed in it, evaluate it.

        A child process that the script forked has no block.
        """
        if os.getpid() != self._process:
            return
        block, graph = self._block, self._graph
        self._block = self._graph = None
        if block is None or graph is None:
            stop_observing()
            return
        block.ends_in = {}  # the graph is not shown, and searching for names takes as long as a step
        if error is None:
            block.__exit__(None, None, None)
        else:
            block.__exit__(type(error), error, error.__traceback__)
        report = graph.evaluate() if error is None and graph.pending else None
        self.account.add(graph, report)
        if error is None and self._repetition is not None:
            known = self._repetition.known(graph)
            if known is not None and not tape.pending:
                self._known, self._nodes = known, graph.nodes

    def stepped(self, count: int) -> None:
        if self._block is not None and not self._block.is_innermost:
            return  # the script has a block of its own around several steps
        if self._known is None:
            self.end()
        else:
            self.account.eager += 1
            if not self._known.matches(self._nodes) and self._repetition is not None:
                self._known, self._nodes = None, ()
                self._repetition.ended()
        if self._known is None:
            self.begin()
        else:
            self._known.observe()


def run(script: Script, *, backend: str | None, recompute: str | None, quiet: bool) -> int:
    """Run a script lazily; return its exit code."""
    if not loaded(script):
        return FAILED
    streams = StandardStreams()
    blocks = StepBlocks({"backend": backend, "recompute": recompute or "off"})
    try:
        blocks.begin()
    except ValueError as error:
        raise UsageError(str(error)) from None
    count = StepCount(blocks.stepped)
    code = 0
    observers.append(blocks)
    try:
        with watched_steps(count.before, count.after):
            script.enter()
            try:
                script.run()
            except SystemExit:
                blocks.end()
                raise
            except BaseException as error:
                blocks.end(error)
                raise
            blocks.end()
    except SystemExit as left:
        script.leave_child(left)
        code = exit_code(left)
    except BaseException as error:
        script.leave_child(error)
        show(error)
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
    finally:
        observers.remove(blocks)
    script.leave_child(None)
    if not quiet and not is_silent():
        print("\n".join(blocks.account.sentences(script, count.count)), file=streams.stderr)
    return code
