"""Model Explorer export: a JSON collection of one graph, with modules as namespaces.

The keys are those of its ``graph_builder.py`` (``Graph``, ``GraphNode``, ``IncomingEdge``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...graph.ir import Graph, Node, Phase, Value
from ...graph.modules import full_name, root_parts
from ...plan.units import format_bytes
from ..scene.boxes import LANE_TITLES
from ..scene.dataflow import drawn_lanes
from ..scene.plan_protocol import PlanLike


def model_explorer(graph: Graph, plan: PlanLike, *, title: str) -> dict[str, Any]:
    """The collection as JSON; every attribute is a string, as Model Explorer requires."""
    timeline: dict[int, int] = {}
    for index, nbytes in plan.timeline:  # in a split run, a node occurs more than once
        timeline[index] = max(nbytes, timeline.get(index, 0))
    writers: dict[int, str] = {}  # the node that last produced a value, by the value's id
    nodes = []
    for value in graph.inputs:
        writers[value.id] = f"input {value.id}"
        nodes.append(
            {
                "id": writers[value.id],
                "label": full_name(value.name or value.storage.name) or "input",
                "namespace": "Inputs",
                "attrs": _attrs({"role": value.storage.role or "", **_of(value)}),
                "incomingEdges": [],
                "outputsMetadata": [{"id": "0", "attrs": _attrs(_of(value))}],
            }
        )
    for node, lane in zip(graph.nodes, drawn_lanes(graph), strict=True):
        edges = _edges(node, writers)
        for value in node.outputs:
            writers[value.id] = str(node.index)
        nodes.append(
            {
                "id": str(node.index),
                "label": node.name.rpartition("_")[0],
                "namespace": _namespace(node, lane),
                "attrs": _attrs(_about(node, timeline)),
                "incomingEdges": edges,
                "outputsMetadata": [
                    {"id": str(position), "attrs": _attrs(_of(value))}
                    for position, value in enumerate(node.outputs)
                ],
            }
        )
    facts = {
        "device": plan.device,
        "projected peak": format_bytes(plan.peak_bytes),
        "of the run by": "plain eager PyTorch" if plan.verdict_of == "eager" else "lazyviz",
        "plain eager PyTorch": format_bytes(plan.eager_peak_bytes),
        "split": plan.split.explain() if plan.split.pieces > 1 else "",
    }
    return {
        "label": title,
        "graphs": [
            {
                "id": title,
                "nodes": nodes,
                "groupNodeAttributes": {"": {key: text for key, text in facts.items() if text}},
            }
        ],
    }


def _edges(node: Node, writers: Mapping[int, str]) -> list[dict[str, str]]:
    """The edges into ``node`` from the producers of its inputs, by the ids of their values."""
    return [
        {
            "sourceNodeId": writers[value.id],
            "sourceNodeOutputId": str(value.index),
            "targetNodeInputId": str(position),
        }
        for position, value in enumerate(node.inputs)
        if value.id in writers
    ]


def _namespace(node: Node, lane: Phase) -> str:
    parts = [LANE_TITLES[lane], *root_parts(node.root)]
    return "/".join([*parts, *node.module.split(".")] if node.module else parts)


def _about(node: Node, timeline: Mapping[int, int]) -> dict[str, str]:
    about = {
        "op": str(node.op),
        "module": node.module,
        "phase": node.phase,
        "state": node.state,
        "allocated during it": format_bytes(timeline.get(node.index, 0)),
    }
    if node.source is not None:
        about["line"] = str(node.source)
        about["code"] = node.source.text.strip()
    if node.forward is not None:
        about["backward of"] = node.forward.name
    if node.measured_seconds is not None:
        about["seconds"] = f"{node.measured_seconds:.3g}"
    return about


def _of(value: Value) -> dict[str, str]:
    return {
        "shape": "×".join(map(str, value.shape)) or "scalar",
        "dtype": str(value.dtype).removeprefix("torch."),
        "device": str(value.device),
        "bytes": format_bytes(value.nbytes),
    }


def _attrs(facts: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in facts.items() if value]
