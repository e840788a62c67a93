"""Run settings: the page's options for running a graph, and text about the last run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ...graph.ir import Graph, Node, RaisedError
from ...graph.modules import module_path
from ...plan.units import format_bytes
from ..scene.boxes import chain, op_name
from ..scene.details import source_json
from ..scene.rejected_op_box import clash_words
from ..scene.scene import Scene, plural
from .run_thread_and_displays import Runnable, Running


class FindingLike(Protocol):
    """The first NaN or infinity; ``str`` has its location and share."""

    @property
    def node(self) -> Node: ...


class Selectable(Protocol):
    """A graph with run options, which all its widgets share."""

    @property
    def graph(self) -> Graph: ...
    @property
    def backend(self) -> str: ...

    @property
    def split(self) -> int | str:
        """The split of ``evaluate``: ``"off"``, ``"auto"``, or a number of pieces."""

    @property
    def summaries(self) -> bool:
        """Whether ``evaluate`` stores statistics of all results."""

    @property
    def nonfinite(self) -> Mapping[str, FindingLike]:
        """The first NaN (``"nan"``) and the first infinity (``"inf"``) that runs have found."""

    def readable(self, nodes: Sequence[Node]) -> bool:
        """Whether results of any of ``nodes`` have not been summarized and are still there."""

    def summarize(self, nodes: Sequence[Node]) -> None:
        """Store statistics of the results, and notify all widgets."""

    def backends(self) -> Sequence[tuple[str, str]]:
        """Backend names, each with the reason why it cannot run the graph here, or ""."""

    def choose(
        self, *, backend: str | None = None, split: int | str | None = None, summaries: bool | None = None
    ) -> None:
        """Set options, and notify all widgets; raises ``ValueError`` for invalid ones, without a change."""


def choices_json(controller: Selectable) -> dict[str, Any]:
    """The chosen options, the available ones, and whether any op of the graph has run."""
    return {
        "begun": any(node.state == "done" for node in controller.graph.nodes),
        "backend": controller.backend,
        "backends": [[name, reason] for name, reason in controller.backends()],
        "summaries": controller.summaries,
    }


def choose(controller: Selectable, action: str, id: str) -> str:
    """Set the options that the page requests; returns the reason if that is not possible, or ""."""
    try:
        if action == "summaries" and id in ("on", "off"):
            controller.choose(summaries=id == "on")
        elif action == "backend" and id in [name for name, _ in controller.backends()]:
            controller.choose(backend=id)
    except Exception as error:  # a third-party backend may raise any exception on import
        return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return ""


def findings_json(found: Mapping[str, FindingLike], scene: Scene) -> list[dict[str, Any]]:
    """The first NaN and the first infinity, with their boxes."""
    rows = []
    for kind in ("nan", "inf"):
        if (first := found.get(kind)) is not None:
            box = scene.near(first.node)
            chained = chain(box) if box is not None else []
            rows.append({"kind": kind, "text": str(first), "chain": chained})
    return rows


def nodes_up_to(scene: Scene, id: str) -> list[Node]:
    """The nodes of a box: those inside, or the producer of its tensor."""
    box = scene.hierarchy.boxes.get(id)
    if box is None:
        return []
    made = [value.node for value in box.values if value.node is not None]
    own = [node for node in made if scene.owns(node)]
    return [*own, *scene.hierarchy.nodes_in(box)]


def failure_json(running: Running, scene: Scene) -> dict[str, Any] | None:
    """The error of the last run, with the user's line and the box."""
    error = running.exception
    if error is None:
        return _raised_json(running, scene)
    node = running.failed_node
    box = scene.near(node) if node is not None else None
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    return {
        "message": "\n".join([f"{type(error).__name__}: {error}".rstrip(": "), *notes]),
        "source": source_json(node.source) if node is not None else None,
        "chain": chain(box) if box is not None else [],
        **(_where(scene, scene.places()[node.index][0], op_name(node), module_path(node)) if node else {}),
    }


def _where(scene: Scene, position: int, op: str, module: str) -> dict[str, Any]:
    """The position of the failed op, and the text of its mark in the chart."""
    place = f" in {module}" if module else ""
    return {"at": position, "words": f"op {position + 1:,} failed: {op}{place}"}


def _stopped(raised: RaisedError, scene: Scene) -> str:
    """``"stopped at line 3"``: the innermost line of the error's stack in the graph's own cell, if any."""
    place, source = scene.graph.place, raised.source
    if source is None:
        return ""
    led = (line for line in (source, *raised.callers) if place is not None and line.file == place.file)
    return f"stopped at {scene.line_text(next(led, source))}"


def _raised_json(running: Running, scene: Scene) -> dict[str, Any] | None:
    """The error that ended the recording."""
    raised = scene.graph.raised
    if raised is None:
        return None
    box = next((each for each in scene.hierarchy.boxes.values() if each.kind == "error"), None)
    return {
        "message": raised.message,
        "source": source_json(raised.source),
        "chain": chain(box) if box is not None else [],
        "recording": True,
        "stopped": _stopped(raised, scene) if running.state == "pending" else "",
        "sizes": clash_words(scene.graph, raised.rejected) if raised.rejected is not None else [],
        **(
            _where(scene, len(scene.plan.timeline), rejected.name, module_path(rejected))
            if (rejected := raised.rejected) is not None
            else {}
        ),
    }


def report_text(controller: Runnable, running: Running) -> str:
    """The report of the last run; "" at a sync point while ops are pending, which is not informative."""
    own = running.report
    report = own if own is not None else getattr(controller, "report", None)
    if report is None or (own is None and controller.state == "pending"):
        return ""
    text = f"ran {plural(report.ops_run, 'op')} in {report.seconds:.3g} s"
    if report.peak_bytes is not None:
        text += f", measured peak {format_bytes(report.peak_bytes)}"
        if comparison := getattr(report, "comparison", ""):
            text += f" ({comparison})"
    if getattr(report, "pieces", 1) > 1:
        text += f", in {report.pieces} pieces"
    backend = getattr(report, "backend", "eager")
    return text if backend == "eager" else f"{text}, with {backend}"
