"""Values of an absent GPU that the host also has, because they were only copied or viewed.

A model that was moved to a planned GPU keeps the values that it had on the host unless recorded ops write
them, and reading such a tensor returns these values.  When the plan is dropped, every moved tensor gets its
host memory back, because no planned op has run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...torch_internals import fake_cuda_devices, private_api
from ..dependency_closure import closure
from ..lazy_tensor import LazyTensor, make_real
from ..sync_points import needs_absent
from ..tracked_storages import TrackedNode, TrackedValue

if TYPE_CHECKING:
    from ...torch_internals.private_api import OpOverload
    from ..shapes.shape_inference_cache import OpInfo
    from ..tape import Tape

_aten = torch.ops.aten
_COPIES = {
    _aten._to_copy.default,
    _aten.clone.default,
    _aten.lift_fresh.default,
    _aten.lift_fresh_copy.default,
}


def host_copy(tape: Tape, tensor: torch.Tensor) -> torch.Tensor | None:
    """A CPU copy of a tensor on an absent GPU, if the host can compute it; otherwise ``None``.

    It may evaluate ops that the host has to run for it.
    """
    value = tensor.__dict__.get("_lazyviz")
    if value is None or not fake_cuda_devices.STAND_INS:
        return None
    with tape.runs.lock:
        return _copy(tape, value, undo=False)


def reads_host(op: OpOverload, info: OpInfo, kwargs: dict[str, Any]) -> bool:
    """Whether an op passes its argument to the host: a copy to the CPU, or a read of Python numbers."""
    if op is _aten._to_copy.default:
        return torch.device(kwargs.get("device") or "meta").type == "cpu"
    return info.returns_numbers


def on_host(tape: Tape, items: Any) -> Any:
    """The arguments with the host's copy of each pending tensor; ``None`` if one of them has none."""
    copies: dict[int, torch.Tensor] = {}

    def replace(item: Any) -> Any:
        if isinstance(item, LazyTensor):
            copy = copies.get(id(item))
            if copy is None:
                copy = host_copy(tape, item)
                if copy is None:
                    raise _NotAvailable
                copies[id(item)] = copy
            return copy
        if isinstance(item, (list, tuple)):
            return type(item)([replace(entry) for entry in item])
        return item

    try:
        return replace(items)
    except _NotAvailable:
        return None


def give_back(tape: Tape) -> None:
    """Turn tensors that were moved to the GPU into host tensors again, before the plan is dropped."""
    if not fake_cuda_devices.STAND_INS:
        return
    moved: dict[TrackedValue, list[torch.Tensor]] = {}
    for node in list(tape.pending):
        for value in node.outputs:
            tensors = [tensor for ref in value.refs() if (tensor := ref()) is not None]
            tensors = [tensor for tensor in tensors if tensor.__dict__.get("_lazyviz") is value]
            if tensors and needs_absent([node]):
                moved[value] = tensors
    copies: dict[Any, torch.Tensor] = {}
    for value in moved:
        copy = _copy(tape, value, undo=True)
        if copy is not None and not copy.is_meta:
            copies[value] = copy
    for value, copy in copies.items():
        value.tensor = None
        for tensor in moved[value]:
            make_real(tensor, copy)
            grad = tensor.grad if tensor.is_leaf else None
            if isinstance(grad, LazyTensor) and grad._lazyviz not in copies:
                tensor.grad = None  # of a backward pass that will not happen


class _NotAvailable(Exception):
    pass


def _copy(tape: Tape, value: TrackedValue, *, undo: bool) -> torch.Tensor | None:
    """The value on the CPU; with ``undo``, without the writes of pending nodes to its memory."""
    chain: list[TrackedNode] = []
    current = value
    while current.real is None:
        node = current.node
        if node is None or node.state == "done":
            return None
        if (not undo and current.storage.has_pending_write) or not _is_copy(node):
            if needs_absent([node]):
                return None
            break  # the host can compute it
        chain.append(node)
        current = node.inputs[0]
    first = chain[-1] if chain else None
    if first is None:
        return None
    needed = closure(
        [node for node in (current.node, *first.after) if node is not None and node not in chain]
    )
    if needs_absent(needed):
        return None
    if needed:
        tape.runs.evaluate(needed, "a copy of host data")
    if current.real is None:
        return None
    result = current.real
    with private_api.kernels_only():  # the tape would make them depend on ops that were recorded after them
        for node in reversed(chain):
            kwargs = {
                k: v for k, v in node.kwargs.items() if k not in ("device", "pin_memory", "non_blocking")
            }
            result = node.op(result, *node.args[1:], **kwargs)
        # `_to_copy` between devices need not change the dtype: the result is never the host's own memory.
        return result if any(node.op in _COPIES for node in chain) else result.clone()


def _is_copy(node: TrackedNode) -> bool:
    """Whether the result has the content of the single argument, as a copy or a view."""
    return len(node.inputs) == 1 and not node.writes and (node.op in _COPIES or bool(node.op.is_view))
