"""Sync points: pending ops run when something needs their values, under one lock."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from types import BuiltinFunctionType, FrameType
from typing import Any, ClassVar, Protocol

import torch

from ..graph.collective_info import NAMESPACES
from ..graph.ir import Graph, RunInside, SourceLine, SyncPoint, at
from ..process.global_state_transaction import Transaction
from ..torch_internals import dynamo, fake_cuda_devices
from .dependency_closure import Search, sequence_of
from .provenance.module_calls_and_phases import Scopes
from .recording_state import RecordingState
from .tracked_storages import TrackedNode

NESTED = (
    "an evaluation is in progress, and code that it calls (a progress callback, a listener, a signal "
    "handler, "
    "a finalizer) needs ops that have not run; the evaluation continues: try again when it has ended"
)
WITHIN_OP = (
    "an operator is being recorded, and code that Python calls in between (a finalizer) needs ops that have "
    "not run, or calls operators itself; recording continues: try again later"
)
TRACE_ELSEWHERE = (
    "Tracing runs the program on tensors with values: trace it on the CPU, and move what was traced to the "
    "planned GPU."
)


FEW = 4  # nodes: a read that needs no more makes hardly any activations
_MUCH = 2**20  # bytes of activations


# They never fail, for elements of any type, and draw no numbers.
_SMALL_UPDATES = frozenset(
    getattr(packet, part)
    for name in (
        *("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "_foreach_add_", "_foreach_mul_"),
        *("zeros", "ones", "full", "zeros_like", "ones_like", "zero_", "fill_", "detach"),
    )
    for packet in [getattr(torch.ops.aten, name)]
    for part in {"default", "Tensor", "Scalar", "List", "ScalarList"}.intersection(packet.overloads())
)
SMALL = 16  # bytes: one element of any type


def is_small_update(node: TrackedNode) -> bool:
    """Whether the node updates a step counter, a running total, or a similar number on the CPU."""
    if node.op is torch.ops.aten.empty.memory_format:  # batch norm makes one without elements
        return not any(value.storage.nbytes for value in node.outputs)
    # Sizes first, because hashing an operator calls Python code.
    return (
        all(value.storage.nbytes <= SMALL and value.meta.device.type == "cpu" for value in node.outputs)
        and node.op in _SMALL_UPDATES
    )


def with_small_updates(nodes: list[TrackedNode], graph: Graph) -> list[TrackedNode]:
    """The nodes that a read needs, and the pending step counters and running totals between them.

    No loss depends on the step counters of AdamW.  If each loss is read, all their updates would be pending
    at the end of the block, and running them alone takes longer than running each with its step.
    """
    if len(nodes) <= FEW or nodes[0].graph is not graph or nodes[-1].graph is not graph:
        return nodes
    start, last = graph.considered_by_reads[0], nodes[-1].index
    if last - start + 1 <= len(nodes):
        return nodes
    chosen = set(nodes)
    more = []
    node: Any
    for node in graph.nodes[start:last]:
        if (
            node.state == "pending"
            and node not in chosen
            and is_small_update(node)
            and all(
                other is None or other.state == "done" or other in chosen
                for other in (*(value.node for value in node.inputs), *node.after)
            )
        ):
            more.append(node)
            chosen.add(node)
    return sorted([*nodes, *more], key=sequence_of) if more else nodes


def with_earlier_backward(nodes: list[TrackedNode], graph: Graph) -> list[TrackedNode]:
    """The nodes that a read needs, and pending backward passes before them whose forward passes have run.

    The loss of a micro-batch does not need its backward pass.  If gradients are accumulated and each loss is
    read, the activations of all micro-batches would exist until the optimizer's step, while eager PyTorch has
    those of one.  Each node is considered twice, at the read that runs its forward node and at the next one,
    so that reads in long blocks cost the same.
    """
    if len(nodes) <= FEW or nodes[0].graph is not graph or nodes[-1].graph is not graph:
        return nodes
    first, last = nodes[0].index, nodes[-1].index
    start, before = graph.considered_by_reads
    graph.considered_by_reads = before, max(before, last)
    # Usually, everything from the first node on is needed: the step before, and this one's forward pass.
    stop = first if last - first + 1 == len(nodes) else last
    waiting = _backward_of_what_ran(graph.nodes[start:stop]) if start < stop else ()
    kept = {
        value.storage: value.storage.nbytes
        for node in waiting
        for value in node.inputs
        if value.storage.role is None and (value.node is None or value.node.state == "done")
    }
    if sum(kept.values()) < _MUCH:
        return nodes
    more = Search.closure([*nodes, *waiting])
    needed = set(nodes)
    return nodes if any(node.state == "failed" and node not in needed for node in more) else more


def _backward_of_what_ran(nodes: Sequence[Any]) -> Sequence[TrackedNode]:
    """The pending backward nodes of forward nodes that have run, and sums of the gradients they compute."""
    found: dict[TrackedNode, None] = {}
    for node in nodes:
        if node.phase != "backward" or node.state != "pending":
            continue
        forward = node.forward
        if forward.state == "done" if forward is not None else any(v.node in found for v in node.inputs):
            found[node] = None
    return tuple(found)


class RunLock(type(threading.RLock())):  # type: ignore[misc]
    """Reentrant lock, held while nodes are chosen and run.

    Acquiring and releasing it with ``with`` happens entirely in C, so that no asynchronous exception can
    leave it locked, which would block all other threads forever.
    """

    @property
    def is_mine(self) -> bool:
        return bool(self._is_owned())

    @property
    def is_free(self) -> bool:
        """Whether no thread holds it."""
        return repr(self).startswith("<unlocked ") or not self.owner

    @property
    def owner(self) -> int:
        """The thread that holds it, or 0. Python has no other way to find out."""
        found = re.findall(r"owner=(-?\d+)", repr(self))
        # A library that replaces threads (gevent) has a lock in Python.
        return int(found[0] if found else getattr(self, "_owner", None) or 0)

    @property
    def is_lost(self) -> bool:
        """Whether a thread that no longer exists holds the lock."""
        if not isinstance(threading.get_ident, BuiltinFunctionType):
            return False  # its owner is a greenlet, and no list has all of them
        return self.owner not in (0, *[thread.ident for thread in threading.enumerate()])

    def wait(self) -> None:
        """Wait until no other thread holds it."""
        # In C, because a tracer (of a debugger, or a test) could raise while a `with` statement holds it.
        deque(map(partial.__call__, (partial(self.acquire), partial(self.release))), maxlen=0)


class if_free(Transaction):
    """Holds a lock unless it is held already, by this thread or another; its value says whether it does.

    Unlike :meth:`RunLock.wait` and the ``with`` statement of the lock, it does not wait.
    """

    def __init__(self, lock: RunLock) -> None:
        self._lock = lock

    def begin(self) -> bool:
        if self._lock.is_mine:
            return False
        self.undo_by(self._release)
        return bool(self._lock.acquire(blocking=False))

    def _release(self) -> None:
        if self._lock.is_mine:
            self._lock.release()


_MOST_CAUSES = 10_000  # cached texts
_LONGEST_WAIT = 0.5  # seconds, for an op that is being recorded
# Reads of addresses, not of values: they need no evaluation if the memory already exists.
ADDRESSES = frozenset({"data_ptr", "storage access", "set_"})


def _computes_nothing(node: TrackedNode) -> bool:
    """Whether it creates a view or an empty tensor."""
    return node.op.is_view or all(value.storage.nbytes == 0 for value in node.outputs)


class SyncError(RuntimeError):
    """An op needed values where sync points are forbidden."""


class AbsentDeviceError(RuntimeError):
    """A value is needed that only an absent GPU could compute."""


@contextmanager
def without_shapes(absent: object) -> Iterator[None]:
    """Context in which a parameter of a lazy module, which has no shape yet, is created, moved or cast.

    Raises:
        AbsentDeviceError: it would be on the planned GPU ``absent``.
    """
    try:
        yield
    except NotImplementedError:  # PyTorch has no kernels for that GPU
        if absent is None:
            raise
        raise AbsentDeviceError(
            "The parameters of a lazy module (LazyLinear, ...) have no shapes before its first call, so they "
            "cannot be on a planned GPU. Call the module once on the CPU, with an input of that shape, "
            "before you move it."
        ) from None


class OtherRanks:
    """``ranks``: ops were recorded that need the other ranks, which do not exist."""

    ranks: ClassVar[bool] = False


class Evaluator(Protocol):
    """Runs pending nodes, given in program order; provided by a later stage."""

    def __call__(self, nodes: Sequence[TrackedNode], cause: str) -> None: ...


class Background(Protocol):
    """A run whose kernels run on another thread; its nodes are not marked as done yet."""

    @property
    def nodes(self) -> AbstractSet[TrackedNode]: ...
    def finish(self) -> None:
        """Wait until it ends, and mark its nodes as done; raises its error, if any."""

    def finish_first(self, needed: Iterable[TrackedNode]) -> None:
        """Like :meth:`finish`, for its nodes up to the last of ``needed``, or for all of them."""


class PendingRuns:
    """Runs of pending nodes: their evaluator and threads, and the sync points that request them.

    It has slots, because the compiled recorder reads one at every op.
    """

    __slots__ = (
        "_causes",
        "_recording",
        "_scopes",
        "background",
        "evaluator",
        "lock",
        "running",
        "active_thread",
    )

    def __init__(self, recording: RecordingState, scopes: Scopes) -> None:
        self._recording, self._scopes = recording, scopes
        # By cause and ids of the lines, which it keeps alive: "item at train.py:4".
        self._causes: dict[tuple[str, int, int], tuple[str, SourceLine | None, SourceLine | None]] = {}
        self.evaluator: Evaluator | None = None
        self.lock = RunLock()
        self.background: Background | None = None  # accessed while holding the lock
        self.running = 0  # thread that runs nodes: reads by a kernel itself need no evaluation
        self.active_thread = 0  # thread whose run has not ended, although it may be in a user's callback

    def await_recorder(self) -> None:
        """Wait until no other thread is in the middle of recording an op; for a run that is about to choose
        what its nodes may free.

        A thread that starts another op finds that a run is active, and waits for its end.  The time is
        limited, because this thread holds the lock, which code in the middle of an op may wait for.
        """
        recording = self._recording
        if recording.busy and recording.owner != threading.get_ident():
            end = time.monotonic() + _LONGEST_WAIT
            while recording.busy and time.monotonic() < end:
                time.sleep(0.0001)

    def await_result(self, tensor: torch.Tensor) -> None:
        """Wait for the run of another thread, if it may be about to make ``tensor`` an ordinary one."""
        active = self.active_thread
        if active and active != threading.get_ident() and "_lazyviz" in tensor.__dict__:
            self.lock.wait()

    def sync(
        self, cause: str, needed: Iterable[TrackedNode], nbytes: int = 0, *, a_number: bool = False
    ) -> None:
        """Evaluate ``needed`` and its dependencies; add the sync point to the graph being recorded.

        ``a_number``: Python numbers are read, for which the user can assume values.

        Raises:
            SyncError: sync points are forbidden here.
            AbsentDeviceError: only a GPU could compute it that is not on this machine.
        """
        recording = self._recording
        with self.lock:  # nodes that run on another thread must not be selected again
            nodes = Search.closure(needed)
            line, reader = self._scopes.sources.read_at(sys._getframe(1))
            if (fake_cuda_devices.STAND_INS or OtherRanks.ranks) and needs_absent(nodes):
                raise AbsentDeviceError(self._needs_absent(nodes, cause, line, reader, a_number))
            noted = recording.graph is not None and not (
                cause in ADDRESSES and all(map(_computes_nothing, nodes))
            )
            if noted and not recording.allow_sync:
                where = at(line, reader) + (f": {line.text}" if line else "")
                raise SyncError(
                    f"{cause} needs {len(nodes)} pending ops to run{where}; sync points are forbidden here"
                )
            if noted and recording.graph is not None:
                for extended in (with_small_updates, with_earlier_backward):
                    more = extended(nodes, recording.graph)
                    if more is not nodes and not needs_absent(more):
                        nodes = more
            start = time.perf_counter()
            if nodes:
                assert self.evaluator is not None, (
                    "lazyviz.session.connect_packages_and_exit_handlers gives it one"
                )
                known = self._causes.get((cause, id(line), id(reader)))
                self.evaluator(nodes, known[0] if known is not None else self._located(cause, line, reader))
            if noted and recording.graph is not None:
                seconds, index = time.perf_counter() - start, len(recording.graph.nodes)
                self.note_run(nodes, recording.graph)
                point = SyncPoint(cause, line, len(nodes), seconds, nbytes, index, reader)
                recording.graph.sync_points.append(point)

    def _located(self, cause: str, line: SourceLine | None, reader: SourceLine | None) -> str:
        """The cause with its place, cached."""
        if len(self._causes) >= _MOST_CAUSES:
            self._causes.clear()
        text = cause + at(line, reader)
        self._causes[cause, id(line), id(reader)] = text, line, reader
        return text

    def _needs_absent(
        self,
        nodes: Sequence[TrackedNode],
        cause: str,
        line: SourceLine | None,
        reader: SourceLine | None,
        a_number: bool,
    ) -> str:
        """Why ``nodes`` cannot run, and what the user can do."""
        recording = self._recording
        where = at(line, reader) + (f" ({line.text.strip()})" if line else "")
        text = f"{cause}{where} needs a value that {_describe_origin(nodes)}"
        if recording.absent is not None or recording.world is not None:
            text += "; the plan covers what was recorded before it"
        text += "."
        quantizes = "a quantized tensor" in cause or _quantizes_weights()
        if recording.absent is not None and a_number and line is not None and not quantizes:
            text += (
                f" To continue, give the value: %%lazy --assume {line.line}=VALUE, or "
                f"lazyviz.lazy(assume={{{line.line}: VALUE}})."
            )
        if cause.startswith(("torch.export", dynamo.EXPORT, "torch.jit.trace", "tracing ")):
            text += f" {TRACE_ELSEWHERE}"
        if quantizes:
            text += (
                " Quantized tensors are not planned on an absent GPU: quantize the model on the CPU, or plan "
                "with device='cpu'."
            )
        if "sparse" in cause:
            text += (
                " Planned are the sparse gradients of nn.Embedding and nn.EmbeddingBag, and COO tensors "
                "without autograd history."
            )
        return text

    def finish_background(self, nodes: Iterable[TrackedNode] | None = None) -> bool:
        """Finish the run on another thread, if there is one and any of ``nodes`` belongs to it.

        Without ``nodes``, finish any such run. Returns whether there was one.
        """
        background = self.background
        if background is None or (nodes is not None and background.nodes.isdisjoint(nodes)):
            return False
        background.finish()
        return True

    def finish_first(self, nodes: Iterable[TrackedNode]) -> bool:
        """Finish what ``nodes`` need of the run on another thread, if there is one and any of them belongs to
        it; returns whether there was one.
        """
        background = self.background
        if background is None or background.nodes.isdisjoint(nodes):
            return False
        background.finish_first(nodes)
        return True

    def evaluate(self, nodes: Sequence[TrackedNode], cause: str) -> None:
        assert self.evaluator is not None, "lazyviz.session.connect_packages_and_exit_handlers gives it one"
        self.evaluator(nodes, cause)

    def note_run(self, nodes: Sequence[TrackedNode], graph: Graph) -> None:
        """Note that ``nodes``, in program order, have run while ``graph`` is being recorded."""
        if ran := _positions(nodes, graph):
            index, own = len(graph.nodes), graph.nodes
            values = chain.from_iterable([own[position].outputs for position in ran])
            gone = [value.storage for value in values if value.storage.dropped == index]
            graph.runs_inside.append(RunInside(index, ran, gone))

    def refuse_nested(self) -> None:
        """Raise ``RuntimeError`` while the pending nodes must not change: during a run of this thread, or
        while it is making a node.
        """
        if self.active_thread == threading.get_ident():
            raise RuntimeError(NESTED)
        if self._recording.appending == threading.get_ident():
            raise RuntimeError(WITHIN_OP)


def _positions(nodes: Sequence[TrackedNode], graph: Graph) -> Sequence[int]:
    """The positions of those ``nodes`` that belong to ``graph``; ``nodes`` are in program order."""
    if not nodes:
        return ()
    first, last = nodes[0], nodes[-1]
    if first.graph is last.graph is graph and last.index - first.index == len(nodes) - 1:
        return range(first.index, last.index + 1)  # nearly always, and every read comes here
    return tuple([node.index for node in nodes if node.graph is graph])


def may_need_absent() -> bool:
    """Whether :func:`needs_absent` can be true in this process."""
    return bool(fake_cuda_devices.STAND_INS) or OtherRanks.ranks


def needs_absent(nodes: Iterable[TrackedNode]) -> bool:
    """Whether only a GPU that is not on this machine, or other ranks, could run some of ``nodes``."""
    absent = fake_cuda_devices.STAND_INS
    if not absent:
        return OtherRanks.ranks and any(node.op.namespace in NAMESPACES for node in nodes)
    return any(
        node.op.namespace in NAMESPACES
        or any(value.meta.device in absent for value in (*node.outputs, *node.inputs))
        for node in nodes
    )


def without_absent(nodes: Iterable[TrackedNode]) -> list[TrackedNode]:
    """Those of ``nodes``, in program order, that do not depend on an absent device."""
    nodes = list(nodes)
    planned: set[TrackedNode] = set()
    for node in nodes if may_need_absent() else ():
        needed = (*(value.node for value in node.inputs), *node.after)
        if needs_absent([node]) or not planned.isdisjoint(needed):
            planned.add(node)
    return [node for node in nodes if node not in planned]


_CONVERTERS = frozenset({"quantize", "quantize_dynamic", "quantize_qat", "convert", "convert_fx"})


def _quantizes_weights() -> bool:
    """Whether PyTorch is replacing modules by quantized ones: values of weights decide their scales."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in _CONVERTERS and "quantization" in Path(code.co_filename).parts:
            return True
        frame = frame.f_back
    return False


def _describe_origin(nodes: Sequence[TrackedNode]) -> str:
    """The absent device or ranks that ``nodes`` need."""
    absent = fake_cuda_devices.STAND_INS
    if any(value.meta.device in absent for node in nodes for value in node.outputs):
        return "only the planned GPU could compute, and it is not on this machine"
    return "depends on data of the other planned ranks, which do not exist"
