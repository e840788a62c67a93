"""Worker process: keeps the program of a pass with its shared tensors, and runs pieces.

Everything comes and goes as bytes (:mod:`lazyviz.execute.microbatch.protocol`), so that a cluster has to
carry nothing else.  A worker has lazyviz and PyTorch, not the user's code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch

from ...graph.ir import TensorMeta
from ...plan.batch.placement import Piece
from ...record.rng import state_of
from ...torch_internals import private_api
from . import protocol
from .program import ONEDNN_FAILED, Changes, Part, PieceRun, Step, out_of_memory
from .rng import Draw
from .serialization import Packed, pack, unpack


@dataclass(frozen=True, slots=True)
class OpName:
    """An operator, by its name."""

    name: str

    def find(self) -> private_api.OpOverload:
        """The operator; raises ``LookupError`` if nothing has registered it in this process."""
        namespace, _, rest = self.name.partition("::")
        name, _, overload = rest.partition(".")
        try:
            return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
        except AttributeError:
            raise LookupError(
                f"the worker does not know the operator {self.name}: import what registers it there"
            ) from None


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
    """What one piece has of its own."""

    piece: Piece
    parts: Packed
    changes: dict[int, Changes]


@dataclass(frozen=True, slots=True)
class Done:
    """What a piece gives for the whole, and each step's seconds."""

    collected: Packed
    seconds: list[float]


@dataclass(frozen=True, slots=True)
class Failed:
    """The step that failed (``None``: before any), with its error."""

    step: int | None
    error: Exception
    out_of_memory: bool


# --- by name, and back ----------------------------------------------------------------------


def portable(steps: Sequence[Step]) -> list[Step]:
    """``steps`` as they can be sent: operators by name, without the sender's generators."""

    def leaf(item: Any) -> Any:
        if isinstance(item, private_api.OpOverload):
            return OpName(item.name())
        return None if isinstance(item, torch.Generator) else item  # the state comes with the work

    return [_converted(step, leaf) for step in steps]


def _received(steps: Sequence[Step], device: Callable[[torch.device], torch.device]) -> list[Step]:
    def leaf(item: Any) -> Any:
        if isinstance(item, OpName):
            return item.find()
        if isinstance(item, TensorMeta):
            meta = item
            return TensorMeta(
                meta.shape, meta.stride, meta.offset, meta.dtype, device(meta.device), meta.flags
            )
        return device(item) if isinstance(item, torch.device) else item

    return [_converted(step, leaf) for step in steps]


def _converted(step: Step, leaf: Callable[[Any], Any]) -> Step:
    def convert(item: Any) -> Any:
        if type(item) in (list, tuple):
            return type(item)([convert(entry) for entry in item])
        if isinstance(item, dict):
            return {name: convert(entry) for name, entry in item.items()}
        return leaf(item)

    draw = step.draw
    if draw is not None:
        names = ("op", "args", "kwargs", "like", "mask")
        draw = replace(draw, **{name: convert(getattr(draw, name)) for name in names})
    return replace(
        step, op=convert(step.op), args=convert(step.args), kwargs=convert(dict(step.kwargs)), draw=draw
    )


# --- what decides a kernel's result besides its arguments --------------------------------------

_SETTINGS = (
    "backends.cuda.matmul.fp32_precision",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.rnn.fp32_precision",
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.mkldnn.matmul.fp32_precision",
    "backends.mkldnn.conv.fp32_precision",
    "backends.mkldnn.rnn.fp32_precision",
)
"""Of ``torch``: what its documentation on numerical accuracy and on reproducibility lets a user set."""


def settings() -> dict[str, Any]:
    """What this process has set."""
    found: dict[str, Any] = {path: reduce(getattr, path.split("."), torch) for path in _SETTINGS}
    found["dtype"] = torch.get_default_dtype()
    found["deterministic"] = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    return found


def _set(wanted: Mapping[str, Any]) -> None:
    now = settings()
    for path, value in wanted.items():
        if now[path] == value:
            continue
        if path == "dtype":
            torch.set_default_dtype(value)
        elif path == "deterministic":
            torch.use_deterministic_algorithms(value[0], warn_only=value[1])
        else:
            owner, _, name = path.rpartition(".")
            setattr(reduce(getattr, owner.split("."), torch), name, value)


@contextmanager
def _as_sent(wanted: Mapping[str, Any], device: torch.device) -> Iterator[None]:
    """The sender's settings; what this process had, and its generators, come back after."""
    before = settings()
    generators = [torch.default_generator]
    if device.type == "cuda" and torch.cuda.is_available():
        generators.append(torch.cuda.default_generators[device.index or 0])
    states = [state_of(generator) for generator in generators]
    with torch.no_grad():
        try:
            _set(wanted)
            with private_api.kernels_only():
                yield
        finally:
            _set(before)
            for generator, state in zip(generators, states):
                generator.set_state(state)


# --- the worker's side ---------------------------------------------------------------------------


@dataclass(slots=True)
class _Prepared:
    steps: list[Step]
    whole: dict[int, torch.Tensor]
    draws: dict[int, Drawing]
    settings: dict[str, Any]
    device: torch.device
    without_onednn: bool = False

    def place(self, recorded: torch.device) -> torch.device:
        """Where a tensor of a device of the sender's is here: one of a GPU on the worker's own."""
        return self.device if recorded.type == "cuda" else recorded


_prepared: dict[str, _Prepared] = {}


def prepare(token: str, device: str, work: bytes) -> bytes:
    """Keep a :class:`PassWork` under ``token``; gives a :class:`Failed` or ``None``; both as messages."""
    try:
        own: PassWork = protocol.loads(work)
        prepared = _Prepared([], {}, own.draws, own.settings, torch.device(device))
        prepared.steps = _received(own.steps, prepared.place)
        with _as_sent(own.settings, prepared.device):
            prepared.whole = unpack(own.whole, prepared.place)
        _prepared[token] = prepared
    except Exception as error:
        return _failed(None, error)
    return protocol.dumps(None)


def forget(token: str) -> None:
    """The pass is over."""
    _prepared.pop(token, None)


def run_piece(token: str, work: bytes) -> bytes:
    """Run a :class:`PieceWork` of pass ``token``; gives :class:`Done` or :class:`Failed`, as messages."""
    number: int | None = None
    try:
        prepared = _prepared[token]
        own: PieceWork = protocol.loads(work)
        seconds = []
        collected: dict[int, Packed] = {}
        with _as_sent(prepared.settings, prepared.device), ExitStack() as stack:
            if prepared.without_onednn:
                stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
            run = _PieceOnWorker(prepared, own)
            for number, step in enumerate(prepared.steps):
                start = time.perf_counter()
                run.run(number, step)
                for key in step.collects:  # at once: a later step may write it
                    collected[key] = pack({key: run.env[key]})
                run.free(step.frees)
                seconds.append(time.perf_counter() - start)
            run.env.clear()
        return protocol.dumps(Done(_joined(collected.values()), seconds))
    except Exception as error:
        if ONEDNN_FAILED in str(error) and token in _prepared:  # as a run in one process goes on
            _prepared[token].without_onednn = True
        return _failed(number, error)


def _joined(parts: Any) -> Packed:
    result = Packed([], {})
    for part in parts:
        shift = len(result.buffers)
        result.buffers.extend(part.buffers)
        result.views.update(
            {key: replace(view, buffer=view.buffer + shift) for key, view in part.views.items()}
        )
    return result


def _failed(step: int | None, error: Exception) -> bytes:
    """The failure, with an error that the sender can read."""
    memory = out_of_memory(error)
    if memory and torch.cuda.is_available():
        torch.cuda.empty_cache()
    plain = error.with_traceback(None)
    plain.__cause__ = plain.__context__ = None
    try:
        protocol.loads(protocol.dumps(plain))
    except Exception:
        plain = RuntimeError(f"{type(error).__name__}: {error}")
    return protocol.dumps(Failed(step, plain, memory))


class _PieceOnWorker(PieceRun):
    """A piece run on what was sent."""

    def __init__(self, prepared: _Prepared, work: PieceWork) -> None:
        super().__init__(work.piece, work.changes)
        self._prepared = prepared
        self._parts: dict[Part, torch.Tensor] = unpack(work.parts, prepared.place)

    def whole(self, key: int) -> torch.Tensor:
        return self._prepared.whole[key]

    def part(self, part: Part) -> torch.Tensor:
        return self._parts[part]

    def numbers(self, number: int, draw: Draw) -> torch.Tensor | None:
        self.before_draw(number)
        return draw.numbers()

    def before_draw(self, number: int) -> None:
        drawing = self._prepared.draws[number]
        generator = torch.default_generator
        if drawing.cuda:
            generator = torch.cuda.default_generators[self._prepared.device.index or 0]
        if drawing.state:
            generator.set_state(torch.frombuffer(bytearray(drawing.state), dtype=torch.uint8).clone())
        else:
            generator.manual_seed(drawing.seed + self.piece.start)
