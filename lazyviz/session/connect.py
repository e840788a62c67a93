"""Connects the stages: what recording asks of running, and what ends or begins anew with the process."""

from __future__ import annotations

import atexit
import os

from ..execute import shutdown
from ..record import lazy_tensor
from ..record.recorder import tape
from ..record.storage import Lost
from . import block, evaluation
from .sync_evaluation import run_for_sync


def connect() -> None:
    """Give each stage what it asks of later ones; once, when lazyviz is imported."""
    lazy_tensor.dispatch_unrecorded = tape.dispatch_unrecorded
    tape.evaluator = run_for_sync
    tape.reachable = evaluation.reachable
    Lost.look = tape.forget_lost
    evaluation.watch.rehearse()
    atexit.register(shutdown.stop_all)
    for module in (shutdown, evaluation, block):
        os.register_at_fork(after_in_child=module.forget_in_child)
