"""Eager backend: runs the recorded kernels op by op, in program order, on the user's real tensors.

Nodes run exactly at the level at which they were recorded, below autograd and autocast, so the kernels, their
order and their inputs are those of eager PyTorch, and results are equal to the last bit. A value's memory is
freed after its last use. A tensor that the user still holds becomes real as soon as its node has run, so that
an interruption between two nodes loses nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..graph.ir import Failure, failure_of
from ..plan.remat.recompute_candidates import statistics
from ..process.deferred_signals import Deferred
from ..process.global_state_transaction import Transaction, complete
from ..record.lazy_tensor import make_real
from ..record.random_draw_order import SavedStates, set_state, state_of
from ..record.tape import Tape
from ..record.tracked_storages import TrackedNode, TrackedStorage, TrackedValue
from ..torch_internals import dispatch_level, fastest_op_calls, private_api
from . import stop_runs_at_exit, write_rollback
from .kernel_errors import note_failure
from .measured_memory import ResidentMemory
from .replay import native_codegen, node_passes

if TYPE_CHECKING:
    from .compute_value_stats import Summaries

Progress = Callable[[int, int, TrackedNode], None]


class AroundNodes(AbstractContextManager[Any], Protocol):
    """Callbacks between nodes; each gets the node's position."""

    def before(self, position: int) -> None: ...
    def after(self, position: int) -> None: ...
    def finished(self, position: int) -> None: ...


class Interrupted(RuntimeError):
    """Evaluation was canceled between two ops; ops that have run are done, the others are pending."""


def run(
    tape: Tape,
    nodes: Sequence[TrackedNode],
    memory: ResidentMemory,
    *,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
    timed: bool = False,
    around: AroundNodes | None = None,
    seen: Summaries | None = None,
    marks: list[tuple[TrackedNode, Any, Any]] | None = None,
) -> None:
    """Run pending ``nodes``, given in program order with all they depend on.

    Args:
        memory: counts the memory that the run holds.
        progress: called after each node with the number done, the total and the node.
        cancelled: called before each node; if it returns true, the run stops.
        timed: store each node's seconds (host time; only meaningful on a synchronous device).
        around: called before and after each node, to drop and recompute values.
        seen: computes statistics of the values.
        marks: receives CUDA events recorded before and after each node.

    Raises:
        Interrupted: ``cancelled`` returned true.
        KeyboardInterrupt: the user interrupted; like a cancellation, between two ops.
        Exception: the kernel's error, with the recording line added to its message; the node
            is ``failed`` and may be evaluated again.
    """
    total = len(nodes)
    touched = nodes if around is None else None
    with kernel_level(tape, nodes, touched) as arrived, around or nullcontext(), ExitStack() as inference:
        for done, node in enumerate(nodes, 1):
            check_interrupts(arrived, cancelled, f"after {done - 1} of {total} ops")
            if around is not None:
                around.before(done - 1)
            if node.inference_mode != torch.is_inference_mode_enabled():
                if node.inference_mode:
                    inference.enter_context(private_api.inference_mode(True))
                else:
                    inference.close()
            if node.grad_mode != torch.is_grad_enabled():
                torch.set_grad_enabled(node.grad_mode)
            memory.step(node)
            start = time.perf_counter() - seconds_of_statistics(seen) if timed else 0.0
            begin = _cuda_event() if marks is not None else None
            run_node(node, memory, seen)
            if timed:
                node.measured_seconds = time.perf_counter() - seconds_of_statistics(seen) - start
            if marks is not None:
                marks.append((node, begin, _cuda_event()))
            if around is not None:
                around.after(done - 1)
                around.finished(done - 1)
            else:
                tape.pending_ops.finished(node)
            if progress is not None:
                report_progress(arrived, progress, done, total, node)


def seconds_of_statistics(seen: Summaries | None) -> float:
    """The seconds that were spent on computing value statistics."""
    return seen.seconds if seen is not None else 0.0


def _cuda_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class kernel_level:
    """Context in which calls run at the level at which they were recorded; yields the signals that arrive.

    ``drawing``: the nodes, at least those that draw random numbers; ``ran``: all of them, if their run
    touches nothing else.  Every sync point enters one.
    """

    __slots__ = (
        "_arrived", "_drawing", "_grad_mode", "_inference", "_level", "_outer_level", "_outside", "_ran",
        "_signals", "_states", "_tape",
    )  # fmt: skip

    def __init__(
        self, tape: Tape, drawing: Sequence[TrackedNode], ran: Sequence[TrackedNode] | None = None
    ) -> None:
        self._tape, self._drawing, self._ran = tape, drawing, ran

    def __enter__(self) -> Deferred:
        tape = self._tape
        self._level: AbstractContextManager[None] | None = None
        self._inference: AbstractContextManager[None] | None = None
        self._states: SavedStates = []
        self._grad_mode, self._outside = torch.is_grad_enabled(), tape.runs.running
        self._signals = Deferred()
        self._arrived = self._signals.__enter__()
        self._outer_level, self._arrived.level = self._arrived.level, self.outside
        self._arrived.leave = partial(self._leave, BaseException)
        try:
            stop_runs_at_exit.enter(self._arrived)
            if torch.is_inference_mode_enabled():  # each node runs in its recorded mode
                self._inference = private_api.inference_mode(False)
                self._inference.__enter__()
            tape.runs.running = threading.get_ident()
            self._level = dispatch_level.kernels_only()
            self._level.__enter__()
            if self._drawing:
                self._states = tape.generators.save(self._drawing)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self._arrived

    def __exit__(self, kind: Any, *error: object) -> None:
        complete(partial(self._leave, kind))

    def _leave(self, kind: Any) -> None:
        tape = self._tape
        try:
            torch.set_grad_enabled(self._grad_mode)
            if kind is not None:
                self._note_done()
            if self._states:
                tape.generators.restore(self._states)
        finally:
            try:
                if self._level is not None:
                    self._level.__exit__(None, None, None)
                    self._level = None
            finally:
                tape.runs.running = self._outside
                try:
                    tape.pending_ops.release_unused(self._ran)
                finally:
                    if self._inference is not None:
                        self._inference.__exit__(None, None, None)
                        self._inference = None
                    self._arrived.level, self._arrived.leave = self._outer_level, None
                    stop_runs_at_exit.leave(self._arrived)
                    self._signals.__exit__()

    def _note_done(self) -> None:
        """Remove nodes that have run from the pending nodes, even after an exception in between."""
        for node in self._drawing if self._ran is None else self._ran:
            if node.state == "done" and not node.is_rematerialized and node in self._tape.pending:
                self._tape.pending_ops.finished(node)

    def outside(self) -> Transaction:
        """A context that temporarily restores the outer level, so that user code called during a run finds
        PyTorch's state unchanged.
        """
        assert self._level is not None
        inference_mode = self._inference is not None
        return _Outside(self._tape, self._level, self._grad_mode, inference_mode, self._outside, self._states)


class _Outside(Transaction):
    """The context of :meth:`kernel_level.outside`: signal handlers may raise anywhere in it."""

    def __init__(
        self,
        tape: Tape,
        level: AbstractContextManager[None],
        grad_mode: bool,
        inference_mode: bool,
        running: int,
        states: SavedStates,
    ) -> None:
        self._tape, self._level = tape, level
        self._outer = running, grad_mode, inference_mode
        self._states = states  # of generators, from before the run; changed if the user's code draws or seeds
        self._lent: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def begin(self) -> None:
        running, grad_mode, inference_mode = self._outer
        self._inner = self._tape.runs.running, torch.is_grad_enabled()
        changes_inference = inference_mode is not torch.is_inference_mode_enabled()
        self.undo_by(self._reenter)
        if self._states:
            self._lend_generators()
        self._level.__exit__(None, None, None)
        self._tape.runs.running = running
        torch.set_grad_enabled(grad_mode)
        if changes_inference:
            mode = private_api.inference_mode(inference_mode)
            self.undo_by(mode.abandoned)
            mode.__enter__()
        user_level = self._tape.user_level()  # the sync point may be in an op
        self.undo_by(partial(user_level.__exit__, None, None, None))
        user_level.__enter__()

    def _reenter(self) -> None:
        self._level.__enter__()
        self._tape.runs.running, grad_mode = self._inner
        torch.set_grad_enabled(grad_mode)
        self._take_generators_back()

    def _lend_generators(self) -> None:
        """Give generators the states that they would have if the run ended here. Those with pending draws get
        states that mark them as such, so that no other draw comes in between.
        """
        inner = [state_of(generator) for generator, *_ in self._states]
        self._tape.generators.restore(self._states)
        lent = [state_of(generator) for generator, *_ in self._states]
        self._lent[:] = zip(range(len(lent)), inner, lent)

    def _take_generators_back(self) -> None:
        while self._lent:
            position, inner, lent = self._lent[-1]
            generator = self._states[position][0]
            state = state_of(generator)
            if not torch.equal(state, lent):  # the user's code has seeded it, or drawn
                self._states[position] = generator, state, None
            call_atomically(partial(set_state, generator, inner), partial(self._lent.pop))


def check_interrupts(arrived: Deferred, cancelled: Callable[[], bool] | None, where: str) -> None:
    """Between two nodes: call the handlers of signals that have arrived, which may raise.

    Raises:
        KeyboardInterrupt: the user interrupted.
        Interrupted: ``cancelled`` returned true.
    """
    if arrived:
        arrived.handle(where)
    if cancelled is not None and cancelled():
        raise Interrupted(f"canceled {where}")


def report_progress(arrived: Deferred, progress: Progress, done: int, total: int, node: TrackedNode) -> None:
    """Call the user's ``progress``; an exception that it raises stops the run between two nodes."""
    try:
        with arrived.level():
            progress(done, total, node)
    except BaseException as error:
        arrived.raised = error
        raise


def recorded_modes(node: TrackedNode) -> ExitStack:
    """Context with the recorded modes of ``node``; :func:`kernel_level` restores the grad mode."""
    stack = ExitStack()
    if node.inference_mode != torch.is_inference_mode_enabled():
        stack.enter_context(private_api.inference_mode(node.inference_mode))
    if node.grad_mode != torch.is_grad_enabled():
        torch.set_grad_enabled(node.grad_mode)
    return stack


_PLAIN = frozenset({int, float, bool, type(None)})


_called = partial.__call__


def call_atomically(*steps: partial[Any]) -> None:
    """Call ``steps``, C functions, one after another, without Python code in between."""
    deque(map(_called, steps), maxlen=0)


def call(node: TrackedNode) -> list[Any]:
    """The results of ``node``'s kernel for its inputs, which must exist.

    The state that it draws from does not advance, because it may have to run again.
    """
    ran: list[Any] = []
    _start(node, ran, [])
    return _as_list(ran[0])


def _start(node: TrackedNode, ran: list[Any], begun: list[Any]) -> None:
    """Run ``node``'s kernel; ``ran`` has its result as soon as it has run.

    No Python code runs in between, so no asynchronous exception can occur there. ``begun`` has an item if the
    kernel has failed and left memory partially written.
    """
    draws = node.draws
    args = [item if type(item) in _PLAIN else _real(item) for item in node.args]
    kwargs = {name: _real(item) for name, item in node.kwargs.items()} if node.kwargs else {}
    if node.is_rematerialized:
        args, kwargs = _without_statistics(node, args, kwargs)
    if draws is not None:
        draws.generator.set_state(draws.state)
    kernel = partial(fastest_op_calls.plain(node.op), *args, **kwargs)
    del args, kwargs
    if node.writes and not node.is_rematerialized:
        if write_rollback.is_refused(node):
            ran[:] = write_rollback.noted(begun, kernel)
            return
        if copied := write_rollback.copied(node):
            kernel = partial(write_rollback.guarded, [_real(value) for value in copied], kernel)
    ran[:] = map(_called, (kernel,))


def _as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _without_statistics(
    node: TrackedNode, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Use copies in place of running statistics, which have already been updated."""
    moved = statistics(node)
    if not moved:
        return list(args), kwargs
    args = [given.clone() if item in moved else given for item, given in zip(node.args, args)]
    kwargs = {name: given.clone() if node.kwargs[name] in moved else given for name, given in kwargs.items()}
    return list(args), kwargs


def run_node(node: TrackedNode, memory: ResidentMemory, seen: Summaries | None = None) -> None:
    ran: list[Any] = []
    begun: list[Any] = []
    note = partial(_note, node, ran, memory, seen)
    try:
        _start(node, ran, begun)
        complete(note)
    except BaseException as error:
        if ran:
            complete(note)
        else:
            note_failure(node, error, midway=bool(begun))
        raise


def _note(node: TrackedNode, ran: list[Any], memory: ResidentMemory, seen: Summaries | None) -> None:
    """Bookkeeping after ``node``'s kernel, with the result in ``ran``; may be called again if interrupted."""
    if len(ran) == 1:
        if node.draws is not None:
            node.draws.state = state_of(node.draws.generator)
        results = _as_list(ran[0])
        node.state = "done"
        node.error = None
        if seen is not None:
            seen.node(node, results)
        own = [value for value in node.outputs if value.node is node]  # an in-place op returns its argument
        if node.writes:
            for value in own:
                memory.resized(value.storage, results[value.index])
        # A kernel may omit a gradient that is not needed, although its shape rule includes it.
        deliver({value: results[value.index] for value in own if results[value.index] is not None}, memory)
        ran[1:] = map(node_passes.note_used, ((node,),))
        ran[0] = None
    free(node, memory)


def deliver(results: Mapping[TrackedValue, torch.Tensor], memory: ResidentMemory) -> None:
    """Store each computed tensor in its value, for later nodes, and in the user's tensor, if there is one."""
    fresh: set[TrackedStorage] = set()
    for value, real in results.items():
        storage, node = value.storage, value.node
        made = node is not None and storage.created == node.index and storage.graph is node.graph
        if made and storage not in fresh:
            fresh.add(storage)
            memory.made(storage, real)
        if value.uses:
            value.real = real
        if value.tensor is not None:
            store_result(value, real)
    for storage in fresh:
        if not storage.uses and not storage.live:
            memory.freed(storage)


def store_result(value: TrackedValue, real: torch.Tensor | None) -> None:
    """Make the user's tensor real, if it still exists; a kernel may omit a result."""
    if real is None or native_codegen.store_result(value, real):
        return
    for ref in list(value.refs()):
        tensor = ref()
        if tensor is not None and "_lazyviz" in tensor.__dict__:
            make_real(tensor, real)
            if real.layout is torch.strided:
                value.memory = private_api.MemoryRef(real)


def consumed(node: TrackedNode, memory: ResidentMemory) -> None:
    """Free the values that only ``node``, which has run, still needed."""
    node_passes.note_used((node,))
    free(node, memory)


def free(node: TrackedNode, memory: ResidentMemory) -> None:
    """Free the inputs of ``node`` that no other node needs."""
    for value in node.inputs:
        storage = value.storage
        if not value.uses:
            value.real = None
        if not storage.uses and not storage.live:
            memory.freed(storage)


def _real(item: Any) -> Any:
    if isinstance(item, TrackedValue):
        real = item.real
        if real is None:
            if item.node is not None and failure_of(item.node.error) is Failure.FORGOTTEN:
                raise RuntimeError(item.node.error)
            raise RuntimeError(f"internal error: {item!r} was freed before its last use")
        return real
    cls = type(item)
    if cls is list or cls is tuple:
        return cls([_real(entry) for entry in item])
    return item
