"""Strategy selection: chooses how to run nodes from the options, their graph, and code of earlier runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from ...execute.backend_protocol import Backend
from ...execute.backend_registry import find_backend
from ...execute.compute_value_stats import Summaries
from ...execute.microbatch.ray_and_ipyparallel import Cluster, is_cluster
from ...execute.replay import program_cache
from ...record.tape import tape
from ...record.tracked_storages import TrackedNode
from .. import recompute_options, split_options
from ..recorded_graph_interface import RecordedGraph
from ..run_options import RunOptions
from . import base
from .base import Request, Strategy
from .eager import EagerRun
from .replay import ReplayRun

if TYPE_CHECKING:  # the other strategies are imported by the first run that needs them
    from ...execute.microbatch.run_pieces_and_add_gradients import SplitRun
    from ...plan.remat.recompute_selection import Choice


def choose(
    nodes: Sequence[TrackedNode],
    wanted: RunOptions,
    graph: RecordedGraph | None,
    touched: Sequence[RecordedGraph],
    begun: SplitRun | None,
    owner: RecordedGraph | None = None,
) -> Strategy:
    """Choose how to run ``nodes`` of the graphs ``touched``; ``begun`` is an interrupted run of some.

    ``owner`` is the graph whose batch is split, if ``graph`` is not given.
    """
    runner = find_backend(wanted.backend)
    cluster = runner if is_cluster(runner) else None
    summaries = wanted.summaries
    if summaries is None:
        summaries = any(lazy.choices.summaries for lazy in touched)
    seen = Summaries() if summaries else None
    request = Request(nodes, wanted, graph, touched, base.cuda_devices(nodes), seen=seen)
    split_run, choice = begun, None
    owner = graph or owner or (touched[-1] if touched else None)
    if owner is not None:
        split_run, choice = _split_or_recompute(request, owner, begun, cluster)
    if cluster is not None:
        from .distributed import DistributedRun

        return DistributedRun(request, cluster, split_run)
    if split_run is not None:
        from .micro_batched import MicroBatchedRun

        return MicroBatchedRun(request, split_run, is_begun=begun is not None)
    if choice is not None:
        from .rematerialized import RematerializedRun

        return RematerializedRun(request, choice)
    compiler = cast(Backend | None, runner)
    return _eager_or_replay(request) if compiler is None else _compiled(request, compiler)


def _split_or_recompute(
    request: Request, owner: RecordedGraph, begun: SplitRun | None, cluster: Cluster | None
) -> tuple[SplitRun | None, Choice | None]:
    """The split run or the recomputed activations, if requested; both ``None`` if neither is necessary."""
    wanted, nodes = request.wanted, request.nodes
    split, recompute = wanted.split, wanted.recompute
    split_run = begun
    if cluster is not None and split == "off":
        split = "auto"  # this backend runs pieces
    if split_run is None and split != "off":
        if recompute == "off" or not recompute_options.needs_recompute(owner):
            split_run = split_options.split_run(tape, owner, nodes, split, cluster)
        if split_run is not None:
            owner.runs.split_run = split_run
    if recompute != "off" and split_run is None and wanted.backend == "eager":
        return None, recompute_options.choose_run(owner, nodes, recompute, tape.pending)
    return split_run, None


def _eager_or_replay(request: Request) -> Strategy:
    """The replay strategy if the nodes have run before, otherwise the eager strategy."""
    if request.seen is not None or (request.cuda and request.wanted.timings):
        return EagerRun(request, None, None)
    replays = program_cache.replays
    subgraph = replays.structure_of(tape, request.nodes, request.graph is not None)
    if subgraph is None:
        return EagerRun(request, None, replays.not_cacheable_reason)
    found = replays.find(subgraph)
    return ReplayRun(request, found) if found is not None else EagerRun(request, subgraph, None)


def _compiled(request: Request, compiler: Backend) -> Strategy:
    """The strategy for a compiling backend, whose code for all nodes may exist from an earlier run."""
    from .compiled import CompiledRun

    subgraph, code = None, None
    if request.nodes and request.seen is None:
        from ...execute.compiler.single_segment_runs import cached_segments

        subgraph = cached_segments.subgraph_of(tape, request.nodes, compiler)
        code = cached_segments.find(subgraph, compiler) if subgraph is not None else None
    return CompiledRun(request, compiler, subgraph, code)
