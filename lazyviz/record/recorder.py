"""The recorder: every ATen op becomes a node instead of running.

One :class:`Tape` per process knows what is pending; graphs are stretches of it, so
tensors may pass from one to another.  :class:`RecorderMode` sends it every op that
reaches the kernels' level: while a graph is open the op is recorded, otherwise (and
while paused) :mod:`lazyviz.record.guard` makes sure that it sees what eager would.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from .. import _torch
from .._torch import OpOverload
from ..graph.ir import Graph, SyncPoint, TensorMeta
from . import constants, guard
from .order import closure, order
from .rng import Generators
from .scopes import Scopes
from .shapes import DataDependent, Inferred, OpInfo, ShapeCache
from .storage import TensorRef, TrackedNode, TrackedStorage, TrackedValue
from .tensor import LazyTensor, make_pending, wrap

HELD_BYTES_LIMIT = 4 * 2**30
"""Bytes of dropped outside tensors a pending graph may keep alive before it is evaluated."""

_NUMBERS = (float, int, bool, complex)


class SyncError(RuntimeError):
    """An op needed values where syncs are forbidden."""


class Evaluator(Protocol):
    """Runs pending nodes, given in program order; provided by a later stage."""

    def __call__(self, nodes: Sequence[TrackedNode], cause: str) -> None: ...


class RecorderMode(_torch.TorchDispatchMode):
    """Sends every op on this thread to the tape."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for cls in types:
            if cls is not LazyTensor and _torch.dispatches_itself(cls):
                return NotImplemented  # another subclass unwraps itself first
        if (
            tape.graph is None
            or tape.pauses
            or (tape.owner != threading.get_ident() and not tape.in_autograd())
        ):
            return guard.dispatch(tape, func, args, kwargs or {})
        return tape.record(func, args, kwargs or {})


class Tape:
    """Everything pending in this process, and the graph being recorded, if any."""

    def __init__(self) -> None:
        self.graph: Graph | None = None
        self.owner = 0  # thread that records
        self.pauses = 0
        self.allow_sync = True
        self.shapes = ShapeCache()
        self.scopes = Scopes()
        self.generators = Generators()
        self.evaluator: Evaluator | None = None
        self.lock = threading.RLock()  # held while nodes run
        self.pending: dict[TrackedNode, None] = {}  # in program order
        self.outside: dict[int, TrackedValue] = {}  # by id of the real tensor
        self.storages: dict[int, TrackedStorage] = {}  # by address of the real storage
        self.held_bytes_limit = HELD_BYTES_LIMIT
        self.on_sync: list[Callable[[SyncPoint], None]] = []

    # --- recording ----------------------------------------------------------------

    def record(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one op call; returns pending tensors in the op's own structure."""
        shapes = self.shapes
        info = shapes.infos.get(op) or shapes.info(op)
        if info.special:
            if info.metadata_only:
                with _torch.excluding_python():
                    return op(*args, **kwargs)
            if info.lifts and type(args[0]) is not LazyTensor:
                return args[0]
        values: list[TrackedValue] = []
        tensors: list[torch.Tensor] = []
        key: list[Any] = [op, torch.get_default_dtype()]
        by_type = info.by_type
        try:
            new_args = tuple([self._translate(item, by_type, values, tensors, key) for item in args])
            new_kwargs = {}
            for name, item in kwargs.items():
                key.append(name)
                new_kwargs[name] = self._translate(item, by_type, values, tensors, key)
        except _NotDeferrable as reason:
            return self.run_now(op, info, args, kwargs, str(reason))
        if info.needs_storage:
            key += [value.storage.nbytes for value in values]
        cache_key = tuple(key)
        inferred = shapes.entries.get(cache_key)
        if inferred is None:
            if not values and not info.returns_tensors:
                return op(*args, **kwargs)  # e.g. profiler annotations
            if info.returns_numbers:
                if constants.known(values):
                    return constants.compute(op, new_args, new_kwargs)
                name = "item" if info.name == "_local_scalar_dense" else info.name
                return self.run_now(op, info, args, kwargs, name)
            try:
                inferred = shapes.infer(op, info, new_args, new_kwargs, values)
            except DataDependent as reason:
                return self.run_now(op, info, args, kwargs, str(reason))
            shapes.entries[cache_key] = inferred
            shapes.misses += 1
        else:
            shapes.hits += 1
        if inferred.on_meta:
            return op(*args, **kwargs)  # no memory, nothing to defer
        if inferred.special:
            if inferred.to_cpu:
                return self.run_now(op, info, args, kwargs, "copy to the CPU")
            if any(type(tensors[at]) is not LazyTensor for at, _ in inferred.restructured):
                return self.run_now(op, info, args, kwargs, f"{info.name} restructures an outside tensor")
            if inferred.dtype is not None and new_kwargs.get("dtype") is None:
                new_kwargs["dtype"] = inferred.dtype  # the default may change before the run
        written: Sequence[TrackedStorage] = ()
        if info.mutates:
            written = [self._storage_of(tensor) for tensor in guard.written_tensors(info, args, kwargs)]
            if any(storage.foreign for storage in written):
                return self.run_now(op, info, args, kwargs, "write to memory shared with others")

        graph = self.graph
        assert graph is not None
        node = TrackedNode(graph, op, new_args, new_kwargs)
        node.inputs = values
        order(node, written)
        self.scopes.locate(node, sys._getframe(2), info.mutates)
        if info.draws and (generator := self._generator(info, args, kwargs, inferred, values)) is not None:
            self.generators.record(node, generator)
        result = self._outputs(node, inferred, values, tensors)
        graph.nodes.append(node)
        self.pending[node] = None
        if (inferred.small and not info.uncertain) or written:
            constants.fold(node, info, inferred, values)
        if TrackedStorage.held_bytes > self.held_bytes_limit:
            self.sync("dropped inputs kept by the graph exceed the byte budget", list(self.pending))
        return result

    def _storage_of(self, tensor: torch.Tensor) -> TrackedStorage:
        return tensor._lazyviz.storage if type(tensor) is LazyTensor else self.outside[id(tensor)].storage

    def _translate(
        self,
        item: Any,
        by_type: frozenset[type],
        values: list[TrackedValue],
        tensors: list[torch.Tensor],
        key: list[Any],
    ) -> Any:
        """The recorded form of one argument; collects tensors and the shape cache's key."""
        cls = type(item)
        if cls is LazyTensor:
            value = item._lazyviz
        elif cls is torch.Tensor or cls is torch.nn.Parameter:
            value = self._from_outside(item)
        elif cls in _NUMBERS:
            key.append(cls)
            if cls not in by_type:
                key.append(item)
            return item
        elif cls is list or cls is tuple:
            key.append(len(item))
            return cls([self._translate(entry, by_type, values, tensors, key) for entry in item])
        elif isinstance(item, torch.Tensor):
            value = self._from_outside(item)
        else:
            key.append(item)
            return item
        values.append(value)
        tensors.append(item)
        key.append(value.meta)
        return value

    def _from_outside(self, tensor: torch.Tensor) -> TrackedValue:
        """The value of a real tensor that recording meets."""
        value = self.outside.get(id(tensor))
        if (
            value is not None
            and value.real is not None
            and value.tensor is not None
            and value.tensor() is tensor
        ) and (not value.storage.foreign or _same_bytes(value.real, tensor)):
            return value
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            raise _NotDeferrable(f"a {tensor.layout} tensor cannot be deferred")
        graph = self.graph
        assert graph is not None
        address = _torch.storage_address(tensor)
        storage = self.storages.get(address)
        memory = _torch.TensorBase.untyped_storage(tensor)
        if storage is None or (storage.foreign and not storage.has_pending_write):
            storage = TrackedStorage(memory.nbytes(), tensor.device, graph, external=True)
            storage.address = address
            storage.foreign = tensor.device.type == "cpu" and not memory.resizable() and tensor.numel() > 0
            storage.role, storage.name = self.scopes.role_of(tensor)
            self.storages[address] = storage
        value = TrackedValue(self.shapes.meta_of(tensor), storage, None)
        value.name = storage.name
        value.real = _torch.alias(tensor)
        if storage.foreign:
            value.real = value.real.clone(memory_format=torch.preserve_format)
            value.meta = self.shapes.meta_of(value.real)
        TensorRef(tensor, value)
        graph.inputs.append(value)
        self.outside[id(tensor)] = value
        if not storage.has_pending_write:
            constants.learn(value, tensor)
        return value

    def _generator(
        self,
        info: OpInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inferred: Inferred,
        values: list[TrackedValue],
    ) -> torch.Generator | None:
        generator = kwargs.get("generator")
        if generator is None and info.generator is not None and info.generator < len(args):
            generator = args[info.generator]
        if generator is not None:
            return generator
        if info.name == "native_dropout" and args[2] is False:
            return None
        device = next((spec.meta.device for spec in inferred.outputs if spec is not None), None)
        return Generators.default(device if device is not None else values[0].device)

    def _outputs(
        self, node: TrackedNode, inferred: Inferred, values: list[TrackedValue], tensors: list[torch.Tensor]
    ) -> Any:
        """Make the node's output values and the tensors that the caller gets for them."""
        results: list[Any] = []
        outputs: list[TrackedValue] = []
        fresh: dict[int, TrackedStorage] = {}
        for at, meta in inferred.restructured:
            if tensors[at]._lazyviz.node is not node:  # type: ignore[attr-defined]
                self._restructure(tensors[at], meta, node)
        graph = node.graph
        for spec in inferred.outputs:
            if spec is None:
                results.append(None)
                continue
            if spec.itself:
                tensor = tensors[spec.source]  # type: ignore[index]
                outputs.append(tensor._lazyviz if type(tensor) is LazyTensor else values[spec.source])  # type: ignore[index]
                results.append(tensor)
                continue
            if spec.source is not None:
                storage = values[spec.source].storage
            else:
                storage = fresh.get(spec.fresh)  # type: ignore[assignment]
                if storage is None:
                    storage = fresh[spec.fresh] = TrackedStorage(
                        spec.nbytes, spec.meta.device, graph, external=False
                    )
            value = TrackedValue(spec.meta, storage, node, len(outputs))
            outputs.append(value)
            results.append(wrap(value))
        node.outputs = outputs
        if inferred.container is not None:
            return inferred.container(results)
        return results[0] if results else None

    def _restructure(self, tensor: torch.Tensor, meta: TensorMeta, node: TrackedNode) -> TrackedValue:
        """``t_``, ``unsqueeze_`` and the like: the same tensor object gets a new value."""
        old: TrackedValue = tensor._lazyviz  # type: ignore[attr-defined]
        new = TrackedValue(meta, old.storage, node)
        release(old)
        make_pending(tensor, new)
        return new

    # --- sync points --------------------------------------------------------------

    def run_now(self, op: OpOverload, info: OpInfo, args: Any, kwargs: Any, cause: str) -> Any:
        """Evaluate what the call needs, then make the call itself on real tensors."""
        needed, nbytes = guard.needed_nodes(self, info, args, kwargs)
        self.sync(cause, needed, nbytes)
        for tensor in guard.written_tensors(info, args, kwargs):
            value = self.outside.pop(id(tensor), None)  # its metadata may change
            if value is not None:
                release(value)
                value.storage.known = False
        return op(*args, **kwargs)

    def sync(self, cause: str, needed: Iterable[TrackedNode], nbytes: int = 0) -> None:
        """Evaluate ``needed`` and what it depends on; note the sync point in the graph being recorded.

        Raises:
            SyncError: syncs are forbidden here.
        """
        nodes = closure(needed)
        line = self.scopes.sources.find(sys._getframe(1))[0]
        if self.graph is not None and not self.allow_sync:
            where = f" at line {line.line}: {line.text}" if line else ""
            raise SyncError(f"{cause} needs {len(nodes)} pending ops to run{where}; syncs are forbidden here")
        start = time.perf_counter()
        if nodes:
            self.evaluate(nodes, f"{cause} at {line}" if line else cause)
        if self.graph is not None:
            point = SyncPoint(
                cause, line, len(nodes), time.perf_counter() - start, nbytes, len(self.graph.nodes)
            )
            self.graph.sync_points.append(point)
            for callback in self.on_sync:
                callback(point)

    def evaluate(self, nodes: Sequence[TrackedNode], cause: str) -> None:
        if self.evaluator is None:
            raise RuntimeError("lazyviz has no evaluator; import lazyviz.session")
        self.evaluator(nodes, cause)

    def finished(self, node: TrackedNode) -> None:
        """Called by the evaluator after each node."""
        self.pending.pop(node, None)

    def settle(self) -> None:
        """After an evaluation: forget real memory that nothing pending touches any more."""
        TrackedStorage.held_bytes = 0
        if not self.pending:
            self.outside.clear()
            self.storages.clear()
            if self.graph is None:
                self.scopes.by_sequence.clear()
                self.scopes.sources.forget()
            return
        self.storages = {a: storage for a, storage in self.storages.items() if storage.has_pending_access}
        for node in self.pending:
            for value in node.inputs:
                if value.real is not None and not value.storage.foreign:
                    self.storages.setdefault(_torch.storage_address(value.real), value.storage)
        self.outside = {key: value for key, value in self.outside.items() if value.real is not None}
        TrackedStorage.held_bytes = sum(
            storage.nbytes for storage in self.storages.values() if storage.external and not storage.live
        )

    def forget_unreachable(self, reachable: Iterable[Graph]) -> None:
        """Drop pending nodes of unreachable graphs that show in no tensor, owed write or owed draw."""
        kept = {id(graph) for graph in reachable}
        if all(id(node.graph) in kept for node in self.pending):
            return
        wanted = closure(node for node in self.pending if id(node.graph) in kept or _is_owed(node))
        for node in self.pending.keys() - set(wanted):
            del self.pending[node]
            for value in node.inputs:
                value.uses -= 1
                value.storage.uses -= 1
                if not value.uses:
                    value.real = None
        self.settle()

    # --- who is who ---------------------------------------------------------------

    def in_autograd(self) -> bool:
        return _torch.current_autograd_node() is not None

    def rebind(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        """``tensor.data = data`` where either is pending: recorded, keeping ``tensor``'s identity."""
        old = tensor.__dict__.get("_lazyviz") or self.outside.pop(id(tensor), None)
        if type(data) is not LazyTensor:
            if old is not None and type(tensor) is LazyTensor:
                from .tensor import make_real

                release(old)
                make_real(tensor, data)
            else:
                _torch.TensorBase.data.__set__(tensor, data)  # type: ignore[attr-defined]
            return
        source: TrackedValue = data._lazyviz
        value = TrackedValue(source.meta, source.storage, source.node, source.index)
        if old is not None:
            release(old)
        role, name = self.scopes.role_of(tensor)
        if source.storage.role is None:
            source.storage.role, source.storage.name = role, name
        make_pending(tensor, value)
        if source.node is not None:
            source.node.outputs.append(value)
            value.constant = source.constant

    def dispatch_unrecorded(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """An op on a pending tensor where our mode is not active (another thread): evaluate, then run."""
        for cls in types:
            if cls is not LazyTensor and _torch.dispatches_itself(cls):
                return NotImplemented
        return guard.dispatch(self, func, args, kwargs)

    def name_tensors(self, variables: Mapping[str, Any]) -> None:
        """Call values as the user's variables are called; only names that do not begin with ``_``."""
        for name, tensor in list(variables.items()):
            if isinstance(tensor, torch.Tensor) and not name.startswith("_"):
                value = tensor.__dict__.get("_lazyviz") or self.outside.get(id(tensor))
                if value is not None and not value.name:
                    value.name = name
                    if value.storage.external and not value.storage.name:
                        value.storage.name = name

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing for a while; ops run at once, after what they need."""
        self.pauses += 1
        try:
            yield
        finally:
            self.pauses -= 1


class _NotDeferrable(Exception):
    pass


def release(value: TrackedValue) -> None:
    """Cut the link between a value and the user's tensor (which now shows something else)."""
    if value.tensor is not None:
        value.tensor = None
        value.storage.live -= 1
        if value.storage.live == 0:
            value.storage.dropped = len(value.storage.graph.nodes)


def _is_owed(node: TrackedNode) -> bool:
    """Whether eager PyTorch would have left something of ``node`` that can still be seen."""
    return (
        node.draws is not None
        or any(storage.external or storage.live for storage in node.writes)
        or any(value.tensor is not None for value in node.outputs)
    )


def _same_bytes(snapshot: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether memory that others can write still holds what was read first."""
    if snapshot.shape != tensor.shape or snapshot.dtype != tensor.dtype:
        return False
    left = snapshot.contiguous().reshape(-1).view(torch.uint8)
    right = _torch.alias(tensor).contiguous().reshape(-1).view(torch.uint8)
    return torch.equal(left, right)


tape = Tape()
