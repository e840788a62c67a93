"""Progress of a run: ops done, bytes held, and the estimated remaining time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..record.tracked_storages import TrackedNode
from .measured_memory import Memory
from .remaining_time import Forecast

if TYPE_CHECKING:
    from .microbatch.run_pieces_and_add_gradients import SplitRun


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of ``total`` ops after ``seconds``; ``label`` says where the run is.

    While a backend compiles, ``compiling`` is true, and the label says what it compiles and for how long.

    ``allocated_bytes`` is the current memory of the run's tensors.  A split run is at ``piece`` (from 1) of
    ``pieces``, or at 0 while it runs whole nodes.  ``share`` is the estimated fraction of the run's time that
    has passed; ``None``: use the fraction of ops that are done.
    """

    done: int
    total: int
    seconds: float
    label: str
    allocated_bytes: int = 0
    piece: int = 0
    pieces: int = 1
    share: float | None = None
    compiling: bool = False

    @property
    def seconds_left(self) -> float | None:
        """Remaining seconds, estimated from the ops that have run; None before the first op."""
        if not self.done or not self.total:
            return None
        share = self.done / self.total if self.share is None else self.share
        return self.seconds * (1 - share) / share if share > 0 else None


class Run:
    """The state of a run in progress, for observers on other threads.

    The run itself only counts and appends: ``ended`` has the nodes in the order in which they ran, in a split
    run once per piece.
    """

    __slots__ = ("_compiling", "_forecast", "_started", "done", "ended", "memory", "nodes", "split", "total")

    def __init__(self, nodes: Sequence[TrackedNode], memory: Memory, split: SplitRun | None = None) -> None:
        self.nodes, self.memory, self.split = nodes, memory, split
        self.done, self.total = 0, len(nodes)
        self.ended: list[TrackedNode] = []
        self._started = time.perf_counter()
        self._forecast: Forecast | None = None
        self._compiling: tuple[str, float] | None = None  # what is compiled, and since when

    def compiles(self, what: str | None) -> None:
        """Called by the executor while a backend compiles ``what``, and with None afterwards."""
        if what is None:
            self._compiling = None
        elif self._compiling is None or self._compiling[0] != what:
            self._compiling = what, time.perf_counter()

    def step(self, done: int, total: int, node: TrackedNode) -> None:
        """Called by the executor after each node."""
        self.ended.append(node)
        self.done, self.total = done, total

    @property
    def running(self) -> TrackedNode | None:
        """The current node: in a split run the last node that ran, otherwise the first that has not run."""
        if self.split is not None:
            return self.ended[-1] if self.ended else None
        done = self.done
        return self.nodes[done] if done < len(self.nodes) else None

    def now(self, *, foresee: bool = False) -> Progress:
        """The progress of the run.  With ``foresee``, estimates ``share``, which visits every node."""
        done, total = self.done, self.total
        share = None
        if foresee and self.split is None:
            if self._forecast is None:
                self._forecast = Forecast(self.nodes)
            share = self._forecast.share(done)
        node = self.ended[-1] if self.ended else None
        label = "" if node is None else node.module or node.name
        compiling = self._compiling
        if compiling is not None:
            label = f"compiling {compiling[0]}, {time.perf_counter() - compiling[1]:.0f} s"
        piece, pieces = (self.split.piece, len(self.split.pieces)) if self.split is not None else (0, 1)
        seconds = time.perf_counter() - self._started
        return Progress(
            done, total, seconds, label, self.memory.now, piece, pieces, share, compiling is not None
        )
