"""Verification of compiled code: a segment is compared with the recorded ops, on copies of its inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...graph.ir import Node, Storage, Value
from ...graph.modules import full_name
from ..backend_protocol import Segment
from ..compute_value_stats import BLANK

_TIMES = 4  # the rounding of one op on every input, compared with that of a whole program


class Copies:
    """Copies of a segment's inputs that share memory in the same way.

    ``nudge``: floating numbers are changed by this relative amount, at least one rounding, as another order
    of sums might do.
    """

    def __init__(
        self, values: Sequence[Value], tensors: Sequence[torch.Tensor], *, nudge: float = 0.0
    ) -> None:
        memory: dict[Storage, torch.UntypedStorage] = {}
        self.tensors: list[torch.Tensor] = []
        for value, tensor in zip(values, tensors, strict=True):
            storage = memory.get(value.storage)
            if storage is None:
                storage = memory[value.storage] = tensor.untyped_storage().clone()
            copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            self.tensors.append(copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride()))
        if nudge:
            for value, copy in zip(values, self.tensors, strict=True):
                storage = memory.pop(value.storage, None)
                if storage is not None and copy.is_floating_point():
                    _perturb(torch.empty(0, dtype=copy.dtype, device=copy.device).set_(storage), nudge)


def rounding(segment: Segment) -> float:
    """The coarsest relative rounding of the segment's ops: that of bfloat16 under autocast."""
    dtypes = {value.meta.dtype for node in segment.nodes for value in node.outputs}
    return max((torch.finfo(each).eps for each in dtypes if each.is_floating_point), default=0.0)


def _perturb(flat: torch.Tensor, part: float) -> None:
    # The sign follows no order that a sum would cancel: the bits of a multiplicative hash.
    signs = (torch.arange(flat.numel(), device=flat.device) * 2654435761 >> 13) % 2 * 2 - 1
    flat.add_(flat * signs.to(flat.dtype), alpha=max(part, torch.finfo(flat.dtype).eps))


def run_recorded(segment: Segment, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The segment's outputs by its own ops, one after the other, on ``inputs``."""
    known: dict[Value, torch.Tensor] = dict(zip(segment.inputs, inputs, strict=True))

    def given(item: Any) -> Any:
        if isinstance(item, Value):
            return known[item]
        return type(item)([given(entry) for entry in item]) if isinstance(item, (list, tuple)) else item

    for node in segment.nodes:
        result = node.op(*given(node.args), **{name: given(item) for name, item in node.kwargs.items()})
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        for value in node.outputs:
            if value.node is node and results[value.index] is not None:
                known[value] = results[value.index]
    return [known[value] for value in segment.outputs]


def written(segment: Segment) -> list[int]:
    """Positions of the inputs whose memory the segment writes."""
    storages = {storage for node in segment.nodes for storage in node.writes}
    return [at for at, value in enumerate(segment.inputs) if value.storage in storages]


def blank(segment: Segment) -> set[Storage]:
    """Storages that the segment creates and does not fill, whose content is undefined."""
    made = {
        storage
        for node in segment.nodes
        if node.op._schema.name.removeprefix("aten::") in BLANK
        for storage in node.made
    }
    return made - {storage for node in segment.nodes for storage in node.writes}


def saved(segment: Segment, tensors: Sequence[torch.Tensor]) -> dict[int, torch.UntypedStorage] | None:
    """Copies of the memory that the segment writes, by position of an input on it; None if there is no memory
    for them.
    """
    try:
        seen = {segment.inputs[at].storage: at for at in written(segment)}
        return {at: tensors[at].untyped_storage().clone() for at in seen.values()}
    except (torch.OutOfMemoryError, MemoryError):
        return None


def first_mismatch(
    values: Sequence[Value],
    ours: Sequence[torch.Tensor],
    theirs: Sequence[torch.Tensor],
    nodes: Mapping[Value, Node],
    nudged: Sequence[torch.Tensor] | None = None,
) -> str | None:
    """The first difference between ``ours`` and ``theirs`` beyond rounding, as text; None if there is none.

    Two floating tensors are equal if no element differs by more than the square root of the dtype's epsilon
    times the largest magnitude in the tensor, plus epsilon times the largest magnitude of all. Fused code
    keeps at least half of the digits, and a gradient that cancels to zero consists of rounding only. The
    program itself may amplify rounding (Adam divides such a gradient by its magnitude), or compute in a
    coarser dtype than it returns. For that, ``nudged`` has the results of the recorded ops for inputs that
    are off by one rounding (:func:`rounding`), and ours may be off by a multiple of that.
    """
    largest = max((_magnitude(tensor) for tensor in theirs), default=0.0)
    for value, mine, other, moved in zip(values, ours, theirs, nudged or theirs, strict=True):
        where = _place(value, nodes)
        if mine.shape != other.shape or mine.dtype != other.dtype:
            return (
                f"{where} is {list(mine.shape)} {mine.dtype}, in eager mode {list(other.shape)} {other.dtype}"
            )
        if not (mine.is_floating_point() or mine.is_complex()):
            if not torch.equal(mine, other):
                return f"{where} differs in {int((mine != other).sum()):,} of {mine.numel():,} elements"
            continue
        epsilon = torch.finfo(mine.dtype).eps
        bound = math.sqrt(epsilon) * _magnitude(other) + epsilon * largest
        if nudged is not None:
            bound += _TIMES * _magnitude(moved - other)
        if mine.numel() and not torch.allclose(mine, other, rtol=0.0, atol=bound, equal_nan=True):
            worst = float((mine - other).abs().nan_to_num(math.inf).max())
            return f"{where} differs by up to {worst:.3g} (allowed: {bound:.3g})"
    return None


def _magnitude(tensor: torch.Tensor) -> float:
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    finite = tensor.abs()
    return float(finite[torch.isfinite(finite)].max()) if torch.isfinite(finite).any() else 0.0


def _place(value: Value, nodes: Mapping[Value, Node]) -> str:
    node = nodes.get(value)
    if node is None:
        return f"the write to {full_name(value.name or value.storage.name) or 'an outside tensor'}"
    line = f" at {node.source}" if node.source is not None else ""
    return f"the result of {node.name}{line}"
