"""What running and planning need of a recorded block, whatever shows it to the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ..execute.microbatch.run import SplitRun
from ..execute.progress import Run
from ..execute.report import NonFinite, Report
from ..graph.ir import Graph, SyncPoint
from ..plan.devices.devices import DeviceLike
from ..plan.plan import Plan
from ..record.storage import TrackedNode
from .named_batch import NamedBatch


class RecordedGraph(Protocol):
    """A recorded block: its nodes, how they are to be run, and what became of that."""

    ir: Graph
    device: Any
    title: str
    summaries: bool
    live: Run | None
    split_run: SplitRun | None
    error: BaseException | None
    run_state: str | None

    @property
    def backend(self) -> str: ...
    @property
    def batch(self) -> NamedBatch | None: ...
    @property
    def split(self) -> int | str: ...
    @property
    def recompute(self) -> int | str: ...
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
    @property
    def watched(self) -> bool: ...
    @property
    def report(self) -> Report | None: ...
    @report.setter
    def report(self, report: Report) -> None: ...
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
    def notify(self) -> None: ...
    def changed(self, state: str | None = None) -> None: ...
    def note_read(self, *report: Any) -> None: ...
    def note_timeline(self, timeline: Sequence[tuple[int, int]]) -> None: ...
    def note_nonfinite(self, found: Mapping[str, NonFinite]) -> None: ...
