"""Connects packages: registers the hooks of recording into later stages, exit handlers, and fork handlers."""

from __future__ import annotations

import atexit
import os

from ..execute import stop_runs_at_exit
from ..graph.ir import Node, Timed, Work
from ..record import lazy_tensor
from ..record.recorder import recorder
from ..record.tape import tape
from ..record.tracked_storages import TrackedNode, Unreachable
from . import block, evaluation
from .evaluate_at_sync_point import evaluator


def connect() -> None:
    """Register the functions of later stages that each stage calls; called once, when lazyviz is imported."""
    lazy_tensor.dispatch_unrecorded = recorder.dispatch_unrecorded
    lazy_tensor.detach = recorder.detach
    tape.runs.evaluator = evaluator
    tape.pending_ops.reachable = evaluation.live_graphs
    Node.count_work = staticmethod(_count_work)
    Node.project_time = staticmethod(_project_time)
    Unreachable.drop = tape.pending_ops.forget_lost
    evaluation.watch.rehearse()
    atexit.register(block.finish_at_exit)  # last, because exit handlers run in reverse order
    atexit.register(stop_runs_at_exit.stop_all)
    atexit.register(evaluation.stop_background)
    for module in (stop_runs_at_exit, evaluation, block):
        os.register_at_fork(after_in_child=module.forget_in_child)


def _count_work(node: Node) -> Work:
    from ..plan.runtime.bytes_and_launches import work_of  # imports PyTorch's FLOP counter on the first call

    return work_of(node)


def _project_time(node: Node) -> Timed | None:
    from ..plan.runtime.run_time_projection import time_of_node  # also imported on the first call

    return time_of_node(node, node.graph) if isinstance(node, TrackedNode) else None
