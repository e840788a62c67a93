"""The tape: everything that this process has recorded, and the part of it that is pending."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ..torch_internals.private_api import OpOverload
from .interception.observers_of_deferred_writes import MemoryHolders
from .pending_ops import PendingOps
from .preexisting_tensors import ExternalTensors
from .provenance.module_calls_and_phases import Scopes
from .random_draw_order import Generators
from .recording_state import RecordingState
from .shapes.shape_inference_cache import ShapeCache
from .sync_points import PendingRuns
from .tensor_table import TensorTable
from .tracked_storages import TrackedValue


class OpRecorder(Protocol):
    """Makes nodes of op calls; :class:`lazyviz.record.recorder.Recorder`."""

    def record(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def record_view(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def translated(self, tensor: torch.Tensor, values: list[TrackedValue]) -> TrackedValue: ...


class Tape:
    """The parts of the record, one object for each subject; there is one tape per process.

    ``pending`` are the nodes of ``pending_ops``, its most used part by far. ``retire`` removes this thread's
    mode if it could not be removed when the last pending op had run. ``user_level`` creates
    the context for functions of the user that are called while an op is recorded or runs.
    """

    recorder: OpRecorder
    retire: Callable[[], None]
    user_level: Callable[[], AbstractContextManager[Any]]

    def __init__(self) -> None:
        self.recording = RecordingState()
        self.shapes = ShapeCache()
        self.scopes = Scopes()
        self.generators = Generators()
        self.tensors = TensorTable(self.recording)
        self.runs = PendingRuns(self.recording, self.scopes)
        self.memory_holders = MemoryHolders(self.tensors, self.recording, self.runs)
        self.external = ExternalTensors(
            self.recording,
            self.runs,
            self.tensors,
            self.memory_holders,
            scopes=self.scopes,
            shapes=self.shapes,
        )
        self.pending_ops = PendingOps(
            self.recording,
            self.runs,
            self.tensors,
            self.memory_holders,
            scopes=self.scopes,
            shapes=self.shapes,
            generators=self.generators,
        )
        self.pending = self.pending_ops.nodes
        self.scopes.note_module_call = self.memory_holders.note_module_call


tape = Tape()
