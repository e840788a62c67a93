"""Tracked nodes, values and storages: which nodes write and read memory, and which user tensors share it.

These extend the plain records of :mod:`lazyviz.graph.ir` with the links to live
tensors that only recording and execution need; planning and drawing never see them.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import torch

from ..graph.ir import Failure, Graph, Node, NodeError, Storage, TensorMeta, Value
from ..torch_internals import private_api
from ..torch_internals.private_api import OpOverload
from .shapes.inferred_outputs import Inferred

FORGOTTEN = NodeError(Failure.FORGOTTEN, "forgotten before it ran: by %lazy reset or by unloading lazyviz")
"""``Node.error`` of a node that will never run."""
FORGOTTEN_BY_FORK = NodeError(
    Failure.FORGOTTEN,
    "forgotten before it ran: it was pending when this process was forked, and a child process does not run "
    "ops of its parent; evaluate it before the fork, for example with lazyviz.sync()",
)
"""The same in a child process."""
PARTIAL_WRITE = (
    "a kernel or a compiled segment stopped midway, and tensors that it writes in place may be partially "
    "written; overwrite each of them completely (copy_, zero_, load_state_dict), or drop all pending ops "
    "(%lazy reset)"
)
"""The beginning of ``Node.error`` of nodes whose kernel or compiled segment failed while it wrote.

They never run again.
"""


class Shadow:
    """The content of a storage once the nodes folded so far have run.

    ``tensors`` are the values on it; ``memory`` is all of it, as bytes, if it was needed. If ``lost``, the
    content is no longer valid.
    """

    __slots__ = ("lost", "memory", "tensors")

    def __init__(self, memory: torch.Tensor | None = None, *, lost: bool = False) -> None:
        self.memory = memory
        self.lost = lost
        self.tensors: dict[TrackedValue, torch.Tensor] = {}


class TrackedStorage(Storage):
    """A storage with its pending accesses.

    ``writer`` is the last recorded node that writes it, ``readers`` the nodes that read it since. ``live``
    counts the user's tensors on it. ``foreign`` memory can be written by others (NumPy, shared memory).
    ``shadow`` is a copy that is ahead of the graph where its content is known, see
    :mod:`lazyviz.record.constant_folding`. ``replaced_by`` is the storage that its tensors are on since their
    memory was resized.
    """

    __slots__ = ("address", "foreign", "graph", "live", "readers", "replaced_by", "shadow", "uses", "writer")

    recording: ClassVar[Graph | None] = None  # the innermost block that is open
    held_bytes: ClassVar[int] = 0  # outside memory that only pending nodes keep alive
    held: ClassVar[dict[TrackedStorage, int]] = {}  # these storages, with their bytes
    unused: ClassVar[list[TrackedValue]] = []  # outside tensors that died before any node read them

    def __init__(self, nbytes: int, device: torch.device, graph: Graph, *, external: bool) -> None:
        super().__init__(nbytes, device, external=external, created=-1 if external else len(graph.nodes))
        self.graph = graph
        self.writer: TrackedNode | None = None
        self.readers: list[TrackedNode] = []
        self.live = 0
        self.uses = 0
        self.foreign = False
        self.replaced_by: TrackedStorage | None = None
        self.shadow: Shadow | None = None
        self.address = 0  # if pending nodes read it as a real tensor: identity of the C++ storage
        graph.storages.append(self)

    def count_held(self) -> None:
        """Count its bytes in ``held_bytes`` while only pending nodes keep it alive."""
        tracked = __class__  # type: ignore[name-defined]  # at the end of the process the module has no names
        held = tracked.held
        counts = self.external and not self.live and self.uses > 0 and self.device.type != "meta"
        if counts or held:
            tracked.held_bytes -= held.pop(self, 0)
        if counts:
            held[self] = self.nbytes
            tracked.held_bytes += self.nbytes

    @property
    def has_pending_write(self) -> bool:
        return self.writer is not None and self.writer.state != "done"

    @property
    def has_pending_access(self) -> bool:
        writer = self.writer
        if writer is not None and writer.state != "done":
            return True
        return any(node.state != "done" for node in self.readers)


class TrackedValue(Value):
    """A value with its links to tensors.

    ``tensor`` is a weak reference to the user's tensor object, the first of a list if several tensors share
    the value (see :class:`TensorRef`). ``real`` is the computed (or outside) tensor while pending nodes need
    it, and ``uses`` is their number. ``given`` marks an outside tensor whose content counts as known.
    ``memory`` is where the user's tensor is once it has been computed.
    """

    __slots__ = ("given", "memory", "real", "tensor", "uses")

    storage: TrackedStorage
    node: TrackedNode | None

    def __init__(
        self, meta: TensorMeta, storage: TrackedStorage, node: TrackedNode | None, index: int = 0
    ) -> None:
        super().__init__(meta, storage, node, index)
        self.tensor: TensorRef | None = None
        self.real: torch.Tensor | None = None
        self.memory: private_api.MemoryRef | None = None
        self.given = False
        self.uses = 0

    @property
    def pending(self) -> bool:
        """Whether reading the tensor now would need a node to run first."""
        return (self.node is not None and self.node.state != "done") or self.storage.has_pending_write

    def refs(self) -> Iterator[TensorRef]:
        """The references to all tensors that share the value."""
        ref = self.tensor
        while ref is not None:
            yield ref
            ref = ref.next

    def ref_to(self, tensor: torch.Tensor) -> TensorRef | None:
        """The reference to ``tensor``, if the tensor has this value."""
        return next((ref for ref in self.refs() if ref() is tensor), None)


class Unreachable:
    """``possible``: a tensor or a graph was deleted since the last check, so pending nodes may be
    unreachable.
    """

    possible: ClassVar[bool] = False
    drop: ClassVar[Callable[[], None] | None] = None  # drops unreachable nodes


class TensorRef(weakref.ref[torch.Tensor]):
    """Weak reference to a user's tensor; eager PyTorch would free the tensor when this reference dies.

    ``next``: the reference to another tensor of the same value, such as one that autograd saves.
    """

    __slots__ = ("next", "value")

    value: TrackedValue
    next: TensorRef | None

    def __new__(cls, tensor: torch.Tensor, value: TrackedValue) -> TensorRef:
        self = super().__new__(cls, tensor, on_tensor_death)
        self.value = value
        return self

    def __init__(self, tensor: torch.Tensor, value: TrackedValue) -> None:
        super().__init__(tensor, on_tensor_death)  # type: ignore[call-arg]
        self.next = value.tensor
        value.tensor = self
        value.storage.live += 1
        value.storage.dropped = None  # another tensor on it may have been dropped before


def on_tensor_death(ref: TensorRef, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
    if is_ending():
        return  # module globals are already cleared then
    value = ref.value
    unlink(ref)
    if value.real is not None and not value.uses and value.node is None:
        TrackedStorage.unused.append(value)
    storage = value.storage
    while storage.replaced_by is not None:
        storage = storage.replaced_by
    storage.live -= 1
    if storage.live == 0:
        Unreachable.possible = True
        note_drop(storage)
        if storage.external and storage.uses:
            storage.count_held()
        if storage.graph.lost and Unreachable.drop is not None:
            # No exception can leave the callback of a weak reference; when a process ends, its thread gets
            # another one.
            with suppress(SystemExit):
                Unreachable.drop()


def unlink(ref: TensorRef) -> None:
    """Remove ``ref`` from the list of its value: the tensor has died, or has another value from now on."""
    value = ref.value
    if value.tensor is ref:
        value.tensor = ref.next
        return
    for before in value.refs():
        if before.next is ref:
            before.next = ref.next
            return


def note_drop(storage: TrackedStorage) -> None:
    """Note that the last tensor on ``storage`` has just been deleted."""
    storage.dropped = len(storage.graph.nodes)
    now = TrackedStorage.recording
    graph = storage.graph
    # Only of a nested block: one iteration of a loop must not keep the next one alive.
    related = now is not None and now is not graph and now.outermost == graph.outermost
    storage.dropped_in = (now, len(now.nodes)) if now is not None and related else None


def drop_reference(tensor: torch.Tensor) -> None:
    """Drop our weak references to ``tensor``, because PyTorch does not swap tensors that have weak
    references.
    """
    for ref in weakref.getweakrefs(tensor):
        if type(ref) is TensorRef:
            unlink(ref)


class TrackedNode(Node):
    """A node with what is needed to run it again exactly.

    ``sequence`` orders nodes of all graphs; ``draws`` is set for random operators; ``grad_mode`` and
    ``inference_mode`` are those it was recorded under. ``folded``: shadows hold its results; ``missed``: a
    shadow that it would have to read has changed since. ``is_rematerialized``: it has run, and will run again
    only for its results. ``entry`` is the answer of the shape cache: nodes with the same entry have the same
    operator, the same metadata of inputs and outputs, and the same arguments, except for numbers that shapes
    do not depend on.
    """

    __slots__ = (
        "is_rematerialized",
        "draws",
        "entry",
        "folded",
        "grad_mode",
        "graph",
        "inference_mode",
        "missed",
        "sequence",
    )

    _sequence = itertools.count()

    inputs: list[TrackedValue]
    outputs: list[TrackedValue]
    writes: list[TrackedStorage]
    after: Sequence[TrackedNode]

    def __init__(self, graph: Graph, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(len(graph.nodes), op, args, kwargs)
        self.graph = graph
        self.sequence = next(TrackedNode._sequence)
        self.draws: DrawSequence | None = None
        self.grad_mode = True
        self.inference_mode = False
        self.folded = False
        self.missed = False
        self.is_rematerialized = False
        self.entry: Inferred | None = None

    def cut(self) -> None:
        """The node is done: its inputs from other graphs become graph inputs, so that no graph keeps an
        earlier one alive.

        Otherwise, a loop that reads its loss in each iteration would keep all iterations alive.
        """
        others = self.graph.from_others

        def outside(item: Any) -> Any:
            if isinstance(item, TrackedValue):
                if item.node is None or item.node.graph is self.graph:
                    return item
                if item.id not in others:
                    others[item.id] = copy = TrackedValue(item.meta, item.storage, None)
                    copy.name = item.name
                return others[item.id]
            return type(item)([outside(entry) for entry in item]) if type(item) in (list, tuple) else item

        self.inputs = [outside(value) for value in self.inputs]
        self.args = outside(self.args)
        self.kwargs = {name: outside(item) for name, item in self.kwargs.items()}


def same_bytes(snapshot: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether memory that others can write still has the content that was read first."""
    if snapshot.shape != tensor.shape or snapshot.dtype != tensor.dtype:
        return False
    return torch.equal(_bytes(snapshot), _bytes(private_api.alias(tensor)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.resolve_conj().resolve_neg().contiguous()  # a dimension of size 1 may still have any stride
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def snapshot_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, including elements in between and shared elements."""
    if tensor.is_conj() or tensor.is_neg():
        return tensor.clone(memory_format=torch.preserve_format)
    shape, stride = tensor.shape, tensor.stride()
    if not tensor.numel():
        return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride))
    return tensor.as_strided((span,), (1,)).clone().as_strided(shape, stride)


class DrawSequence:
    """Draws from one generator without reseeding in between.

    ``state`` is the state before the next pending draw; it is a value if another sequence has to be drawn
    first.
    """

    __slots__ = ("_state", "generator", "last")

    def __init__(self, generator: torch.Generator, state: torch.Tensor | TrackedValue) -> None:
        self.generator = generator
        self._state = state
        if isinstance(state, TrackedValue):
            state.uses += 1
        self.last: TrackedNode | None = None

    @property
    def awaits(self) -> TrackedNode | None:
        """The pending node that returns the initial state."""
        return self._state.node if isinstance(self._state, TrackedValue) else None

    @property
    def newest(self) -> TrackedNode | None:
        """The last node that the final state depends on; a draw that failed has not drawn."""
        last = self.last
        while last is not None and last.state == "failed":
            last = next((node for node in last.after if node.draws is self), None)
        return last or self.awaits

    @property
    def state(self) -> torch.Tensor:
        if isinstance(self._state, TrackedValue):
            value, real = self._state, self._state.real
            if real is None:
                raise RuntimeError("internal error: the generator's state has not been computed")
            self.state = real
            value.uses -= 1
            if not value.uses:
                value.real = None
            return real
        return self._state

    @state.setter
    def state(self, state: torch.Tensor) -> None:
        self._state = state

    @property
    def earlier_state(self) -> torch.Tensor:
        """A known state with the same seed as ``state``: the last one that was computed before it."""
        sequence = self
        while isinstance(sequence._state, TrackedValue):
            node = sequence._state.node
            assert node is not None and node.draws is not None
            if node.state == "done":
                return sequence.state
            sequence = node.draws
        return sequence._state
