"""Bytes and launches of every op: what it reads and writes, its kernel launches, and its whole work.

FLOPs are counted as in :mod:`.flop_count`.  Bytes are those that a kernel must access once: a broadcast
dimension is one element wide, and a view moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ...graph.collective_info import collective_of
from ...graph.ir import Node, TensorMeta, Value
from ...torch_internals.private_api import OpOverload
from .flop_count import arguments_of, executed_flops_of, flops_of, steps_of
from .op_classes import OpClass, class_of, short_name

FOREACH_TENSORS = 100
"""Approximate number of tensors per launch of a foreach kernel: ``multi_tensor_apply`` has 110 slots for one
list of tensors, 30 for five."""
MOST_KNOWN = 50_000


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one or more ops.

    ``flops``: multiplications and additions, as PyTorch counts them; ``bytes_read`` and ``bytes_written``:
    memory traffic; ``launches``: number of kernels; ``executed``: the FLOPs that the kernels execute
    (:func:`~.flop_count.executed_flops_of`).
    """

    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    launches: int = 0
    executed: int = 0

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
            self.executed + other.executed,
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
        "exponential_",
        "cauchy_",
        "geometric_",
        "log_normal_",
        "_foreach_zero_",
        "_foreach_copy_",
    )
)
"""Operators that overwrite their first argument without reading it."""
_SHAPE_GIVEN = frozenset(
    f"{name}_backward"
    for name in (
        "nll_loss", "nll_loss2d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
        "adaptive_max_pool2d", "adaptive_max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices",
        "fractional_max_pool2d", "fractional_max_pool3d", "reflection_pad1d", "reflection_pad2d",
        "reflection_pad3d", "replication_pad1d", "replication_pad2d", "replication_pad3d",
    )
)  # fmt: skip
"""Backward passes to which ``self``, the input of the forward pass, gives no more than its shape."""
_ROWS_READ = frozenset(("embedding", "index", "index_select", "gather", "_embedding_bag", "take"))
_ROWS_WRITTEN = frozenset(
    ("index_put_", "_index_put_impl_", "scatter_", "scatter_add_", "index_add_", "index_copy_", "index_fill_")
)


def work_of(node: Node) -> Work:
    """The work of one recorded op; cached for ops on tensors of the same shapes."""
    key = work_key(node)
    if key is None:
        return _count(node)
    found = _memo.get(key)
    if found is None:
        if len(_memo) > MOST_KNOWN:
            _memo.clear()
        found = _memo[key] = _count(node)
    return found


def work_key(node: Node) -> object | None:
    """An object that ops with the same :func:`signature` share, stored on each node; ``None`` without a
    signature.

    It replaces the signature as a key, because it is compared by identity, which is cheaper.
    """
    if node.work_key is None and (key := signature(node)) is not None:
        node.work_key = interned(key)
    return node.work_key


def interned(key: Hashable) -> object:
    """The canonical object for ``key``: equal keys share one object."""
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
    return Work(flops_of(node), read, written, _launches(node, kind), executed_flops_of(node))


def _traffic(node: Node) -> tuple[int, int]:
    """Bytes read and written."""
    name, targets = short_name(node.op), _written_arguments(node.op)
    named = arguments_of(node)
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
            elif argument == "self" and _gives_only_its_shape(name):
                continue
            elif argument == "self" and name in ("nll_loss_forward", "nll_loss2d_forward"):
                read += min(size, _elements(named["target"]) * value.dtype.itemsize)  # one class of each
            elif name in _ROWS_READ and table:
                read += min(size, made)  # the selected rows, not the whole table
                table = False
            else:
                read += size
    if name in _ROWS_WRITTEN:
        target = node.inputs[0]
        chosen = named.get("index")
        if isinstance(chosen, Value) and "index_" not in name:  # scatter: an element per index
            source = _elements(chosen) * target.dtype.itemsize
        else:
            source = max((touched(value.meta) for value in node.inputs[1:]), default=0)
        read, written = read + source, source
    return read, written + made


def _gives_only_its_shape(name: str) -> bool:
    """Whether a kernel reads nothing of ``self``: ``zeros_like``, ``new_full``, and some backward passes."""
    return name in _SHAPE_GIVEN or name.endswith("_like") or name.startswith("new_")


def _elements(value: Value) -> int:
    return math.prod(value.shape)


def read_again(node: Node) -> int:
    """Bytes that an op reads twice: the operands of normalizations that are too large for one thread block.

    Batch and group norm read their input for its mean and variance, and again to normalize it; their backward
    passes read it and the gradient for two sums, and again for the gradient of the input.
    """
    name = short_name(node.op)
    if class_of(node.op) != "norm" or not ("batch_norm" in name or "group_norm" in name):
        return 0
    named = arguments_of(node)
    if not named.get("training", named.get("train", "no_training" not in name)):
        return 0
    again = [value for key, value in named.items() if key in ("input", "X", "grad_out", "grad_output", "dY")]
    return sum(touched(value.meta) for value in again if isinstance(value, Value))


def _launches(node: Node, kind: OpClass) -> int:
    if kind == "optimizer":
        return max(1, math.ceil(len(node.inputs) / FOREACH_TENSORS))
    if kind in ("convolution", "norm") and "backward" in short_name(node.op):
        return 2
    if kind == "attention" and "backward" in short_name(node.op):
        return 3
    if kind == "rnn":
        return steps_of(node)
    return 1 if any(value.nbytes for value in (*node.outputs, *node.inputs)) else 0


# --- totals ---------------------------------------------------------------------------------------------


def total(nodes: Iterable[Node]) -> Work:
    """The total work of several ops."""
    return added(map(work_of, nodes))


def added(works: Iterable[Work]) -> Work:
    """The sum of ``works``."""
    flops = read = written = launches = executed = 0
    for work in works:
        flops += work.flops
        read += work.bytes_read
        written += work.bytes_written
        launches += work.launches
        executed += work.executed
    return Work(flops, read, written, launches, executed)


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
