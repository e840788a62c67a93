"""Messages between this process and its workers: the work of a pass and a piece, and the results.

Records contain only plain data: operators by name, tensors as bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...graph.ir import TensorMeta
from ...plan.batch.batch_placement import Piece, Shard
from ...torch_internals import private_api
from .pickle_free_encoding import Codec
from .piece_program import Changes, Own, Part, Step, Whole, weight_alone
from .random_draws_of_pieces import Draw
from .tensor_serialization import Packed, View

_OPERATOR = re.compile(r"(?P<namespace>[A-Za-z]\w*)::(?P<name>\w+)(?:\.(?P<overload>\w+))?")
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {weight_alone.__name__: weight_alone}
"""Functions that a piece calls besides operators."""


@dataclass(frozen=True, slots=True)
class OpName:
    """The name of an operator, or of a function that pieces call like one."""

    name: str

    @classmethod
    def of(cls, op: Any) -> OpName:
        """The name of the operator or function that a step calls."""
        if isinstance(op, private_api.OpOverload):
            return cls(op.name())
        for name, function in _FUNCTIONS.items():
            if function is op:
                return cls(name)
        raise TypeError(f"{op} is not an operator and cannot be sent to a worker")

    def find(self) -> Callable[..., Any]:
        """The operator or function of that name; raises ``LookupError`` if it is not registered here."""
        if self.name in _FUNCTIONS:
            return _FUNCTIONS[self.name]
        found = None
        if parts := _OPERATOR.fullmatch(self.name):
            packet = getattr(getattr(torch.ops, parts["namespace"]), parts["name"], None)
            found = getattr(packet, parts["overload"] or "default", None)
        if not isinstance(found, private_api.OpOverload) or found.name() != self.name:
            raise LookupError(
                f"the worker does not know the operator {self.name[:200]}: import what registers it there"
            )
        return found


@dataclass(frozen=True, slots=True)
class Drawing:
    """The start of a step's random numbers: a generator state, or a seed if the kernel draws them itself."""

    cuda: bool
    state: bytes = b""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PassWork:
    """The data that all pieces of a pass share."""

    steps: list[Step]
    whole: Packed
    draws: dict[int, Drawing]
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class PieceWork:
    """The parts of a message that are specific to one piece."""

    piece: Piece
    parts: Packed
    changes: dict[int, Changes]


@dataclass(frozen=True, slots=True)
class Prepared:
    """The worker has received the shared data of the pass ``token``."""

    token: str


@dataclass(frozen=True, slots=True)
class Done:
    """A piece's contribution to the collected values of the pass ``token``, and the seconds of each step."""

    token: str
    start: int
    stop: int
    collected: Packed
    seconds: list[float]


@dataclass(frozen=True, slots=True)
class Failed:
    """The step that failed (``None``: before any), with its error."""

    step: int | None
    error: Exception
    out_of_memory: bool


_PROGRAM: tuple[type, ...] = (Own, Whole, Part, Shard, Piece, Step, Draw, TensorMeta, View, Packed)
_OWN: tuple[type, ...] = (OpName, Drawing, PassWork, PieceWork, Prepared, Done, Failed)
CODEC = Codec([*_PROGRAM, *_OWN])
