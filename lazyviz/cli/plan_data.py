"""The plan of a script as plain data: for printing, for JSON, and to compare with a budget."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..graph.ir import SourceLine
from ..graph.nested_blocks import flattened
from ..graph.sync_point_groups import SyncSite, listed, sites
from ..plan.devices.device_lookup import DeviceLike
from ..plan.explain_memory import (
    allocation_text,
    assumptions,
    keeper,
    other_kernels,
    release_lines,
    sizes_by_module,
    time_of_a_step,
    uncertainties,
)
from ..plan.liveness.live_set_and_categories import Moment
from ..plan.make_plan import make_plan
from ..plan.node_formatting import where
from ..plan.plan import Plan
from ..session.lazy_graph import LazyGraph

FORMAT = 1
HERE = os.getcwd()  # where the command was started; a script may change its directory
PICTURES = ("html", "svg", "png", "pdf", "dot", "json", "pickle")  # suffixes of a graph's files
MOST_LINES, MOST_TENSORS, MOST_REMEDIES = 20, 10, 20

Data = dict[str, Any]


class _Whole(LazyGraph):
    """Copies of the ops of all of a script's blocks, which are planned and drawn, but never run."""

    def __init__(self, graph: LazyGraph) -> None:
        super().__init__(flattened(graph.ir), device=graph.device, code=graph.code)
        self.title = graph.title
        del self._owned.graph  # the recorder did not create the copies, so it must not release them

    @property
    def has_pending(self) -> bool:
        return self.pending > 0

    @property
    def state(self) -> str:
        return "pending" if self.has_pending else "done"

    def __del__(self, *_: object) -> None:
        """Do nothing, because no pending op needs the copies."""


def with_inner_blocks(graph: LazyGraph) -> LazyGraph:
    """``graph`` or, if the script opens lazy blocks itself, one with their ops, for plans and pictures."""
    return _Whole(graph) if graph.ir.nested else graph


def plan_of(graph: LazyGraph, device: DeviceLike | None = None) -> Plan:
    """The plan of a script's graph, including lazy blocks that the script opens itself.

    ``device`` defaults to the graph's. Always for eager PyTorch, because that will run the script; an
    evaluation by lazyviz may have another peak and other remedies.
    """
    return make_plan(flattened(graph.ir), device=graph.device if device is None else device, of="eager")


def described(graph: LazyGraph, plan: Plan | None = None) -> Data:
    """The plan of ``graph`` (or ``plan``, another plan of it) as data without references to either."""
    graph = with_inner_blocks(graph)
    plan = plan_of(graph) if plan is None else plan
    context = plan.needed_bytes - plan.reserved_bytes if plan.reserved_bytes is not None else 0
    held = plan.eager_reserved_bytes
    moment = plan.at(plan.peak_position) if graph.nodes else None
    return {
        "format": FORMAT,
        "torch": str(torch.__version__),
        "torch_version": plan.torch_version,
        "release": release_lines(plan),
        "device": plan.device,
        "capacity_bytes": plan.capacity_bytes,
        "ops": len(graph.nodes),
        # For eager PyTorch: on a GPU, the allocator's memory and the context.
        "needed_bytes": plan.eager_peak_bytes if held is None else held + context,
        "eager_peak_bytes": plan.eager_peak_bytes,
        "eager_peak_range": list(plan.eager_peak_range),
        "eager_reserved_bytes": held,
        "context_bytes": context,
        "peak_bytes": plan.peak_bytes,
        "peak_range": list(plan.peak_range),
        "lazyviz_peak_bytes": plan.lazyviz_peak_bytes,
        "reserved_bytes": plan.reserved_bytes,
        "fits": plan.fits,
        "verdict": plan.verdict(),
        "notes": _notes(plan),
        "peak_at": where(plan.peak_node) if plan.peak_node is not None else None,
        "peak_line": _line(plan.peak_node.source) if plan.peak_node is not None else None,
        "by_category": {category: size for category, size in plan.by_category.items() if size},
        "by_line": _lines(moment.by_line) if moment is not None else [],
        "by_module": _modules(moment) if moment is not None else [],
        "largest": [
            {
                "bytes": each.nbytes,
                "what": allocation_text(each),
                "kept_by": keeper(each),
                "line": _line(each.source),
            }
            for each in plan.alive_at_peak[:MOST_TENSORS]
        ],
        "remedies": [
            {
                "kind": each.kind,
                "text": each.text,
                "saves_bytes": each.saves_bytes,
                "peak_bytes": each.peak_bytes,
                "costs": str(each.cost),
                "fits": each.fits,
                "sure": not (each.estimate or each.at_best),
                "line": _line(each.source),
            }
            for each in plan.remedies[:MOST_REMEDIES]
        ],
        "time": _time(plan),
        "sync_points": listed(graph.sync_points),
        "reads": [_read(site) for site in sites(graph.sync_points)],
        "not_recorded": sorted(graph.ir.elsewhere),
    }


def _notes(plan: Plan) -> list[str]:
    """What to know of a plan: a device that the script does not use, unknown memory, assumed values."""
    notes = [*uncertainties(plan), *assumptions(plan)]
    if plan.borrowed and plan.recorded_device.type == "cpu":
        return [
            f"All recorded tensors are on the CPU, so the script as recorded does not use {plan.device}. "
            "This is the plan of the same ops there, where other kernels may save other tensors.",
            *notes,
        ]
    return [*other_kernels(plan), *notes]


def _time(plan: Plan) -> Data | None:
    """Projected time of the last training step: seconds, their bounds, and text about bottlenecks."""
    found = time_of_a_step(plan)
    if found is None:
        return None
    time, sentences = found
    return {
        "seconds": time.seconds,
        "range": list(time.seconds_range),
        "by_bound": time.by_bound,
        "flops": time.flops,
        "mfu": time.mfu,
        "text": sentences,
    }


def _read(site: SyncSite) -> Data:
    """A place where the script reads values, and the ops that had to run for it."""
    return {
        "cause": site.cause,
        "line": _line(site.source),
        "reader": _line(site.reader),
        "times": site.count,
        "ops": site.ops,
        "seconds": site.seconds,
    }


def _line(source: SourceLine | None) -> Data | None:
    if source is None:
        return None
    return {"file": source.file, "line": source.line, "text": source.text.strip()}


def _lines(by_line: Mapping[SourceLine, int]) -> Sequence[Data]:
    largest = sorted(by_line.items(), key=lambda item: -item[1])
    return [{**(_line(source) or {}), "bytes": size} for source, size in largest[:MOST_LINES]]


def _modules(moment: Moment) -> Sequence[Data]:
    largest = sorted(sizes_by_module(moment).items(), key=lambda item: -item[1])
    return [{"module": module, "bytes": size} for module, size in largest[:MOST_LINES]]


def place_of(line: Mapping[str, Any] | None) -> str:
    """``"train.py:12"``, relative to the current directory."""
    return f"{relative(line['file'])}:{line['line']}" if line else ""


def relative(file: str) -> str:
    """A path relative to this directory or, for an installed library, to its installation directory."""
    library = file.replace(os.sep, "/").rpartition("-packages/")
    if library[1]:
        return library[2]
    here = os.path.join(HERE, "")
    return file[len(here) :] if file.startswith(here) else file


INCOMPLETE = ("failed", "interrupted", "out of reach")  # reasons for which a recording ends before all steps


def is_incomplete(data: Data) -> bool:
    """Whether a script's plan lacks some of the requested steps."""
    steps, wanted = data.get("steps"), data.get("steps_wanted")
    fewer = isinstance(steps, int) and isinstance(wanted, int) and steps < wanted
    return fewer and data.get("end") in INCOMPLETE
