"""Collectives as nodes: their reads and writes are recorded; data of other ranks is unknown.

The operators of ``torch.distributed`` (``c10d``) have no shape rules, and their schemas do not declare what
they write; functional ones (``_c10d_functional``) return new tensors by PyTorch's own rules.  A node names
its group (:class:`~lazyviz.graph.collective_info.Group`) instead of the process group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from ...graph.collective_info import Group
from ...process.install_paths import PACKAGE
from ...torch_internals import fake_process_groups, private_api
from ..dependency_closure import order
from ..intercept_ops_outside_blocks import tensors_in
from ..interception.observers_of_deferred_writes import Unexamined
from ..lazy_tensor import is_pending
from ..sync_points import OtherRanks
from ..tape import Tape
from ..tracked_storages import TrackedNode, TrackedStorage, TrackedValue

_aten = torch.ops.aten
_READ_ONLY = {"send", "barrier", "monitored_barrier_"}  # c10d ops; the others write their first argument


def group_of(process_group: Any) -> Group:
    """The group that nodes store in place of a process group."""
    ranks = fake_process_groups.ranks_of(process_group)
    name = process_group.group_desc
    if name in ("", "undefined"):
        name = process_group.group_name
    return Group(name, ranks, process_group.rank())


def record(tape: Tape, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a collective of ``c10d``; returns its outputs, and its work handle."""
    names = [argument.name for argument in op._schema.arguments]
    args = (*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs))
    name = op._schema.name.rpartition("::")[2]
    frame = sys._getframe(2)
    is_alike = _is_alike(name, args, frame)
    written = [] if name in _READ_ONLY or is_alike else list(tensors_in((args[0],)))
    with tape.runs.lock:
        _note(tape, op, args, written, frame)
        if is_alike and tape.recording.world is not None:
            tape.recording.world.alike = {_value(tape, tensor).storage for tensor in tensors_in((args[0],))}
    # Sent tensors are kept until the work handle is released, as gloo and NCCL do.
    work = fake_process_groups.done(list(tensors_in((args[0],))) if name == "send" else written)
    kinds = [str(ret.type) for ret in op._schema.returns]
    results = [args[0] if "Tensor" in kind else work for kind in kinds]
    return tuple(results) if len(results) > 1 else results[0] if results else None


def _is_alike(name: str, args: tuple[Any, ...], frame: FrameType) -> bool:
    """Whether the collective sums values that are assumed equal on all ranks, so that only zeros stay zeros.

    At the end of a backward pass, DDP's reducer counts on how many ranks each parameter has been used
    (``find_unused_parameters``), and checks each count for zero.
    """
    if name != "allreduce_" or any(tensor.dtype != torch.int32 for tensor in tensors_in((args[0],))):
        return False
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename.startswith(PACKAGE):
        caller = caller.f_back
    return private_api.is_engine_call(caller)


def _note(tape: Tape, op: Any, args: tuple[Any, ...], written: list[torch.Tensor], frame: FrameType) -> None:
    values: list[TrackedValue] = []
    try:
        recorded = tuple([_translated(tape, item, values) for item in args])
    except Unexamined:
        tape.memory_holders.examine(list(tensors_in(args)))
        return _note(tape, op, args, written, frame)
    graph = tape.recording.graph
    assert graph is not None
    node = TrackedNode(graph, op, recorded, {})
    node.inputs = values
    storages: list[TrackedStorage] = [_value(tape, tensor).storage for tensor in written]
    order(node, storages)
    tape.scopes.locate(node, frame, bool(written))
    node.outputs = [_value(tape, tensor) for tensor in written]
    graph.nodes.append(node)
    tape.pending[node] = None
    OtherRanks.ranks = True


def _value(tape: Tape, tensor: torch.Tensor) -> TrackedValue:
    value: TrackedValue = tensor._lazyviz if is_pending(tensor) else tape.tensors.outside[id(tensor)]  # type: ignore[attr-defined]
    return value


def _translated(tape: Tape, item: Any, values: list[TrackedValue]) -> Any:
    """The recorded form of one argument; collects the values."""
    if isinstance(item, (list, tuple)):
        return type(item)([_translated(tape, entry, values) for entry in item])
    if isinstance(item, torch.Tensor):
        return tape.recorder.translated(item, values)
    if (group := fake_process_groups.unboxed(item)) is not None:
        return group_of(group)
    return type(item).__name__ if isinstance(item, torch.ScriptObject) else item


def record_functional(
    tape: Tape, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recorded: Callable[..., Any]
) -> Any:
    """Record an operator of ``_c10d_functional`` or ``_dtensor``, or one that FSDP2's operators call.

    ``recorded`` records an operator like any other, with shapes by PyTorch's rule.
    """
    schema = op._schema
    namespace, _, name = schema.name.partition("::")
    if namespace == "fsdp":
        return _FSDP[name](recorded, *args, **kwargs)
    if name == "wait_tensor":  # returns its argument: it does not have to wait
        return args[0]
    if name == "_wrap_tensor_autograd":  # its kernel is in Python, and allocates no memory
        return fake_process_groups.wrapper_classes()[1](*args)
    names = [argument.name for argument in schema.arguments]
    if "group_name" not in names:
        return recorded(op, args, kwargs)
    args, kwargs = tuple([_by_name(item) for item in args]), {k: _by_name(v) for k, v in kwargs.items()}
    result = recorded(op, args, kwargs)
    graph = tape.recording.graph
    assert graph is not None
    node = graph.nodes[-1]
    position = names.index("group_name")
    if node.op is op and position < len(node.args) and type(node.args[position]) is str:
        group = group_of(fake_process_groups.group_named(node.args[position]))
        node.args = (*node.args[:position], group, *node.args[position + 1 :])
    OtherRanks.ranks = True
    return result


def _by_name(item: Any) -> Any:
    group = fake_process_groups.unboxed(item)
    return item if group is None else group.group_name


# --- FSDP2's operators, whose kernels are Python functions -------------------------------


def _all_gather_copy_in(
    recorded: Callable[..., Any],
    inputs: list[torch.Tensor],
    output: torch.Tensor,
    sizes: list[int],
    count: int,
    rank: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    own = recorded(_aten.slice.Tensor, (output, 0, count * rank, count * (rank + 1)), {})
    parts = recorded(_aten.split_with_sizes.default, (own, sizes), {})
    recorded(_aten._foreach_copy_.default, (parts, inputs), {})
    return own, output


def _split_with_sizes_copy(
    recorded: Callable[..., Any],
    gathered: torch.Tensor,
    sizes: list[int],
    dim: int = 0,
    *,
    out: list[torch.Tensor],
) -> None:
    recorded(_aten.split_with_sizes_copy.out, (gathered, sizes, dim), {"out": out})


def _chunk_cat(
    recorded: Callable[..., Any], tensors: list[torch.Tensor], dim: int, num_chunks: int, out: torch.Tensor
) -> None:
    recorded(_aten._chunk_cat.out, (tensors, dim, num_chunks), {"out": out})


def _copy_(recorded: Callable[..., Any], tensor: torch.Tensor, data: torch.Tensor) -> None:
    recorded(_aten.copy_.default, (tensor, data), {})


_FSDP: dict[str, Callable[..., Any]] = {
    "all_gather_copy_in": _all_gather_copy_in,
    "split_with_sizes_copy": _split_with_sizes_copy,
    "chunk_cat": _chunk_cat,
    "copy_": _copy_,
}
