"""The recorder: every ATen op becomes a node instead of running.

:class:`RecorderMode` sees every op that reaches the level of kernels. While a graph is open,
:class:`Recorder` makes a node of it. Otherwise, and while recording is paused,
:mod:`lazyviz.record.intercept_ops_outside_blocks` makes sure that the op sees the same memory as in eager
mode. The :class:`~lazyviz.record.tape.Tape` has everything that is known about pending ops. Graphs are
parts of it, so tensors may be used in several graphs.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch

from ..graph.ir import RejectedOp, TensorMeta
from ..process.deferred_signals import Deferred, at_once, deferred
from ..process.global_state_lock import CriticalSection
from ..process.tracebacks import shorten
from ..torch_internals import dynamo, fake_cuda_devices, private_api
from ..torch_internals.private_api import OpOverload
from ..torch_internals.redispatch_from_dispatch_mode import (
    ask_subclasses,
    call_decomposed,
    call_kernel,
    dense_kernel,
    is_dispatched_in_cpp,
    past_torch_function,
)
from ..torch_internals.storage_ownership import WeakStorage
from . import constant_folding, eager_fallback, intercept_ops_outside_blocks
from .dependency_closure import order, order_check
from .interception import torchscript_calls
from .interception.observers_of_deferred_writes import Unexamined, workaround_for
from .lazy_tensor import (
    LazyParameter,
    LazyTensor,
    detached,
    is_lazy,
    is_pending,
    make_pending,
    view_is_being_made,
    wrap,
)
from .parity.inplace_gradient_sums import accumulates_in_place, is_taken_over, sharing_memory
from .preexisting_tensors import NotDeferrable, Placeholder, ZeroTensor, no_storage
from .provenance.variable_names import variable_for
from .random_draw_order import Generators
from .shapes import kernel_probes, scalar_operands
from .shapes.scalar_operands import LARGEST_COMMON
from .shapes.shape_inference_cache import CHECKED_EVERYWHERE, DataDependent, Inferred, OpInfo, OutputSpec
from .sparse import record_on_components as sparse_recording
from .sparse.components import parts_of
from .sync_points import without_shapes
from .tape import Tape, tape
from .tensor_table import release
from .tracked_storages import TrackedNode, TrackedStorage, TrackedValue

_NUMBERS = (float, int, bool, complex)
_STAND_INS = fake_cuda_devices.STAND_INS
_NO_ANSWER = object()
_MOST_EXPRESSIONS = 256  # that are remembered for written tensors


def _shares_its_value(tensor: torch.Tensor) -> bool:
    first = tensor._lazyviz.tensor  # type: ignore[attr-defined]
    return first is not None and first.next is not None


_SPARSE_ADDMM = torch.ops.aten._sparse_addmm.default


class RecorderMode(private_api.TorchDispatchMode):
    """Sends every op on this thread to the recorder."""

    supports_higher_order_operators = True  # these run immediately: torch.cond, flex_attention, ...

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise each op would pass two wrappers; `skip_code` below has the same effect on Dynamo.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Finalizers would run at the op's dispatch level, where their ops see neither autograd nor this mode.
        collects = gc.isenabled()
        try:
            gc.disable()
            for cls in types:
                if not issubclass(cls, LazyTensor) and private_api.dispatches_itself(cls):
                    if issubclass(cls, private_api.TRACING_TENSORS):
                        return func(*args, **(kwargs or {}))  # export and compile run through their own modes
                    return _unwrapped(self, func, types, args, kwargs or {})
            if tape.recording.viewed is not None:
                tape.recording.view_is_made()
            # Our mode is off the stack here: this shows tracers, all of which are below it.
            if private_api.active_dispatch_modes():
                return intercept_ops_outside_blocks.dispatch_traced(tape, func, args, kwargs or {})
            if type(func) is not OpOverload:
                if _is_planned() and (kernel := dense_kernel(func)) is not None:
                    with tape.runs.lock:
                        return call_kernel(self, kernel, args, kwargs or {})
                return eager_fallback.dispatch_opaque(tape, func, args, kwargs or {})
            if torch.is_inference_mode_enabled() and (
                (info := tape.shapes.info(func)).of_views
                or info.of_ops
                or sparse_recording.is_composite(func, args)
            ):
                return call_decomposed(self, func, args, kwargs or {})
            args = _operands(self, func, args)
            with past_torch_function():  # the op has already been through that
                graph = tape.recording.graph  # another thread may end its block at any time
                if graph is None or tape.recording.pauses:
                    return intercept_ops_outside_blocks.dispatch(tape, func, args, kwargs or {})
                if not tape.recording.is_on_this_thread():
                    graph.elsewhere.add(threading.current_thread().name)
                    return intercept_ops_outside_blocks.dispatch(tape, func, args, kwargs or {})
                with tape.runs.lock:  # a run on another thread must know which thread needs its results
                    if tape.recording.absent is not None:
                        return tape.recording.absent.record(self, func, args, kwargs or {})
                    return recorder.record(func, args, kwargs or {})
        except BaseException as error:
            shorten(error)
            torchscript_calls.note(error)
            raise
        finally:
            if collects:
                gc.enable()


def _is_planned() -> bool:
    """Whether the recorded program can only be planned, so that calls that are not one kernel have no tensors
    to run on.
    """
    recording = tape.recording
    planned = recording.absent is not None or recording.world is not None
    return planned and not recording.pauses and recording.is_on_this_thread()


def _operands(mode: RecorderMode, func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments as the kernel will get them."""
    if func is _SPARSE_ADDMM and not tape.recording.pauses:
        with mode:
            return sparse_recording.autocast(func, args)
    if (
        args
        and type(args[0]) in _NUMBERS
        and func.namespace == "aten"  # prims accept numbers as tensors
        and str(func._schema.arguments[0].type) == "Tensor"
    ):
        # Constants of a TorchScript program, which are numbers, arrive as tensors of its interpreter.
        return torch.tensor(args[0], device="cpu"), *args[1:]
    return args


def _unwrapped(
    mode: RecorderMode | None, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of third-party subclasses, which treat a pending tensor as a plain one, and are called
    first.
    """
    others = tuple([cls for cls in types if not issubclass(cls, LazyTensor)])
    if len(others) == len(types) or any(map(is_dispatched_in_cpp, others)):
        return NotImplemented  # PyTorch calls them next
    return ask_subclasses(mode, others, func, args, kwargs)


dynamo.skip_code(RecorderMode.__torch_dispatch__.__code__, recursive=True)


class _Call(NamedTuple):
    """A call that can be recorded; ``written`` are the storages that it writes."""

    op: OpOverload
    info: OpInfo
    given: tuple[tuple[Any, ...], dict[str, Any]]
    recorded: tuple[tuple[Any, ...], dict[str, Any]]  # with values in place of tensors
    values: list[TrackedValue]
    tensors: list[torch.Tensor]
    written: Sequence[TrackedStorage]
    inferred: Inferred
    generator: torch.Generator | None  # that it draws from


class Recorder:
    """Makes a node of every op call that can be deferred, and runs the others."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._recording, self._tensors, self._external = tape.recording, tape.tensors, tape.external
        self._runs, self._pending, self._memory_holders = tape.runs, tape.pending, tape.memory_holders
        self._shapes, self._scopes, self._generators = tape.shapes, tape.scopes, tape.generators
        # The user's expression for memory, by its address, and the file and number of the line.
        self._expressions: dict[tuple[int, str, int], tuple[Any, str | None]] = {}
        tape.recorder = self
        tape.scopes.stepped = self.end_step

    # --- steps of optimizers --------------------------------------------------------

    def begin_immediate_step(self, cause: str) -> None:
        """An optimizer makes a write that cannot be deferred: the rest of its step runs immediately."""
        self._runs.sync(cause, list(self._pending))
        self._recording.pauses += 1
        self._recording.immediate_step = cause

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The step of an optimizer has ended."""
        cause = self._recording.immediate_step
        if cause is None:
            return
        self._recording.pauses -= 1
        self._recording.immediate_step = None
        if self._recording.graph is not None:
            eager_fallback.note_region(self._tape, cause, optimizer.param_groups, [*optimizer.state.values()])

    # --- recording ----------------------------------------------------------------

    def record(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one op call; returns pending tensors in the structure of the op's result.

        Signals wait for its end, because their handlers may evaluate what the call needs, or record ops.
        After a finalizer has done so, it starts over.
        """
        recording, answer = self._recording, None
        while recording.graph is not None:  # such code may have ended the block as well
            last_change, signals = recording.last_change, Deferred(of_op=self._tape.user_level)
            try:
                with signals:
                    call, answer = self._prepared(op, args, kwargs)
                    if call is None:
                        return answer
                    if recording.last_change == last_change:
                        # A thread of the engine has no frame above the one that called this function.
                        answer = self._append(call, sys._getframe(1).f_back)
                        break
            finally:
                signals.__exit__()  # another thread's exception may have stopped it
        else:
            return intercept_ops_outside_blocks.dispatch(self._tape, op, args, kwargs)
        if TrackedStorage.held_bytes > recording.held_bytes_limit:
            self._runs.sync("dropped inputs kept by the graph exceed the byte budget", list(self._pending))
        return answer

    def _prepared(  # noqa: C901 - see LONG in tests/test_architecture.py
        self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_Call | None, Any]:
        """Prepare a call: ``(call, None)``, or ``(None, result)`` if it is not recorded; idempotent."""
        shapes = self._shapes
        info = shapes.infos.get(id(op)) or shapes.info(op)
        if info.special and (answer := self._answer_immediately(op, info, args, kwargs)) is not _NO_ANSWER:
            return None, answer
        values: list[TrackedValue] = []
        tensors: list[torch.Tensor] = []
        key: list[Any] = [info, torch.get_default_dtype(), torch.is_grad_enabled()]
        by_type = info.by_type
        try:
            if info.is_view and not is_lazy(args[0]) and self._external.is_foreign(args[0]):
                # Later writes by others show in views, but not in a snapshot.
                return None, op(*args, **kwargs)
            new_args = tuple([self._translate(item, by_type, values, tensors, key) for item in args])
            new_kwargs = {}
            for name, item in kwargs.items():
                key.append(name)
                new_kwargs[name] = self._translate(item, by_type, values, tensors, key)
        except NotDeferrable as reason:
            if reason.sparse:
                return None, self._with_sparse(op, info, args, kwargs)
            return None, self.run_now(op, info, args, kwargs, str(reason))
        except Unexamined:
            self._memory_holders.examine(
                list(intercept_ops_outside_blocks.tensors_in((*args, *kwargs.values())))
            )
            return None, self.record(op, args, kwargs)
        except Placeholder:
            return None, self._of_uninitialized(op, args, kwargs)
        except ZeroTensor:
            return None, self._with_memory(op, args, kwargs)
        if info.checks_content and (
            refused := constant_folding.refusal(shapes, op, new_args, new_kwargs, values)
        ):
            if not kernel_probes.on_absent_gpu(values, new_kwargs):
                return None, self.run_now(op, info, args, kwargs, f"{op} rejects these arguments")
            if info.name in CHECKED_EVERYWHERE:
                raise refused
        written: Sequence[TrackedStorage] = ()
        if info.mutates:
            found = {id(tensor): value.storage for tensor, value in zip(tensors, values)}
            written = [
                found[id(each)] for each in intercept_ops_outside_blocks.written_tensors(info, args, kwargs)
            ]
            if any(storage.foreign for storage in written):
                return None, self._write_shared(op, info, args, kwargs)
            if len(values) > 1:
                key.append(kernel_probes.sharing(values))  # the kernel may refuse to write its input
        if info.needs_storage:
            key += [value.storage.nbytes for value in values]
        cache_key = tuple(key)
        inferred = shapes.entries.get(cache_key)
        if inferred is None:
            recorded = new_args, new_kwargs
            inferred, answer = self._infer(op, info, args, kwargs, recorded, values, cache_key)
            if inferred is None:
                return None, answer
        else:
            shapes.hits += 1
        if (inferred.on_meta or inferred.special) and (
            answer := self._run_unlike_others(op, info, args, kwargs, inferred, tensors)
        ) is not _NO_ANSWER:
            return None, answer
        if inferred.dtype is not None and new_kwargs.get("dtype") is None:
            new_kwargs["dtype"] = inferred.dtype  # the default may change before the run
        generator = self._generator(info, args, kwargs, inferred, values) if info.draws else None
        call = (args, kwargs), (new_args, new_kwargs), values, tensors, written
        return _Call(op, info, *call, inferred, generator), None

    def _append(self, call: _Call, frame: FrameType | None) -> Any:
        """Create the node; returns the op's result."""
        recording, info, graph = self._recording, call.info, self._recording.graph
        assert graph is not None
        self._runs.refuse_nested()
        recording.appending = threading.get_ident()
        try:
            if info.counts_writes:
                intercept_ops_outside_blocks.count_writes(info, *call.given)
            node = TrackedNode(graph, call.op, *call.recorded)
            recording.last_change = node.sequence
            node.inputs, node.entry = call.values, call.inferred
            order(node, call.written)
            self._scopes.locate(node, frame, info.mutates)
            if call.generator is not None:
                self._generators.record(node, call.generator)
            result = self._outputs(node, call.inferred, call.values, call.tensors)
            graph.nodes.append(node)
            self._pending[node] = None
            if info.checks:
                order_check(node)
            if info.is_view and is_lazy(call.tensors[0]):
                recording.viewed = view_is_being_made(call.tensors[0])
            return result
        finally:
            recording.appending = 0

    def _answer_immediately(
        self, op: OpOverload, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of a call that is not recorded unchanged; ``_NO_ANSWER`` for any other call."""
        if info.metadata_only:
            with private_api.excluding_python():
                return op(*args, **kwargs)
        if info.profiles:
            return op(*args, **kwargs)
        if info.lifts and not is_lazy(args[0]):
            if self._recording.graph is not None:
                self._tensors.arrivals.note(args[0], self._recording.graph)
            return args[0]
        if info.detaches and is_lazy(args[0]) and not self._recording.explicit_detach:
            if (tensor := detached(args[0])) is None:
                return _NO_ANSWER
            self._scopes.mark_stored_gradient(args[0]._lazyviz)
            self._recording.viewed = view_is_being_made(args[0])
            return tensor
        if info.makes_sparse:
            made = sparse_recording.make(self._tape, op, args, kwargs)
            return _NO_ANSWER if made is NotImplemented else made
        if info.communicates:
            return self._communicate(op, args, kwargs)
        if info.copies and is_taken_over(args):
            return self._take_over(args[0])
        if info.zeros:
            return op(*args, **kwargs)  # a tensor without memory, which the layers above handle
        if info.adds and self._recording.summing is not None and accumulates_in_place(self._recording, args):
            torch.autograd.graph.increment_version(args[0])
            return self.record(torch.ops.aten.add_.Tensor, args, kwargs)
        if info.resizes and not kwargs and args[0].shape == torch.Size(getattr(args[1], "shape", args[1])):
            return args[0]
        if info.shows_bits and (bits := intercept_ops_outside_blocks.lazy_bits(args[1])):
            return self._with_bits(op, args, kwargs, bits)
        if (cause := self._reason_to_run(op, info, args, kwargs)) is not None:
            return self.run_now(op, info, args, kwargs, cause)
        return _NO_ANSWER

    def _reason_to_run(
        self, op: OpOverload, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str | None:
        """Why a call has to run immediately: its kernel depends on dispatch layers above it."""
        operands = (*args, *kwargs.values())
        if info.of_parts and intercept_ops_outside_blocks.is_differentiated(operands):
            return f"{op} has no gradient formula of its own"
        if info.calls_autocast and self._recording.absent is None:
            device = next(intercept_ops_outside_blocks.tensors_in(operands)).device
            if private_api.autocast_dtype(device) is not None:
                return f"{op} under autocast"
        return None

    def _take_over(self, gradient: torch.Tensor) -> torch.Tensor:
        """Store a sparse gradient as the engine would: in the same memory."""
        result = sharing_memory(gradient)
        if any(map(is_pending, parts_of(gradient))):
            return result
        eager_fallback.note_region(self._tape, "sparse gradient stored without a copy", (), result, held=0)
        return result

    def _communicate(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an op that communicates with other ranks, if this process is one of N."""
        recording = self._recording
        if recording.world is None or recording.communicating:
            return _NO_ANSWER
        recording.communicating = True
        try:
            return recording.world.functional(op, args, kwargs, self.record)
        finally:
            recording.communicating = False

    def _note_refused(
        self,
        op: OpOverload,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        values: Sequence[TrackedValue],
        error: Exception,
    ) -> None:
        """Note that PyTorch rejects these inputs. If the error ends the block, the picture shows where."""
        graph, scopes = self._recording.graph, self._scopes
        if graph is None:
            return
        source, hint = scopes.sources.find(sys._getframe(1))
        phase = "backward" if self._recording.in_autograd() else hint or scopes.phase
        phase = "forward" if phase == "other" else phase
        graph.rejected = RejectedOp(
            op, *call, list(values), id(error), source, scopes.module, scopes.root, phase
        )

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
        """For a call that is not in the cache: the results' metadata, or ``None`` and the immediate result of
        the call.

        ``recorded`` are the arguments, with values in place of tensors.
        """
        shapes = self._shapes
        new_args, new_kwargs = recorded
        if info.gradients:
            given = dict(zip(info.argument_names, args)) | kwargs
            if all(given.get(name) is None for name in info.gradients):
                # As all such kernels do, so there is nothing to record.
                return None, (None,) * len(op._schema.returns)
        if not values and not info.returns_tensors:
            return None, op(*args, **kwargs)  # for example, profiler annotations
        if info.returns_numbers:
            tensors_known = constant_folding.known(shapes, values)
            if tensors_known is not None and info.name != "is_set_to":  # it has no meaning for copies
                return None, constant_folding.compute(op, new_args, new_kwargs, tensors_known)
            if info.name == "_has_same_storage_numel":  # called for each pair of a value and its tangent
                left, right = (value.storage.nbytes // value.dtype.itemsize for value in values)
                return None, left == right
            if not intercept_ops_outside_blocks.needed_nodes(self._tape, info, args, kwargs)[0]:
                return None, op(*args, **kwargs)  # real tensors without pending writes
            if info.name == "equal" and kernel_probes.differ_in_shape(values):
                return None, False
            kernel_probes.refuse_planned(op, new_args, new_kwargs, values)
            name = "item" if info.name == "_local_scalar_dense" else info.name
            return None, self.run_now(op, info, args, kwargs, name)
        inferred: Inferred | None
        device = kwargs.get("device")
        if device is not None and device.type in private_api.DEVICES_WITHOUT_STORAGE:
            return None, self.run_now(op, info, args, kwargs, no_storage(device))
        reason = shapes.dependent.get(cache_key)
        try:
            inferred = self._inferred(op, info, recorded, values) if reason is None else None
        except DataDependent as error:
            inferred, reason = None, shapes.remember_dependent(cache_key, error)
        if inferred is None:
            assert reason is not None
            inferred = constant_folding.infer_from_values(shapes, op, info, new_args, new_kwargs, values)
            if inferred is None:
                if self._recording.absent is not None:
                    kernel_probes.refuse_planned(op, new_args, new_kwargs, values)
                return None, self.run_now(op, info, args, kwargs, str(reason), of_sparse=reason.sparse)
        else:
            shapes.remember(cache_key, inferred)
        shapes.missed(op, values)
        return inferred, None

    def _inferred(
        self,
        op: OpOverload,
        info: OpInfo,
        recorded: tuple[tuple[Any, ...], dict[str, Any]],
        values: list[TrackedValue],
    ) -> Inferred:
        """The results' metadata; an error is noted if PyTorch raises it for these inputs."""
        with deferred():  # a signal handler's exception is neither a result nor a rejection
            try:
                return self._shapes.infer(op, info, *recorded, values)
            except DataDependent:
                raise
            except Exception as error:
                self._note_refused(op, recorded, values, error)
                raise

    def _run_unlike_others(
        self,
        op: OpOverload,
        info: OpInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inferred: Inferred,
        tensors: list[torch.Tensor],
    ) -> Any:
        """The result of an op that is recorded in a special way, if this is such an op."""
        if inferred.on_meta:
            # No memory, nothing to defer.
            return op(
                *intercept_ops_outside_blocks.replaced(args, intercept_ops_outside_blocks.on_meta),
                **intercept_ops_outside_blocks.replaced(kwargs, intercept_ops_outside_blocks.on_meta),
            )
        if inferred.to_cpu and self._recording.absent is None:
            return self.run_now(op, info, args, kwargs, "copy to the CPU")
        if any(not is_lazy(tensors[at]) for at, _ in inferred.restructured):
            if info.metadata_write:  # pending nodes have their own alias of the memory
                self._tensors.forget_outside(args[0])
                return op(*args, **kwargs)
            return self.run_now(op, info, args, kwargs, f"{info.name} changes an outside tensor's metadata")
        shared = [tensors[at] for at, _ in inferred.restructured if _shares_its_value(tensors[at])]
        if shared:
            for tensor in shared:
                self._give_own_value(tensor)
            return self.record(op, args, kwargs)
        return _NO_ANSWER

    def _with_sparse(
        self, op: OpOverload, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of a call with sparse tensors, pending where a rule knows what the kernel returns."""
        answer = sparse_recording.record(self.record, op, args, kwargs)
        if answer is not NotImplemented:
            return answer
        cause = f"{info.name} of a sparse tensor cannot be deferred"
        return self.run_now(op, info, args, kwargs, cause, of_sparse=True)

    def _with_memory(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call with zero tensors, which have no memory: recorded if others are pending."""
        if not any(
            is_pending(tensor)
            for tensor in intercept_ops_outside_blocks.tensors_in((*args, *kwargs.values()))
        ):
            return op(*args, **kwargs)
        return self.record(
            op,
            intercept_ops_outside_blocks.replaced(args, intercept_ops_outside_blocks.with_memory),
            intercept_ops_outside_blocks.replaced(kwargs, intercept_ops_outside_blocks.with_memory),
        )

    def _of_uninitialized(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call with a parameter that has no shape yet."""
        with without_shapes(self._recording.absent):
            return intercept_ops_outside_blocks.dispatch(self._tape, op, args, kwargs)

    def _give_own_value(self, tensor: torch.Tensor) -> None:
        """The kernel will change the metadata of the computed value, but other tensors must keep theirs."""
        self._recording.explicit_detach = True
        try:
            own = self.record(torch.ops.aten.detach.default, (tensor,), {})
        finally:
            self._recording.explicit_detach = False
        self._recording.view_is_made()
        release(tensor._lazyviz, tensor)  # type: ignore[attr-defined]
        make_pending(tensor, own._lazyviz, own)

    def _with_bits(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], bits: Sequence[OpOverload]
    ) -> Any:
        """Zeros with the layout and the bits of ``args[1]``, because autograd will set them without an op."""
        plain = args[1]
        for view in bits:
            plain = self.record(view, (plain,), {})
            self._recording.view_is_made()
        zeros = self.record(op, (args[0], plain, *args[2:]), kwargs)
        for view in bits:
            zeros = self.record(view, (zeros,), {})
            self._recording.view_is_made()
        return zeros

    def _storage_of(self, tensor: torch.Tensor) -> TrackedStorage:
        return tensor._lazyviz.storage if is_lazy(tensor) else self._tensors.outside[id(tensor)].storage

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
        if cls is LazyTensor or cls is LazyParameter:
            value = item._lazyviz
        elif cls is torch.Tensor or cls is torch.nn.Parameter:
            value = self._external.from_outside(item)
        elif cls in _NUMBERS:
            key.append(cls)
            if cls not in by_type:
                key.append(item)
            elif cls is complex or not -LARGEST_COMMON <= item <= LARGEST_COMMON:
                key.append(scalar_operands.extent(item))
            return item
        elif cls is list or cls is tuple:
            key.append(len(item))
            return cls([self._translate(entry, by_type, values, tensors, key) for entry in item])
        elif isinstance(item, torch.Tensor):
            if isinstance(item, private_api.UninitializedTensorMixin):
                raise Placeholder
            value = item._lazyviz if is_lazy(item) else self._external.from_outside(item)
        elif isinstance(item, private_api.SYMBOLIC):
            raise NotDeferrable("a symbolic number of a tracer", sparse=False)
        else:
            key.append(item)
            return item
        values.append(value)
        tensors.append(item)
        key.append(value.meta)
        return value

    def translated(self, tensor: torch.Tensor, values: list[TrackedValue]) -> TrackedValue:
        """The value of a tensor that an op reads; it is appended to ``values``."""
        value: TrackedValue = self._translate(tensor, frozenset(), values, [], [])
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
        if device in _STAND_INS or info.draws_nothing(args, kwargs):
            return None
        generator = kwargs.get("generator")
        if generator is None and info.generator is not None and info.generator < len(args):
            generator = args[info.generator]
        return generator if generator is not None else Generators.default(device)

    def _outputs(
        self, node: TrackedNode, inferred: Inferred, values: list[TrackedValue], tensors: list[torch.Tensor]
    ) -> Any:
        """Create the node's output values and the tensors that the caller gets for them."""
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
                value = tensor._lazyviz if is_lazy(tensor) else values[spec.source]  # type: ignore[index]
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
        release(old, tensor)
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
        with at_once():  # it may take long
            return self._run_now(op, info, args, kwargs, cause, of_sparse)

    def _run_now(
        self, op: OpOverload, info: OpInfo, args: Any, kwargs: Any, cause: str, of_sparse: bool
    ) -> Any:
        needed, nbytes = intercept_ops_outside_blocks.needed_nodes(self._tape, info, args, kwargs)
        absent = self._recording.absent
        answer = absent.answer(needed, one=True) if absent is not None and info.returns_numbers else None
        if answer is not None:
            read = args[0] if args and info.name in ("item", "_local_scalar_dense") else None
            return answer.value if read is None else answer.for_dtype(read.dtype)
        # Creating a sparse tensor and exchanging memory happen immediately, but are not sync points by
        # themselves.
        if needed or not (of_sparse or info.name == "set_"):
            self._runs.sync(cause, needed, nbytes, a_number=info.returns_numbers)
        written = list(intercept_ops_outside_blocks.written_tensors(info, args, kwargs))
        before = [eager_fallback.memory_of(tensor) for tensor in written]
        for tensor in written:
            self._tensors.forget_outside(tensor)
            self._tensors.forget_shadow(tensor)
        result, held = intercept_ops_outside_blocks.call_measured(op, info, args, kwargs)
        if info.counts_writes:
            intercept_ops_outside_blocks.count_writes(info, args, kwargs)
        eager_fallback.note_operator(self._tape, cause, op, args, kwargs, result, written, before, held)
        return result

    def _write_shared(self, op: OpOverload, info: OpInfo, args: Any, kwargs: Any) -> Any:
        """A write to memory that may be shared: runs immediately, unless a closer examination finds no
        holder.
        """
        operands = list(intercept_ops_outside_blocks.tensors_in((*args, *kwargs.values())))
        shown = [
            tensor
            for tensor in intercept_ops_outside_blocks.written_tensors(info, args, kwargs)
            if not is_pending(tensor)
        ]
        if self._memory_holders.may_be_resolved(shown):
            self._memory_holders.examine(operands)
            return self.record(op, args, kwargs)
        for tensor in shown:
            holder = self._memory_holders.holder(tensor)
            if holder is not None:
                name = self._storage_of(tensor).name or self._variable_for(tensor) or "a tensor"
                cause = f"write to {name}, whose memory {holder} shares; {workaround_for(holder)}"
                if self._scopes.steps and not self._recording.in_autograd():
                    self.begin_immediate_step(cause)
                    return intercept_ops_outside_blocks.dispatch(self._tape, op, args, kwargs)
                return self.run_now(op, info, args, kwargs, cause)
        for tensor in shown:  # there is no holder any more
            self._tensors.forget_outside(tensor)
        return self.record(op, args, kwargs)

    def _variable_for(self, tensor: torch.Tensor) -> str | None:
        """The user's expression for ``tensor``, which is searched once for each line."""
        user = self._scopes.sources.users(sys._getframe(1))
        if user is None:
            return None
        frame, line = user
        key = private_api.storage_address(tensor), line.file, line.line
        known = self._expressions.get(key)
        if known is None or known[0].expired():  # other memory at the same address
            if len(self._expressions) >= _MOST_EXPRESSIONS:
                self._expressions.clear()
            with private_api.no_function_modes():
                memory = WeakStorage(private_api.TensorBase.untyped_storage(tensor))
                known = self._expressions[key] = memory, variable_for(tensor, frame)
        return known[1]

    def record_view(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A view of a pending tensor taken outside of a block: recorded, not evaluated.

        Autograd creates such views while it holds locks of tensors that an evaluation would need.
        """
        lazy = next(
            tensor
            for tensor in intercept_ops_outside_blocks.tensors_in(args)
            if isinstance(tensor, LazyTensor)
        )
        if op is torch.ops.aten.alias.default and (same := detached(lazy)) is not None:
            return same  # a component of a sparse tensor
        graph = lazy._lazyviz.storage.graph
        recorded = len(graph.nodes)
        with CriticalSection():  # no other thread begins or ends a block meanwhile
            before, self._recording.graph = self._recording.graph, graph
            try:
                return self.record(op, args, kwargs)
            finally:
                self._recording.graph = before
                self._tape.pending_ops.views += graph.nodes[recorded:]  # type: ignore[arg-type]

    def detach(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor.detach()`` called by Python code, which is recorded."""
        recording = self._recording
        recording.explicit_detach = True
        try:
            return private_api.TensorBase.detach(tensor)
        finally:
            recording.explicit_detach = False

    def dispatch_unrecorded(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """An op on a pending tensor where our mode is not active (on another thread): evaluate, then run."""
        for cls in types:
            if not issubclass(cls, LazyTensor) and private_api.dispatches_itself(cls):
                return _unwrapped(None, func, types, args, kwargs)
        return intercept_ops_outside_blocks.dispatch(self._tape, func, args, kwargs)


recorder = Recorder(tape)
