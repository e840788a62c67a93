"""Graphviz export: clusters by phase and module, one node per op.

Text only; nothing here runs ``dot``.  Every string is escaped.
"""

from __future__ import annotations

import graphviz

from ...graph.ir import Graph, places
from ..printable_text import visible
from ..scene.boxes import LANE_TITLES, Box, op_name
from ..scene.hierarchy import build_hierarchy
from ..scene.scene import value_text, values_text
from .svg import PHASE_COLORS


def _label(*lines: str) -> str:
    """Lines of a DOT label, with backslashes and record characters escaped."""
    # graphviz.escape makes backslashes literal; "\n" here is DOT's own line break.
    return graphviz.nohtml("\\n".join(graphviz.escape(visible(line)) for line in lines))


def to_dot(graph: Graph) -> graphviz.Digraph:
    """``graph`` as a :class:`graphviz.Digraph`, including views.

    Runs nothing. ``dot`` is slow for large graphs: lay out a few hundred ops at most.
    """
    hierarchy = build_hierarchy(graph, views=True)
    dot = graphviz.Digraph("lazyviz")
    dot.attr("graph", rankdir="TB", fontname="sans-serif", compound="true")
    dot.attr("node", shape="box", style="rounded", fontname="sans-serif", fontsize="11")
    dot.attr("edge", fontname="sans-serif", fontsize="9", color="#7a8794")
    # Clusters are built iteratively, innermost first, because subgraphs nest as deeply as modules.
    opened: list[tuple[Box, graphviz.Digraph]] = [(hierarchy.root, dot)]
    clusters: list[tuple[Box, graphviz.Digraph, graphviz.Digraph]] = []
    while opened:
        box, into = opened.pop()
        for child in box.children:
            if child.is_group:
                cluster = graphviz.Digraph(name=f"cluster_{child.id}")
                label = LANE_TITLES.get(child.label, child.label) if child.kind == "lane" else child.label
                if child.repeats > 1:
                    label += f" × {child.repeats}"
                cluster.attr(label=_label(label), color=PHASE_COLORS[child.phase])
                clusters.append((child, cluster, into))
                opened.append((child, cluster))
            else:
                _add(into, child, graph)
    for _, cluster, into in reversed(clusters):
        into.subgraph(cluster)
    for index, reads in enumerate(hierarchy.reads):
        reader = hierarchy.box_of[index]
        if reader is None:
            continue
        for producer, value in reads:
            made = (
                hierarchy.box_of[producer] if producer is not None else hierarchy.box_of_value.get(value.id)
            )
            if made is not None and made is not reader:
                dot.edge(made.id, reader.id, label=_label(value_text(value, graph)))
    return dot


def _add(dot: graphviz.Digraph, box: Box, graph: Graph) -> None:
    if box.node is not None:
        text = _label(op_name(box.node), values_text(box.node.outputs, graph))
        dot.node(box.id, text, color=PHASE_COLORS[box.phase])
    elif box.sync is not None:
        lines = [f"sync point: {box.sync.cause}", *places(box.sync.source, box.sync.reader)]
        dot.node(box.id, _label(*lines), color="#c0352b", style="dashed")
    else:
        dot.node(box.id, _label(box.label, values_text(box.values, graph)), shape="oval")
