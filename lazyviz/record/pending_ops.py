"""What is pending: evaluating it when something needs it, forgetting it when nothing can."""

from __future__ import annotations

import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Protocol

import torch

from ..graph.collectives import NAMESPACES
from ..graph.ir import Graph, SyncPoint, at
from ..process.transaction import Transaction
from ..torch_internals import cuda as torch_cuda
from ..torch_internals import private_api
from ..torch_internals.private_api import OpOverload
from . import observable_work
from .dependencies import closure
from .fake_cuda.card import Card
from .interception.memory_holders import MemoryHolders
from .interception.sparse_components import parts_of
from .lazy_tensor import LazyTensor
from .provenance.module_scopes import Scopes
from .rng import Generators
from .shapes.inference import ShapeCache
from .storage import FORGOTTEN, Lost, TensorRef, TrackedNode, TrackedStorage, TrackedValue, note_drop

HELD_BYTES_LIMIT = 4 * 2**30
"""Bytes of dropped outside tensors a pending graph may keep alive before it is evaluated."""
NOWHERE = 1  # no storage's address
MOST_LOST_GRAPHS = 16  # that are kept for nothing but an owed write of a known value


NESTED = (
    "an evaluation is under way, and what is called in its midst (a progress callback, a listener, a signal "
    "handler, a finalizer) needs ops that have not run; the evaluation goes on: ask again once it has ended"
)


class RunLock(type(threading.RLock())):  # type: ignore[misc]
    """Held while nodes are chosen and run; a thread may take it again.

    Taking it and giving it back by ``with`` is C's own work, so no exception from elsewhere comes between
    either and its being noted: a lock that such a one left behind would hold up all other threads for good.
    """

    @property
    def is_mine(self) -> bool:
        return bool(self._is_owned())

    @property
    def owner(self) -> int:
        """The thread that has it, 0: none.  Python tells by no other way."""
        return int(re.findall(r"owner=(-?\d+)", repr(self))[0])

    @property
    def is_lost(self) -> bool:
        """Whether a thread has it that is no more."""
        return self.owner not in (0, *[thread.ident for thread in threading.enumerate()])

    def wait(self) -> None:
        """Until no other thread has it."""
        with self:
            pass


# Reads of where memory lies, not of what it holds: nothing is waited for where it is there already.
_ADDRESSES = frozenset({"data_ptr", "storage access", "set_"})


def _computes_nothing(node: TrackedNode) -> bool:
    """Whether it makes a view, or something without elements."""
    return node.op.is_view or all(value.storage.nbytes == 0 for value in node.outputs)


class Paused(Transaction):
    """Context in which the thread that records does not; what others do is not recorded anyway."""

    def __init__(self, tape: PendingOps) -> None:
        self._tape = tape

    def begin(self) -> None:
        tape = self._tape
        before = tape.pauses
        mine = tape.owner == threading.get_ident() or private_api.current_autograd_node() is not None
        if tape.graph is not None and mine:
            self.undo_by(lambda: setattr(tape, "pauses", before))
            tape.pauses = before + 1


class SyncError(RuntimeError):
    """An op needed values where syncs are forbidden."""


class AbsentDeviceError(RuntimeError):
    """Something needs a value that only a GPU which is not on this machine could compute."""


class Elsewhere:
    """``ranks``: something was recorded that other ranks, which are not here, would have to take part in."""

    ranks: ClassVar[bool] = False


class OneRank(Protocol):
    """The rank of N that a cell is recorded for, without the others."""

    size: int
    rank: int

    def collective(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def functional(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recorded: Callable[..., Any]
    ) -> Any: ...


class Evaluator(Protocol):
    """Runs pending nodes, given in program order; provided by a later stage."""

    def __call__(self, nodes: Sequence[TrackedNode], cause: str) -> None: ...


class Assumed(Protocol):
    """A value that the user says a read gives."""

    @property
    def value(self) -> Any: ...


class PlannedCards(Protocol):
    """The GPUs that a cell is planned for and this machine has not."""

    @property
    def card(self) -> Card: ...
    def remove(self) -> None: ...
    def record(self, mode: Any, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def answer(self, needed: Sequence[TrackedNode]) -> Assumed | None: ...


class PendingOps:
    """What is pending in this process, with what it needs to be run and to be forgotten."""

    # Of these the compiled recorder asks at every op.
    __slots__ = (
        "__dict__", "__weakref__", "absent", "batch", "exported", "graph", "held_bytes_limit", "met",
        "outside", "owner", "pauses", "pending", "storages", "summing", "under_way", "viewed",
    )  # fmt: skip

    def __init__(self) -> None:
        self.graph: Graph | None = None
        self.owner = 0  # thread that records
        self.pauses = 0
        self.viewed: TensorRef | None = None  # the tensor of which a view is being made
        self.allow_sync = True
        self.step_at_once: str | None = None  # why the optimizer's step that is being taken is not recorded
        self.batch: Callable[[torch.Tensor], int | None] | None = None  # the dimension with a batch's samples
        self.summing: Any = None  # the mark of the autograd node whose results the engine adds to others now
        self.shapes = ShapeCache()
        self.scopes = Scopes()
        self.generators = Generators()
        self.evaluator: Evaluator | None = None
        self.lock = RunLock()
        self.running = 0  # thread that runs nodes: what a kernel itself reads is as it should be
        self.under_way = 0  # thread whose run has not ended, though it may be in a callback of the user's
        self.pending: dict[TrackedNode, None] = {}  # in program order
        self.outside: dict[int, TrackedValue] = {}  # by id of the real tensor
        self.storages: dict[int, TrackedStorage] = {}  # by address of the real storage
        # By address: who was given the memory while we looked; see `MemoryHolders`.
        self.exported: dict[int, list[tuple[Any, str]]] = {}
        self.memory_holders = MemoryHolders(self)
        self.scopes.meet, self.scopes.stepped = self.memory_holders.meet, self.end_step
        self.met: dict[int, TrackedStorage] = {}  # likewise, of what sync points made real: who it was
        self.made: dict[int, TrackedValue] = {}  # by id of the tensor: made at once, by this block
        self._many_outside = self._many_made = 200  # of these, when next to look for dead ones
        self._watched: set[weakref.ref[Graph]] = set()  # whose values point to tensors
        self._views: list[TrackedNode] = []  # pending ones recorded outside of a block
        self.held_bytes_limit = HELD_BYTES_LIMIT
        self.reachable: Callable[[], Iterable[Graph]] = tuple  # the graphs that somebody can evaluate
        self.unlink_tensors: Callable[[Iterable[Any], Iterable[Any]], None] = unlink_tensors  # or compiled
        # Of graphs that nobody can evaluate: what is known already and still owed, such as step counters.
        self.overdue: list[TrackedNode] = []
        self._born = time.perf_counter()
        self._looked_for = 0.0  # seconds
        self.absent: PlannedCards | None = None  # the card that is planned, where it is not in this machine
        self.world: OneRank | None = None  # of the ranks that are planned, the one that is recorded
        self.communicating = False  # what is recorded now is (a part of) a functional collective

    def sync(
        self, cause: str, needed: Iterable[TrackedNode], nbytes: int = 0, *, a_number: bool = False
    ) -> None:
        """Evaluate ``needed`` and what it depends on; note the sync point in the graph being recorded.

        ``a_number``: what is read are Python's numbers, which the user may assume.

        Raises:
            SyncError: syncs are forbidden here.
            AbsentDeviceError: only a GPU that is not here could compute it.
        """
        with self.lock:  # what another thread runs must not be chosen to be run once more
            self._sync(needed, cause, nbytes, a_number)

    def _sync(self, needed: Iterable[TrackedNode], cause: str, nbytes: int, a_number: bool) -> None:
        nodes = closure(needed)
        line, reader = self.scopes.sources.read_at(sys._getframe(2))
        if may_need_absent() and needs_absent(nodes):
            where = at(line, reader) + (f": {line.text}" if line else "")
            text = f"{cause}{where} needs a value that {_who(nodes)}"
            if self.absent is not None or self.world is not None:
                text += "; the plan is of what comes before"
            text += "."
            if self.absent is not None and a_number and line is not None:
                text += (
                    f" To go on, say what is read there: %%lazy --assume {line.line}=VALUE, or "
                    f"lazyviz.lazy(assume={{{line.line}: VALUE}})."
                )
            raise AbsentDeviceError(text)
        noted = self.graph is not None and not (cause in _ADDRESSES and all(map(_computes_nothing, nodes)))
        if noted and not self.allow_sync:
            where = at(line, reader) + (f": {line.text}" if line else "")
            raise SyncError(f"{cause} needs {len(nodes)} pending ops to run{where}; syncs are forbidden here")
        start = time.perf_counter()
        if nodes:
            assert self.evaluator is not None, "lazyviz.session.connect gives it one"
            self.evaluator(nodes, cause + at(line, reader))
        if noted and self.graph is not None:
            seconds, index = time.perf_counter() - start, len(self.graph.nodes)
            point = SyncPoint(cause, line, len(nodes), seconds, nbytes, index, reader)
            self.graph.sync_points.append(point)

    def evaluate(self, nodes: Sequence[TrackedNode], cause: str) -> None:
        assert self.evaluator is not None, "lazyviz.session.connect gives it one"
        self.evaluator(nodes, cause)

    def refuse_nested(self) -> None:
        """Raise ``RuntimeError`` in the midst of a run of this thread: what is pending is not to change."""
        if self.under_way == threading.get_ident():
            raise RuntimeError(NESTED)

    def view_is_made(self) -> None:
        """Autograd is done with the view: its base is what it was, if it is there and pending still."""
        tensor = self.viewed() if self.viewed is not None else None
        if type(tensor) is LazyTensor:
            private_api.show_as_wrapper(tensor, True)
        self.viewed = None

    def finished(self, node: TrackedNode, *, for_good: bool = True) -> None:
        """Called by the evaluator after each node; not ``for_good`` if it will run again."""
        self.pending.pop(node, None)
        if for_good:
            node.after = ()
        if for_good and any(
            value.node is not None and value.node.graph is not node.graph for value in node.inputs
        ):
            node.cut()
        if node.writes and not node.folded:
            for storage in node.writes:
                storage.shadow = None
        if self.graph is not None:
            self.made_real(value for value in node.outputs if value.node is node)

    def made_real(self, values: Iterable[TrackedValue]) -> None:
        """At a sync point: the rest of the record may come back to the memory of ``values``."""
        for value in values:
            tensor = value.tensor() if value.tensor is not None else None
            if tensor is not None:
                self.met[private_api.storage_address(tensor)] = value.storage

    def forget_shadow(self, tensor: torch.Tensor) -> None:
        """``tensor`` is about to be written without being recorded."""
        for part in [tensor] if tensor.layout == torch.strided else parts_of(tensor):
            storage = self.storages.get(private_api.storage_address(part))
            if storage is not None:
                storage.shadow = None

    def forget_storage(self, address: int, *, but_if_foreign: bool | None = None) -> list[TrackedNode]:
        """Have real memory met anew: who shows it has changed.  Returns what has to run before it is used.

        ``but_if_foreign``: nothing is forgotten where the record has it so already.
        """
        storage = self.storages.get(address)
        if storage is not None and but_if_foreign is False:
            return []
        for key, value in list(self.outside.items()):
            if value.storage.address == address and value.storage.foreign is not but_if_foreign:
                del self.outside[key]
                release(value)
        if storage is None:
            return []
        del self.storages[address]
        accesses = [*storage.readers, *([storage.writer] if storage.writer is not None else [])]
        return [node for node in accesses if node.state != "done"]

    def owed_to_overlapping(self, tensor: torch.Tensor) -> list[TrackedNode]:
        """Pending nodes on memory that is a part of ``tensor``'s, though their storages are others."""
        nodes: list[TrackedNode] = []
        for address in self.memory_holders.overlapped(tensor):
            if (storage := self.storages.get(address)) is not None:
                nodes += [*storage.readers, *([storage.writer] if storage.writer is not None else [])]
        return [node for node in nodes if node.state != "done"]

    def _drop_unseen_views(self) -> None:
        """Views taken outside of a block that nobody holds any more need not run."""
        for node in self._views:
            if node.state != "done" and not any(value.tensor or value.uses for value in node.outputs):
                node.state = "done"
                self._withdraw(node)
        self._views = [node for node in self._views if node.state != "done"]

    def _withdraw(self, node: TrackedNode) -> None:
        """Take a node out of what is pending; it no longer needs its inputs."""
        self.pending.pop(node, None)
        for value in node.inputs:
            value.uses -= 1
            value.storage.uses -= 1
            if not value.uses:
                value.real = None

    def forget_all(self) -> None:
        """Drop everything pending, unevaluated, for good."""
        graphs = {id(node.graph): node.graph for node in list(self.pending)}.values()
        for node in list(self.pending):
            node.state, node.error = "failed", FORGOTTEN
            self._withdraw(node)
        observable_work.give_up_gradients(
            [*self.outside.values(), *[value for ir in graphs for value in ir.inputs]]
        )
        self.generators.forget()
        self.overdue = []
        self.settle()

    def settle(self, ran: Sequence[TrackedNode] | None = None) -> None:
        """After an evaluation: forget real memory that nothing pending touches any more.

        With ``ran``, the nodes that were to run, at a cost that depends on these and not on what is pending.
        """
        if self._views:
            self._drop_unseen_views()
        if TrackedStorage.unused:
            self._forget_unused()
        if self.graph is None:
            self.met.clear()
            self.made.clear()
            if ran is None:  # the block has ended: no op is being recorded that would read them
                for value in list(self.outside.values()):
                    if not value.uses:
                        value.real = None
        if not self.pending:
            if self.graph is not None:
                self.met.update([(a, storage) for a, storage in list(self.storages.items()) if storage.live])
            self._forget_memory()
            if self.graph is None:
                self.scopes.forget_forward()
                self.scopes.sources.forget_old()
                self._let_go()
        elif ran is not None:
            PendingOps.settle_after(self, ran)
        else:
            self._settle_all()
        if len(self.outside) > self._many_outside or len(self.made) > self._many_made:
            self._forget_dead()

    def _forget_memory(self) -> None:
        self.outside.clear()
        self.storages.clear()
        TrackedStorage.held.clear()
        TrackedStorage.held_bytes = 0

    def settle_after(self, ran: Iterable[TrackedNode]) -> None:
        """The part of :meth:`settle` for memory that the nodes in ``ran`` touch: no other has changed."""
        for node in ran:
            for value in (*node.inputs, *node.outputs):
                storage = value.storage
                if value.real is None:
                    tensor = value.tensor() if value.node is None and value.tensor is not None else None
                    if tensor is not None and self.outside.get(id(tensor)) is value:
                        del self.outside[id(tensor)]
                elif value.uses and not storage.foreign:
                    self._place(storage, private_api.storage_address(value.real))
                if not storage.uses:
                    self._leave(storage)
                if storage.external:
                    storage.count_held()

    def _forget_dead(self) -> None:
        """Drop what is known of outside tensors that have died, now and then."""
        if len(self.outside) > self._many_outside:
            self.outside = {key: value for key, value in list(self.outside.items()) if value.real is not None}
            self._many_outside = 2 * len(self.outside) + 200
        if len(self.made) > self._many_made:
            self.made = {key: value for key, value in list(self.made.items()) if value.tensor is not None}
            self._many_made = 2 * len(self.made) + 200

    def _settle_all(self) -> None:
        storages = [storage for storage in list(self.storages.values()) if not storage.has_pending_access]
        for storage in storages:
            self._leave(storage)
        TrackedStorage.held.clear()
        TrackedStorage.held_bytes = 0
        for value in self._read_by_pending():
            storage, real = value.storage, value.real
            storage.count_held()
            if real is not None and not storage.foreign:
                self._place(storage, private_api.storage_address(real))
        self.outside = {key: value for key, value in list(self.outside.items()) if value.real is not None}

    def _place(self, storage: TrackedStorage, address: int) -> None:
        """Pending nodes read ``storage``, which is at ``address``."""
        if self.storages.setdefault(address, storage) is storage:
            storage.address = address

    def _leave(self, storage: TrackedStorage) -> None:
        """Nothing pending touches ``storage``: who meets its memory does so for the first time, or again."""
        address = storage.address
        if self.storages.get(address) is storage:
            del self.storages[address]
            if self.graph is not None and storage.live:
                self.met[address] = storage
            storage.address = NOWHERE  # values of it that no node has read yet are not to be read now

    def _forget_unused(self) -> None:
        """Let go of outside tensors that no node has read, and nobody has any more."""
        values = TrackedStorage.unused[:]
        del TrackedStorage.unused[: len(values)]
        for value in values:
            if not value.uses:
                value.real = None
                if not value.storage.uses:
                    self._leave(value.storage)

    def _read_by_pending(self) -> Iterable[TrackedValue]:
        """The values that pending nodes read, as far as they are real or outside; each once."""
        nodes = list(self.pending)
        graph = nodes[0].graph
        if nodes == graph.nodes:  # a block that has just ended, and nothing else: the rest is made by them
            return [value for value in graph.inputs if value.uses]  # type: ignore[attr-defined, misc]
        return dict.fromkeys([value for node in nodes for value in node.inputs])

    def watch(self, graph: Graph) -> None:
        """Have the graph's values point to the user's tensors until nothing is recorded or pending."""
        self._watched.add(weakref.ref(graph, self._watched.discard))

    def _let_go(self) -> None:
        """Nothing is recorded or pending: leave no weak references to the user's tensors."""
        graphs = [reference() for reference in tuple(self._watched)]
        self._watched.clear()
        for graph in graphs:
            if graph is not None:
                self.unlink_tensors(graph.nodes, graph.inputs)

    def forget_lost(self) -> None:
        """Forget what nobody can see any more, if something went out of sight since the last time.

        It looks at all that is pending, so it takes a tenth of the time at most, after the first moments.
        """
        if self.graph is not None or self.running or self.shapes.inferring:
            return
        if self.lock.is_mine:  # somebody has chosen what to run
            return
        taken: list[bool] = []  # with the answer as soon as there is one
        try:
            taken.extend(map(self.lock.acquire, (False,)))
            if not taken[0]:
                return
            start = time.perf_counter()
            if self._looked_for > 0.05 + 0.1 * (start - self._born):
                return
            Lost.something = False
            self.forget_unreachable(self.reachable())
            known = [node for node in list(self.pending) if node.folded and node.graph.lost]
            self.overdue = known if len({id(node.graph) for node in known}) >= MOST_LOST_GRAPHS else []
            self._looked_for += time.perf_counter() - start
        finally:
            if any(taken):
                self.lock.release()

    def forget_unreachable(self, reachable: Iterable[Graph]) -> None:
        """Drop pending nodes of unreachable graphs that show in no tensor, owed write or owed draw."""
        self._drop_unseen_views()
        kept = {id(graph) for graph in reachable}
        if all(id(node.graph) in kept for node in list(self.pending)):
            return
        seen = observable_work.seen(self)
        wanted = closure(
            node
            for node in list(self.pending)
            if id(node.graph) in kept or observable_work.is_owed(node, seen)
        )
        for node in self.pending.keys() - set(wanted):
            node.state = "done"  # for the storages that remember it as a reader
            self._withdraw(node)
        self.generators.settle()
        self.settle()

    def begin_step(self, cause: str) -> None:
        """An optimizer has come to a write that cannot wait: the rest of its step is taken at once."""
        self.sync(cause, list(self.pending))
        self.pauses += 1
        self.step_at_once = cause

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's step is over."""
        if self.step_at_once is not None:
            self.pauses -= 1
            self.step_at_once = None

    def paused(self) -> Paused:
        """Record nothing for a while; ops run at once, after what they need."""
        return Paused(self)


def may_need_absent() -> bool:
    """Whether :func:`needs_absent` may be true of anything in this process."""
    return bool(torch_cuda.STAND_INS) or Elsewhere.ranks


def needs_absent(nodes: Iterable[TrackedNode]) -> bool:
    """Whether only a GPU that is not on this machine, or other ranks, could run some of ``nodes``."""
    absent = torch_cuda.STAND_INS
    if not absent:
        return Elsewhere.ranks and any(node.op.namespace in NAMESPACES for node in nodes)
    return any(
        node.op.namespace in NAMESPACES
        or any(value.meta.device in absent for value in (*node.outputs, *node.inputs))
        for node in nodes
    )


def _who(nodes: Sequence[TrackedNode]) -> str:
    """Who could compute what needs ``nodes``, and is not here."""
    absent = torch_cuda.STAND_INS
    if any(value.meta.device in absent for node in nodes for value in node.outputs):
        return "only the planned GPU could compute, which is not on this machine"
    return "depends on what the other planned ranks would send, which are not there"


def unlink_tensors(nodes: Iterable[TrackedNode], given: Iterable[TrackedValue]) -> None:
    """Cut the links between the user's tensors and the results of ``nodes``, and those ``given``."""
    for value in (*given, *[value for node in nodes for value in node.outputs]):
        if value.tensor is not None:
            value.tensor = None


def release(value: TrackedValue) -> None:
    """Cut the link between a value and the user's tensor (which now shows something else)."""
    if value.tensor is not None:
        value.tensor = None
        storage = value.storage
        while storage.replaced_by is not None:
            storage = storage.replaced_by
        storage.live -= 1
        if storage.live == 0:
            note_drop(storage)
