"""Rollback of in-place writes: undo the writes of a failed kernel, or refuse to run it again.

An elementwise kernel allocates all its memory before it writes, and a kernel that overwrites memory without
reading it writes the same values again.  Others may fail midway: batch norm, whose running statistics are
written before its result, kernels that check indices while running, kernels over lists of tensors, and
operators of other libraries.  Small outputs of such kernels are copied before they run (:data:`MOST_COPIED`);
larger ones cannot be used after a failure (:mod:`lazyviz.record.partially_written_memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch

from ..plan.remat.recompute_candidates import statistics
from ..process.global_state_transaction import complete
from ..record.partially_written_memory import OVERWRITES
from ..record.tracked_storages import TrackedNode, TrackedValue
from ..torch_internals.private_api import OpOverload

MOST_COPIED = 1 << 16  # bytes, before a kernel runs; running statistics always are

_ELEMENTWISE = frozenset(
    {"abs_", "absolute_", "gelu_", "hardswish_", "masked_fill_", "mish_", "negative_", "relu6_", "threshold_"}
    | {f"{name}_" for name in ("eq", "ge", "gt", "heaviside", "le", "lt", "ne", "tril", "triu")}
)  # that have no tag in PyTorch
# Integers divided by zero: an error midway.
_DIVIDES = frozenset({"div_", "floor_divide_", "fmod_", "remainder_"})

_fails_midway: dict[OpOverload, bool] = {}


def _may_fail_midway(op: OpOverload) -> bool:
    """Whether ``op``'s kernel may have written a part of its arguments when it fails, if it writes any."""
    known = _fails_midway.get(op)
    if known is None:
        name = op._schema.name.partition("::")[2]
        elementwise = torch.Tag.pointwise in op.tags or name in _ELEMENTWISE
        known = op.namespace != "aten" or not (
            (elementwise and name not in _DIVIDES) or torch.Tag.inplace_view in op.tags
        )
        _fails_midway[op] = known
    return known


def _at_risk(node: TrackedNode) -> list[TrackedValue]:
    """The arguments that ``node``'s kernel may leave partially written when it fails, and cannot
    write again.
    """
    if not node.writes or not _may_fail_midway(node.op):
        return []
    schema = node.op._schema
    if not schema.is_mutable:
        return [value for value in node.inputs if value in statistics(node)]
    name = schema.name.partition("::")[2]
    found: list[TrackedValue] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        items = given if isinstance(given, (list, tuple)) else [given]
        values = [item for item in items if isinstance(item, TrackedValue)]
        if argument.is_out or (name in OVERWRITES and position == 0):
            memory = [value.storage for value in node.inputs]
            values = [value for value in values if memory.count(value.storage) > 1]  # it may also read it
        found += values
    if name in _DIVIDES and all(_is_floating(value) for value in found):
        return []
    return found


def _is_floating(value: TrackedValue) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


def copied(node: TrackedNode) -> Sequence[TrackedValue]:
    """The tensors to copy before the kernel of ``node`` runs."""
    values = _at_risk(node)
    return values if _is_small(node, values) else ()


def is_refused(node: TrackedNode) -> bool:
    """Whether the memory that ``node`` writes is partially written if its kernel fails."""
    values = _at_risk(node)
    return bool(values) and not _is_small(node, values)


def _is_small(node: TrackedNode, values: Sequence[TrackedValue]) -> bool:
    # Memory with gaps is copied and restored without these.
    return not node.op._schema.is_mutable or sum(value.meta.nbytes for value in values) <= MOST_COPIED


def guarded(tensors: Sequence[torch.Tensor], kernel: Callable[[], Any]) -> Any:
    """Call ``kernel``; if it fails, restore the contents of ``tensors``."""
    before = [tensor.clone() for tensor in tensors]
    try:
        return kernel()
    except BaseException:
        complete(partial(_put_back, tensors, before))
        raise


def _put_back(tensors: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
    for tensor, content in zip(tensors, before, strict=True):
        tensor.copy_(content)


def noted(begun: list[Any], kernel: Callable[[], Any]) -> Any:
    """An iterator whose only item is the result of ``kernel``; ``begun`` gets an item just before the call.

    No Python code runs in between.
    """
    steps: tuple[partial[Any], ...] = (partial(begun.append, None), partial(kernel))
    return islice(map(partial.__call__, steps), 1, None)
