"""Shape inference with its cache: the result of an op from the metadata of its arguments.

FakeTensor knows every op but takes many times as long as a look-up, because many of its rules are Python
references.  It is used if :mod:`lazyviz.record.shapes.fast_shape_rules` has no answer.  Programs repeat
themselves, so results are cached, keyed by everything that they depend on.  Ops with results that depend on
tensor data raise :class:`DataDependent`; only that they do is cached.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch

from ...graph.ir import TensorMeta
from ...process.deferred_signals import deferred
from ...torch_internals import fake_cuda_devices, private_api
from ...torch_internals.private_api import OpOverload
from ..interception import warning_routing
from . import (
    ctc_loss,
    cudnn_rnn_shapes,
    fast_shape_rules,
    kernel_probes,
    meta_kernel_corrections,
    synchronized_batch_norm_shapes,
    unsupported_cuda_dtypes,
)
from .inferred_outputs import Inferred as Inferred
from .inferred_outputs import Output
from .inferred_outputs import OutputSpec as OutputSpec
from .interned_metadata import MetadataTable
from .kernel_probes import DataDependent as DataDependent
from .operator_schema_properties import CHECKED_EVERYWHERE as CHECKED_EVERYWHERE
from .operator_schema_properties import OpInfo as OpInfo

MOST_ENTRIES = 100_000  # entries of the cache; it is cleared when full, for example if sizes never repeat
# Ops whose shape rule differs from the result of the CPU kernel (oneDNN's workspace): call the kernel.
_ASK_THE_KERNEL = {"mkldnn_rnn_layer"}
# They do not resize an `out=` that has the right number of elements, regardless of its shape.
_FILL = {"arange", "range", "linspace", "logspace"}
_MAKE_SPARSE = {
    "sparse_compressed_tensor", "_sparse_compressed_tensor_with_dims", "sparse_coo_tensor", "_to_sparse",
    "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc",
}  # fmt: skip
# Ops that create quantized tensors, whose scheme a shape rule does not show.
_QUANTIZING = ("quantize_per_", "_make_per_", "_empty_affine", "_empty_per_channel")

_CONSTANTS = (
    OpInfo, TensorMeta, torch.dtype, torch.device, torch.layout, torch.memory_format, type, type(None), str,
    bool, int, float, complex, tuple,
)  # fmt: skip
"""Types in the keys of calls, apart from those of arguments such as storages and generators."""


_OF_CUDA = cudnn_rnn_shapes.RULES | synchronized_batch_norm_shapes.RULES


class _FakeCall:
    """A call on tensors without memory: ``inputs``, which the op may change, had the metadata ``metas``."""

    def __init__(
        self, op: OpOverload, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Any]
    ) -> None:
        self.op, self.info, self.recorded, self.values = op, info, (args, kwargs), values
        self.fakes = {id(value): kernel_probes.fake(value.meta, value.storage.nbytes) for value in values}
        self.inputs = [self.fakes[id(value)] for value in values]
        self.metas = [_key(fake) for fake in self.inputs]
        self.addresses = [private_api.storage_address(fake) for fake in self.inputs]
        self.args = kernel_probes.substitute(args, self.fakes)
        self.kwargs = kernel_probes.substitute(kwargs, self.fakes)
        if info.draws:  # not every rule accepts one
            self.kwargs = {name: None if name == "generator" else item for name, item in self.kwargs.items()}
        self.arguments = dict(zip(info.argument_names, self.args)) | self.kwargs
        self.fresh: dict[int, int] = {}  # numbers of the storages that the op creates, by address


def _results(call: _FakeCall, result: Any) -> tuple[type | None, list[Any]]:
    """The results one by one, and the type of their container: ``None`` for one tensor, or none."""
    info, (args, kwargs) = call.info, call.recorded
    container = type(result) if isinstance(result, (tuple, list)) else None
    results = [] if result is None else list(result) if container is not None else [result]
    for number, position in info.returned:
        # Some rules return a new tensor where the kernel returns its argument.
        value = args[position] if position < len(args) else kwargs.get(info.argument_names[position])
        results[number] = call.fakes.get(id(value), results[number])
    if container is not None and container is not list:
        container = tuple
    for position, wanted in enumerate(_output_mask(info, args, kwargs)):
        if not wanted and not info.mutates and type(results[position]) is not list:
            # Kernels omit the results that the mask excludes, but not every shape rule does.
            results[position] = None
    return container, results


def _output_mask(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[bool]:
    if "output_mask" not in info.argument_names:
        return ()
    position = info.argument_names.index("output_mask")
    return args[position] if position < len(args) else kwargs.get("output_mask", ())


class ShapeCache:
    """Infers the results of ops, and caches them. One per process."""

    def __init__(self) -> None:
        self.infos: dict[int, OpInfo] = {}  # by id of the operator: OpOverload hashes in Python
        self.entries: dict[Any, Inferred] = {}
        self.dependent: dict[Any, DataDependent] = {}
        self.metadata = MetadataTable()
        self.meta_of = self.metadata.meta_of
        self.hits = 0
        self.misses = 0
        self.inferring = False  # PyTorch's own shape rules are running, on our tensors without content
        self._missed: tuple[OpOverload, list[Any]] | None = None

    @functools.cached_property
    def _fake_mode(self) -> private_api.FakeTensorMode:
        """Created on first use, because creating it imports Dynamo."""
        mode = private_api.FakeTensorMode()
        mode.cache_enabled = False  # our cache precedes FakeTensor's, which loses the offsets of empty views
        return mode

    def info(self, op: OpOverload) -> OpInfo:
        info = self.infos.get(id(op))
        if info is None:
            info = self.infos.setdefault(id(op), OpInfo(op))  # another thread may be first
        return info

    @property
    def last_miss(self) -> str:
        """The last call that was not in the cache, as text."""
        if self._missed is None:
            return ""
        op, metas = self._missed
        return f"{op} of {', '.join(map(str, metas)) or 'no tensors'}"

    def missed(self, op: OpOverload, values: list[Any]) -> None:
        """Count a call that was not in the cache."""
        self.misses += 1
        self._missed = op, [value.meta for value in values]

    def learn(
        self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Any], key: Any
    ) -> Inferred | None:
        """Store under ``key`` the answer for a call that needs no inference; for the compiled recorder."""
        with deferred():
            known = fast_shape_rules.find(self.metadata, info.op, info, args, kwargs, values)
        if known is not None:
            self.remember(key, known)
            self.missed(info.op, values)
        return known

    def remember(self, key: Any, inferred: Inferred) -> None:
        """Store an answer."""
        self._make_room()
        self.entries[key] = inferred

    def remember_dependent(self, key: Any, raised: DataDependent) -> DataDependent:
        """Store that a call's result depends on data; returns the reason, without the frames of ``raised``.

        A call with a storage, or another object that the key would keep alive, is not stored.
        """
        reason = DataDependent(str(raised), sparse=raised.sparse)
        if all(isinstance(item, _CONSTANTS) for item in key):
            self._make_room()
            self.dependent[key] = reason
        return reason

    def _make_room(self) -> None:
        if max(len(self.entries), len(self.dependent), len(self.metadata.entries)) >= MOST_ENTRIES:
            self.entries.clear()
            self.dependent.clear()
            self.metadata.entries.clear()  # users of metadata keep it alive

    def infer(
        self, op: OpOverload, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Any]
    ) -> Inferred:
        """Look up the call, or ask FakeTensor. ``args`` hold Values for tensors; ``inputs`` are those, in
        order.

        Raises:
            DataDependent: the result's shape or a decision in the op needs tensor data, or
                torch has no shape rule for it.
            Exception: whatever eager PyTorch raises for these shapes.
        """
        if info.set_like:
            raise DataDependent(f"{info.name} exchanges memory")
        if info.name in _MAKE_SPARSE:  # no rule knows how many elements it has; some would read indices
            raise DataDependent(f"{op} (its sparse result cannot be deferred)", sparse=True)
        if info.name.startswith(_QUANTIZING):
            raise DataDependent(f"{info.name} creates a quantized tensor")
        if kernel_probes.on_absent_gpu(inputs, kwargs):
            unsupported_cuda_dtypes.refuse(op, inputs)
        known = fast_shape_rules.find(self.metadata, op, info, args, kwargs, inputs)
        return known if known is not None else self._ask(op, info, args, kwargs, inputs)

    @warning_routing.silenced
    def _ask(
        self, op: OpOverload, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Any]
    ) -> Inferred:
        """Ask FakeTensor, and correct its answer."""
        own = ctc_loss.rule(info.name, dict(zip(info.argument_names, args)) | kwargs)
        if own is None and kernel_probes.on_absent_gpu(inputs, kwargs):
            own = _OF_CUDA.get(info.name)
        self.inferring = True
        made: list[_FakeCall] = []
        by_rule = functools.partial(self._by_rule, op, info, own, args, kwargs, inputs, made)
        try:
            result = by_rule()
        except private_api.DATA_DEPENDENT as error:
            result = self._without_rule(info, made, kwargs, inputs)
            if result is None:
                raise DataDependent(f"the result of {op} depends on data") from error
        except Exception as error:
            kernel_probes.must_come_again(error, by_rule)
            if info.counts_writes:
                raise DataDependent(f"{op} may fail partway through its list") from error
            result = self._without_rule(info, made, kwargs, inputs)
            if result is None:
                result = self._overruled(op, info, args, kwargs, inputs, error)
            if not made:  # a view's arguments may not fit
                raise
        finally:
            self.inferring = False
        call = made[-1]
        if own is None:  # or there is no kernel to call
            answered = kernel_probes.ask(op, info, args, kwargs, inputs, call.arguments, result)
            if answered is not None:
                with private_api.same_dispatch_state(), self._fake_mode, private_api.no_function_modes():
                    result = meta_kernel_corrections.as_answered(result, answered, call.addresses)
        kernel_probes.check_dimension(info.name, call.arguments.get("dim"), inputs, result)
        if info.name in _ASK_THE_KERNEL:
            result = self._ask_the_kernel(op, args, kwargs, inputs, result)
        restructured = self._restructured(call, result)
        container, results = _results(call, result)
        together: Callable[[list[Any]], Any] | None = container
        if own is not None and type(results[-1]) is list:  # the gradients of weights, among others
            several = len(results) - 1
            together = lambda flat: (*flat[:several], flat[several:])  # noqa: E731
            results = [*results[:-1], *results[-1]]
        outputs = [self._output(call, at, item, container) for at, item in enumerate(results)]
        returned = {spec.source for spec in outputs if isinstance(spec, OutputSpec) and spec.itself}
        if any(position not in returned for position, _ in restructured):
            raise DataDependent(f"{op} changes the metadata of a tensor that it does not return")
        from_cpu = all(value.meta.device.type == "cpu" for value in inputs)
        return Inferred(info, together, outputs, restructured, from_cpu)

    def _by_rule(
        self,
        op: OpOverload,
        info: OpInfo,
        own: Callable[[dict[str, Any]], Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[Any],
        made: list[_FakeCall],
    ) -> Any:
        """The results of FakeTensor, or of our ``own`` rule; the call for which it was inferred is added to
        ``made``.
        """
        if info.is_view:
            kernel_probes.view_without_memory(op, args, kwargs, inputs)
        with (
            private_api.same_dispatch_state(),
            torch.no_grad(),
            self._fake_mode,
            private_api.no_function_modes(),
            private_api.quiet_shape_rules(),
            fake_cuda_devices.cuda_guards() if fake_cuda_devices.STAND_INS else nullcontext(),
        ):
            call = _FakeCall(op, info, args, kwargs, inputs)
            made.append(call)
            if own is not None:
                return own(call.arguments)
            result = op(*call.args, **call.kwargs)
            return meta_kernel_corrections.corrected(op, info.name, call.arguments, call.inputs, result)

    def _without_rule(
        self, info: OpInfo, made: list[_FakeCall], kwargs: dict[str, Any], inputs: list[Any]
    ) -> Any:
        """The results on an absent GPU, whose kernels cannot be called, if they are known without a rule."""
        if not made or info.is_view or not kernel_probes.on_absent_gpu(inputs, kwargs):
            return None
        with (
            private_api.same_dispatch_state(),
            torch.no_grad(),
            self._fake_mode,
            private_api.no_function_modes(),
        ):
            return meta_kernel_corrections.without_rule(info.name, made[-1].arguments)

    def _restructured(self, call: _FakeCall, result: Any) -> list[tuple[int, TensorMeta]]:
        """The inputs, by position, whose metadata the op changes in place, and their new metadata.

        Kernels change the strides of a tensor in place only if it has to grow, unlike some shape rules.
        """
        info = call.info
        found = []
        for position, (fake, before) in enumerate(zip(call.inputs, call.metas)):
            changed = _key(fake) != before if info.metadata_write else fake.shape != before[0]
            if changed and not (info.name in _FILL and fake.numel() == before[0].numel()):
                found.append((position, self.meta_of(fake)))
        if found and not info.metadata_write:
            return self._grown(call.op, *call.recorded, call.values, call.inputs, result, found)
        return found

    def _output(self, call: _FakeCall, at: int, item: Any, container: type | None) -> Output:
        """The kind of the result ``item`` at position ``at``: an input, a view of one, or on fresh memory."""
        if item is None or (type(item) is int and container is tuple):
            return item
        op, info, values = call.op, call.info, call.values
        if not isinstance(item, torch.Tensor):
            raise DataDependent(f"{op} returns {type(item).__name__}")
        if item.layout != torch.strided:
            layout = str(item.layout).removeprefix("torch.")
            sparse = layout.startswith("sparse")
            raise DataDependent(f"{op} (its {layout} result cannot be deferred)", sparse=sparse)
        meta = self.meta_of(item)
        source, itself = None, False
        address = private_api.storage_address(item)
        for position, fake in enumerate(call.inputs):
            if item is fake:
                source, itself = position, True
                break
            if source is None and call.addresses[position] == address:
                source = position
        fixed = not itself or info.needs_storage  # `out=` may grow
        if source is not None and fixed and meta.storage_nbytes > values[source].storage.nbytes:
            error = RuntimeError(f"{op} reads or writes beyond its storage")
            self._raise_as_eager(op, *call.recorded, values, error)
        number = call.fresh.setdefault(address, len(call.fresh)) if source is None else -1
        nbytes = meta_kernel_corrections.storage_nbytes(info.name, call.arguments, at, item)
        return OutputSpec(meta, source, itself, number, nbytes)

    def describe(self, info: OpInfo, result: Any, device: torch.device | None = None) -> Inferred | None:
        """The answer for results that have been computed, valid for these inputs only; None if there cannot
        be one.

        ``device`` is where the kernel itself would leave the results, if another kernel computed them.
        """
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        outputs: list[Output] = []
        for item in results:
            if not isinstance(item, torch.Tensor) or item.layout != torch.strided or item.is_quantized:
                return None
            nbytes = private_api.TensorBase.untyped_storage(item).nbytes()
            outputs.append(OutputSpec(self.meta_of(item, device), None, False, len(outputs), nbytes))
        container = type(result) if isinstance(result, (list, tuple)) else None
        return Inferred(info, container, outputs, [], True)

    def _ask_the_kernel(
        self, op: OpOverload, args: Any, kwargs: Any, inputs: list[Any], inferred: Any
    ) -> Sequence[torch.Tensor]:
        """The kernel's results for zeros of these shapes, with the aliases that the shape rule reports."""
        # In the user's grad mode, which decides what is saved for the backward pass.
        with private_api.kernels_only():
            actual = kernel_probes.answer(op, args, kwargs, inputs)
        with private_api.same_dispatch_state(), self._fake_mode, private_api.no_function_modes():
            return [meta_kernel_corrections.like_answered(fake, real) for fake, real in zip(inferred, actual)]

    def _grown(
        self,
        op: OpOverload,
        args: Any,
        kwargs: Any,
        inputs: list[Any],
        before: list[torch.Tensor],
        result: Any,
        restructured: list[tuple[int, TensorMeta]],
    ) -> list[tuple[int, TensorMeta]]:
        """``restructured`` with the strides that the kernel gives to an ``out=`` that has to grow."""
        actual = None
        if op.namespace == "aten" and kernel_probes.are_small(inputs, result):
            with torch.no_grad(), private_api.kernels_only():
                try:
                    actual = kernel_probes.answer(op, args, kwargs, inputs)
                except Exception as error:  # some kernels reject zeros
                    kernel_probes.must_come_again(
                        error, lambda: kernel_probes.answer(op, args, kwargs, inputs)
                    )
        if actual is None:
            raise DataDependent(f"{op} resizes its output")
        pairs = zip(*[item if isinstance(item, (list, tuple)) else [item] for item in (result, actual)])
        left = {id(fake): self.meta_of(real) for fake, real in pairs}
        return [(position, left.get(id(before[position]), meta)) for position, meta in restructured]

    def _overruled(
        self, op: OpOverload, info: OpInfo, args: Any, kwargs: Any, inputs: list[Any], error: Exception
    ) -> torch.Tensor:
        """The results of a kernel whose shape rule has stricter requirements, such as alignment."""
        try:
            self._raise_as_eager(op, args, kwargs, inputs, error)
        except DataDependent:
            if info.mutates or info.is_view or op.namespace != "aten":
                raise
            with torch.no_grad(), private_api.kernels_only():
                try:
                    actual, other = (
                        kernel_probes.answer(op, args, kwargs, inputs, fill) for fill in ((0, 0), (1, 1))
                    )
                except Exception:
                    actual = other = None
            if not isinstance(actual, torch.Tensor) or actual.layout != torch.strided or actual.is_nested:
                raise
            if other.shape != actual.shape:  # an old-style mask of dtype uint8
                raise
        with private_api.same_dispatch_state(), self._fake_mode, private_api.no_function_modes():
            return torch.empty_strided(
                actual.shape, actual.stride(), dtype=actual.dtype, device=actual.device
            )

    def _raise_as_eager(
        self, op: OpOverload, args: Any, kwargs: Any, inputs: list[Any], error: Exception
    ) -> NoReturn:
        """Shape rules have their own error messages, so let the kernel itself reject tensors of these
        shapes.
        """
        refused = kernel_probes.refusal(op, args, kwargs, inputs)
        if refused is not None:
            raise refused.with_traceback(None) from None
        if kernel_probes.on_absent_gpu(inputs, kwargs):
            raise kernel_probes.as_kernel_error(error)
        if op.namespace != "aten":
            raise DataDependent(f"no shape rule for {op}") from error
        if sum(value.storage.nbytes for value in inputs) > kernel_probes.LARGEST_NBYTES:
            raise error
        if op in (torch.ops.aten.index.Tensor, torch.ops.aten.index.Tensor_out):  # masks of dtype uint8
            raise DataDependent(f"the result of {op} depends on data") from error
        raise DataDependent(
            f"PyTorch's shape rule for {op} rejects arguments that its kernel accepts"
        ) from error


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
