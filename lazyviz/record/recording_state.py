"""Recording state: the graph being recorded, the recording thread, pauses, and options."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ..graph.ir import Graph
from ..process.transaction import Transaction
from ..torch_internals import private_api
from ..torch_internals.private_api import OpOverload
from .fake_cuda.gpu import Card
from .lazy_tensor import is_lazy
from .storage import TensorRef, TrackedNode, TrackedStorage

HELD_BYTES_LIMIT = 4 * 2**30
"""Bytes of dropped outside tensors a pending graph may keep alive before it is evaluated."""


class Assumed(Protocol):
    """A value that the user says a read gives."""

    @property
    def value(self) -> Any: ...


class PlannedCards(Protocol):
    """The GPUs that a cell is planned for and this machine has not."""

    @property
    def card(self) -> Card: ...
    def remove(self) -> None: ...
    def record(self, mode: Any, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def answer(self, needed: Sequence[TrackedNode]) -> Assumed | None: ...
    def make_sparse(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class OneRank(Protocol):
    """The rank of N that a cell is recorded for, without the others."""

    size: int
    rank: int
    alike: set[TrackedStorage]
    """What all ranks were last taken to have alike; a copy of it to the host brings nothing new."""

    def collective(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def functional(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recorded: Callable[..., Any]
    ) -> Any: ...


class RecordingState:
    """The graph that ops are recorded in, if any, and how.

    Slots, since the compiled recorder reads them at every op.
    """

    __slots__ = (
        "absent", "allow_sync", "batch", "communicating", "explicit_detach", "graph", "held_bytes_limit",
        "immediate_step", "owner", "pauses", "summing", "viewed", "world",
    )  # fmt: skip

    def __init__(self) -> None:
        self.graph: Graph | None = None
        self.owner = 0  # thread that records
        self.pauses = 0
        self.viewed: TensorRef | None = None  # the tensor of which a view is being made
        self.explicit_detach = False  # Python code is calling Tensor.detach: that is recorded as an op
        self.allow_sync = True
        self.immediate_step: str | None = None  # why the rest of this optimizer step runs instead
        self.batch: Callable[[torch.Tensor], int | None] | None = None  # the dimension with a batch's samples
        self.summing: Any = None  # the mark of the autograd node whose results the engine adds to others now
        self.held_bytes_limit = HELD_BYTES_LIMIT
        self.absent: PlannedCards | None = None  # the card that is planned, where it is not in this machine
        self.world: OneRank | None = None  # of the ranks that are planned, the one that is recorded
        self.communicating = False  # what is recorded now is (a part of) a functional collective

    @staticmethod
    def in_autograd() -> bool:
        """Whether the autograd engine is calling, on whatever thread."""
        return private_api.current_autograd_node() is not None

    def is_on_this_thread(self) -> bool:
        """Whether ops of this thread are recorded: it has opened the block, or computes its gradients."""
        return self.graph is not None and (self.owner == threading.get_ident() or self.in_autograd())

    def view_is_made(self) -> None:
        """Autograd is done with the view: its base is what it was, if it is there and pending still."""
        tensor = self.viewed() if self.viewed is not None else None
        if is_lazy(tensor):
            private_api.show_as_wrapper(tensor, True)
        self.viewed = None

    def paused(self) -> Paused:
        """Record nothing for a while; ops run at once, after what they need."""
        return Paused(self)


class Paused(Transaction):
    """Context in which the thread that records does not; what others do is not recorded anyway."""

    def __init__(self, recording: RecordingState) -> None:
        self._recording = recording

    def begin(self) -> None:
        recording = self._recording
        before = recording.pauses
        if recording.is_on_this_thread():
            self.undo_by(lambda: setattr(recording, "pauses", before))
            recording.pauses = before + 1
