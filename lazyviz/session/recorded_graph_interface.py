"""Interface of a recorded graph for execution and planning, independent of its display."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from ..execute.run_report import Report
from ..graph.ir import Graph, SyncPoint
from ..plan.devices.device_lookup import DeviceLike
from ..record.tracked_storages import TrackedNode
from .graph_options import GraphOptions
from .run_history import RunHistory

if TYPE_CHECKING:
    from ..plan.plan import Plan


class RecordedGraph(Protocol):
    """A recorded block: its nodes, how to run them, and the results of runs."""

    ir: Graph
    device: DeviceLike | None
    title: str
    choices: GraphOptions
    runs: RunHistory

    @property
    def nodes(self) -> Sequence[TrackedNode]: ...
    @property
    def pending(self) -> int: ...
    @property
    def has_pending(self) -> bool: ...
    @property
    def sync_points(self) -> Sequence[SyncPoint]: ...
    @property
    def state(self) -> str: ...
    def plan(
        self,
        device: DeviceLike | None = None,
        batch_size: int | None = None,
        split: int | str | None = None,
        backend: str | None = None,
        *,
        recompute: int | str | None = None,
    ) -> Plan: ...
    def evaluate(self, *tensors: torch.Tensor) -> Report: ...
    def unfinished(self) -> list[TrackedNode]: ...
