"""Recording state: the graph being recorded, the recording thread, pauses, and options."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ..graph.ir import Graph
from ..process.global_state_transaction import Transaction
from ..torch_internals import private_api
from ..torch_internals.private_api import OpOverload
from .fake_cuda.fake_gpu import Gpu
from .lazy_tensor import is_lazy
from .tracked_storages import TensorRef, TrackedNode, TrackedStorage

HELD_BYTES_LIMIT = 4 * 2**30
"""Bytes of dropped outside tensors a pending graph may keep alive before it is evaluated."""


class Assumed(Protocol):
    """The value that the user assumes for a read."""

    @property
    def value(self) -> Any: ...
    def for_dtype(self, dtype: torch.dtype) -> Any: ...


class PlannedGpus(Protocol):
    """The GPUs that a cell is planned for and that are not in this machine."""

    @property
    def gpu(self) -> Gpu: ...
    def remove(self) -> None: ...
    def record(self, mode: Any, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def answer(self, needed: Sequence[TrackedNode], *, one: bool = False) -> Assumed | None: ...
    def assumes_each_read(self) -> bool: ...
    def make_sparse(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class OneRank(Protocol):
    """The rank of N for which a cell is recorded, without the others."""

    size: int
    rank: int
    alike: set[TrackedStorage]
    """Storages whose content was last assumed to be equal on all ranks, so that a copy to the host adds
    nothing new.
    """

    def collective(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def functional(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recorded: Callable[..., Any]
    ) -> Any: ...


class RecordingState:
    """The graph that ops are recorded in, if any, and how.

    It has slots, because the compiled recorder reads them at every op.
    """

    __slots__ = (
        "absent", "allow_sync", "appending", "batch", "busy", "communicating", "explicit_detach", "graph",
        "held_bytes_limit", "immediate_step", "last_change", "owner", "pauses", "summing", "viewed", "world",
    )  # fmt: skip

    def __init__(self) -> None:
        self.graph: Graph | None = None
        self.owner = 0  # thread that records
        self.pauses = 0
        self.busy = False  # the compiled recorder is recording an op, without holding the lock of runs
        self.appending = 0  # thread that is creating a node; no other code may change the pending nodes
        # A number that changes when anything is recorded, evaluated, or forgotten: then, checks on an op that
        # is being recorded must be repeated.
        self.last_change = 0
        self.viewed: TensorRef | None = None  # the tensor of which a view is being created
        self.explicit_detach = False  # Python code is calling Tensor.detach, which is recorded as an op
        self.allow_sync = True
        self.immediate_step: str | None = None  # why the rest of this optimizer step runs immediately
        self.batch: Callable[[torch.Tensor], int | None] | None = None  # the dimension with a batch's samples
        self.summing: Any = None  # the mark of the autograd node whose results the engine adds to others now
        self.held_bytes_limit = HELD_BYTES_LIMIT
        self.absent: PlannedGpus | None = None  # the planned GPU, if it is not in this machine
        self.world: OneRank | None = None  # the recorded rank, if several ranks are planned
        self.communicating = False  # a functional collective, or a part of one, is being recorded

    def changed(self) -> None:
        """Note that tensors have become real or pending, or will be recorded elsewhere."""
        self.last_change = next(TrackedNode._sequence)

    @staticmethod
    def in_autograd() -> bool:
        """Whether the autograd engine is calling, on any thread."""
        return private_api.current_autograd_node() is not None

    def is_on_this_thread(self) -> bool:
        """Whether ops of this thread are recorded: it has opened the block, or computes its gradients."""
        if self.graph is None:
            return False
        return self.owner == threading.get_ident() or (self.in_autograd() and not is_of_python())

    def view_is_made(self) -> None:
        """Autograd has finished creating the view: restore the state of its base, if that still exists and is
        pending.
        """
        tensor = self.viewed() if self.viewed is not None else None
        if is_lazy(tensor):
            private_api.show_as_wrapper(tensor, True)
        self.viewed = None

    def paused(self) -> Paused:
        """Pause recording: ops run immediately, after the nodes that they depend on."""
        return Paused(self)


_of_python = threading.local()


def is_of_python() -> bool:
    """Whether this thread was started in Python, or is the main one. If so, it computes its own gradients;
    only threads of the autograd engine compute those of a block that another thread records.
    """
    known: bool | None = getattr(_of_python, "known", None)
    if known is None:
        known = any(
            thread.ident == threading.get_ident() and not isinstance(thread, threading._DummyThread)
            for thread in threading.enumerate()
        )
        _of_python.known = known
    return known


class Paused(Transaction):
    """Context in which the recording thread does not record; other threads are not recorded anyway."""

    def __init__(self, recording: RecordingState) -> None:
        self._recording = recording

    def begin(self) -> None:
        recording = self._recording
        before = recording.pauses
        if recording.is_on_this_thread():
            self.undo_by(lambda: setattr(recording, "pauses", before))
            recording.pauses = before + 1
