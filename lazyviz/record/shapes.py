"""Shape inference with a cache: what an op returns, from its arguments' metadata alone.

FakeTensor knows every op but takes 150-190 us a call, since many of its rules are Python
references.  Programs repeat themselves, so its answers are kept, keyed by all they
depend on.  What depends on tensor data is never cached: it raises :class:`DataDependent`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from .. import _torch
from .._torch import OpOverload
from ..graph.ir import TensorMeta
from .rng import Generators

_NEED_FLOATS = ("arange", "range", "linspace", "upsample", "_upsample", "interpolate")
_PROBE_NBYTES = 256 * 2**20  # largest inputs on which a kernel is asked for its error message
# Arithmetic on scalars that carries no `pointwise` tag; a scalar's value changes no shape.
_ARITHMETIC = {
    "addmm", "addmm_", "addbmm", "baddbmm", "baddbmm_", "addmv", "addr", "native_dropout",
    "bernoulli", "bernoulli_", "normal_", "uniform_", "fill_", "fill", "native_layer_norm",
    "native_batch_norm", "_native_batch_norm_legit", "native_group_norm", "scalar_tensor", "full_like",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
}  # fmt: skip
# Answered from metadata by the kernel itself, at once: nothing to defer.
_METADATA_ONLY = {
    "_fused_sdp_choice", "_has_compatible_shallow_copy_type", "is_same_size", "is_pinned", "is_set_to",
    "cudnn_is_acceptable", "_use_cudnn_rnn_flatten_weight", "is_complex",
    "is_floating_point", "is_signed", "is_distributed", "is_inference", "_nested_tensor_storage_offsets",
    "can_cast", "result_type", "promote_types", "size", "stride", "sym_size", "sym_stride", "sym_numel",
    "sym_storage_offset", "dim", "numel", "is_contiguous", "is_strides_like_format",
    "is_non_overlapping_and_dense", "_is_zerotensor", "is_conj", "is_neg", "storage_offset", "_version",
    "output_nr", "is_leaf", "_debug_has_internal_overlap",
}  # fmt: skip

# Ops that write arguments which their schema does not mark: which, and the argument that says whether.
_RUNNING_STATISTICS = ("running_mean", "running_var")
_HIDDEN_WRITES: dict[str, tuple[tuple[str, ...], str | None]] = {
    "native_batch_norm": (_RUNNING_STATISTICS, "training"),
    "cudnn_batch_norm": (_RUNNING_STATISTICS, "training"),
    "miopen_batch_norm": (_RUNNING_STATISTICS, "training"),
    "_batch_norm_impl_index": (_RUNNING_STATISTICS, "training"),
    "batch_norm": (_RUNNING_STATISTICS, "training"),
    "instance_norm": (_RUNNING_STATISTICS, "use_input_stats"),
    "batch_norm_update_stats": (_RUNNING_STATISTICS, None),
    "batch_norm_gather_stats": (_RUNNING_STATISTICS, None),
    "batch_norm_gather_stats_with_counts": (_RUNNING_STATISTICS, None),
}
# Ops whose shape rule is wrong about what the CPU kernel returns (oneDNN's workspace): ask the kernel.
_ASK_THE_KERNEL = {"mkldnn_rnn_layer"}
# Ops that make quantized tensors, whose kind a shape rule does not show.
_QUANTIZING = ("quantize_per_", "_make_per_", "_empty_affine", "_empty_per_channel")


class DataDependent(Exception):
    """The op's result cannot be described without running it."""


class OpInfo:
    """What does not change between calls of one operator."""

    __slots__ = (
        "argument_names", "by_type", "counts_writes", "draws", "fills_dtype", "generator",
        "hidden_condition", "hidden_writes",
        "is_view", "lifts", "metadata_only", "metadata_write", "mutable_kwargs",
        "mutable_positions", "mutates", "name", "needs_storage", "resizes", "returned", "returns_numbers",
        "returns_tensors",
        "special", "set_like", "uncertain", "zeros",
    )  # fmt: skip

    def __init__(self, op: OpOverload) -> None:
        schema = op._schema
        self.name = schema.name.rpartition("::")[2]
        tags = op.tags
        self.metadata_only = self.name in _METADATA_ONLY
        self.returns_tensors = any("Tensor" in str(ret.type) for ret in schema.returns)
        mutable = [
            (position, argument)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.mutable_positions = [position for position, argument in mutable]
        self.mutable_kwargs = [argument.name for position, argument in mutable]
        names = [argument.name for argument in schema.arguments]
        hidden, condition = _HIDDEN_WRITES.get(self.name, ((), None))
        self.hidden_writes = [names.index(name) for name in hidden if name in names]
        self.hidden_condition = names.index(condition) if condition in names else None
        self.mutates = bool(mutable) or bool(self.hidden_writes)
        self.argument_names = names
        # Their kernels count writes only where they call further ops above the level that we record at.
        self.counts_writes = bool(mutable) and self.name.startswith("_foreach")
        # Which results are arguments that the op wrote: positions among results and arguments.
        self.returned = [
            (number, position)
            for number, ret in enumerate(schema.returns)
            for position, argument in mutable
            if ret.alias_info is not None
            and argument.alias_info is not None
            and ret.alias_info.is_write
            and ret.alias_info.before_set == argument.alias_info.before_set
            and "List" not in str(ret.type)
        ]
        self.is_view = (
            bool(schema.returns)
            and not self.mutates
            and all(ret.alias_info is not None and not ret.alias_info.is_write for ret in schema.returns)
        )
        self.draws = torch.Tag.nondeterministic_seeded in tags
        self.generator = names.index("generator") if "generator" in names else None
        self.by_type: frozenset[type] = frozenset()  # numbers of these types need no place in the cache's key
        if self.name.startswith(_NEED_FLOATS) or self.name == "pow":
            pass  # sizes, and integers to negative integer powers, which are an error
        elif torch.Tag.pointwise in tags or self.name.startswith("_foreach"):
            self.by_type = frozenset((float, int, complex))
        elif self.name in _ARITHMETIC:
            self.by_type = frozenset((float, complex))
        takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
        self.fills_dtype = not takes_tensors and "dtype" in names and self.returns_tensors
        self.lifts = self.name in ("lift", "lift_fresh")  # hands over a tensor made from Python data
        self.needs_storage = "as_strided" in self.name
        # They exchange storages under the tensor; running them is the only safe way.
        self.set_like = self.name in {
            "set_",
            "set",
            "resize_",
            "resize_as_",
            "_resize_output_",
            "_sparse_coo_tensor_unsafe",
        }
        self.metadata_write = torch.Tag.inplace_view in tags and not self.set_like  # t_, squeeze_, ...
        self.zeros = self.name == "_efficientzerotensor"
        self.resizes = self.name in ("resize_", "resize_as_")
        self.special = self.metadata_only or self.lifts or self.zeros or self.resizes
        # An op that returns nothing is a check, which can fail as well when the graph runs.
        self.returns_numbers = bool(schema.returns) and not self.returns_tensors and not self.mutates
        self.uncertain = self.name.startswith(("empty", "new_empty", "_empty")) or self.draws


class OutputSpec:
    """One output: on fresh memory (``source`` None), a view of input ``source``, or that input itself."""

    __slots__ = ("fresh", "itself", "meta", "nbytes", "small", "source")

    def __init__(self, meta: TensorMeta, source: int | None, itself: bool, fresh: int, nbytes: int) -> None:
        self.meta = meta
        self.source = source  # position among the call's tensor inputs
        self.itself = itself
        self.fresh = fresh  # outputs with the same number share one new storage
        self.nbytes = nbytes  # of that storage
        self.small = meta.device.type == "cpu" and nbytes <= 512


class Inferred:
    """The cached answer for one call."""

    __slots__ = ("container", "dtype", "on_meta", "outputs", "restructured", "small", "special", "to_cpu")

    def __init__(
        self,
        info: OpInfo,
        container: type | None,
        outputs: list[OutputSpec | None],
        restructured: list[tuple[int, TensorMeta]],
        from_cpu: bool,
    ) -> None:
        self.container = container  # tuple or list the op returns, None for a bare tensor or nothing
        self.outputs = outputs
        self.restructured = restructured  # inputs whose metadata the op changes in place
        self.small = all(spec is None or spec.small for spec in outputs)
        meta = next((spec.meta for spec in outputs if spec is not None), None)
        self.on_meta = meta is not None and meta.device.type == "meta"
        self.to_cpu = (
            info.name in ("_to_copy", "copy_")
            and not from_cpu
            and meta is not None
            and meta.device.type == "cpu"
        )
        self.dtype = meta.dtype if info.fills_dtype and meta is not None else None
        self.special = self.to_cpu or self.dtype is not None or bool(restructured)


class ShapeCache:
    """Infers and remembers.  One per process; metadata is interned here."""

    def __init__(self) -> None:
        self.infos: dict[OpOverload, OpInfo] = {}
        self.entries: dict[Any, Inferred] = {}
        self.metas: dict[Any, TensorMeta] = {}
        self.hits = 0
        self.misses = 0
        self.inferring = False  # torch's own shape rules are running, on tensors of ours that hold nothing
        self.last_miss = ""  # the last call that had to be asked for, in words
        self._fake_mode = _torch.FakeTensorMode()

    def info(self, op: OpOverload) -> OpInfo:
        info = self.infos.get(op)
        if info is None:
            info = self.infos[op] = OpInfo(op)
        return info

    def meta_of(self, tensor: torch.Tensor) -> TensorMeta:
        flags = int(tensor.is_conj()) | int(tensor.is_neg()) << 1
        key = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, flags)
        meta = self.metas.get(key)
        if meta is None:
            shape, stride, offset, dtype, device, flags = key
            meta = self.metas[key] = TensorMeta(
                tuple(shape), tuple(stride), int(offset), dtype, device, flags
            )
        return meta

    def infer(
        self, op: OpOverload, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Any]
    ) -> Inferred:
        """Ask FakeTensor.  ``args`` hold Values for tensors; ``inputs`` are those, in order.

        Raises:
            DataDependent: the result's shape or a decision in the op needs tensor data, or
                torch has no shape rule for it.
            Exception: whatever eager PyTorch raises for these shapes.
        """
        if info.set_like:
            raise DataDependent(f"{info.name} exchanges memory")
        if info.name.startswith(_QUANTIZING):
            raise DataDependent(f"{info.name} makes a quantized tensor")
        self.inferring = True
        try:
            with torch.no_grad(), self._fake_mode, _torch.no_function_modes(), _torch.quiet_shape_rules():
                fakes = {id(value): _fake(value.meta, value.storage.nbytes) for value in inputs}
                before = [fakes[id(value)] for value in inputs]
                metas = [_key(fake) for fake in before]
                addresses = [_torch.storage_address(fake) for fake in before]
                result = op(*_substitute(args, fakes), **_substitute(kwargs, fakes))
        except _torch.DATA_DEPENDENT as error:
            raise DataDependent(f"the result of {op} depends on data") from error
        except Exception as error:
            self._raise_as_eager(op, args, kwargs, inputs, error)
        finally:
            self.inferring = False
        if info.mutates and _may_overlap(inputs):
            self._let_the_kernel_refuse(op, args, kwargs, inputs)
        if info.name in _ASK_THE_KERNEL:
            result = self._ask_the_kernel(op, args, kwargs, inputs, result)
        restructured = [
            (position, self.meta_of(fake))
            for position, fake in enumerate(before)
            if _key(fake) != metas[position]
        ]
        container = type(result) if isinstance(result, (tuple, list)) else None
        results = [] if result is None else list(result) if container is not None else [result]
        for number, position in info.returned:
            # Some rules hand back a new tensor where the kernel hands back its argument.
            value = args[position] if position < len(args) else kwargs.get(info.argument_names[position])
            results[number] = fakes.get(id(value), results[number])
        if container is not None and container is not list:
            container = tuple
        fresh: dict[int, int] = {}
        outputs: list[OutputSpec | None] = []
        for item in results:
            if item is None:
                outputs.append(None)
                continue
            if not isinstance(item, torch.Tensor) or item.layout != torch.strided:
                raise DataDependent(f"{op} returns {type(item).__name__}")
            meta = self.meta_of(item)
            source, itself = None, False
            address = _torch.storage_address(item)
            for position, fake in enumerate(before):
                if item is fake:
                    source, itself = position, True
                    break
                if source is None and addresses[position] == address:
                    source = position
            fixed = not itself or info.needs_storage  # `out=` may grow
            if source is not None and fixed and meta.storage_nbytes > inputs[source].storage.nbytes:
                self._raise_as_eager(op, args, kwargs, inputs, RuntimeError(f"{op} goes out of its storage"))
            number = fresh.setdefault(address, len(fresh)) if source is None else -1
            outputs.append(OutputSpec(meta, source, itself, number, item.untyped_storage().nbytes()))
        returned = {spec.source for spec in outputs if spec is not None and spec.itself}
        if any(position not in returned for position, _ in restructured):
            raise DataDependent(f"{op} restructures a tensor that it does not return")
        from_cpu = all(value.meta.device.type == "cpu" for value in inputs)
        return Inferred(info, container, outputs, restructured, from_cpu)

    def infer_from_constants(
        self, op: OpOverload, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Any]
    ) -> Inferred | None:
        """What the kernel returns for the inputs that are known, and zeros for the others.

        Right for this call only, where the known ones decide the shape (:mod:`lazyviz.record.constants`).

        Raises:
            Exception: whatever the kernel raises for these values.
        """
        if sum(value.storage.nbytes for value in inputs) > _PROBE_NBYTES:
            return None
        with torch.no_grad(), _torch.kernels_only():
            probes = {
                id(value): _fake(value.meta, value.storage.nbytes).zero_()
                if value.constant is None or not value.storage.known
                else value.constant
                for value in inputs
            }
            result = op(*_substitute(args, probes), **_substitute(kwargs, probes))
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        outputs: list[OutputSpec | None] = []
        for item in results:
            if not isinstance(item, torch.Tensor) or item.layout != torch.strided or item.is_quantized:
                return None
            nbytes = item.untyped_storage().nbytes()
            outputs.append(OutputSpec(self.meta_of(item), None, False, len(outputs), nbytes))
        container = None if isinstance(result, torch.Tensor) else tuple
        from_cpu = all(value.meta.device.type == "cpu" for value in inputs)
        return Inferred(info, container, outputs, [], from_cpu)

    def _ask_the_kernel(
        self, op: OpOverload, args: Any, kwargs: Any, inputs: list[Any], inferred: Any
    ) -> Sequence[torch.Tensor]:
        """What the kernel returns for zeros of these shapes, with the aliases that the shape rule tells."""
        with _torch.kernels_only():  # in the user's grad mode: it decides what is kept for backward
            probes = _zeros(inputs)
            actual = op(*_substitute(args, probes), **_substitute(kwargs, probes))
        with self._fake_mode, _torch.no_function_modes():
            return [
                fake
                if fake is None or real is None or _key(fake) == _key(real)
                else torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)
                for fake, real in zip(inferred, actual)
            ]

    def _raise_as_eager(
        self, op: OpOverload, args: Any, kwargs: Any, inputs: list[Any], error: Exception
    ) -> NoReturn:
        """Shape rules word errors in their own way: let the kernel itself refuse tensors of these shapes."""
        if op.namespace == "aten" and sum(value.storage.nbytes for value in inputs) > _PROBE_NBYTES:
            raise error
        self._let_the_kernel_refuse(op, args, kwargs, inputs)
        raise DataDependent(f"torch's shape rule for {op} refuses what its kernel takes") from error

    def _let_the_kernel_refuse(self, op: OpOverload, args: Any, kwargs: Any, inputs: list[Any]) -> None:
        """Have the kernel raise what it raises for zeros of these shapes on storages shared like these.

        A kernel that is not PyTorch's own may do anything: it is called only for the user.
        """
        if op.namespace != "aten" or sum(value.storage.nbytes for value in inputs) > _PROBE_NBYTES:
            return
        states: list[tuple[torch.Generator, torch.Tensor]] = []
        if torch.Tag.nondeterministic_seeded in op.tags and inputs:
            own = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Generator)]
            generators = own or [Generators.default(inputs[0].meta.device)]
            states = [(generator, generator.get_state()) for generator in generators]
        try:
            with torch.no_grad(), _torch.kernels_only():
                probes = _zeros(inputs)
                op(*_substitute(args, probes), **_substitute(kwargs, probes))
        except Exception as error:
            raise error.with_traceback(None) from None
        finally:
            for generator, state in states:
                generator.set_state(state)


def _substitute(item: Any, tensors: dict[int, torch.Tensor]) -> Any:
    """``item`` with each value replaced by its tensor."""
    if isinstance(item, dict):
        return {name: _substitute(entry, tensors) for name, entry in item.items()}
    if isinstance(item, (list, tuple)):
        return type(item)([_substitute(entry, tensors) for entry in item])
    return tensors.get(id(item), item)


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)


def _may_overlap(inputs: list[Any]) -> bool:
    """Whether two of the values share a storage, or one shows an element of it twice."""
    if len({value.storage for value in inputs}) < len({id(value) for value in inputs}):
        return True
    metas = [value.meta for value in inputs]
    return any(0 in meta.stride and meta.storage_nbytes < meta.nbytes for meta in metas)


def _zeros(inputs: list[Any]) -> dict[int, torch.Tensor]:
    """By id of the value: zeros with its metadata, on memory shared as the values share theirs."""
    probes: dict[int, torch.Tensor] = {}
    memory: dict[Any, torch.UntypedStorage] = {}
    for value in inputs:
        meta = value.meta
        if value.storage not in memory:
            zeros = torch.zeros(value.storage.nbytes, dtype=torch.uint8, device=meta.device)
            memory[value.storage] = _torch.TensorBase.untyped_storage(zeros)
        probe = torch.empty(0, dtype=meta.dtype, device=meta.device)
        _torch.TensorBase.set_(probe, memory[value.storage], meta.offset, meta.shape, meta.stride)
        probes[id(value)] = _with_flags(probe, meta)
    return probes


def _fake(meta: TensorMeta, storage_nbytes: int) -> torch.Tensor:
    """A fake tensor with ``meta``'s metadata on a storage of the true size."""
    elements = storage_nbytes // meta.dtype.itemsize
    if meta.offset == 0 and meta.storage_nbytes == storage_nbytes and meta.nbytes == storage_nbytes:
        fake = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
    else:
        fake = torch.empty(elements, dtype=meta.dtype, device=meta.device)
        fake = fake.as_strided(meta.shape, meta.stride, meta.offset)
    return _with_flags(fake, meta)


def _with_flags(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    if meta.flags & 1:
        tensor = tensor.conj()
    if meta.flags & 2:
        tensor = _torch.neg_view(tensor)
    return tensor
