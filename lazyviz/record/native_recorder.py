"""Native recorder: connects the compiled recorder (``recorder.pyx``), if it was built.

It is optional: without it (``lazyviz compile`` was not run, or ``LAZYVIZ_PURE_PYTHON`` is set in the
environment), every op is recorded in Python, with the same results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..graph.ir import Graph, RunInside, SourceLine, TensorMeta
from ..process.deferred_signals import Deferred
from ..process.global_state_transaction import complete
from ..torch_internals import (
    dispatcher_bypasses,
    fake_cuda_devices,
    native_module_loader,
    private_api,
    redispatch_from_dispatch_mode,
    storage_ownership,
)
from ..torch_internals.private_api import OpOverload
from . import backward_nodes, constant_folding, dependency_closure, intercept_ops_outside_blocks, sync_points
from .constant_folding import is_given
from .intercept_ops_outside_blocks import count_writes, written_tensors
from .interception import attribute_patches
from .interception.observers_of_deferred_writes import MemoryHolders, Unexamined, are_ordinary
from .interception.register_optimizer_step_hooks import OptimizerSteps
from .item_and_bool_reads import number_in, raise_from_read
from .lazy_tensor import MOST_TENSORS, LazyParameter, LazyTensor, Wrappers, wrap
from .pending_ops import PendingOps
from .provenance import module_calls_and_phases, source_lines
from .recorder import RecorderMode, recorder
from .recording_state import is_of_python
from .shapes.kernel_probes import sharing
from .shapes.scalar_operands import extent
from .shapes.shape_inference_cache import Inferred, OutputSpec
from .sync_points import PendingRuns
from .tape import tape
from .tensor_table import NOWHERE, TensorTable
from .tracked_storages import (
    Shadow,
    TensorRef,
    TrackedNode,
    TrackedStorage,
    TrackedValue,
    Unreachable,
    on_tensor_death,
)

METHODS: tuple[tuple[type, str], ...] = (
    (TensorTable, "release_after"),
    (TensorTable, "release_all"),
    (TensorTable, "made_real"),
    (PendingOps, "release_unused"),
    (PendingRuns, "note_run"),
    (PendingRuns, "sync"),
    (OptimizerSteps, "before_step"),
    (OptimizerSteps, "after_step"),
    (source_lines.SourceFinder, "find"),
    (source_lines.SourceFinder, "read_at"),
    (source_lines.SourceFinder, "users"),
    (source_lines.SourceFinder, "enter"),
    (source_lines.SourceFinder, "leave"),
)
"""Methods with a compiled form of the same name."""
IN_PYTHON = (
    RecorderMode.__torch_dispatch__,
    module_calls_and_phases.ScopePatches.module_call_of,
    module_calls_and_phases.content_of,
    attribute_patches.exchange,
    are_ordinary,
    dependency_closure.Search.closure,
    dependency_closure.Search.graph_of,
    constant_folding.Search.is_unknown,
    *[getattr(owner, name) for owner, name in METHODS],
)
_ways: tuple[Any, ...] | None = None


def _take(op: OpOverload, records: bool) -> None:
    """Let the dispatcher call ``op`` directly if it is one of PyTorch's operators, which do not change.

    ``records``: the compiled recorder handles it. Outside of blocks its calls may go past Python if
    :func:`.intercept_ops_outside_blocks.passes` says so.
    """
    passes = intercept_ops_outside_blocks.passes(tape.shapes.info(op))
    if op.namespace == "aten" and (records or passes) and not private_api.is_defined_in_python(op):
        _dispatcher.take(op._schema.name, op._schema.overload_name, op, records, passes)


def _connect(accelerator: Any, dispatcher: Any) -> tuple[Any, ...]:
    """The compiled replacements that :func:`use` installs for the Python functions."""
    connect = _with_functions(_with_objects(accelerator.connect, dispatcher))
    return _replacements(accelerator, connect())


def _with_objects(connect: Callable[..., Any], dispatcher: Any) -> Callable[..., Any]:
    """``connect`` with the objects and classes of recording that the compiled module uses."""
    graph = Graph()
    device = torch.device("cpu")
    storage = TrackedStorage(0, device, graph, external=False)
    meta = TensorMeta((), (), 0, torch.float32, device)
    return partial(
        connect,
        dispatcher=dispatcher,
        take=_take,
        mode=RecorderMode,
        slow=IN_PYTHON[0],
        Unexamined=Unexamined,
        tape=tape,
        recorder=recorder,
        Deferred=Deferred,
        complete=complete,
        node=TrackedNode(graph, torch.ops.aten.add.Tensor, (), {}),
        value=TrackedValue(meta, storage, None),
        storage=storage,
        Graph=Graph,
        SourceLine=SourceLine,
        TensorMeta=TensorMeta,
        OutputSpec=OutputSpec,
        Inferred=Inferred,
        TensorRef=TensorRef,
        TrackedStorage=TrackedStorage,
        Unreachable=Unreachable,
        LazyTensor=LazyTensor,
        LazyParameter=LazyParameter,
        MOST_TENSORS=MOST_TENSORS,
        Tensor=torch.Tensor,
        Parameter=torch.nn.Parameter,
        OpOverload=OpOverload,
        cuda=fake_cuda_devices,
    )


def _with_functions(connect: Callable[..., Any]) -> Callable[..., Any]:
    """``connect`` with the functions and constants that the compiled module uses."""
    return partial(
        connect,
        wrap=wrap,
        sharing=sharing,
        extent=extent,
        symbolic=private_api.SYMBOLIC,
        written_tensors=written_tensors,
        count_writes=count_writes,
        note_death=on_tensor_death,
        storage_address=private_api.storage_address,
        dispatch_depth=private_api.active_dispatch_modes,
        default_dtype=torch.get_default_dtype,
        grad_enabled=torch.is_grad_enabled,
        inference_enabled=torch.is_inference_mode_enabled,
        engine_node=private_api.current_autograd_node,
        is_of_python=is_of_python,
        sequence_number=private_api.sequence_number,
        is_calling=backward_nodes.is_calling,
        is_in_op=redispatch_from_dispatch_mode.is_in_op,
        default_generator=torch.default_generator,
        make_wrapper=dispatcher_bypasses.make_wrapper,
        strided=torch.strided,
        dtype=torch.dtype,
        layout=torch.layout,
        memory_format=torch.memory_format,
        cpu=torch.device("cpu"),
        alias=private_api.alias,
        memory_of=private_api.TensorBase.untyped_storage,
        is_ordinary=storage_ownership.is_ordinary,
        is_given=is_given,
        add_=torch.ops.aten.add_.Tensor,
        increment_version=torch.autograd.graph.increment_version,
        forward_mode_active=private_api.forward_mode_active,
        engine_is_sole_owner=private_api.engine_is_sole_owner,
        is_zero=private_api.is_zero_tensor,
        snapshot_key=private_api.SNAPSHOT_KEY,
        key_set_offset=private_api.KEY_SET_OFFSET,
        ENTRY=source_lines.ENTRY,
        NOWHERE=NOWHERE,
        run_inside=partial(tuple.__new__, RunInside),  # its own constructor is in Python
        slow_sync=PendingRuns.sync,
        slow_release_unused=PendingOps.release_unused,
        slow_before_step=OptimizerSteps.before_step,
        slow_after_step=OptimizerSteps.after_step,
        sync_points=sync_points,
        constant_folding=constant_folding,
        Shadow=Shadow,
        raise_from_read=raise_from_read,
        number_in=number_in,
        can_run_without=dependency_closure.can_run_without,
        MISSING=attribute_patches.MISSING,
        MOST_FRAMES=source_lines.MOST_FRAMES,
        is_reader=source_lines.is_reader,
        NO_SEQUENCE=module_calls_and_phases.NO_SEQUENCE,
    )


def _replacements(accelerator: Any, dispatch: Any) -> tuple[Any, ...]:
    """The compiled functions, in the order of ``IN_PYTHON``."""
    return (
        dispatch,
        accelerator.module_call_of,
        accelerator.content_of,
        accelerator.exchange,
        accelerator.are_ordinary,
        accelerator.closure,
        accelerator.graph_of,
        accelerator.is_unknown,
        *[getattr(accelerator, name) for _, name in METHODS],
    )


def shape_cache_hits() -> int:
    """Cache hits of the compiled module, which the cache's own counter does not include."""
    return 0 if _module is None else int(_module.hits())


def override_composite() -> Callable[[str, Callable[..., Any]], Any] | None:
    """The compiled dispatcher, which handles calls of composites without Python, if there is one."""
    return _dispatcher.override_composite if active and _dispatcher is not None else None


def watches_access() -> bool:
    """Whether :func:`watch_access` works; otherwise such code gets an error from PyTorch."""
    return active and _dispatcher is not None


def watch_access(before: Callable[[torch.Tensor], None]) -> None:
    """Call ``before`` with a pending tensor whose memory C++ code is about to use without an op."""
    if _dispatcher is not None:
        _dispatcher.watch_access(before)


def watch_calls(before: Callable[[int, Any, Any], None] | None) -> None:
    """Call ``before`` before C functions that read memory of any object; None: stop.

    It gets the function's position among ``EXPORTS``, or a higher number for a legacy type, and the
    arguments.
    """
    if _dispatcher is not None:
        _dispatcher.watch_calls(dispatcher_bypasses.EXPORTS, dispatcher_bypasses.LEGACY_TYPES, before)


def collection_callbacks() -> list[Callable[[str, dict[str, int]], None]]:
    """What the compiled module adds to ``gc.callbacks``."""
    return [] if _module is None else [_module.around_collection]


def show(graph: Graph) -> None:
    """Let the garbage collector track what the compiled recorder hid from it: ``graph`` has no owner now."""
    if _module is not None:
        _module.show(graph)


def use(compiled: bool) -> bool:
    """Record with the compiled module, or in Python, from the next block on; returns which one is active."""
    global active
    ways = _ways if compiled and _ways is not None else IN_PYTHON
    dispatch, module_call_of, content_of, exchange, ordinary, closure, graph_of, is_unknown, *methods = ways
    RecorderMode.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
    module_calls_and_phases.ScopePatches.module_call_of = staticmethod(module_call_of)
    module_calls_and_phases.Root.content_of = staticmethod(content_of)
    attribute_patches.Patches.exchange = staticmethod(exchange)
    MemoryHolders.are_ordinary = staticmethod(ordinary)
    dependency_closure.Search.closure = staticmethod(closure)
    dependency_closure.Search.graph_of = staticmethod(graph_of)
    constant_folding.Search.is_unknown = staticmethod(is_unknown)
    for (owner, name), method in zip(METHODS, methods, strict=True):
        setattr(owner, name, method)
    active = compiled and _ways is not None
    make_wrapper = dispatcher_bypasses.make_wrapper
    if _dispatcher is not None:
        _dispatcher.use(active)
        if active:
            make_wrapper = _dispatcher.make_wrapper
    Wrappers.make = staticmethod(make_wrapper)
    return active


_module = native_module_loader.load("recorder.pyx")
# For ATen ops, a shorter path from PyTorch's dispatcher to the compiled recorder.
_dispatcher: Any = native_module_loader.load("dispatch.cpp") if _module is not None else None
if _module is not None:
    _ways = _connect(_module, _dispatcher)
if _dispatcher is not None:
    for _mark in private_api.PROFILER_MARKS:
        _dispatcher.pass_marks(_mark._schema.name, _mark._schema.overload_name)
active = use(True)
