"""Operator schema properties: what any call of an operator writes, returns, and draws; its cache key."""

from __future__ import annotations

from typing import Any

import torch

from ...graph.collective_info import NAMESPACES
from ...graph.ir import works_by_element
from ...torch_internals import operator_registration, private_api, sparse_tensors
from ...torch_internals.private_api import OpOverload
from ...torch_internals.redispatch_from_dispatch_mode import consists_of_ops, makes_views_by_decomposition
from . import kernel_argument_checks

_NEED_FLOATS = ("arange", "range", "linspace", "upsample", "_upsample", "interpolate")
# Arithmetic on scalars that carries no `pointwise` tag; a scalar's value changes no shape.
_ARITHMETIC = {
    "addmm", "addmm_", "addbmm", "baddbmm", "baddbmm_", "addmv", "addr", "native_dropout",
    "fill_", "fill", "native_layer_norm",
    "native_batch_norm", "_native_batch_norm_legit", "native_group_norm", "scalar_tensor", "full_like",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
}  # fmt: skip
# The kernel answers from metadata, immediately, so there is nothing to defer.
_METADATA_ONLY = {
    "_fused_sdp_choice", "_has_compatible_shallow_copy_type", "is_same_size", "is_pinned",
    "cudnn_is_acceptable", "_use_cudnn_rnn_flatten_weight", "is_complex",
    "is_floating_point", "is_signed", "is_distributed", "is_inference", "_nested_tensor_storage_offsets",
    "can_cast", "result_type", "promote_types", "size", "stride", "sym_size", "sym_stride", "sym_numel",
    "sym_storage_offset", "dim", "numel", "is_contiguous", "is_strides_like_format",
    "is_non_overlapping_and_dense", "_is_zerotensor", "is_conj", "is_neg", "storage_offset", "_version",
    "output_nr", "is_leaf", "_debug_has_internal_overlap",
}  # fmt: skip

# Ops that write arguments that their schema does not mark: the written arguments, and the argument that
# decides it.
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
# Namespaces of ops that communicate with other ranks, and of FSDP2's ops that prepare this.
_COMMUNICATION = {*NAMESPACES, "fsdp"}
# Ops that check the content of their integers, usually constants of the program: the error belongs to their
# line. The kernels of every device check the first, only the CPU's kernels the others.
CHECKED_EVERYWHERE = {"segment_reduce"}
# Autocast skips them, but their kernels call operators whose arguments it converts.
_CALLING_AUTOCAST = frozenset({"linalg_pinv", "_trilinear"})
_CHECKED_CONTENT = {"_embedding_bag", "_embedding_bag_forward_only", *CHECKED_EVERYWHERE}


# Arguments of random operators: no dropout in attention, and layers that are not in training.
_DRAWS_NOTHING: dict[str, float | bool] = {"dropout_p": 0.0, "train": False, "training": False}


class OpInfo:
    """The properties that all calls of one operator share."""

    __slots__ = (
        "adds", "argument_names", "by_type", "calls_autocast", "checks", "checks_content", "communicates",
        "copies",
        "counts_writes", "detaches", "draws", "draws_unless", "fills_dtype", "generator", "gradients",
        "hidden_condition", "hidden_writes", "is_view", "op", "lifts", "makes_sparse", "metadata_only",
        "metadata_write", "mutable_kwargs", "mutable_positions", "mutates", "name", "needs_storage",
        "of_ops", "of_parts", "of_views",
        "profiles", "resizes", "returned",
        "returns_numbers",
        "returns_tensors",
        "shows_bits", "special", "set_like", "uncertain", "zeros",
    )  # fmt: skip

    def __init__(self, op: OpOverload) -> None:
        schema = op._schema
        self.op = op  # its id identifies it
        self.name = schema.name.rpartition("::")[2]
        self.argument_names = [argument.name for argument in schema.arguments]
        self.returns_tensors = any("Tensor" in str(ret.type) for ret in schema.returns)
        self._note_writes(schema)
        # An op that returns nothing is a check, which can also fail when the graph runs.
        self.checks = not schema.returns and not self.mutates
        self._note_key_properties()
        self._note_kinds()
        self.returns_numbers = bool(schema.returns) and not self.returns_tensors and not self.mutates
        # Never run for constant folding: results differ between calls, or it is a user-defined kernel with
        # unknown effects.
        self.uncertain = (
            self.draws or op.namespace != "aten" or self.name.startswith(("empty", "new_empty", "_empty"))
        )

    def _note_writes(self, schema: Any) -> None:
        """Determine which arguments it writes, and which results are these arguments."""
        mutable = [
            (position, argument)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.mutable_positions = [position for position, argument in mutable]
        self.mutable_kwargs = [argument.name for position, argument in mutable]
        names = self.argument_names
        hidden, condition = _HIDDEN_WRITES.get(self.name, ((), None))
        self.hidden_writes = [names.index(name) for name in hidden if name in names]
        self.hidden_condition = names.index(condition) if condition in names else None
        self.mutates = bool(mutable) or bool(self.hidden_writes)
        # Their kernels advance version counters only if they call further ops above the level at which we
        # record.
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

    def draws_nothing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call of this random operator leaves its generator alone."""
        if self.draws_unless is None:
            return False
        position, value = self.draws_unless
        given = args[position] if position < len(args) else kwargs.get(self.argument_names[position])
        if given is None:
            given = self.op._schema.arguments[position].default_value
        return given is not None and given == value

    def _note_key_properties(self) -> None:
        """Determine what its results and its cache key depend on."""
        op, names = self.op, self.argument_names
        schema = op._schema
        self.gradients = _gradients_taken(op)
        self.draws = torch.Tag.nondeterministic_seeded in op.tags
        # The argument with which nothing is drawn, and its value.
        switches = [(at, _DRAWS_NOTHING[name]) for at, name in enumerate(names) if name in _DRAWS_NOTHING]
        self.draws_unless = switches[0] if self.draws and switches else None
        self.generator = names.index("generator") if "generator" in names else None
        self.by_type: frozenset[type] = frozenset()  # numbers of these types are not part of the cache key
        if (
            self.name.startswith(_NEED_FLOATS)
            or self.name == "pow"
            or self.name.removesuffix("_") in kernel_argument_checks.CHECKED_NUMBERS
        ):
            pass  # sizes, integers to negative integer powers (an error), and other numbers that may be one
        elif works_by_element(op) or self.name.startswith("_foreach"):
            # An int that is not an operand is part of the program: ``round(decimals=2)``.
            counts = any(str(argument.type) == "int" for argument in schema.arguments)
            self.by_type = frozenset((float, complex) if counts else (float, int, complex))
        elif self.name in _ARITHMETIC:
            self.by_type = frozenset((float, complex))
        takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
        self.fills_dtype = not takes_tensors and "dtype" in names and self.returns_tensors

    def _note_kinds(self) -> None:
        """Determine whether recording handles the operator specially."""
        op = self.op
        self.metadata_only = self.name in _METADATA_ONLY
        self.lifts = self.name in ("lift", "lift_fresh")  # passes on a tensor created from Python data
        # They exchange the storage of a tensor, so it is only safe to run them.
        self.set_like = self.name in {
            "set_",
            "set",
            "resize_",
            "resize_as_",
            "_resize_output_",
            "_sparse_coo_tensor_unsafe",
        }
        self.metadata_write = torch.Tag.inplace_view in op.tags and not self.set_like  # t_, squeeze_, ...
        self.zeros = self.name == "_efficientzerotensor"
        self.adds = op is torch.ops.aten.add.Tensor
        self.detaches = op is torch.ops.aten.detach.default
        self.copies = op is torch.ops.aten.clone.default
        self.resizes = self.name in ("resize_", "resize_as_")
        self.shows_bits = self.name == "_new_zeros_with_same_feature_meta"
        self.needs_storage = "as_strided" in self.name or self.shows_bits
        self.profiles = op.namespace == "profiler"  # marks in a profiler's trace
        self.of_ops = op.namespace == "aten" and consists_of_ops(op)  # modes see them, but in inference mode
        self.of_views = makes_views_by_decomposition(op)  # its result is a view that PyTorch does not track
        self.of_parts = (
            op.namespace != operator_registration.NAMESPACE and private_api.leaves_autograd_to_its_parts(op)
        )
        self.checks_content = self.name in _CHECKED_CONTENT
        self.calls_autocast = self.name in _CALLING_AUTOCAST
        self.communicates = op.namespace in _COMMUNICATION
        self.makes_sparse = op in sparse_tensors.MAKERS
        self.special = (
            self.metadata_only
            or self.checks
            or self.checks_content
            or self.calls_autocast
            or self.communicates
            or self.copies
            or self.lifts
            or self.makes_sparse
            or self.zeros
            or self.adds
            or self.detaches
            or self.resizes
            or self.shows_bits
            or self.of_parts
            or self.of_views
            or self.profiles
        )


def _gradients_taken(op: OpOverload) -> list[str]:
    """The requested gradients of the backward of an op with several inputs; if there are none, it returns
    none.
    """
    schema = op._schema
    if len(schema.returns) == 1 or not schema.name.endswith("_backward"):
        return []
    if any(str(ret.type) != "Tensor" for ret in schema.returns):
        return []
    return [
        argument.name
        for argument in schema.arguments
        if argument.name.startswith("grad_") and "Tensor" in str(argument.type)
    ]
