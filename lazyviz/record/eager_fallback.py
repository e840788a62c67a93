"""Eager fallback: ops that run immediately during recording, and are added to the graph as done.

Data-dependent operators, compiled functions, and formulas that read values are not deferred, but allocate
memory that the rest of the block uses.  When such an op has run, its results are known: it becomes a node
that is done, with real sizes.  The scratch memory of an operator's CPU kernels is measured as they run; that
of other subgraphs is unknown.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch

from ..graph.collective_info import NAMESPACES
from ..graph.ir import RAN_AT_ONCE, Storage, TensorMeta
from ..torch_internals import composite_ops, dispatcher_bypasses, operator_registration, private_api
from .dependency_closure import closure
from .intercept_ops_outside_blocks import evaluate_arguments, nodes_before_access, replaced, tensors_in
from .provenance.variable_names import tensors_under
from .sparse.components import parts_of
from .sync_points import may_need_absent, needs_absent, without_absent
from .tape import Tape
from .tracked_storages import TensorRef, TrackedNode, TrackedStorage, TrackedValue, on_tensor_death

region = operator_registration.define("ran_at_once", "(Tensor[] read) -> Tensor[]")
"""Stands in a node for a subgraph of the program that is not an operator; it is never called."""
assert region._schema.name == RAN_AT_ONCE


def dispatch_opaque(tape: Tape, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a higher-order operator (``torch.cond``, flex attention) immediately, since it is not one
    kernel.
    """
    if getattr(op, "namespace", "") == "profiler":
        return op(*args, **kwargs)
    world = tape.recording.world
    if op.namespace in NAMESPACES and world is not None and _is_recording(tape) and not tape.recording.pauses:
        return world.collective(op, args, kwargs)
    evaluate_arguments(tape, args, kwargs, str(op), write=False)
    with tape.recording.paused():
        result, held = dispatcher_bypasses.measured(op, args, kwargs)
    note_region(tape, str(op), (args, kwargs), result, held=held)
    return result


def note_operator(
    tape: Tape,
    cause: str,
    op: private_api.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    written: Sequence[torch.Tensor],
    before: Sequence[tuple[int, int] | None],
    held: int | None = None,
) -> None:
    """Add an operator that has run and returned ``result``; ``before`` has the addresses and sizes that the
    memory of ``written`` had before, ``held`` is the kernel's peak memory in bytes.
    """
    if not _is_recording(tape):
        return
    read = list(tensors_in((*args, *kwargs.values())))
    sparse = [tensor for tensor in written if parts_of(tensor)]  # operators on lists return nothing
    returned = {id(tensor): tensor for tensor in (*tensors_in((result,)), *sparse)}
    made = list(_made(tape, read, returned.values()))
    grown: list[torch.Tensor] = []
    for tensor, then, now in zip(written, before, map(memory_of, written)):
        # Memory with another address has been exchanged (`set_`), so the old memory has not been resized.
        if then is not None and now is not None and then[0] == now[0] and then[1] != now[1]:
            grown.append(tensor)
            if _known(tape, now[0]) is None and (old := _value_of(tape, tensor)) is not None:
                old.storage.nbytes = then[1]
    if not made and not grown:
        for tensor in sparse:
            _forget_components(tape, tensor)
        return

    def value(tensor: torch.Tensor) -> Any:
        return _value_of(tape, tensor) or tensor.layout

    node = TrackedNode(tape.recording.graph, op, replaced(args, value), replaced(kwargs, value))  # type: ignore[arg-type]
    node.inputs = [found for tensor in read if (found := _value_of(tape, tensor)) is not None]
    outputs = _outputs(tape, node, made)
    for tensor in grown:
        address, nbytes = memory_of(tensor) or (0, 0)
        if (fresh := _resized(tape, address, nbytes)) is not None:
            outputs.append(TrackedValue(_meta(tape, tensor, nbytes), fresh, node, len(outputs)))
    if outputs:
        _note_scratch(node, outputs, held)
        _append(tape, node, cause, outputs, sys._getframe(2), bool(written))
    for tensor in sparse:
        _forget_components(tape, tensor)


def _forget_components(tape: Tape, tensor: torch.Tensor) -> None:
    """Release the indices and values that a sparse tensor had before a write that replaced them."""
    there = {_known(tape, private_api.storage_address(part)) for part in parts_of(tensor)}
    for ref in weakref.getweakrefs(tensor):
        if type(ref) is TensorRef and ref.value.storage not in there:
            on_tensor_death(ref)  # this unlinks the reference, so that it is not counted again


def note_region(
    tape: Tape,
    cause: str,
    read: Any,
    returned: Any,
    *,
    modules: Iterable[torch.nn.Module] = (),
    held: int | None = None,
) -> None:
    """Add a subgraph of the program that has read ``read`` and returned ``returned``, which may be any
    container.

    ``held`` is the peak memory of its kernels in bytes, if it was measured.
    """
    if not _is_recording(tape):
        return
    with tape.recording.paused():
        below = composite_ops.below_functorch
        of_modules = (each for module in modules for each in _held_by(module))
        inputs = [*map(below, tensors_under(read)), *of_modules]
        made = list(_made(tape, inputs, map(below, tensors_under(returned))))
        if not made:
            return
        values = {found: None for tensor in inputs if (found := _value_of(tape, tensor)) is not None}
        node = TrackedNode(tape.recording.graph, region, (list(values),), {})  # type: ignore[arg-type]
        node.inputs = list(values)
        outputs = _outputs(tape, node, made)
        _note_scratch(node, outputs, held)
        _append(tape, node, cause, outputs, sys._getframe(2), False)


def _note_scratch(node: TrackedNode, outputs: Sequence[TrackedValue], held: int | None) -> None:
    """Note the peak CPU memory of the node's kernels in bytes, including that of its results."""
    if held is not None and all(found.storage.device.type == "cpu" for found in outputs):
        results = {found.storage: None for found in outputs if found.storage.created == node.index}
        node.scratch_bytes = max(held - sum(storage.nbytes for storage in results), 0)


def evaluate_before_tracing(tape: Tape, cause: str, given: Any) -> None:
    """Evaluate pending ops, except those that are only planned, before PyTorch traces a program with
    ``given``.

    Raises:
        AbsentDeviceError: ``given`` has tensors that only an absent device could compute.
    """
    if not tape.pending:
        return
    if may_need_absent():
        modules = [item for item in given if isinstance(item, torch.nn.Module)]
        tensors = [*tensors_under(given), *(each for module in modules for each in _held_by(module))]
        needed = [node for tensor in tensors for node in nodes_before_access(tape, tensor, write=False)]
        if needs_absent(closure(needed)):
            tape.runs.sync(cause, needed)
    if nodes := without_absent(tape.pending):
        tape.runs.sync(cause, nodes)


def note_copies(tape: Tape, copies: Any) -> None:
    """Treat tensors that PyTorch created unrecorded as outside memory, even if no op uses them."""
    if (graph := tape.recording.graph) is None or not _is_recording(tape):
        return
    for tensor in tensors_under(copies):
        place = memory_of(tensor) if "_lazyviz" not in tensor.__dict__ else None
        if place is not None and _known(tape, place[0]) is None:
            tape.tensors.arrivals.note(tensor, graph, *tape.scopes.role_of(tensor))


def note_resize(tape: Tape, cause: str, address: int, before: int, nbytes: int) -> None:
    """Note that recorded memory has been resized."""
    storage = _known(tape, address)
    if before == nbytes or storage is None or not _is_recording(tape):
        return
    old = TrackedValue(_bytes(storage), storage, None)
    fresh = _resized(tape, address, nbytes)
    if fresh is not None and nbytes:
        node = TrackedNode(fresh.graph, region, ([old],), {})
        node.inputs = [old]
        _append(tape, node, cause, [TrackedValue(_bytes(fresh), fresh, node)], sys._getframe(2), False)


def _resized(tape: Tape, address: int, nbytes: int) -> TrackedStorage | None:
    """The storage of resized memory from the next node on; to an allocator, it is other memory.

    Both storages exist while the content is copied (``resize_bytes_cpu``, ATen's Resize.cpp).
    """
    first, graph = _known(tape, address), tape.recording.graph
    if first is None or graph is None:
        return None
    fresh = TrackedStorage(nbytes, first.device, graph, external=not nbytes)
    fresh.role, fresh.name, fresh.address = first.role, first.name, address
    names: list[Storage | None] = [
        tape.tensors.storages.pop(address, None),
        tape.tensors.computed.get(address),
    ]
    while names:
        storage = names.pop()
        if not isinstance(storage, TrackedStorage) or storage.replaced_by is not None:
            continue
        names.append(storage.continues)
        if storage.live:
            storage.dropped = len(storage.graph.nodes)
            storage.dropped += nbytes > 0 and storage.graph is graph
            fresh.live, storage.live = fresh.live + storage.live, 0
        storage.replaced_by = fresh
    tape.tensors.computed[address] = fresh
    return fresh


def _meta(tape: Tape, tensor: torch.Tensor, nbytes: int) -> TensorMeta:
    """The tensor's metadata; for a nested tensor, which has no sizes, its bytes."""
    if tensor.is_nested:
        return TensorMeta((nbytes,), (1,), 0, torch.uint8, tensor.device)
    return tape.shapes.meta_of(tensor)


def _bytes(storage: TrackedStorage) -> TensorMeta:
    return TensorMeta((storage.nbytes,), (1,), 0, torch.uint8, storage.device)


def memory_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The address and size in bytes of an ordinary tensor's memory."""
    if tensor.layout != torch.strided or private_api.is_zero_tensor(tensor):
        return None
    if not private_api.has_storage(tensor):
        return None
    return private_api.storage_address(tensor), private_api.TensorBase.untyped_storage(tensor).nbytes()


def _is_recording(tape: Tape) -> bool:
    return not tape.shapes.inferring and tape.recording.is_on_this_thread()


def _append(
    tape: Tape,
    node: TrackedNode,
    cause: str,
    outputs: list[TrackedValue],
    frame: FrameType,
    mutates: bool,
) -> None:
    node.at_once = cause
    node.state = "done"
    node.outputs = outputs
    tape.scopes.locate(node, frame, mutates)
    node.graph.nodes.append(node)


def _outputs(tape: Tape, node: TrackedNode, made: Iterable[_Made]) -> list[TrackedValue]:
    """The values of the results; later ops may use their tensors."""
    outputs: list[TrackedValue] = []
    for tensor, address, nbytes, meta in made:
        storage = _known(tape, address)  # a sparse tensor has been created from it, or has returned it
        if is_new := storage is None or storage.graph is not node.graph:
            storage = TrackedStorage(nbytes, tensor.device, node.graph, external=False)
        value = TrackedValue(meta, storage, node, len(outputs))
        TensorRef(tensor, value)
        outputs.append(value)
        if is_new:
            tape.tensors.computed[address] = storage
            tape.tensors.storages.pop(address, None)  # its memory has been freed
        if tensor.layout == torch.strided:
            tape.tensors.results[id(tensor)] = value
        else:
            tape.tensors.components[address] = storage.id
    return outputs


_Made = tuple[torch.Tensor, int, int, TensorMeta]  # a result, the address and the size of its memory


def _made(tape: Tape, read: Iterable[torch.Tensor], results: Iterable[torch.Tensor]) -> Iterator[_Made]:
    """The results in new memory, one per storage; for sparse tensors, all components."""
    known = {place[0] for tensor in read if (place := memory_of(tensor)) is not None}
    for tensor in results:
        if parts := parts_of(tensor):
            for part in parts:
                nbytes = private_api.TensorBase.untyped_storage(part).nbytes()
                if nbytes and not part.is_meta:
                    yield tensor, private_api.storage_address(part), nbytes, tape.shapes.meta_of(part)
            continue
        if "_lazyviz" in tensor.__dict__ or tensor.is_meta or (place := memory_of(tensor)) is None:
            continue
        address, nbytes = place
        if address in known:
            continue
        known.add(address)
        there = _known(tape, address)
        handed_out = there is not None and tape.tensors.components.get(address) == there.id
        if nbytes and (there is None or handed_out) and not tape.external.is_shared(tensor):
            yield tensor, address, nbytes, _meta(tape, tensor, nbytes)


def _known(tape: Tape, address: int) -> TrackedStorage | None:
    """The recorded storage at an address, if that memory certainly still exists."""
    for storage in (tape.tensors.storages.get(address), tape.tensors.computed.get(address)):
        if storage is not None and (storage.live > 0 or storage.has_pending_access):
            return storage
    return None


def _value_of(tape: Tape, tensor: torch.Tensor) -> TrackedValue | None:
    """The value of a tensor that was read immediately; nothing is kept of it for later."""
    value = tape.tensors.value_of(tensor)
    place = memory_of(tensor) if value is None or value.storage.address else None
    if value is not None and (place is None or place[0] == value.storage.address):
        return value
    if place is None:
        return None
    address, nbytes = place
    storage = _known(tape, address)
    graph = tape.recording.graph
    assert graph is not None
    if storage is None:
        storage = TrackedStorage(nbytes, tensor.device, graph, external=True)
        storage.role, storage.name = tape.scopes.role_of(tensor)
        storage.foreign = tape.external.is_shared(tensor)
        tape.tensors.found_outside(tensor, storage, graph)
        if not storage.foreign:
            tape.tensors.computed[address] = storage
    value = TrackedValue(_meta(tape, tensor, nbytes), storage, None)
    value.name = storage.name
    TensorRef(tensor, value)
    graph.inputs.append(value)
    return value


def _held_by(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def watched_resize(tape: Tape, original: Callable[..., Any]) -> Callable[..., Any]:
    """``UntypedStorage.resize_`` that also updates the record."""

    @functools.wraps(original)
    def resize_(storage: Any, size: int) -> Any:
        before = storage.nbytes()
        result = original(storage, size)
        note_resize(tape, "UntypedStorage.resize_", storage._cdata, before, storage.nbytes())
        return result

    return resize_
