"""The recorder: every ATen op becomes a node instead of running.

One :class:`Tape` per process knows what is pending; graphs are subgraphs of it, so
tensors may pass from one to another.  :class:`RecorderMode` sends it every op that
reaches the kernels' level: while a graph is open the op is recorded, otherwise (and
while paused) :mod:`lazyviz.record.unrecorded_ops` makes sure that it sees what eager would.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch

from ..graph.ir import TensorMeta
from ..process.tracebacks import shorten
from ..torch_internals import cuda as torch_cuda
from ..torch_internals import dynamo, private_api
from ..torch_internals.dispatch_handlers import ask_subclasses, by_others, past_torch_function
from ..torch_internals.private_api import OpOverload
from . import backward_nodes, constant_folding, fallback, unrecorded_ops
from .dependencies import order
from .external_tensors import ExternalTensors, NotDeferrable, Placeholder, ZeroTensor
from .interception.memory_holders import Unexamined, cure_of
from .lazy_tensor import LazyTensor, is_pending, make_pending, view_is_being_made, wrap
from .pending_ops import release
from .rng import Generators
from .shapes import kernel_probes, scalar_operands
from .shapes.inference import CHECKED_EVERYWHERE, DataDependent, Inferred, OpInfo, OutputSpec
from .shapes.scalar_operands import LARGEST_COMMON
from .storage import TrackedNode, TrackedStorage, TrackedValue

_NUMBERS = (float, int, bool, complex)
_STAND_INS = torch_cuda.STAND_INS
_NO_ANSWER = object()


class RecorderMode(private_api.TorchDispatchMode):
    """Sends every op on this thread to the tape."""

    supports_higher_order_operators = True  # run at once: torch.cond, flex_attention, ...

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or each op would pass two wrappers: `skip_code` below asks the same of Dynamo

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            for cls in types:
                if cls is not LazyTensor and private_api.dispatches_itself(cls):
                    if issubclass(cls, private_api.TRACING_TENSORS):
                        return func(*args, **(kwargs or {}))  # export and compile run through their own modes
                    return _unwrapped(self, func, types, args, kwargs or {})
            if tape.viewed is not None:
                tape.view_is_made()
            if private_api.active_dispatch_modes():  # ours is off the stack here: tracers, all below it
                return unrecorded_ops.dispatch_traced(tape, func, args, kwargs or {})
            if type(func) is not OpOverload:
                return fallback.dispatch_opaque(tape, func, args, kwargs or {})
            if torch.is_inference_mode_enabled() and tape.shapes.info(func).of_views:
                return by_others(self, func, args, kwargs or {})
            if (
                args
                and type(args[0]) in _NUMBERS
                and func.namespace == "aten"  # prims take numbers for tensors
                and str(func._schema.arguments[0].type) == "Tensor"
            ):
                # A constant of a TorchScript program: tensors of its interpreter that are numbers arrive so.
                args = (torch.tensor(args[0]), *args[1:])
            with past_torch_function():  # the op has been through that
                if tape.graph is None or tape.pauses:
                    return unrecorded_ops.dispatch(tape, func, args, kwargs or {})
                if tape.owner != threading.get_ident() and not tape.in_autograd():
                    tape.graph.elsewhere.add(threading.current_thread().name)
                    return unrecorded_ops.dispatch(tape, func, args, kwargs or {})
                with tape.lock:  # what another thread runs must know who needs its results
                    if tape.absent is not None:
                        return tape.absent.record(self, func, args, kwargs or {})
                    return tape.record(func, args, kwargs or {})
        except BaseException as error:
            shorten(error)
            raise


def _unwrapped(
    mode: RecorderMode | None, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What other people's subclasses answer, who take a pending tensor for a tensor: they unwrap first."""
    others = tuple([cls for cls in types if cls is not LazyTensor])
    if len(others) == len(types):
        return NotImplemented  # PyTorch asks them next
    return ask_subclasses(mode, others, func, args, kwargs)


dynamo.skip_code(RecorderMode.__torch_dispatch__.__code__, recursive=True)


class Tape(ExternalTensors):
    """Everything pending in this process, and the graph being recorded, if any."""

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        cause = self.step_at_once
        super().end_step(optimizer)
        if cause is not None and self.graph is not None:
            fallback.note_region(self, cause, optimizer.param_groups, [*optimizer.state.values()])

    # --- recording ----------------------------------------------------------------

    def record(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: C901 - see LONG in tests/test_architecture.py
        """Record one op call; returns pending tensors in the op's own structure."""
        shapes = self.shapes
        info = shapes.infos.get(id(op)) or shapes.info(op)
        if info.special and (answer := self._at_once(op, info, args, kwargs)) is not _NO_ANSWER:
            return answer
        values: list[TrackedValue] = []
        tensors: list[torch.Tensor] = []
        key: list[Any] = [info, torch.get_default_dtype(), torch.is_grad_enabled()]
        by_type = info.by_type
        try:
            if info.is_view and type(args[0]) is not LazyTensor and self.is_foreign(args[0]):
                return op(*args, **kwargs)  # what others write later shows in views, but not in a snapshot
            new_args = tuple([self._translate(item, by_type, values, tensors, key) for item in args])
            new_kwargs = {}
            for name, item in kwargs.items():
                key.append(name)
                new_kwargs[name] = self._translate(item, by_type, values, tensors, key)
        except NotDeferrable as reason:
            return self.run_now(op, info, args, kwargs, str(reason), of_sparse=reason.sparse)
        except Unexamined:
            self.memory_holders.examine(list(unrecorded_ops.tensors_in((*args, *kwargs.values()))))
            return self.record(op, args, kwargs)
        except Placeholder:
            return unrecorded_ops.dispatch(self, op, args, kwargs)
        except ZeroTensor:
            if not any(is_pending(tensor) for tensor in unrecorded_ops.tensors_in((*args, *kwargs.values()))):
                return op(*args, **kwargs)
            return self.record(
                op,
                unrecorded_ops.replaced(args, unrecorded_ops.with_memory),
                unrecorded_ops.replaced(kwargs, unrecorded_ops.with_memory),
            )
        if info.checks_content and (
            refused := constant_folding.refusal(shapes, op, new_args, new_kwargs, values)
        ):
            if not kernel_probes.nowhere(values, new_kwargs):
                return self.run_now(op, info, args, kwargs, f"{op} does not take these arguments")
            if info.name in CHECKED_EVERYWHERE:
                raise refused
        written: Sequence[TrackedStorage] = ()
        if info.mutates:
            written = [
                self._storage_of(tensor) for tensor in unrecorded_ops.written_tensors(info, args, kwargs)
            ]
            if any(storage.foreign for storage in written):
                return self._write_shared(op, info, args, kwargs)
            if len(values) > 1:
                key.append(kernel_probes.sharing(values))  # the kernel may refuse to write what it reads
        if info.needs_storage:
            key += [value.storage.nbytes for value in values]
        cache_key = tuple(key)
        inferred = shapes.entries.get(cache_key)
        if inferred is None:
            recorded = new_args, new_kwargs
            inferred, answer = self._infer(op, info, args, kwargs, recorded, values, cache_key)
            if inferred is None:
                return answer
        else:
            shapes.hits += 1
        if (inferred.on_meta or inferred.special) and (
            answer := self._run_unlike_others(op, info, args, kwargs, inferred, tensors)
        ) is not _NO_ANSWER:
            return answer
        if inferred.dtype is not None and new_kwargs.get("dtype") is None:
            new_kwargs["dtype"] = inferred.dtype  # the default may change before the run
        if info.counts_writes:
            unrecorded_ops.count_writes(info, args, kwargs)

        graph = self.graph
        assert graph is not None
        node = TrackedNode(graph, op, new_args, new_kwargs)
        node.inputs, node.entry = values, inferred
        order(node, written)
        self.scopes.locate(node, sys._getframe(2), info.mutates)
        if info.draws and (generator := self._generator(info, args, kwargs, inferred, values)) is not None:
            self.generators.record(node, generator)
        result = self._outputs(node, inferred, values, tensors)
        graph.nodes.append(node)
        self.pending[node] = None
        if info.is_view and type(tensors[0]) is LazyTensor:
            self.viewed = view_is_being_made(tensors[0])
        if TrackedStorage.held_bytes > self.held_bytes_limit:
            self.sync("dropped inputs kept by the graph exceed the byte budget", list(self.pending))
        return result

    def _at_once(self, op: OpOverload, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an op gives that is not recorded as it is, if this call of it is such a one."""
        if info.metadata_only:
            with private_api.excluding_python():
                return op(*args, **kwargs)
        if info.profiles:
            return op(*args, **kwargs)
        if info.lifts and type(args[0]) is not LazyTensor:
            return args[0]
        if info.zeros:
            return op(*args, **kwargs)  # a tensor without memory, which the layers above see through
        if info.adds and self.summing is not None and self._sums_in_place(args):
            torch.autograd.graph.increment_version(args[0])
            return self.record(torch.ops.aten.add_.Tensor, args, kwargs)
        if info.resizes and not kwargs and args[0].shape == torch.Size(getattr(args[1], "shape", args[1])):
            return args[0]
        if info.shows_bits and (bits := unrecorded_ops.lazy_bits(args[1])):
            return self._with_bits(op, args, kwargs, bits)
        if info.of_parts and unrecorded_ops.is_differentiated((*args, *kwargs.values())):
            return self.run_now(op, info, args, kwargs, f"{op} has no gradient but that of its kernel's ops")
        return _NO_ANSWER

    def _infer(
        self,
        op: OpOverload,
        info: OpInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        recorded: tuple[tuple[Any, ...], dict[str, Any]],
        values: list[TrackedValue],
        cache_key: tuple[Any, ...],
    ) -> tuple[Inferred | None, Any]:
        """What the cache does not know: the results' metadata, or ``None`` and what the call gives at once.

        ``recorded`` are the arguments with values for tensors.
        """
        shapes = self.shapes
        new_args, new_kwargs = recorded
        if info.gradients:
            given = dict(zip(info.argument_names, args)) | kwargs
            if all(given.get(name) is None for name in info.gradients):
                return None, (None,) * len(op._schema.returns)  # as every such kernel does: nothing to record
        if not values and not info.returns_tensors:
            return None, op(*args, **kwargs)  # e.g. profiler annotations
        if info.returns_numbers:
            tensors_known = constant_folding.known(shapes, values)
            if tensors_known is not None and info.name != "is_set_to":  # of copies it tells nothing
                return None, constant_folding.compute(op, new_args, new_kwargs, tensors_known)
            if info.name == "_has_same_storage_numel":  # asked for each pair of a value and its tangent
                left, right = (value.storage.nbytes // value.dtype.itemsize for value in values)
                return None, left == right
            if not unrecorded_ops.needed_nodes(self, info, args, kwargs)[0]:
                return None, op(*args, **kwargs)  # real tensors that are owed nothing
            if info.name == "equal" and kernel_probes.differ_in_shape(values):
                return None, False
            kernel_probes.refuse_planned(op, new_args, new_kwargs, values)
            name = "item" if info.name == "_local_scalar_dense" else info.name
            return None, self.run_now(op, info, args, kwargs, name)
        inferred: Inferred | None
        try:
            inferred = shapes.infer(op, info, new_args, new_kwargs, values)
        except DataDependent as reason:
            if self.absent is not None:
                kernel_probes.refuse_planned(op, new_args, new_kwargs, values)
            inferred = constant_folding.foresee(shapes, op, info, new_args, new_kwargs, values)
            if inferred is None:
                return None, self.run_now(op, info, args, kwargs, str(reason), of_sparse=reason.sparse)
        else:
            shapes.remember(cache_key, inferred)
        shapes.missed(op, values)
        return inferred, None

    def _run_unlike_others(
        self,
        op: OpOverload,
        info: OpInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inferred: Inferred,
        tensors: list[torch.Tensor],
    ) -> Any:
        """What an op gives that is not recorded for what it returns, if it is such a one."""
        if inferred.on_meta:
            # No memory, nothing to defer.
            return op(
                *unrecorded_ops.replaced(args, unrecorded_ops.on_meta),
                **unrecorded_ops.replaced(kwargs, unrecorded_ops.on_meta),
            )
        if inferred.to_cpu and self.absent is None:
            return self.run_now(op, info, args, kwargs, "copy to the CPU")
        if any(type(tensors[at]) is not LazyTensor for at, _ in inferred.restructured):
            if info.metadata_write:  # pending nodes have their own alias of the memory
                self.forget_outside(args[0])
                return op(*args, **kwargs)
            return self.run_now(op, info, args, kwargs, f"{info.name} restructures an outside tensor")
        return _NO_ANSWER

    def _with_bits(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], bits: Sequence[OpOverload]
    ) -> Any:
        """Zeros laid out like ``args[1]``, with its bits: autograd will set them, past every op."""
        plain = args[1]
        for view in bits:
            plain = self.record(view, (plain,), {})
            self.view_is_made()
        zeros = self.record(op, (args[0], plain, *args[2:]), kwargs)
        for view in bits:
            zeros = self.record(view, (zeros,), {})
            self.view_is_made()
        return zeros

    def _sums_in_place(self, args: tuple[Any, ...]) -> bool:
        """Whether the engine would add two gradients of one tensor in the memory of the first.

        It does not where either is subclass-like, as every tensor is to it here; the other
        conditions are its own (``can_accumulate_inplace`` of its input buffer).
        """
        if not backward_nodes.is_calling(self.summing):
            self.summing = None
            return False
        if type(args[0]) is not LazyTensor or torch.is_grad_enabled() or len(args) != 2:
            return False
        value: TrackedValue = args[0]._lazyviz
        return (
            value.storage.live == 1
            and value.meta.dense
            and args[1].dtype == value.meta.dtype
            and args[1].shape == value.meta.shape
            and not private_api.is_zero_tensor(args[1])
            and not private_api.forward_mode_active()
            and private_api.engine_is_sole_owner(args)
        )

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
            value = self.from_outside(item)
        elif cls in _NUMBERS:
            key.append(cls)
            if cls not in by_type:
                key.append(item)
            elif cls is not complex and not -LARGEST_COMMON <= item <= LARGEST_COMMON:
                key.append(scalar_operands.extent(item))
            return item
        elif cls is list or cls is tuple:
            key.append(len(item))
            return cls([self._translate(entry, by_type, values, tensors, key) for entry in item])
        elif isinstance(item, torch.Tensor):
            if isinstance(item, private_api.UninitializedTensorMixin):
                raise Placeholder
            value = self.from_outside(item)
        else:
            key.append(item)
            return item
        values.append(value)
        tensors.append(item)
        key.append(value.meta)
        return value

    def _generator(
        self,
        info: OpInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inferred: Inferred,
        values: list[TrackedValue],
    ) -> torch.Generator | None:
        device = next((spec.meta.device for spec in inferred.outputs if type(spec) is OutputSpec), None)
        device = device if device is not None else values[0].device
        if device in _STAND_INS or (info.name == "native_dropout" and args[2] is False):
            return None  # nothing will be drawn
        generator = kwargs.get("generator")
        if generator is None and info.generator is not None and info.generator < len(args):
            generator = args[info.generator]
        return generator if generator is not None else Generators.default(device)

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
        for position, spec in enumerate(inferred.outputs):
            if type(spec) is not OutputSpec:
                results.append(spec)
                continue
            if spec.itself:
                tensor = tensors[spec.source]  # type: ignore[index]
                value = tensor._lazyviz if type(tensor) is LazyTensor else values[spec.source]  # type: ignore[index]
                if value.node is node:  # restructured
                    value.index = len(outputs)
                outputs.append(value)
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
            value = TrackedValue(spec.meta, storage, node, position)
            outputs.append(value)
            results.append(wrap(value, None if spec.source is None else tensors[spec.source]))
        node.outputs = outputs
        if inferred.container is not None:
            return inferred.container(results)
        return results[0] if results else None

    def _restructure(self, tensor: torch.Tensor, meta: TensorMeta, node: TrackedNode) -> None:
        """``t_``, ``unsqueeze_`` and the like: the same tensor object gets a new value."""
        old: TrackedValue = tensor._lazyviz  # type: ignore[attr-defined]
        new = TrackedValue(meta, old.storage, node)
        new.storage.nbytes = max(new.storage.nbytes, meta.storage_nbytes)  # `out=` may have to grow
        release(old)
        make_pending(tensor, new, tensor)

    # --- sync points --------------------------------------------------------------

    def run_now(
        self,
        op: OpOverload,
        info: OpInfo,
        args: Any,
        kwargs: Any,
        cause: str,
        *,
        of_sparse: bool = False,
    ) -> Any:
        """Evaluate what the call needs, then make the call itself on real tensors."""
        needed, nbytes = unrecorded_ops.needed_nodes(self, info, args, kwargs)
        if self.absent is not None and info.returns_numbers:
            answer = self.absent.answer(needed)
            if answer is not None:
                return answer.value
        # A sparse tensor is made at once, and memory exchanged, which is no sync point by itself.
        if needed or not (of_sparse or info.name == "set_"):
            self.sync(cause, needed, nbytes, a_number=info.returns_numbers)
        written = list(unrecorded_ops.written_tensors(info, args, kwargs))
        before = [fallback.memory_of(tensor) for tensor in written]
        for tensor in written:
            self.forget_outside(tensor)
            self.forget_shadow(tensor)
        result = unrecorded_ops.call(op, info, args, kwargs)
        if info.counts_writes:
            unrecorded_ops.count_writes(info, args, kwargs)
        fallback.note_operator(self, cause, op, args, kwargs, result, written, before)
        return result

    def _write_shared(self, op: OpOverload, info: OpInfo, args: Any, kwargs: Any) -> Any:
        """A write to memory that others may show: at once, unless a closer look finds nobody."""
        operands = list(unrecorded_ops.tensors_in((*args, *kwargs.values())))
        shown = [
            tensor for tensor in unrecorded_ops.written_tensors(info, args, kwargs) if not is_pending(tensor)
        ]
        if self.memory_holders.could_tell(shown):
            self.memory_holders.examine(operands)
            return self.record(op, args, kwargs)
        for tensor in shown:
            holder = self.memory_holders.holder(tensor)
            if holder is not None:
                name = self._storage_of(tensor).name or "a tensor"
                cause = f"write to {name}, whose memory {holder} shows; {cure_of(holder)}"
                if self.scopes.steps and not self.in_autograd():
                    self.begin_step(cause)
                    return unrecorded_ops.dispatch(self, op, args, kwargs)
                return self.run_now(op, info, args, kwargs, cause)
        for tensor in shown:  # nobody has it any more
            self.forget_outside(tensor)
        return self.record(op, args, kwargs)

    def record_view(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A view of a pending tensor taken outside of a block: recorded, not evaluated.

        Autograd takes such views while it holds locks of the tensors that an evaluation
        would touch.
        """
        lazy = next(tensor for tensor in unrecorded_ops.tensors_in(args) if isinstance(tensor, LazyTensor))
        graph = lazy._lazyviz.storage.graph
        recorded = len(graph.nodes)
        before, self.graph = self.graph, graph
        try:
            return self.record(op, args, kwargs)
        finally:
            self.graph = before
            self._views += graph.nodes[recorded:]  # type: ignore[arg-type]

    def in_autograd(self) -> bool:
        return private_api.current_autograd_node() is not None

    def dispatch_unrecorded(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """An op on a pending tensor where our mode is not active (another thread): evaluate, then run."""
        for cls in types:
            if cls is not LazyTensor and private_api.dispatches_itself(cls):
                return _unwrapped(None, func, types, args, kwargs)
        return unrecorded_ops.dispatch(self, func, args, kwargs)


tape = Tape()
