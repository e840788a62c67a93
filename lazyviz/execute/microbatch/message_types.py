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
"""What a piece calls besides operators."""


@dataclass(frozen=True, slots=True)
class OpName:
    """An operator, or a function that pieces call as they call operators, by its name."""

    name: str

    @classmethod
    def of(cls, op: Any) -> OpName:
        """The name of what a step calls."""
        if isinstance(op, private_api.OpOverload):
            return cls(op.name())
        for name, function in _FUNCTIONS.items():
            if function is op:
                return cls(name)
        raise TypeError(f"{op} is not an operator and cannot be sent to a worker")

    def find(self) -> Callable[..., Any]:
        """What is called so; raises ``LookupError`` if nothing has registered it in this process."""
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
    """Where a step's random numbers begin: the state of its generator, or a seed if it draws for itself."""

    cuda: bool
    state: bytes = b""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PassWork:
    """What all pieces of a pass share."""

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
    """The worker has what pieces of the pass ``token`` share."""

    token: str


@dataclass(frozen=True, slots=True)
class Done:
    """What a piece of the pass ``token`` gives for the whole, and each step's seconds."""

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
