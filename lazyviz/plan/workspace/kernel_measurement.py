"""Workspace of library kernels on the CPU, measured by calling them, if that takes little time.

What oneDNN allocates depends on kernels that it chooses internally, so rules for it are estimates where they
were not verified: in half precision, for channels last, and with other instruction sets.  A kernel is called
on zeros with the recorded metadata, and the allocator's events are noted.  Larger calls keep the estimate.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...graph.ir import Node, TensorMeta, Value
from ...torch_internals.cpu_kernel_selection import scratch_of_call
from ..runtime.flop_count import executed_flops_of
from .workspace_rule import exactly
from .workspace_size import Need

# Their workspace depends on metadata only. They draw no random numbers and write nothing but their results.
_MEASURABLE = frozenset(
    f"aten::{name}"
    for name in (
        "convolution", "convolution_overrideable", "convolution_backward",
        "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
    )
)  # fmt: skip
LARGEST_FLOPS = 3 * 10**8  # some milliseconds
LARGEST_NBYTES = 16 * 2**20  # of operands and results
_MOST = 4096  # calls that are remembered

_known: dict[Any, int] = {}


class _Operand(NamedTuple):
    """What a tensor argument is created from."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def refined(node: Node, threads: int, need: Need) -> Need:
    """``need``, or what the kernel was measured to need, if the rule is an estimate and a call takes little
    time.
    """
    if need.exact or node.op._schema.name not in _MEASURABLE or not _is_small(node):
        return need
    call = _hashable(node.args), _hashable(node.kwargs)
    key = (node.op, call, threads, torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled)
    found = _known.get(key)
    if found is None:
        found = scratch_of_call(node.op, lambda: _arguments(*call))
        if found is None:
            return need
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = found
    return exactly(found)


def _is_small(node: Node) -> bool:
    operands = {value.storage: value.meta for value in (*node.inputs, *node.outputs)}
    for meta in operands.values():
        if meta.device.type != "cpu" or meta.flags or meta.dtype.is_complex:
            return False
    return (
        sum(_extent(meta) for meta in operands.values()) <= LARGEST_NBYTES
        and executed_flops_of(node) <= LARGEST_FLOPS
    )


def _extent(meta: TensorMeta) -> int:
    """Bytes from a tensor's first element to its last, of an expanded one fewer than it has elements."""
    if 0 in meta.shape:
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(meta.shape, meta.stride, strict=True))
    return (reach + 1) * meta.dtype.itemsize


def _hashable(item: Any) -> Any:
    if isinstance(item, Value):
        return _Operand(item.meta.shape, item.meta.stride, item.meta.dtype)
    if isinstance(item, (list, tuple)):
        return tuple(map(_hashable, item))
    if isinstance(item, dict):
        return tuple((name, _hashable(each)) for name, each in sorted(item.items()))
    return item


def _arguments(args: tuple[Any, ...], kwargs: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(map(_created, args)), {name: _created(item) for name, item in kwargs}


def _created(item: Any) -> Any:
    if isinstance(item, _Operand):
        reach = sum((size - 1) * stride for size, stride in zip(item.shape, item.stride, strict=True))
        memory = torch.zeros(0 if 0 in item.shape else reach + 1, dtype=item.dtype, device="cpu")
        return memory.as_strided(item.shape, item.stride)
    return [_created(each) for each in item] if isinstance(item, tuple) else item
