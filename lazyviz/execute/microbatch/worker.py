"""Worker process: stores the program of a pass with its shared tensors, and runs pieces.

All communication is in bytes (:mod:`lazyviz.execute.microbatch.message_framing`), so that a cluster needs to
transport nothing else.  A worker needs lazyviz and PyTorch, but not the user's code.
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
from ...record.random_draw_order import state_of
from ...torch_internals import private_api
from . import message_framing
from .message_types import Done, Drawing, Failed, OpName, PassWork, PieceWork, Prepared
from .piece_program import ONEDNN_FAILED, Part, PieceRun, Step, out_of_memory
from .random_draws_of_pieces import Draw
from .tensor_serialization import Packed, pack, unpack

FORGOTTEN_AFTER = 86_400.0
"""Seconds without a message after which a pass is forgotten, because its sender may have ended."""


# --- conversion to names, and back ------------------------------------------------------------


def portable(steps: Sequence[Step]) -> list[Step]:
    """``steps`` in serializable form: operators by name, without the sender's generators."""

    def leaf(item: Any) -> Any:
        return None if isinstance(item, torch.Generator) else item  # the message includes the state

    return [_converted(step, OpName.of, leaf) for step in steps]


def _received(steps: Sequence[Step], device: Callable[[torch.device], torch.device]) -> list[Step]:
    def leaf(item: Any) -> Any:
        if isinstance(item, TensorMeta):
            meta = item
            return TensorMeta(
                meta.shape, meta.stride, meta.offset, meta.dtype, device(meta.device), meta.flags
            )
        return device(item) if isinstance(item, torch.device) else item

    return [_converted(step, OpName.find, leaf) for step in steps]


def _converted(step: Step, called: Callable[[Any], Any], leaf: Callable[[Any], Any]) -> Step:
    def convert(item: Any) -> Any:
        if type(item) in (list, tuple):
            return type(item)([convert(entry) for entry in item])
        if isinstance(item, dict):
            return {name: convert(entry) for name, entry in item.items()}
        return leaf(item)

    draw = step.draw
    if draw is not None:
        names = ("args", "kwargs", "like", "mask")
        changed = {name: convert(getattr(draw, name)) for name in names}
        draw = replace(draw, op=called(draw.op), **changed)
    return replace(
        step, op=called(step.op), args=convert(step.args), kwargs=convert(dict(step.kwargs)), draw=draw
    )


# --- settings that affect a kernel's result ------------------------------------------------------

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
"""The settings of ``torch`` that its documentation on numerical accuracy and on reproducibility describes."""


def settings() -> dict[str, Any]:
    """The settings of this process."""
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
        if path not in now:
            raise message_framing.MessageError(f"a message to a worker may not set {path[:100]!r}")
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
    """Use the sender's settings; afterwards, this process's settings and generators are restored."""
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
class _Pass:
    """A running pass: its work, with tensors and operators of this process."""

    steps: list[Step]
    whole: dict[int, torch.Tensor]
    draws: dict[int, Drawing]
    settings: dict[str, Any]
    device: torch.device
    used: float
    without_onednn: bool = False

    def place(self, recorded: torch.device) -> torch.device:
        """Map a device of the sender to one of this worker: GPU tensors are on the worker's own GPU."""
        return self.device if recorded.type == "cuda" else recorded


_passes: dict[str, _Pass] = {}


def prepare(token: str, device: str, work: bytes) -> bytes:
    """Store a :class:`PassWork` under ``token``; returns :class:`Prepared` or :class:`Failed`, all as
    messages.
    """
    now = time.monotonic()
    for old in [old for old, each in _passes.items() if now - each.used > FORGOTTEN_AFTER]:
        del _passes[old]
    try:
        own = message_framing.loads(work, PassWork)
        prepared = _Pass([], {}, own.draws, own.settings, torch.device(device), now)
        prepared.steps = _received(own.steps, prepared.place)
        with _as_sent(own.settings, prepared.device):
            prepared.whole = unpack(own.whole, prepared.place)
        _passes[token] = prepared
    except Exception as error:
        return _failed(None, error)
    return message_framing.dumps(Prepared(token))


def forget(token: str) -> None:
    """Drop the pass, which is over."""
    _passes.pop(token, None)


def run_piece(token: str, work: bytes) -> bytes:
    """Run a :class:`PieceWork` of pass ``token``; returns :class:`Done` or :class:`Failed`, as messages."""
    number: int | None = None
    try:
        own = message_framing.loads(work, PieceWork)
        if token not in _passes:
            raise LookupError("the worker does not know this run: it was restarted in the meantime")
        prepared = _passes[token]
        prepared.used = time.monotonic()
        seconds = []
        collected: list[Packed] = []
        with _as_sent(prepared.settings, prepared.device), ExitStack() as stack:
            if prepared.without_onednn:
                stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
            run = _PieceOnWorker(prepared, own)
            for number, step in enumerate(prepared.steps):
                start = time.perf_counter()
                run.run(number, step)
                if step.collects:  # immediately, because a later step may write it
                    collected += [pack({key: run.env[key]}) for key in step.collects]
                run.free(step.frees)
                seconds.append(time.perf_counter() - start)
            run.env.clear()
        piece = own.piece
        return message_framing.dumps(Done(token, piece.start, piece.stop, _joined(collected), seconds))
    except Exception as error:
        if ONEDNN_FAILED in str(error) and token in _passes:  # continue like a run in one process
            _passes[token].without_onednn = True
        return _failed(number, error)


def _joined(parts: Sequence[Packed]) -> Packed:
    result = Packed([], {})
    for part in parts:
        shift = len(result.buffers)
        result.buffers.extend(part.buffers)
        result.views.update(
            {key: replace(view, buffer=view.buffer + shift) for key, view in part.views.items()}
        )
    return result


def _failed(step: int | None, error: Exception) -> bytes:
    """The failure as a message, with an error that the sender can decode."""
    memory = out_of_memory(error)
    if memory and torch.cuda.is_available():
        torch.cuda.empty_cache()
    return message_framing.dumps(Failed(step, error, memory))


class _PieceOnWorker(PieceRun):
    """A piece that runs with the received tensors."""

    def __init__(self, prepared: _Pass, work: PieceWork) -> None:
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
