"""The eager backend: the recorded kernels, in program order, on the user's real tensors.

Nodes run exactly where recording met them, below autograd and autocast, so the
kernels, their order and their inputs are those of eager PyTorch and results are equal
to the last bit.  A value's memory is freed after its last use; a tensor the user still
holds becomes real as soon as its node has run, so that an interruption between two
nodes loses nothing.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps, which looks for names of handlers
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from .. import _torch
from ..plan.again import statistics
from ..record.recorder import Tape
from ..record.rng import state_of
from ..record.storage import FORGOTTEN, TrackedNode, TrackedStorage, TrackedValue
from ..record.tensor import make_real
from . import straight_line
from .memory import ResidentMemory

if TYPE_CHECKING:
    from .recompute import RecomputeRun
    from .summaries import Summaries

Progress = Callable[[int, int, TrackedNode], None]


STAYS = (
    "It stays pending, as does what needs it: %lazy reset, or lazyviz.reset(), forgets all that is pending."
)


class Interrupted(RuntimeError):
    """Evaluation was cancelled between two ops; finished ops are finished, the others pending."""


def run(
    tape: Tape,
    nodes: Sequence[TrackedNode],
    memory: ResidentMemory,
    *,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
    timed: bool = False,
    again: RecomputeRun | None = None,
    seen: Summaries | None = None,
    marks: list[tuple[TrackedNode, Any, Any]] | None = None,
) -> None:
    """Run pending ``nodes``, given in program order with all they depend on.

    Args:
        memory: counts what the run holds.
        progress: called after each node with the number done, the total and the node.
        cancelled: asked before each node.
        timed: note each node's seconds (host time; only meaningful on a synchronous device).
        again: drops values of these nodes and makes them again.
        seen: takes note of the values.
        marks: is given CUDA events from before and after each node.

    Raises:
        Interrupted: ``cancelled`` said so.
        KeyboardInterrupt: the user interrupted; like a cancellation, between two ops.
        Exception: what the kernel raised, with the recording line added to its message; the node
            is ``failed`` and may be evaluated again.
    """
    total = len(nodes)
    with kernel_level(tape, nodes) as interrupted, again or nullcontext(), ExitStack() as inference:
        for done, node in enumerate(nodes, 1):
            check_interrupts(interrupted, cancelled, f"after {done - 1} of {total} ops")
            if again is not None:
                again.before(done - 1)
            if node.inference_mode != torch.is_inference_mode_enabled():
                if node.inference_mode:
                    inference.enter_context(_torch.inference_mode(True))
                else:
                    inference.close()
            if node.grad_mode != torch.is_grad_enabled():
                torch.set_grad_enabled(node.grad_mode)
            memory.step(node)
            start = time.perf_counter() - spent_on(seen) if timed else 0.0
            begin = _cuda_event() if marks is not None else None
            run_node(node, memory, seen)
            if timed:
                node.seconds = time.perf_counter() - spent_on(seen) - start
            if marks is not None:
                marks.append((node, begin, _cuda_event()))
            if again is not None:
                again.after(done - 1)
                again.finished(done - 1)
            else:
                tape.finished(node)
            if progress is not None:
                progress(done, total, node)


def spent_on(seen: Summaries | None) -> float:
    """The seconds that were spent on looking at values."""
    return seen.seconds if seen is not None else 0.0


def _cuda_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@contextmanager
def kernel_level(tape: Tape, nodes: Sequence[TrackedNode]) -> Iterator[list[int]]:
    """Context in which recorded calls run where they were recorded; yields the interrupts that arrive."""
    grad_mode, outside = torch.is_grad_enabled(), tape.running
    # Each node runs in the mode of its record.
    mode = _torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
    with _deferred_interrupts() as arrived, mode:
        tape.running = threading.get_ident()
        try:
            with straight_line.kernels_only():
                states = tape.generators.save(nodes)
                try:
                    yield arrived
                finally:
                    torch.set_grad_enabled(grad_mode)
                    tape.generators.restore(states)
        finally:
            tape.running = outside
            tape.settle()


def check_interrupts(arrived: list[int], cancelled: Callable[[], bool] | None, where: str) -> None:
    if arrived:
        raise KeyboardInterrupt(f"interrupted {where}")
    if cancelled is not None and cancelled():
        raise Interrupted(f"cancelled {where}")


@contextmanager
def _deferred_interrupts() -> Iterator[list[int]]:
    """Collect SIGINT; raised in the middle of a node, an in-place op could run twice."""
    arrived: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield arrived
        return
    before = _signal.getsignal(_signal.SIGINT)
    if not callable(before):  # not set from Python, or ignored: not ours to touch
        yield arrived
        return
    _signal.signal(_signal.SIGINT, lambda number, frame: arrived.append(number))
    try:
        yield arrived
    finally:
        _signal.signal(_signal.SIGINT, before)
    if arrived:  # it came during the last op: everything is done, but the user did interrupt
        signal.raise_signal(signal.SIGINT)


def recorded_modes(node: TrackedNode) -> ExitStack:
    """Context with the modes that ``node`` was recorded under; :func:`kernel_level` puts grad mode back."""
    stack = ExitStack()
    if node.inference_mode != torch.is_inference_mode_enabled():
        stack.enter_context(_torch.inference_mode(node.inference_mode))
    if node.grad_mode != torch.is_grad_enabled():
        torch.set_grad_enabled(node.grad_mode)
    return stack


def call(node: TrackedNode) -> list[Any]:
    """The results of ``node``'s kernel on its inputs, which have to be there."""
    draws = node.draws
    args, kwargs = _real(node.args), {name: _real(item) for name, item in node.kwargs.items()}
    if node.again:
        args, kwargs = _without_statistics(node, args, kwargs)
    if draws is not None:
        draws.generator.set_state(draws.state)
    result = node.op(*args, **kwargs)
    if draws is not None:
        draws.state = state_of(draws.generator)
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _without_statistics(
    node: TrackedNode, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Copies in place of running statistics, which have been moved along already."""
    moved = statistics(node)
    if not moved:
        return list(args), kwargs
    args = [given.clone() if item in moved else given for item, given in zip(node.args, args)]
    kwargs = {name: given.clone() if node.kwargs[name] in moved else given for name, given in kwargs.items()}
    return list(args), kwargs


def run_node(node: TrackedNode, memory: ResidentMemory, seen: Summaries | None = None) -> None:
    try:
        results = call(node)
    except Exception as error:
        node.state = "failed"
        node.error = str(error)
        name_line(error, node)
        raise
    node.state = "done"
    node.error = None
    if seen is not None:
        seen.node(node, results)
    own = [value for value in node.outputs if value.node is node]  # an in-place op returns its argument
    if node.writes:
        for value in own:
            memory.resized(value.storage, results[value.index])
    # A kernel may leave out a gradient that nobody needs and that its shape rule has.
    deliver({value: results[value.index] for value in own if results[value.index] is not None}, memory)
    consumed(node, memory)


def deliver(results: Mapping[TrackedValue, torch.Tensor], memory: ResidentMemory) -> None:
    """Give each computed value its tensor: to later nodes, and to the user where one is held."""
    fresh: set[TrackedStorage] = set()
    for value, real in results.items():
        storage, node = value.storage, value.node
        made = node is not None and storage.created == node.index and storage.graph is node.graph
        if made and storage not in fresh:
            fresh.add(storage)
            memory.made(storage, real)
        if value.uses:
            value.real = real
        tensor = value.tensor() if value.tensor is not None else None
        if tensor is not None and "_lazyviz" in tensor.__dict__:
            make_real(tensor, real)
            if real.layout is torch.strided:
                value.memory = _torch.MemoryRef(real)
    for storage in fresh:
        if not storage.uses and not storage.live:
            memory.freed(storage)


def consumed(node: TrackedNode, memory: ResidentMemory) -> None:
    """``node`` has run: free what it was the last to need."""
    for value in node.inputs:
        storage = value.storage
        value.uses -= 1
        storage.uses -= 1
        if not value.uses:
            value.real = None
        if not storage.uses and not storage.live:
            memory.freed(storage)


def _real(item: Any) -> Any:
    if isinstance(item, TrackedValue):
        real = item.real
        if real is None:
            if item.node is not None and item.node.error == FORGOTTEN:
                raise RuntimeError(FORGOTTEN)
            raise RuntimeError(f"internal error: {item!r} was freed before its last use")
        return real
    cls = type(item)
    if cls is list or cls is tuple:
        return cls([_real(entry) for entry in item])
    return item


def name_line(error: Exception, node: TrackedNode) -> None:
    """Add where the op was recorded to the error's message."""
    lines = []
    if node.source is not None:
        lines.append(f"{node.op} was recorded at {node.source}: {node.source.text}")
    if node.forward is not None and node.forward.source is not None:
        lines.append(
            f"it is the gradient of {node.forward.op} at {node.forward.source}: {node.forward.source.text}"
        )
    if lines and error.args and isinstance(error.args[0], str) and lines[0] not in error.args[0]:
        error.args = ("\n".join([error.args[0], *lines, STAYS]), *error.args[1:])
