"""Work of every op: FLOPs, bytes read and written, kernel launches; computed without running.

FLOPs are counted by the formulas of ``torch.utils.flop_counter``: a multiplication and an addition are two.
Operators that it does not know, and whose work is a matrix product, have rules here.  Elementwise work counts
as zero, as it does there and in papers on model FLOPs.  Bytes are those that a kernel must access once: a
broadcast dimension is one element wide, and a view moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ...graph.collectives import collective_of
from ...graph.ir import Node, TensorMeta, Value
from ...torch_internals.private_api import OpOverload
from .op_classes import OpClass, class_of, short_name

FOREACH_TENSORS = 100
"""Approximate number of tensors per launch of a foreach kernel: ``multi_tensor_apply`` has 110 slots for one
list of tensors, 30 for five."""
MOST_KNOWN = 50_000


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one or more ops.

    ``flops``: multiplications and additions; ``bytes_read`` and ``bytes_written``: memory traffic;
    ``launches``: number of kernels.
    """

    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    launches: int = 0

    @property
    def bytes_moved(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte moved (arithmetic intensity); ``None`` if no bytes are moved."""
        return self.flops / self.bytes_moved if self.bytes_moved else None

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
            self.launches + other.launches,
        )


NOTHING = Work()
_memo: dict[object, Work] = {}
_shared: dict[Hashable, object] = {}
_NOT_READ = frozenset(
    (
        "copy_",
        "fill_",
        "zero_",
        "normal_",
        "uniform_",
        "random_",
        "bernoulli_",
        "_foreach_zero_",
        "_foreach_copy_",
    )
)
"""Operators that overwrite their first argument without reading it."""
_ROWS_READ = frozenset(("embedding", "index", "index_select", "gather", "_embedding_bag", "take"))
_ROWS_WRITTEN = frozenset(
    ("index_put_", "_index_put_impl_", "scatter_", "scatter_add_", "index_add_", "index_copy_", "index_fill_")
)


def work_of(node: Node) -> Work:
    """The work of one recorded op; cached for ops on tensors of the same shapes."""
    key = likeness(node)
    if key is None:
        return _count(node)
    found = _memo.get(key)
    if found is None:
        if len(_memo) > MOST_KNOWN:
            _memo.clear()
        found = _memo[key] = _count(node)
    return found


def likeness(node: Node) -> object | None:
    """An object that ops with the same :func:`signature` share, stored on each node; ``None`` without a
    signature.

    It replaces the signature as a key, because it is compared by identity, which is cheaper.
    """
    if node.likeness is None and (key := signature(node)) is not None:
        node.likeness = shared(key)
    return node.likeness


def shared(key: Hashable) -> object:
    """The shared object of ``key``."""
    found = _shared.get(key)
    if found is None:
        if len(_shared) > MOST_KNOWN:
            _shared.clear()
        found = _shared[key] = object()
    return found


def operator_class(node: Node) -> OpClass:
    """The class of a recorded op; views of any operator move no bytes."""
    return "view" if is_view(node) else class_of(node.op)


def signature(node: Node) -> Hashable | None:
    """The key that work and time of an op depend on: operator, shapes, strides, dtypes, numbers.

    ``None`` if there is none: for a collective, or an argument that is not hashable.
    """
    if class_of(node.op) == "collective":
        return None
    key = (
        node.op,
        _hashable(node.args),
        _hashable(tuple(node.kwargs.items())),
        tuple(
            (value.index, _meta(value.meta), value.storage.created == node.index) for value in node.outputs
        ),
        is_view(node),
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _meta(meta: TensorMeta) -> Hashable:
    return meta.shape, meta.stride, meta.dtype, meta.device.type


def _hashable(argument: Any) -> Hashable:
    if isinstance(argument, Value):
        return _meta(argument.meta)
    if isinstance(argument, (tuple, list)):
        return tuple(map(_hashable, argument))
    return argument


def is_view(node: Node) -> bool:
    """Whether the op only returns a view of existing memory."""
    if node.writes or not node.outputs:
        return False
    given = {value.storage for value in node.inputs}
    return bool(given) and all(value.storage in given for value in node.outputs)


def touched(meta: TensorMeta) -> int:
    """Bytes of memory that a tensor covers; broadcast dimensions and overlapping windows count once."""
    elements = math.prod(size for size, step in zip(meta.shape, meta.stride) if step)
    if not all(meta.shape):
        return 0
    return min(
        elements * meta.dtype.itemsize, max(meta.storage_nbytes - meta.offset * meta.dtype.itemsize, 0)
    )


@cache
def _written_arguments(op: OpOverload) -> frozenset[str]:
    return frozenset(
        each.name for each in op._schema.arguments if each.alias_info is not None and each.alias_info.is_write
    )


def _tensors(argument: Any) -> Iterable[Value]:
    if isinstance(argument, Value):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for each in argument:
            yield from _tensors(each)


def _count(node: Node) -> Work:
    kind = class_of(node.op)
    if kind == "allocation" or is_view(node):
        return NOTHING
    collective = collective_of(node) if kind == "collective" else None
    if kind == "collective":
        sent = collective.sent_bytes if collective is not None else 0
        return Work(0, sent, sent, 1)
    read, written = _traffic(node)
    return Work(flops_of(node), read, written, _launches(node, kind))


def _traffic(node: Node) -> tuple[int, int]:
    """Bytes read and written."""
    name, targets = short_name(node.op), _written_arguments(node.op)
    named = dict(zip((each.name for each in node.op._schema.arguments), node.args)) | node.kwargs
    made = sum(touched(value.meta) for value in node.outputs if value.storage.created == node.index)
    read = written = 0
    table = True
    for argument, given in named.items():
        for value in _tensors(given):
            size = touched(value.meta)
            if argument in targets:
                if name in _ROWS_WRITTEN:
                    continue
                written += size
                overwritten = name in _NOT_READ or argument.startswith("out")
                read += 0 if overwritten else size
            elif name in _ROWS_READ and table:
                read += min(size, made)  # the selected rows, not the whole table
                table = False
            else:
                read += size
    if name in _ROWS_WRITTEN:
        source = max((touched(value.meta) for value in node.inputs[1:]), default=0)
        read, written = read + source, source
    return read, written + made


def _launches(node: Node, kind: OpClass) -> int:
    if kind == "optimizer":
        return max(1, math.ceil(len(node.inputs) / FOREACH_TENSORS))
    if kind in ("convolution", "norm") and "backward" in short_name(node.op):
        return 2
    if kind == "attention" and "backward" in short_name(node.op):
        return 3
    return 1 if any(value.nbytes for value in (*node.outputs, *node.inputs)) else 0


# --- FLOPs ----------------------------------------------------------------------------------------------


def flops_of(node: Node) -> int:
    """FLOPs of one op: by PyTorch's counter, otherwise by a rule of lazyviz, otherwise 0."""
    formula = flop_registry.get(node.op.overloadpacket)
    if formula is not None:
        returned: list[Any] = [None] * len(node.op._schema.returns)
        for value in node.outputs:
            if value.index < len(returned):
                returned[value.index] = value.shape
        out = returned[0] if len(returned) == 1 else tuple(returned)
        try:
            return int(formula(*_shapes(node.args), **_shapes(node.kwargs), out_val=out))
        except (AttributeError, TypeError, AssertionError, IndexError, ValueError):
            return 0  # a call that the formula does not support
    rule = _OWN.get(short_name(node.op))
    return int(rule(node)) if rule is not None else 0


def _shapes(argument: Any) -> Any:
    if isinstance(argument, Value):
        return argument.shape
    if isinstance(argument, (tuple, list)):
        return [_shapes(each) for each in argument]
    if isinstance(argument, dict):
        return {key: _shapes(each) for key, each in argument.items()}
    return argument


def _product_with_vector(node: Node) -> int:
    matrix = node.inputs[1 if short_name(node.op) == "addmv" else 0]
    return 2 * math.prod(matrix.shape)


def _linear(node: Node) -> int:
    return 2 * math.prod(node.inputs[0].shape) * node.inputs[1].shape[0]


def _attention(node: Node) -> int:
    query, key, value = (each.shape for each in node.inputs[:3])
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(node: Node) -> int:
    grad, query, key, value = (each.shape for each in node.inputs[:4])
    return int(sdpa_backward_flop_count(grad, query, key, value))


def _rnn(node: Node) -> int:
    """Every weight matrix is multiplied once per element of the sequences, twice in the backward pass."""
    steps = math.prod(node.inputs[0].shape[:-1])
    passes = 2 if "backward" in short_name(node.op) else 1
    kernels = [value for value in node.inputs[1:] if len(value.shape) == 2 and min(value.shape) > 1]
    return 2 * passes * steps * sum(math.prod(value.shape) for value in kernels)


def _encoder_layer(node: Node) -> int:
    """One layer of ``nn.TransformerEncoder``'s fused inference path: its matrix products and attention."""
    if len(node.inputs[0].shape) != 3:  # a nested tensor, whose sizes the record does not have
        return 0
    batch, length, width = node.inputs[0].shape
    weights = [value.shape for value in node.inputs[1:] if len(value.shape) == 2]
    kernels = [shape for shape in weights if width in shape]
    return 2 * batch * length * sum(map(math.prod, kernels)) + 4 * batch * length * length * width


_OWN: Mapping[str, Callable[[Node], int]] = {
    "mv": _product_with_vector,
    "addmv": _product_with_vector,
    "dot": _product_with_vector,
    "vdot": _product_with_vector,
    "linear": _linear,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_cudnn_rnn": _rnn,
    "_cudnn_rnn_backward": _rnn,
    "mkldnn_rnn_layer": _rnn,
    "mkldnn_rnn_layer_backward": _rnn,
    "_transformer_encoder_layer_fwd": _encoder_layer,
}


# --- totals ---------------------------------------------------------------------------------------------


def total(nodes: Iterable[Node]) -> Work:
    """The total work of several ops."""
    flops = read = written = launches = 0
    for node in nodes:
        work = work_of(node)
        flops += work.flops
        read += work.bytes_read
        written += work.bytes_written
        launches += work.launches
    return Work(flops, read, written, launches)


def grouped(nodes: Sequence[Node], key: Callable[[Node], Hashable]) -> dict[Hashable, Work]:
    """The work grouped by ``key(op)``, most FLOPs first, then most bytes."""
    found: dict[Hashable, Work] = {}
    for node in nodes:
        group = key(node)
        found[group] = found.get(group, NOTHING) + work_of(node)
    return dict(sorted(found.items(), key=lambda item: (-item[1].flops, -item[1].bytes_moved)))


def compute_dtype(node: Node) -> torch.dtype:
    """The compute dtype of an op: the dtype of its largest floating-point operand."""
    floating = [value for value in (*node.inputs, *node.outputs) if value.dtype.is_floating_point]
    if not floating:
        floating = [*node.inputs, *node.outputs]
    return max(floating, key=lambda value: value.nbytes).dtype if floating else torch.float32
