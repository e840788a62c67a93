"""Shape inference with a cache: what an op returns, from its arguments' metadata alone.

FakeTensor knows every op but takes many times as long as a look-up, since many of its rules are
Python references: it is asked where :mod:`lazyviz.record.shapes.known_shapes` has no answer.  Programs repeat
themselves, so answers are kept, keyed by all they depend on.  What depends on tensor data is never cached: it
raises :class:`DataDependent`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch

from ...graph.ir import TensorMeta, works_by_element
from ...torch_internals import cuda as torch_cuda
from ...torch_internals import private_api
from ...torch_internals.dispatch_handlers import makes_views_by_others
from ...torch_internals.private_api import OpOverload
from ..interception import warning_routing
from . import argument_checks, cudnn_rnn, kernel_probes, known_shapes, stride_rules
from .kernel_probes import DataDependent as DataDependent
from .output_specs import Inferred as Inferred
from .output_specs import Output
from .output_specs import OutputSpec as OutputSpec

MOST_ENTRIES = 100_000  # of the cache; it starts anew when full, as with ever new sizes
_NEED_FLOATS = ("arange", "range", "linspace", "upsample", "_upsample", "interpolate")
# Arithmetic on scalars that carries no `pointwise` tag; a scalar's value changes no shape.
_ARITHMETIC = {
    "addmm", "addmm_", "addbmm", "baddbmm", "baddbmm_", "addmv", "addr", "native_dropout",
    "fill_", "fill", "native_layer_norm",
    "native_batch_norm", "_native_batch_norm_legit", "native_group_norm", "scalar_tensor", "full_like",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
}  # fmt: skip
# Answered from metadata by the kernel itself, at once: nothing to defer.
_METADATA_ONLY = {
    "_fused_sdp_choice", "_has_compatible_shallow_copy_type", "is_same_size", "is_pinned",
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
# They leave an `out=` of as many elements as it is, whatever its shape.
_FILL = {"arange", "range", "linspace", "logspace"}
# Ops that check what their integers hold, constants of the program as a rule: an error is its line's.
CHECKED_EVERYWHERE = {"segment_reduce"}  # by the kernels of every device; by the CPU's alone:
_CHECKED_CONTENT = {"_embedding_bag", "_embedding_bag_forward_only", *CHECKED_EVERYWHERE}
_MAKE_SPARSE = {"sparse_compressed_tensor", "_sparse_compressed_tensor_with_dims", "sparse_coo_tensor"}
# Ops that make quantized tensors, whose kind a shape rule does not show.
_QUANTIZING = ("quantize_per_", "_make_per_", "_empty_affine", "_empty_per_channel")


class OpInfo:
    """What does not change between calls of one operator."""

    __slots__ = (
        "adds", "argument_names", "by_type", "checks_content", "counts_writes", "draws", "fills_dtype",
        "generator", "gradients", "hidden_condition", "hidden_writes",
        "is_view", "op", "lifts", "metadata_only", "metadata_write", "mutable_kwargs",
        "mutable_positions", "mutates", "name", "needs_storage", "of_parts", "of_views",
        "profiles", "resizes", "returned",
        "returns_numbers",
        "returns_tensors",
        "shows_bits", "special", "set_like", "uncertain", "zeros",
    )  # fmt: skip

    def __init__(self, op: OpOverload) -> None:
        schema = op._schema
        self.op = op  # whose id stands for it
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
        self.gradients = kernel_probes.gradients_taken(op)
        self.draws = torch.Tag.nondeterministic_seeded in tags
        self.generator = names.index("generator") if "generator" in names else None
        self.by_type: frozenset[type] = frozenset()  # numbers of these types need no place in the cache's key
        if (
            self.name.startswith(_NEED_FLOATS)
            or self.name == "pow"
            or self.name.removesuffix("_") in argument_checks.CHECKED_NUMBERS
        ):
            pass  # sizes, integers to negative integer powers, which are an error, and others that may be
        elif works_by_element(op) or self.name.startswith("_foreach"):
            # An int that is no operand is part of the program: ``round(decimals=2)``.
            counts = any(str(argument.type) == "int" for argument in schema.arguments)
            self.by_type = frozenset((float, complex) if counts else (float, int, complex))
        elif self.name in _ARITHMETIC:
            self.by_type = frozenset((float, complex))
        takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
        self.fills_dtype = not takes_tensors and "dtype" in names and self.returns_tensors
        self.lifts = self.name in ("lift", "lift_fresh")  # hands over a tensor made from Python data
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
        self.adds = op is torch.ops.aten.add.Tensor
        self.resizes = self.name in ("resize_", "resize_as_")
        self.shows_bits = self.name == "_new_zeros_with_same_feature_meta"
        self.needs_storage = "as_strided" in self.name or self.shows_bits
        self.profiles = op.namespace == "profiler"  # marks in a profiler's trace
        self.of_views = makes_views_by_others(op)  # a view of such is one that PyTorch does not know of
        self.of_parts = private_api.leaves_autograd_to_its_parts(op)
        self.checks_content = self.name in _CHECKED_CONTENT
        self.special = (
            self.metadata_only
            or self.checks_content
            or self.lifts
            or self.zeros
            or self.adds
            or self.resizes
            or self.shows_bits
            or self.of_parts
            or self.of_views
            or self.profiles
        )
        # An op that returns nothing is a check, which can fail as well when the graph runs.
        self.returns_numbers = bool(schema.returns) and not self.returns_tensors and not self.mutates
        # Never run for a constant: results differ, or a kernel of the user's own could do anything.
        self.uncertain = (
            self.draws or op.namespace != "aten" or self.name.startswith(("empty", "new_empty", "_empty"))
        )


def _output_mask(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[bool]:
    if "output_mask" not in info.argument_names:
        return ()
    position = info.argument_names.index("output_mask")
    return args[position] if position < len(args) else kwargs.get("output_mask", ())


class ShapeCache:
    """Infers and remembers.  One per process; metadata is interned here."""

    def __init__(self) -> None:
        self.infos: dict[int, OpInfo] = {}  # by id of the operator: OpOverload hashes in Python
        self.entries: dict[Any, Inferred] = {}
        self.metas: dict[Any, TensorMeta] = {}
        self.hits = 0
        self.misses = 0
        self.inferring = False  # torch's own shape rules are running, on tensors of ours that hold nothing
        self._missed: tuple[OpOverload, list[Any]] | None = None
        self._fake_mode = private_api.FakeTensorMode()
        self._fake_mode.cache_enabled = False  # ours stands before it, and it forgets offsets of empty views

    def info(self, op: OpOverload) -> OpInfo:
        info = self.infos.get(id(op))
        if info is None:
            info = self.infos[id(op)] = OpInfo(op)
        return info

    def meta_of(self, tensor: torch.Tensor, device: torch.device | None = None) -> TensorMeta:
        flags = int(tensor.is_conj()) | int(tensor.is_neg()) << 1
        place = device or tensor.device
        return self.meta(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, place, flags)

    def meta(
        self, shape: Any, stride: Any, offset: Any, dtype: torch.dtype, device: torch.device, flags: int = 0
    ) -> TensorMeta:
        """The one object for this metadata."""
        key = (shape, stride, offset, dtype, device, flags)
        meta = self.metas.get(key)
        if meta is None:
            meta = self.metas[key] = TensorMeta(
                tuple(shape), tuple(stride), int(offset), dtype, device, flags
            )
        return meta

    @property
    def last_miss(self) -> str:
        """The last call that was not in the cache, in words."""
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
        """Keep, under ``key``, what is known of a call without asking; for the compiled recorder."""
        known = known_shapes.find(self, info.op, info, args, kwargs, values)
        if known is not None:
            self.remember(key, known)
            self.missed(info.op, values)
        return known

    def remember(self, key: Any, inferred: Inferred) -> None:
        """Keep an answer."""
        if max(len(self.entries), len(self.metas)) >= MOST_ENTRIES:
            self.entries.clear()
            self.metas.clear()  # metadata that is in use stays with its users
        self.entries[key] = inferred

    def infer(
        self, op: OpOverload, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Any]
    ) -> Inferred:
        """Know it, or ask FakeTensor.  ``args`` hold Values for tensors; ``inputs`` are those, in order.

        Raises:
            DataDependent: the result's shape or a decision in the op needs tensor data, or
                torch has no shape rule for it.
            Exception: whatever eager PyTorch raises for these shapes.
        """
        if info.set_like:
            raise DataDependent(f"{info.name} exchanges memory")
        if info.name in _MAKE_SPARSE:  # the rules would check what indices hold
            raise DataDependent(f"{op} (its sparse result cannot be deferred)", sparse=True)
        if info.name.startswith(_QUANTIZING):
            raise DataDependent(f"{info.name} makes a quantized tensor")
        known = known_shapes.find(self, op, info, args, kwargs, inputs)
        return known if known is not None else self._ask(op, info, args, kwargs, inputs)

    @warning_routing.nowhere
    def _ask(
        self, op: OpOverload, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Any]
    ) -> Inferred:
        """Ask FakeTensor, and correct it."""
        own = cudnn_rnn.RULES.get(info.name) if kernel_probes.nowhere(inputs, kwargs) else None
        self.inferring = True
        try:
            if info.is_view:
                kernel_probes.view_without_memory(op, args, kwargs, inputs)
            with (
                torch.no_grad(),
                self._fake_mode,
                private_api.no_function_modes(),
                private_api.quiet_shape_rules(),
                torch_cuda.cuda_guards() if torch_cuda.STAND_INS else nullcontext(),
            ):
                fakes = {id(value): kernel_probes.fake(value.meta, value.storage.nbytes) for value in inputs}
                before = [fakes[id(value)] for value in inputs]
                metas = [_key(fake) for fake in before]
                addresses = [private_api.storage_address(fake) for fake in before]
                fake_args, fake_kwargs = (
                    kernel_probes.substitute(args, fakes),
                    kernel_probes.substitute(kwargs, fakes),
                )
                if info.draws:  # not every rule knows what to do with one
                    fake_kwargs = {
                        name: None if name == "generator" else item for name, item in fake_kwargs.items()
                    }
                arguments = dict(zip(info.argument_names, fake_args)) | fake_kwargs
                if own is not None:
                    result = own(arguments)
                else:
                    result = op(*fake_args, **fake_kwargs)
                    result = stride_rules.corrected(op, info.name, arguments, before, result)
        except private_api.DATA_DEPENDENT as error:
            raise DataDependent(f"the result of {op} depends on data") from error
        except Exception as error:
            if info.counts_writes:
                raise DataDependent(f"{op} may stop halfway through its list") from error
            result = None
            if not info.is_view and kernel_probes.nowhere(inputs, kwargs):
                with torch.no_grad(), self._fake_mode, private_api.no_function_modes():
                    result = stride_rules.without_rule(info.name, arguments)
            if result is None:
                result = self._overruled(op, info, args, kwargs, inputs, error)
        finally:
            self.inferring = False
        if own is None:  # or there is no kernel to ask
            answered = kernel_probes.ask(op, info, args, kwargs, inputs, arguments, result)
            if answered is not None:
                with self._fake_mode, private_api.no_function_modes():
                    result = stride_rules.as_answered(result, answered, addresses)
        kernel_probes.check_dimension(info.name, arguments.get("dim"), inputs, result)
        if info.name in _ASK_THE_KERNEL:
            result = self._ask_the_kernel(op, args, kwargs, inputs, result)
        # Kernels give a tensor other strides in place only where it has to grow, whatever shape rules say.
        restructured = [
            (position, self.meta_of(fake))
            for position, fake in enumerate(before)
            if (_key(fake) != metas[position] if info.metadata_write else fake.shape != metas[position][0])
            and not (info.name in _FILL and fake.numel() == metas[position][0].numel())
        ]
        if restructured and not info.metadata_write:
            restructured = self._grown(op, args, kwargs, inputs, before, result, restructured)
        container = type(result) if isinstance(result, (tuple, list)) else None
        results = [] if result is None else list(result) if container is not None else [result]
        for number, position in info.returned:
            # Some rules hand back a new tensor where the kernel hands back its argument.
            value = args[position] if position < len(args) else kwargs.get(info.argument_names[position])
            results[number] = fakes.get(id(value), results[number])
        if container is not None and container is not list:
            container = tuple
        for position, wanted in enumerate(_output_mask(info, args, kwargs)):
            if not wanted and not info.mutates and type(results[position]) is not list:
                results[position] = None  # kernels leave out what the mask does; not every shape rule does
        together: Callable[[list[Any]], Any] | None = container
        if own is not None and type(results[-1]) is list:  # the gradients of weights, beside others
            several = len(results) - 1
            together = lambda flat: (*flat[:several], flat[several:])  # noqa: E731
            results = [*results[:-1], *results[-1]]
        fresh: dict[int, int] = {}
        outputs: list[Output] = []
        for at, item in enumerate(results):
            if item is None or (type(item) is int and container is tuple):
                outputs.append(item)
                continue
            if not isinstance(item, torch.Tensor):
                raise DataDependent(f"{op} returns {type(item).__name__}")
            if item.layout != torch.strided:
                layout = str(item.layout).removeprefix("torch.")
                sparse = layout.startswith("sparse")
                raise DataDependent(f"{op} (its {layout} result cannot be deferred)", sparse=sparse)
            meta = self.meta_of(item)
            source, itself = None, False
            address = private_api.storage_address(item)
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
            nbytes = stride_rules.storage_nbytes(info.name, arguments, at, item)
            outputs.append(OutputSpec(meta, source, itself, number, nbytes))
        returned = {spec.source for spec in outputs if isinstance(spec, OutputSpec) and spec.itself}
        if any(position not in returned for position, _ in restructured):
            raise DataDependent(f"{op} restructures a tensor that it does not return")
        from_cpu = all(value.meta.device.type == "cpu" for value in inputs)
        return Inferred(info, together, outputs, restructured, from_cpu)

    def describe(self, info: OpInfo, result: Any, device: torch.device | None = None) -> Inferred | None:
        """What has been computed, as an answer that holds for these inputs only; None if it cannot be one.

        ``device`` is where the kernel itself would leave it, if another one computed it.
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
        """What the kernel returns for zeros of these shapes, with the aliases that the shape rule tells."""
        with private_api.kernels_only():  # in the user's grad mode: it decides what is kept for backward
            actual = kernel_probes.answer(op, args, kwargs, inputs)
        with self._fake_mode, private_api.no_function_modes():
            return [stride_rules.like_answered(fake, real) for fake, real in zip(inferred, actual)]

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
        """``restructured`` with the strides that the kernel gives an ``out=`` which has to grow."""
        actual = None
        if op.namespace == "aten" and kernel_probes.are_small(inputs, result):
            with torch.no_grad(), private_api.kernels_only():
                try:
                    actual = kernel_probes.answer(op, args, kwargs, inputs)
                except Exception:
                    pass  # zeros are not for every kernel
        if actual is None:
            raise DataDependent(f"{op} resizes its output")
        pairs = zip(*[item if isinstance(item, (list, tuple)) else [item] for item in (result, actual)])
        left = {id(fake): self.meta_of(real) for fake, real in pairs}
        return [(position, left.get(id(before[position]), meta)) for position, meta in restructured]

    def _overruled(
        self, op: OpOverload, info: OpInfo, args: Any, kwargs: Any, inputs: list[Any], error: Exception
    ) -> torch.Tensor:
        """What a kernel returns whose shape rule asks for more than it does (alignment, say)."""
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
            if other.shape != actual.shape:  # an old mask, of uint8
                raise
        with self._fake_mode, private_api.no_function_modes():
            return torch.empty_strided(
                actual.shape, actual.stride(), dtype=actual.dtype, device=actual.device
            )

    def _raise_as_eager(
        self, op: OpOverload, args: Any, kwargs: Any, inputs: list[Any], error: Exception
    ) -> NoReturn:
        """Shape rules word errors in their own way: let the kernel itself refuse tensors of these shapes."""
        refused = kernel_probes.refusal(op, args, kwargs, inputs)
        if refused is not None:
            raise refused.with_traceback(None) from None
        if kernel_probes.nowhere(inputs, kwargs):
            raise kernel_probes.as_of_kernel(error)
        if op.namespace != "aten":
            raise DataDependent(f"no shape rule for {op}") from error
        if sum(value.storage.nbytes for value in inputs) > kernel_probes.LARGEST_NBYTES:
            raise error
        raise DataDependent(f"torch's shape rule for {op} refuses what its kernel takes") from error


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
