"""Release of graphs: a graph is freed with its owner, before the garbage collector runs.

Objects of a graph refer to each other in cycles, and there are many of them.  In a loop, the garbage
collector would take a large part of the recording time to find those of earlier iterations.  Therefore, when
the owner is deleted, ``graph_release.cpp`` (compiled) checks whether anything else refers to any of the
objects: a pending tensor, a plan, another graph, a variable with a node.  If not, the cycles are cut.  If
nodes are pending, :mod:`lazyviz.record.shrink_dropped_graphs` keeps these alone when the next block begins.
Otherwise, the graph is left to the garbage collector, as it is without that module or with
``LAZYVIZ_GRAPH_RELEASE=0`` in the environment.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable

from ..graph.ir import Graph
from ..torch_internals import native_module_loader
from . import native_recorder
from .shrink_dropped_graphs import shrink
from .tape import tape
from .tracked_storages import DrawSequence, Shadow, TensorRef, TrackedNode, TrackedStorage, TrackedValue

_TRIED_AGAIN = 4  # graphs that something still refers to: each attempt visits the whole record

_held: list[
    weakref.ref[Graph]
] = []  # graphs whose owner was deleted while parts of them were still referenced


class Owned:
    """The last attribute of the owner of a graph: when it is deleted, all others are already gone."""

    __slots__ = ("graph",)

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_ending() or not hasattr(self, "graph"):
            return  # module globals are already cleared then, or its creation was interrupted
        holder = [self.graph]
        del self.graph
        if not _release(holder):
            native_recorder.show(holder[0])
            # Not reduced to its pending nodes here, because these may be about to run.
            holder[0].has_dropped_nodes = True
            _held.append(weakref.ref(holder[0]))


def _release(holder: list[Graph]) -> bool:
    """Free the graph that only ``holder`` refers to, if nothing else refers to its nodes."""
    return _module is not None and bool(_module.release(holder))


def release_unreferenced() -> None:
    """Check again the graphs that something else referred to, such as a plan or a scheduled run."""
    global _held
    if not _held:
        return
    held, _held = _held, []
    tried: list[weakref.ref[Graph]] = []
    for reference in held:
        holder = [graph for graph in [reference()] if graph is not None]
        if not holder:
            continue
        if holder[0].has_dropped_nodes and not tape.runs.running and tape.runs.background is None:
            shrink(holder, tape.pending)
        if _is_pending(holder[0]):
            _held.append(reference)
        elif not _release(holder):
            tried.append(reference)
    if tape.runs.background is not None:  # this may be the only reference to them
        _held += tried[-_TRIED_AGAIN:]


def _is_pending(graph: Graph) -> bool:
    """Whether its last node is pending; for other pending nodes, the check of references finds out."""
    return bool(graph.nodes) and graph.nodes[-1] in tape.pending


_module = (
    native_module_loader.load("graph_release.cpp") if os.environ.get("LAZYVIZ_GRAPH_RELEASE") != "0" else None
)
if _module is not None:
    _module.connect(TrackedNode, TrackedValue, TrackedStorage, DrawSequence, Shadow, TensorRef)
