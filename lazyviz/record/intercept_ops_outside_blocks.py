"""Interception of ops outside of blocks: first evaluates the pending ops that they depend on.

While anything is pending, each of these first evaluates what it needs: reading a pending tensor or a storage
with a pending write, writing a storage that pending nodes read or write, and drawing from a generator with
pending draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..torch_internals import composite_ops, dispatcher_bypasses, fake_cuda_devices, private_api
from ..torch_internals.private_api import OpOverload
from .dependency_closure import closure
from .fake_cuda.gpu_copies_of_host_values import on_host, reads_host
from .lazy_tensor import is_lazy, is_pending, refusal
from .parity.inplace_gradient_sums import is_taken_over, sharing_memory
from .partially_written_memory import OVERWRITES, is_all_of, is_partial_write, mark_overwritten
from .random_draw_order import Generators
from .shapes.shape_inference_cache import OpInfo
from .sparse.components import parts_of
from .sync_points import may_need_absent, needs_absent
from .tape import Tape
from .tracked_storages import TrackedNode, TrackedStorage, Unreachable


def tensors_in(items: Any, around: tuple[int, ...] = ()) -> Iterator[torch.Tensor]:
    """Every tensor among a call's arguments, lists included; ``around`` are the ids of the enclosing
    lists.
    """
    for item in items:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple)) and id(item) not in around:
            yield from tensors_in(item, (*around, id(item)))


def written_tensors(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that the call mutates."""
    if info.hidden_writes and _argument(info, info.hidden_condition, args, kwargs, True):
        for position in info.hidden_writes:
            tensor = _argument(info, position, args, kwargs, None)
            if isinstance(tensor, torch.Tensor):
                yield tensor
    for position, name in zip(info.mutable_positions, info.mutable_kwargs):
        item = args[position] if position < len(args) else kwargs.get(name)
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from tensors_in(item)


def count_writes(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Advance the version counters that the kernel would have advanced in eager PyTorch, on the CPU."""
    for tensor in written_tensors(info, args, kwargs):
        if tensor.device.type == "cpu" and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _argument(info: OpInfo, position: int | None, args: Any, kwargs: Any, default: Any) -> Any:
    if position is None:
        return default
    return args[position] if position < len(args) else kwargs.get(info.argument_names[position], default)


def nodes_before_access(tape: Tape, tensor: torch.Tensor, *, write: bool) -> list[TrackedNode]:
    """Pending nodes that have to run before ``tensor``'s memory may be read (or written)."""
    needed: list[TrackedNode] = []
    if not is_lazy(tensor):
        tensor = composite_ops.below_functorch(tensor)
    if is_lazy(tensor) or "_lazyviz" in tensor.__dict__:
        value = tensor._lazyviz  # type: ignore[attr-defined]
        storage = value.storage
        if value.node is not None:
            needed.append(value.node)
    elif tensor.layout != torch.strided:
        return [node for part in parts_of(tensor) for node in nodes_before_access(tape, part, write=write)]
    elif not tape.tensors.storages:
        return needed
    else:
        found = tape.tensors.storages.get(private_api.storage_address(tensor))
        if found is None:
            return tape.external.pending_on_overlapping(tensor)
        storage = found
    if storage.writer is not None:
        needed.append(storage.writer)
    if write:
        needed.extend(node for node in storage.readers if not is_partial_write(node))  # these never run
    return [node for node in needed if node.state != "done"]


def is_out_of_reach(tape: Tape, tensor: torch.Tensor) -> bool:
    """Whether only an absent GPU could compute the content of ``tensor``."""
    if not may_need_absent():  # checked before the walk, because every read calls this function
        return False
    return needs_absent(closure(nodes_before_access(tape, tensor, write=False)))


def needed_nodes(
    tape: Tape,
    info: OpInfo,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    anew: Sequence[TrackedStorage] = (),
) -> tuple[list[TrackedNode], int]:
    """The pending nodes that a call needs, and the bytes of the pending tensors that it reads.

    Nodes that left the storages in ``anew`` partially written are not needed.
    """
    needed: list[TrackedNode] = []
    nbytes = 0
    written = {id(tensor) for tensor in written_tensors(info, args, kwargs)} if info.mutates else ()
    for tensor in tensors_in((*args, *kwargs.values())):
        nodes = nodes_before_access(tape, tensor, write=id(tensor) in written)
        if anew and tape.tensors.storages.get(private_api.storage_address(tensor)) in anew:
            nodes = [node for node in nodes if not is_partial_write(node)]
        if nodes:
            needed.extend(nodes)
            nbytes += tensor.numel() * tensor.element_size()
    if info.draws:
        generator = kwargs.get("generator")
        if generator is None and info.generator is not None and info.generator < len(args):
            generator = args[info.generator]
        if generator is None:
            device = next((tensor.device for tensor in tensors_in(args)), None) or kwargs.get("device")
            device = torch.device(device) if device is not None else torch.device("cpu")
            generator = None if device in fake_cuda_devices.STAND_INS else Generators.default(device)
        draw = tape.generators.pending(generator) if generator is not None else None
        if draw is not None:
            needed.append(draw)
    return needed, nbytes


def _overwritten_whole(
    tape: Tape, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[TrackedStorage]:
    """Partially written storages that the call overwrites."""
    addresses = [
        private_api.storage_address(tensor)
        for tensor in tensors_in((*args, *kwargs.values()))
        if not is_lazy(tensor) and tensor.layout == torch.strided
    ]
    for tensor in written_tensors(info, args, kwargs):
        if is_lazy(tensor) or tensor.layout != torch.strided:
            continue
        address = private_api.storage_address(tensor)
        storage = tape.tensors.storages.get(address)
        if storage is None or storage.writer is None or not is_partial_write(storage.writer):
            continue
        if addresses.count(address) == 1 and is_all_of(storage, tape.shapes.meta_of(tensor)):
            yield storage


def dispatch(tape: Tape, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one op that is not being recorded, after the nodes that it depends on."""
    info = tape.shapes.info(op)
    if info.metadata_only:
        with private_api.excluding_python():
            return op(*args, **kwargs)
    anew: list[TrackedStorage] = []
    if tape.pending:
        if Unreachable.possible and tape.recording.graph is None:
            tape.pending_ops.forget_lost()
        if info.is_view and any(is_lazy(tensor) for tensor in tensors_in(args)):
            with tape.runs.lock:  # a run on another thread may be about to make it real
                if any(is_lazy(tensor) for tensor in tensors_in(args)):
                    return tape.recorder.record_view(op, args, kwargs)
        if info.name in OVERWRITES:
            anew = list(_overwritten_whole(tape, info, args, kwargs))
        needed, nbytes = needed_nodes(tape, info, args, kwargs, anew)
        if info.is_view:  # it reads nothing, so its result can be overwritten as well
            needed = [node for node in needed if not is_partial_write(node)]
        if info.draws and not anew and not needed:
            with tape.runs.lock:  # a run on another thread has control of the generators' states
                return op(*args, **kwargs)
        if needed:
            if reads_host(op, info, kwargs) and needs_absent(closure(needed)):
                copies = on_host(tape, args)
                if copies is not None:
                    return op(*copies, **kwargs)
            with tape.runs.lock:
                tape.runs.sync(info.name if info.name != "_local_scalar_dense" else "item", needed, nbytes)
        if info.mutates:
            _forget_written(tape, info, args, kwargs)
    refuse_forgotten(tape, (*args, *kwargs.values()))
    result = call(op, info, args, kwargs)
    for storage in anew:
        mark_overwritten(storage)
    if info.counts_writes:
        count_writes(info, args, kwargs)
    return result


def passes(info: OpInfo) -> bool:
    """Whether :func:`dispatch` has nothing to do for calls on ordinary tensors whose memory no pending op
    uses.
    """
    return not (
        info.draws
        or info.of_parts
        or info.of_views
        or info.counts_writes
        or info.set_like
        or info.metadata_write
        or info.metadata_only
    )


def _forget_written(tape: Tape, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The recorded content of the tensors that the op is about to write is no longer valid."""
    for tensor in written_tensors(info, args, kwargs):
        tape.tensors.forget_shadow(tensor)
        if info.set_like or info.metadata_write:
            tape.tensors.forget_address(tensor)  # it had other memory, or another view of the same memory


def call_measured(
    op: OpOverload, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, int | None]:
    """:func:`call`, and the kernel's peak CPU memory in bytes, results included.

    ``None`` if it is not measured: for kernels that may free operands, or that are not PyTorch's own.
    """
    may_free = info.resizes or info.set_like or info.mutable_kwargs
    if op.namespace != "aten" or may_free or any(map(parts_of, written_tensors(info, args, kwargs))):
        return call(op, info, args, kwargs), None
    return dispatcher_bypasses.measured(call, (op, info, args, kwargs), {})


def call(op: OpOverload, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on real tensors, at the dispatch level at which it was called."""
    if info.copies and is_taken_over(args):
        return sharing_memory(args[0])
    if info.of_parts:
        with private_api.with_autograd():
            return op(*args, **kwargs)
    if info.calls_autocast:
        with private_api.with_autocast():
            return op(*args, **kwargs)
    with private_api.seeing_lazy_bits():
        return op(*args, **kwargs)


def is_differentiated(items: Any) -> bool:
    """Whether autograd would record an op on these arguments."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(items))


def dispatch_traced(tape: Tape, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pass an op to the tracer below us (``make_fx``, fake tensors), because it is part of the traced
    program.
    """
    evaluate_arguments(tape, args, kwargs, f"tracing {op}", write=True)
    return op(*args, **kwargs)


def evaluate_arguments(
    tape: Tape, args: tuple[Any, ...], kwargs: dict[str, Any], cause: str, *, write: bool
) -> None:
    """Evaluate the nodes that reading (or writing) any tensor of a call depends on."""
    if not tape.pending:
        return
    needed = [
        node
        for tensor in tensors_in((*args, *kwargs.values()))
        for node in nodes_before_access(tape, tensor, write=False)
    ]
    if write:  # what only an absent device could read is only planned
        needed += [
            node
            for tensor in tensors_in((*args, *kwargs.values()))
            for node in nodes_before_access(tape, tensor, write=True)
            if not (may_need_absent() and needs_absent(closure([node])))
        ]
    if needed:
        with tape.runs.lock:
            tape.runs.sync(cause, needed)


def refuse_forgotten(tape: Tape, items: Any) -> None:
    """Raise a clear error for a tensor that can no longer be evaluated.

    Raises:
        RuntimeError: one of the tensors is still without a value.
    """
    for tensor in tensors_in(items):
        if is_lazy(tensor):
            tape.runs.lock.wait()  # another thread that has run its node may be about to make it real
        if is_lazy(tensor):
            raise RuntimeError(refusal(tensor._lazyviz))


def replaced(item: Any, replacement: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Arguments with ``replacement(tensor)`` for each tensor, lists included."""
    if isinstance(item, dict):
        return {name: replaced(entry, replacement) for name, entry in item.items()}
    if isinstance(item, (list, tuple)):
        return type(item)([replaced(entry, replacement) for entry in item])
    return replacement(item) if isinstance(item, torch.Tensor) else item


def lazy_bits(tensor: torch.Tensor) -> list[OpOverload]:
    """The views that set the conjugate and negative bits of ``tensor``."""
    views = {
        torch.ops.aten._conj.default: tensor.is_conj(),
        torch.ops.aten._neg_view.default: tensor.is_neg(),
    }
    return [view for view, has in views.items() if has]


def with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Ordinary zeros in place of autograd's zero tensors without memory."""
    if private_api.is_zero_tensor(tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A stand-in for a pending tensor where only metadata matters."""
    if is_pending(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return tensor
