"""Lazy blocks: entering and leaving one switches the recording state as a whole.

A part of :mod:`lazyviz.session.lazy_graph`.  Everything that may fail, take time, or call user code happens
before the switch (options, a run on another thread, pending evaluations) or after it (names, bookkeeping).
"""

from __future__ import annotations

import contextvars
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch

from ..execute import stop_runs_at_exit
from ..execute.backend_registry import find_backend
from ..execute.microbatch.ray_and_ipyparallel import is_cluster
from ..graph.ir import Graph
from ..plan.devices.device_lookup import DeviceLike
from ..process.deferred_signals import deferred, deferring
from ..process.gc_pause import patience
from ..process.global_state_lock import CriticalSection, forget_holder
from ..process.global_state_transaction import Transaction
from ..process.thread_lifetime import lifetime
from ..process.tracebacks import shorten_block
from ..record.dependency_closure import closure
from ..record.distributed.planned_rank import world_size
from ..record.free_graph_with_owner import release_unreferenced
from ..record.provenance.variable_names import global_models_of, name_earlier, name_tensors, variables_of
from ..record.recording_state import HELD_BYTES_LIMIT
from ..record.tape import tape
from ..record.tracked_storages import TrackedNode, TrackedStorage, TrackedValue, Unreachable
from ..torch_internals import op_stream, private_api
from . import device_options, evaluation
from .argument_type_checks import check_texts, check_type
from .batch_specification import BatchLike, NamedBatch, bound_names, unknown_names
from .error_that_ended_block import note_raised
from .recorded_graph_interface import RecordedGraph
from .run_options import Recompute, RunOptions, recompute_option

_ANOTHER_THREAD = "another thread is recording; one lazy block at a time"
_ANOTHER_TASK = (
    "another task is recording; one lazy block at a time: leave a block before you await, or open it around "
    "the tasks"
)


@dataclass(frozen=True)
class Options:
    """The arguments of :func:`lazyviz.lazy`."""

    device: DeviceLike | None = None
    batch: BatchLike | None = None
    split: int | str | None = "off"
    backend: str = "eager"
    allow_sync: bool = True
    assume: Mapping[int | str, Any] | None = None
    held_bytes_limit: int = HELD_BYTES_LIMIT
    code: str = ""
    names: Mapping[str, Any] | None = None
    whole: Sequence[str] = ()
    independent_rng: bool = False
    recompute: int | str | None = "off"
    mesh: Sequence[int] | int | None = None
    rank: int = 0
    torch_version: str | None = None

    def checked(self) -> tuple[int | str, Recompute]:
        """The split and the recompute budget, after checking the combination.

        Raises ``ValueError`` for an invalid combination, ``TypeError`` for an option of a wrong type.
        """
        check_type("names", self.names, Mapping, "a mapping of variables", optional=True)
        check_type("held_bytes_limit", self.held_bytes_limit, (int, float), "a number of bytes")
        check_type("code", self.code, str, "text")
        check_texts("whole", self.whole, "['cumsum']")
        split = "off" if self.split is None else self.split
        recompute = recompute_option(self.recompute)
        has_batch = self.batch is not None
        RunOptions(self.backend, split=split, recompute=recompute).validate(has_batch=has_batch)
        if split == "off" and is_cluster(find_backend(self.backend)):
            split = "auto"  # a cluster runs pieces
        return split, recompute

    def named_batch(self, frame: FrameType) -> NamedBatch | None:
        """The batch; names are looked up in the code around the block."""
        if self.batch is None:
            return None
        names = self.names
        look_up: Callable[[], Mapping[str, Any]] = (
            (lambda: names) if names is not None else (lambda: {**frame.f_globals, **frame.f_locals})
        )
        named = NamedBatch(self.batch, look_up)
        if names is None and (reason := unknown_names(named.names, look_up(), bound_names(frame.f_code))):
            raise ValueError(f"batch: {reason}")
        return named


G = TypeVar("G", bound=RecordedGraph)


class LazyBlock(Transaction, Generic[G]):
    """The context manager that :func:`lazyviz.lazy` returns; it records one ``with`` statement."""

    name = "this lazy block"

    def __init__(self, make: Callable[..., G], options: Options) -> None:
        self._make = make
        self.options = options
        self.graph: G | None = None
        self.thread = 0
        self._lifetime: Callable[[], object] | None = None  # None is returned once that thread has ended
        self.named: NamedBatch | None = None
        self._outer: LazyBlock[Any] | None = None  # in the same task
        # The frames of user code where it begins and ends, if other code enters and exits it; or the
        # variables at the end.
        self.begins_in: FrameType | None = None
        self.ends_in: FrameType | Mapping[str, Any] | None = None
        self._unaccounted = False
        self._is_suspended = False

    def _recreate_cm(self) -> LazyBlock[G]:  # each call of a function that it decorates is a block
        return LazyBlock(self._make, replace(self.options))

    # --- entering -------------------------------------------------------------------

    if TYPE_CHECKING:

        def __enter__(self) -> G: ...

    def begin(self) -> G:
        frame, self.begins_in = self.begins_in or sys._getframe(2), None
        options = self.options
        split, recompute = options.checked()
        named = options.named_batch(frame)
        size = world_size(options.mesh, options.rank)
        device, gpu = device_options.resolved(options.device, size, options.rank, options.torch_version)
        self.thread, self._lifetime = threading.get_ident(), lifetime()
        _finish_orphans()
        self._refuse_others()
        tape.runs.refuse_nested()
        stop_runs_at_exit.uses()
        tape.runs.lock.wait()  # finish a run on another thread first
        self._new = partial(
            self._make,
            device=device,
            backend=options.backend,
            code=options.code,
            batch=named,
            split=split,
            recompute=recompute,
        )
        graph = self._new(Graph())
        ir = graph.ir
        if named is not None:
            named.begin(tape, ir)
        ir.cudnn_benchmark = torch.backends.cudnn.benchmark
        ir.whole, ir.independent_rng = tuple(options.whole), options.independent_rng
        ir.is_cell = bool(options.code)
        ir.place = tape.scopes.sources.opened_at(frame, whole_cell=ir.is_cell)
        world = device_options.one_of_many(tape, size, options.rank, gpu, ir, device)
        gpus = device_options.gpus(tape, gpu, ir, options.assume, device)
        if not _open:
            if Unreachable.possible and tape.pending:
                tape.pending_ops.forget_lost()
            if tape.pending_ops.overdue:
                evaluation.run_writes_of_known_values()
            release_unreferenced()
        self._take(graph)
        self.named = named
        with CriticalSection():
            self._exchange(frame, gpus, world)
        return graph

    def _take(self, graph: G) -> None:
        """Record in ``graph`` when it is published."""
        ir = graph.ir
        evaluation.graphs[id(ir)] = graph
        evaluation.latest = weakref.ref(graph)
        tape.pending_ops.watch(ir)
        self.graph, self._title = graph, graph.title
        self._start = time.perf_counter()

    def renew(self, between: Callable[[G], None], place: FrameType | None = None) -> None:
        """End the graph here, call ``between`` with it while not recording, and continue with a new graph.

        For a block without a planned GPU, batch, or outer block.  This is cheaper than closing the block and
        opening another one, because patches and modes stay in place.  The graph's tensors are named after the
        variables in ``place``, if it is given.
        """
        graph = self.graph
        assert graph is not None
        ir = graph.ir
        evaluation.watch.stays = True
        try:
            with CriticalSection():
                self._unpublish()
            tape.runs.finish_background()  # then only nodes of this graph are pending
            if place is not None:
                self.ends_in = place
                self._name_tensors()
            self._account()
            between(graph)
            del graph
            release_unreferenced()
            following = self._new(Graph())
            following.ir.place, following.ir.is_cell = ir.place, ir.is_cell
            self._take(following)
            with CriticalSection():
                self._unaccounted = True
                _open.append(self)
                _publish()
        finally:
            evaluation.watch.stays = False

    def suspend(self, shown: G) -> None:
        """Stop recording until :meth:`resume`: PyTorch is as it is outside of blocks.

        ``shown`` is the last graph as long as there is no newer one.  For a block like that of :meth:`renew`
        whose graph is empty, while nothing is pending.
        """
        with CriticalSection():
            self._unpublish()
            _stop_watching()
            self._unaccounted, self._is_suspended = False, True
        evaluation.latest = weakref.ref(shown)

    def resume(self) -> None:
        """Record again; has no effect if the block was closed meanwhile."""
        graph = self.graph
        if graph is None or self not in _claims or self in _open:
            return
        with CriticalSection():
            self._watch()
            self._unaccounted, self._is_suspended = True, False
            _open.append(self)
            _publish()
        self._start = time.perf_counter()
        evaluation.latest = weakref.ref(graph)

    def _watch(self) -> None:
        """Install the modes and patches for recording, unless another block has done so."""
        if not _open:
            evaluation.watch.begin_recording()
            tape.scopes.sources.block = self._code
            patience.begin()

    @property
    def is_orphaned(self) -> bool:
        """Whether the thread that has entered it has ended; nothing is recorded in it any more."""
        return self._lifetime is not None and self._lifetime() is None

    @property
    def is_innermost(self) -> bool:
        """Whether this block is recording now, and not a block inside it."""
        return bool(_open) and _open[-1] is self

    def _refuse_others(self) -> LazyBlock[Any] | None:
        """The outer block; raises ``RuntimeError`` if it belongs to another thread or task."""
        outer = _claims[-1] if _claims else None
        if outer is not None and outer.thread != self.thread:
            raise RuntimeError(_ANOTHER_THREAD)
        if outer is not _innermost():
            raise RuntimeError(_ANOTHER_TASK)
        return outer

    def _exchange(self, frame: FrameType, gpus: Transaction | None, world: Transaction | None) -> None:
        self._outer = self._refuse_others()
        self.undo_by(self._withdraw)
        _claims.append(self)
        _block_of_task.set(self)
        self._unaccounted = True
        self.undo_by(_stop_watching)
        self._code = frame.f_code
        self._watch()
        if gpus is not None:
            self.undo_by(gpus.abandoned)
            gpus.__enter__()
        if world is not None:
            self.undo_by(world.abandoned)
            world.__enter__()
        outer = _open[-1] if _open else None
        self._first_node = private_api.sequence_number()
        self.undo_by(self._unpublish)
        _open.append(self)
        _publish()
        if outer is not None and outer.graph is not None and self.graph is not None:
            outer.graph.ir.nested.append((len(outer.graph.ir.nodes), self.graph.ir))
            self.graph.ir.outermost = outer.graph.ir.outermost

    # --- leaving --------------------------------------------------------------------

    def end(self, error: BaseException | None) -> None:
        if self.graph is not None:
            if error is not None:
                note_raised(self.graph.ir, error)
            self.graph.ir.rejected = None
        with CriticalSection():
            self.undo(1)  # all except the claim: the recorded ops are not registered yet
        if error is not None:
            shorten_block(error)
        self._name_tensors()
        if self.named is not None and self.graph is not None:
            self.named.resolve(tape, self.graph.ir)
        self._account()
        self.undo()
        self.graph = self.named = None  # contexts that were copied inside the block keep a reference to it
        if not _open and not tape.pending:  # nothing else refers to the graph: drop its ops
            with CriticalSection():
                _stop_watching()

    def abandoned(self) -> None:
        """Handle an exit without a regular end: recorded ops stay pending, without names."""
        with CriticalSection():
            self.undo(1)  # all except the claim: the recorded ops are not registered yet
        self._account()
        self.undo()

    def _name_tensors(self) -> None:
        """Name tensors and modules after variables, which inspects the contents of objects."""
        names, place = self.options.names, self.ends_in
        self.ends_in = None
        if self._is_suspended:
            return  # nothing was recorded after the last graph, which has its names
        if names is None and isinstance(place, Mapping):
            names = place
        frame: Any = sys._getframe() if place is None else place
        variables = names if names is not None else variables_of(frame)
        models = variables if names is not None else {**global_models_of(frame), **variables}
        place = frame = None  # avoids a reference cycle
        tape.scopes.name_modules(models)
        models = {name: each for name, each in models.items() if issubclass(type(each), torch.nn.Module)}
        name_tensors(tape.tensors.value_of, variables, copied=names is None)
        if self.graph is None:
            return
        ir = self.graph.ir
        if ir.sync_points or any(each.role == "parameter" and not each.name for each in ir.storages):
            held = _values_of_tensors(ir)
            if ir.sync_points:
                name_earlier(held, variables)
            tape.scopes.name_weights(held, {**models, **variables})

    def _account(self) -> None:
        """Register the recorded ops as pending ops of the graph."""
        graph = self.graph
        if graph is None or not self._unaccounted:
            return
        # Another thread, or the handler of a signal, may be about to run these ops.
        with tape.runs.lock, deferred():
            self._account_of(graph)

    def _account_of(self, graph: RecordedGraph) -> None:
        graph.ir.cudnn_benchmark |= torch.backends.cudnn.benchmark
        own = graph.unfinished()
        if own != list(tape.pending) and (earlier := len(closure(own)) - len(own)):
            # The plan covers only this cell's ops: name the other ops that its evaluation will run.
            graph.title = f"{self._title}, after {earlier:,} pending ops of earlier cells"
        if own:
            # It was removed by a sync point inside, after which nothing was pending.
            evaluation.graphs[id(graph.ir)] = graph
        else:
            evaluation.graphs.pop(id(graph.ir), None)
        tape.pending_ops.release_unused()
        self._unaccounted = False
        evaluation.metrics.add("record", time.perf_counter() - self._start)
        evaluation.metrics.count("graphs")
        evaluation.metrics.count("ops recorded", len(graph.ir))

    def _unpublish(self) -> None:
        with suppress(ValueError):  # not entered, or a signal handler has removed it
            _open.remove(self)
        _publish()
        if self.graph is not None:
            if threading.get_ident() == self.thread:  # each thread has its own numbers
                self.graph.ir.autograd_nodes = range(self._first_node, private_api.sequence_number())
            if not _open:
                tape.scopes.keep_forward_nodes(self.graph.ir)

    def _withdraw(self) -> None:
        with suppress(ValueError):  # not entered, or a signal handler has removed it
            _claims.remove(self)
        if _block_of_task.get() is self:
            _block_of_task.set(self._outer)


def _values_of_tensors(ir: Graph) -> list[TrackedValue]:
    """The values whose tensors still exist: in a long loop, these are few."""
    inputs, nodes = cast("list[TrackedValue]", ir.inputs), cast("list[TrackedNode]", ir.nodes)
    held = [value for value in inputs if value.tensor is not None]
    return held + [value for node in nodes for value in node.outputs if value.tensor is not None]


# --- what is open in this process ---------------------------------------------------------

_claims: list[LazyBlock[Any]] = []  # blocks that are recording or about to record; all on one thread
_open: list[LazyBlock[Any]] = []  # blocks that are recording, innermost last
_block_of_task = contextvars.ContextVar["LazyBlock[Any] | None"]("lazyviz_block", default=None)


def _innermost() -> LazyBlock[Any] | None:
    """The innermost block around this task's code."""
    block = _block_of_task.get()
    while block is not None and block not in _claims:
        block = block._outer
    return block


def _publish() -> None:
    """Record for the innermost open block, or nothing; idempotent."""
    block, recording = _open[-1] if _open else None, tape.recording
    recording.changed()
    if block is None or block.graph is None:
        recording.graph = None
        recording.owner, recording.allow_sync = 0, True
        recording.held_bytes_limit, recording.batch = HELD_BYTES_LIMIT, None
        TrackedStorage.recording = None
        tape.tensors.arrivals.end()
        return
    options = block.options
    TrackedStorage.recording = block.graph.ir
    recording.owner, recording.allow_sync = block.thread, options.allow_sync
    recording.held_bytes_limit = options.held_bytes_limit
    recording.batch = block.named.dim if block.named is not None else None
    recording.graph = block.graph.ir


def _stop_watching() -> None:
    if not _open:
        patience.end()
        evaluation.watch.end_recording()
        tape.scopes.sources.block = None


def open_blocks() -> list[LazyBlock[Any]]:
    """The recording blocks, innermost last."""
    return list(_open)


def is_any_entered() -> bool:
    """Whether a block has been entered and not exited; it may be suspended."""
    return bool(_claims)


def close_all() -> None:
    """End every open block; exiting it later has no effect."""
    forget_holder()
    with CriticalSection():
        for block in reversed(_claims):
            with suppress(Exception):  # in an unexpected state
                block.undo(1)
        _open.clear()
        _publish()
        _stop_watching()
        _claims.clear()


def _finish_orphans() -> None:
    """Exit the blocks of threads that have ended without exiting them; exiting them later has no effect."""
    for block in reversed(_claims.copy()):
        if block.is_orphaned:
            block.finish()


@deferring
def finish_at_exit() -> None:
    """At process exit: exit the blocks of suspended generators, which Python closes later."""
    running = sys._current_frames().keys() - {threading.get_ident()}
    for block in reversed(_claims.copy()):
        if block.thread not in running:
            block.finish()


def forget_in_child() -> None:
    """In a forked child: leave the parent's blocks, and restore PyTorch to its state outside of blocks."""
    forget_holder()
    op_stream.end()
    if not _claims:
        return
    for block in reversed(_claims.copy()):
        with suppress(Exception):  # another thread may have been about to enter or to leave it
            block.undo()
    _open.clear()
    _claims.clear()
    _publish()
    _stop_watching()
