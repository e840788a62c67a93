"""Intermediate representation: graph, nodes, values, storages and sync points, as plain data.

A :class:`Graph` is a list of :class:`Node` in program order.  A node calls one
ATen operator; its arguments are Python constants and :class:`Value` objects.  A
value is one tensor (an identity with metadata); several values can share one
:class:`Storage`, as views do.  Everything later stages need (lifetimes, batch
analysis, drawing, execution) is derived from these three.

Nothing here imports from a later stage, holds a user's tensor, or runs anything.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch

from ..torch_internals.private_api import OpOverload
from .value_stats_data import Summary

Phase = Literal["forward", "backward", "optimizer", "other"]
State = Literal["pending", "done", "failed"]
Alarm = Literal["nan", "inf"]
Bound = Literal["compute", "memory", "launch"]
RAN_AT_ONCE = "lazyviz::ran_at_once"
"""The operator name of a node that represents a part of the program, such as a call of compiled code."""
Role = Literal["parameter", "gradient", "optimizer", "buffer", "input", "kv_cache"]


@dataclass(frozen=True, slots=True)
class SourceLine:
    """One line of code, usually the user's; ``cell`` is the number of its notebook cell, if any."""

    file: str
    line: int
    text: str
    cell: int | None = field(default=None, compare=False)  # the same code, also if the cell is run again

    @property
    def in_cell(self) -> bool:
        """Whether the line is in a notebook cell, whose file name (IPython's, marimo's) is meaningless."""
        if self.cell is not None or self.file.startswith("<"):
            return True
        return f"{os.sep}ipykernel_" in self.file or f"{os.sep}__marimo__cell_" in self.file

    def __str__(self) -> str:
        """``"cell [7], line 3"``, or the full path with the line."""
        if self.cell is not None:
            return f"cell [{self.cell}], line {self.line}"
        return f"line {self.line}" if self.in_cell else f"{self.file}:{self.line}"

    @property
    def short(self) -> str:
        """``"cell [7], line 3"``, ``"train.py:4"``, or, in a library, ``"transformers/trainer.py:1893"``."""
        return str(self) if self.in_cell else f"{_short_name(self.file)}:{self.line}"


@functools.lru_cache(maxsize=1000)
def _short_name(file: str) -> str:
    _, installed, path = file.replace(os.sep, "/").rpartition("-packages/")  # site-, dist-
    return path if installed else os.path.basename(file)


def places(source: SourceLine | None, reader: SourceLine | None) -> list[str]:
    """The user's line, and the line of the library that read the value."""
    return [
        *([source.short] if source is not None else []),
        *([f"in {reader.short}"] if reader is not None else []),
    ]


@functools.lru_cache(maxsize=1000)
def at(source: SourceLine | None, reader: SourceLine | None) -> str:
    """``" at train.py:4, in transformers/trainer.py:1893"``, or the known part of it."""
    return f" at {', '.join(found)}" if (found := places(source, reader)) else ""


class TensorMeta:
    """Metadata of a tensor; interned, so that equal metadata is the same object.

    ``offset`` and ``stride`` count elements; ``storage_nbytes`` is the size in bytes of the smallest storage
    that the tensor fits in, from the start of the storage.  ``dense``: whether the elements are contiguous in
    memory, in any order of the dimensions.
    """

    __slots__ = ("dense", "device", "dtype", "flags", "nbytes", "offset", "shape", "storage_nbytes", "stride")

    def __init__(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int,
        dtype: torch.dtype,
        device: torch.device,
        flags: int = 0,
    ) -> None:
        self.shape = shape
        self.stride = stride
        self.offset = offset
        self.dtype = dtype
        self.device = device
        self.flags = flags  # bit 0: conjugate view, bit 1: negative view
        numel = 1
        last = offset
        for size, step in zip(shape, stride):
            numel *= size
            last += (size - 1) * step
        self.nbytes = numel * dtype.itemsize
        self.storage_nbytes = (last + 1) * dtype.itemsize if numel else 0
        self.dense = is_dense(shape, stride)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{list(self.shape)} {dtype} {self.device}"


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements of a tensor are contiguous in memory, in any order of the dimensions."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


# These lack the tag in torch 2.11.
_BY_ELEMENT = {f"aten::{name}_" for name in ("celu", "elu", "hardsigmoid", "hardtanh", "leaky_relu", "selu")}
_BY_ELEMENT.add("aten::leaky_relu")


@functools.cache
def works_by_element(op: OpOverload) -> bool:
    """Whether PyTorch tags the operator as ``pointwise``."""
    return torch.Tag.pointwise in op.tags or op._schema.name in _BY_ELEMENT


class Fetch(NamedTuple):
    """A data loader returned a batch after ``position`` nodes; ``beside`` are earlier batches that still
    existed.
    """

    position: int
    beside: tuple[Storage, ...]


class Resize(NamedTuple):
    """A storage has ``nbytes`` bytes from node ``position`` of the graph with id ``graph``."""

    graph: int
    position: int
    nbytes: int


class Storage:
    """One allocation, as eager PyTorch would make it.

    Times are positions in the graph's program order.  The storage exists from the start of node ``created``
    (-1: an *external* storage, which existed before recording).  User code (including autograd) dropped its
    last reference when ``dropped`` nodes were recorded (``None``: still referenced).  If another block, such
    as a nested one, was recording at that time, ``dropped_in`` is the graph of that block and its number of
    nodes.  ``variables`` are the user's expressions that referred to it when recording ended
    (``"out.logits"``), if there were no other references.  ``continues`` is an earlier storage of the graph
    for the same memory, because after a sync point, recorded memory is seen as outside memory.  ``place`` is
    the address of outside memory on a GPU if known, else 0.  ``resized`` lists the sizes after each resize,
    starting with the original one; ``nbytes`` is the largest of them.  Empty: it was never resized.
    ``arrived`` is the number of nodes that had been recorded when an external storage came into being without
    an op, such as a data loader's batch; -1: not known, or before recording.  ``borrowed`` memory does not
    come from PyTorch's allocator: it belongs to NumPy, a mapped file, or another process.  ``is_data``: the
    program computed it, but not its model; planning sets it.
    """

    __slots__ = (
        "_origin",
        "arrived",
        "borrowed",
        "continues",
        "created",
        "device",
        "dropped",
        "dropped_in",
        "external",
        "id",
        "is_data",
        "name",
        "nbytes",
        "place",
        "resized",
        "role",
        "variables",
    )

    _ids = itertools.count()

    def __init__(self, nbytes: int, device: torch.device, *, external: bool, created: int) -> None:
        self.id = next(Storage._ids)
        self.nbytes = nbytes
        self.device = device
        self.external = external
        self.created = created
        self.dropped: int | None = None
        self.dropped_in: tuple[Graph, int] | None = None
        self.continues: Storage | None = None
        self._origin: Storage | None = None  # of a storage that continues another; set on first use
        self.role: Role | None = None
        self.name = ""
        self.place = 0
        self.arrived = -1
        self.borrowed = False
        self.is_data = False
        self.resized: tuple[Resize, ...] = ()
        self.variables: tuple[str, ...] = ()

    @property
    def origin(self) -> Storage:
        """The first storage recorded for this memory: itself, unless there was a sync point in between."""
        if self.continues is None:
            return self
        if self._origin is None:
            # A loop that reads its loss adds a storage per parameter in each iteration: follow the chain
            # once.
            storage = self.continues
            while storage.continues is not None and storage._origin is None:
                storage = storage.continues
            self._origin = storage._origin or storage
        return self._origin

    def __repr__(self) -> str:
        return f"<Storage {self.id} {self.name or ''} {self.nbytes} B {self.device}>"


class Value:
    """One tensor of the recorded program."""

    __slots__ = ("__weakref__", "id", "index", "meta", "name", "node", "storage", "symbolic_shape")

    _ids = itertools.count()

    def __init__(self, meta: TensorMeta, storage: Any, node: Node | None, index: int = 0) -> None:
        self.id = next(Value._ids)
        self.meta = meta
        self.storage: Storage = storage
        self.node = node  # the node that produced it; None for an input from outside
        self.index = index
        self.name = ""
        self.symbolic_shape: tuple[int | str, ...] = meta.shape

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.meta.shape)

    @property
    def stride(self) -> tuple[int, ...]:
        return self.meta.stride

    @property
    def dtype(self) -> torch.dtype:
        return self.meta.dtype

    @property
    def device(self) -> torch.device:
        return self.meta.device

    @property
    def nbytes(self) -> int:
        """Size of the tensor's elements in bytes (not of the storage it views)."""
        return self.meta.nbytes

    def __repr__(self) -> str:
        return f"<Value {self.id} {self.meta!r}>"


class Failure(Enum):
    """Why a node has not run and may never run."""

    RAISED = "its kernel raised an error"
    FORGOTTEN = "it was dropped before it ran"
    PARTIAL_WRITE = "it failed midway, and its in-place writes may be incomplete"


class NodeError(str):
    """The text of a node's error, with the kind of failure."""

    failure: Failure

    def __new__(cls, failure: Failure, text: str) -> NodeError:
        made = super().__new__(cls, text)
        made.failure = failure
        return made

    def __reduce__(self) -> tuple[type[NodeError], tuple[Failure, str]]:
        return NodeError, (self.failure, str(self))


def failure_of(error: str | None) -> Failure | None:
    """The kind of a node's ``error``; ``None`` without one."""
    if error is None:
        return None
    return error.failure if isinstance(error, NodeError) else Failure.RAISED


class Work(Protocol):
    """The work of an op, as planning counts it."""

    @property
    def flops(self) -> int: ...
    @property
    def bytes_moved(self) -> int: ...


class Timed(Protocol):
    """The projected time of an op, and what bounds it."""

    @property
    def seconds(self) -> float: ...
    @property
    def bound(self) -> Bound: ...


class Node:
    """One recorded operator call.

    ``args`` and ``kwargs`` are those of the call, with each tensor replaced by its :class:`Value`.
    ``inputs`` are the values read, in argument order; ``outputs`` the values returned (an in-place operator
    returns its own argument).  ``writes`` are the storages it mutates.  ``after`` are nodes that must run
    first in addition to the producers of ``inputs``, because of writes to shared storages.  ``at_once``: the
    reason why it ran during recording, "" for a node that was deferred.  ``scratch_bytes``: measured bytes
    that its CPU kernel held in addition to operands and results; ``None`` if not measured.
    """

    __slots__ = (
        "after",
        "alarm",
        "args",
        "at_once",
        "callers",
        "error",
        "forward",
        "index",
        "inputs",
        "kwargs",
        "work_key",
        "measured_seconds",
        "module",
        "op",
        "outputs",
        "phase",
        "root",
        "scratch_bytes",
        "source",
        "state",
        "summaries",
        "writes",
    )

    # Functions of planning, which :mod:`lazyviz.session.connect_packages_and_exit_handlers` registers here.
    count_work: ClassVar[Callable[[Node], Work]]
    project_time: ClassVar[Callable[[Node], Timed | None]]

    def __init__(self, index: int, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.index = index  # position in its graph
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self.inputs: Sequence[Value] = ()
        self.outputs: Sequence[Value] = ()
        self.writes: Sequence[Storage] = ()
        self.after: Sequence[Node] = ()
        self.module = ""  # "transformer.h.0.attn", relative to the outermost module called
        self.root = ""  # class name of that outermost module, "" outside of one
        self.source: SourceLine | None = None
        self.callers: tuple[SourceLine, ...] = ()  # the user's call stack above it, innermost line first
        self.phase: Phase = "other"
        self.forward: Node | None = None  # of a backward node: the node it differentiates
        self.state: State = "pending"
        self.error: str | None = None
        self.at_once = ""
        self.scratch_bytes: int | None = None
        self.measured_seconds: float | None = None  # its run time, once run with timing
        # Statistics of each output right after the node ran, if requested; None for an output without
        # numbers.
        self.summaries: Sequence[Summary | None] = ()
        self.work_key: object | None = None  # set by planning on first use; ops with the same work share it
        self.alarm: Alarm | None = None  # NaN and infinity in the summarized outputs

    @property
    def name(self) -> str:
        """The operator's short name and the node's position: ``"addmm_12"``."""
        if self.op._schema.name == RAN_AT_ONCE:
            return f"{self.at_once}_{self.index}"
        return f"{self.op._schema.name.rpartition('::')[2]}_{self.index}"

    @property
    def flops(self) -> int:
        """Floating-point operations, as counted by ``torch.utils.flop_counter``; 0 if it does not count
        them.
        """
        return type(self).count_work(self).flops

    @property
    def bytes_moved(self) -> int:
        """Minimum number of bytes that its kernel reads and writes; 0 for a view."""
        return type(self).count_work(self).bytes_moved

    @property
    def seconds(self) -> float | None:
        """Measured time after a run with timings; before that, projected time on the recorded device.

        ``None`` if neither is known.
        """
        if self.measured_seconds is not None:
            return self.measured_seconds
        found = type(self).project_time(self)
        return found.seconds if found is not None else None

    @seconds.setter
    def seconds(self, measured: float | None) -> None:
        self.measured_seconds = measured

    @property
    def bound(self) -> Bound | None:
        """What bounds its projected time: arithmetic, memory traffic, or the kernel launch by the host."""
        found = type(self).project_time(self)
        return found.bound if found is not None else None

    @property
    def made(self) -> set[Storage]:
        """The storages that the op allocated, without those of its arguments, which may belong to other
        graphs.
        """
        given = {value.storage for value in self.inputs}
        made = {value.storage for value in self.outputs if value.storage.created == self.index}
        return made - given

    def __repr__(self) -> str:
        return f"<Node {self.name} {self.phase} {self.module or '-'} {self.state}>"


# Not frozen, because that makes creation several times slower, and every read creates one.
@dataclass(slots=True, unsafe_hash=True)
class SyncPoint:
    """A place where recording had to evaluate.

    ``source`` is the user's line, ``reader`` the line of the library that read the value, if any.
    ``ops`` is the number of nodes that ran, ``seconds`` their time, ``bytes`` the size of the tensor that was
    read, and ``index`` the number of nodes recorded before it.
    """

    cause: str
    source: SourceLine | None
    ops: int
    seconds: float
    bytes: int
    index: int = 0
    reader: SourceLine | None = None

    def __repr__(self) -> str:
        place = ", ".join(places(self.source, self.reader)) or "unknown line"
        ran = f"ran {self.ops:,} op{'' if self.ops == 1 else 's'} in {self.seconds:.3g} s"
        return f"<SyncPoint {self.cause}, {place}: {ran}>"


class RunInside(NamedTuple):
    """A run of a graph's nodes while it was being recorded, at a sync point or at the user's request.

    ``recorded`` is the number of nodes recorded before it, ``ran`` are the positions of those that ran,
    ascending, and ``gone`` the storages of their results that had been dropped since the last recorded node.
    """

    recorded: int
    ran: Sequence[int]
    gone: Sequence[Storage]


@dataclass(slots=True)
class RejectedOp:
    """An op that PyTorch rejected with these inputs, so that it was not recorded.

    ``args`` and ``kwargs`` are those of the call, with values in place of tensors. ``error`` is the id of the
    exception; whether it ended the block is known only later.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: Sequence[Value]
    error: int
    source: SourceLine | None
    module: str
    root: str
    phase: str

    @property
    def name(self) -> str:
        """``"addmm"``"""
        return str(self.op._schema.name).removeprefix("aten::")

    def argument(self, name: str) -> Any:
        """An argument of the call by its name; its default value if it was not given."""
        for at, argument in enumerate(self.op._schema.arguments):
            if argument.name == name:
                return self.args[at] if at < len(self.args) else self.kwargs.get(name, argument.default_value)
        return None


@dataclass(slots=True)
class RaisedError:
    """The error that ended a block, the user's line that raised it, and the rejected op, if any.

    ``callers`` are the user's lines that led to that line, the innermost first.
    """

    message: str
    source: SourceLine | None
    rejected: RejectedOp | None
    callers: tuple[SourceLine, ...] = ()


@dataclass(frozen=True, slots=True)
class Annotation:
    """The numbers under one name: by index of a node, and by the full name of a module (``"net.h.0"``)."""

    name: str
    nodes: Mapping[int, float]
    modules: Mapping[str, float]

    @property
    def least(self) -> float:
        return min(self._numbers())

    @property
    def most(self) -> float:
        return max(self._numbers())

    def _numbers(self) -> Iterable[float]:
        yield from self.nodes.values()
        yield from self.modules.values()


class Graph:
    """Nodes in program order, with the storages and outside inputs they touch."""

    # The compiled recorder accesses these slots at every op.
    __slots__ = ("__dict__", "__weakref__", "calls", "inputs", "lost", "nodes", "storages")

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.storages: list[Storage] = []  # in order of first appearance
        self.arrivals: dict[Storage, None] = {}  # created while recording, and not used by any op
        self.fetches: list[Fetch] = []  # the batches of data loaders
        self.inputs: list[Value] = []  # values from outside the graph
        self.sync_points: list[SyncPoint] = []
        self.runs_inside: list[RunInside] = []  # in the order of running
        # The positions up to which the last two reads have considered pending backward passes.
        self.considered_by_reads = (0, 0)
        self.from_others: dict[int, Value] = {}  # by id of the value in an earlier graph: this one's input
        self.by_sequence: Mapping[int, Node] = {}  # autograd sequence number -> forward node
        # Sequence numbers of the autograd nodes that the block's thread created in it; None: unknown.
        self.autograd_nodes: range | None = None
        self.lost = False  # it can no longer be evaluated as a whole
        self.has_dropped_nodes = False  # pending nodes that nothing can show were dropped from it
        # By index of a node: (root, path) of the module calls whose first node it is.
        self.calls: dict[int, tuple[tuple[str, str], ...]] = {}
        self.gpu = ""  # the name of the absent GPU that it was recorded for
        # The PyTorch release that will run there; None: the installed one.
        self.torch_release: tuple[int, int] | None = None
        self.cudnn_benchmark = False  # torch.backends.cudnn.benchmark was on at its start or its end
        self.release_differences: tuple[
            str, ...
        ] = ()  # differences of that release that were recorded, as text
        self.batch: dict[Value, int] = {}  # the batch dimension of each value that was named as batch
        self.whole: tuple[str, ...] = ()  # operators that may run on the whole batch in a split run
        self.independent_rng = False  # pieces may draw random numbers separately inside fused kernels
        # Nodes that cut a tensor into a part for each GPU, as DataParallel does, and the number of GPUs.
        self.handed_out: dict[Node, int] = {}
        self.nested: list[tuple[int, Graph]] = []  # nested blocks: nodes recorded before, and graphs
        self.outermost = id(self)  # equal for blocks that are nested in the same outer block
        self.elsewhere: set[str] = set()  # names of threads whose ops ran unrecorded during the block
        self.in_parts: set[str] = (
            set()
        )  # layers recorded as single ops although that GPU has a kernel for them
        self.as_eager: set[str] = set()  # compiled functions that were recorded op by op, as in eager mode
        self.assumed: set[str] = (
            set()
        )  # descriptions of assumed values that only an absent device could compute
        self.place: SourceLine | None = None  # where the block was opened
        self.is_cell = False  # the block is a whole cell
        self.rejected: RejectedOp | None = None  # the last one
        self.raised: RaisedError | None = None  # the error that ended the block
        self.world_size = 1  # the number of ranks, one of which was recorded
        self.rank = 0
        self.annotations: dict[str, Annotation] = {}  # the user's annotations by name, newest last

    @property
    def where(self) -> str:
        """``"cell [7]"`` if the block is a whole cell, else the line where the block was opened."""
        if self.place is None:
            return "a block"
        return (
            f"cell [{self.place.cell}]" if self.is_cell and self.place.cell is not None else self.place.short
        )

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)
