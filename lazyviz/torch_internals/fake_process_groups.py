"""Fake process groups of ``torch.distributed``: all are replaced as a whole by those of one rank of N.

Private:

- The tables of ``distributed_c10d`` (``_world`` and the module's globals): which groups there are, by name,
  rank, tag and backend.  There is no public way to have other groups for a while; ``destroy_process_group``
  would end those of the user.
- ``_register_process_group``, ``_unregister_process_group``: the names that functional collectives
  (``torch.distributed._functional_collectives``) look their group up by, in C++.
- ``FakeProcessGroup``: PyTorch's own group without communication, and ``Backend._plugins``, where
  ``init_process_group`` finds it.  ``BackendConfig`` would ask for NCCL, which a CPU build lacks.
- ``_create_work_from_future``: a ``Work`` whose future has the tensors of the call, which the reducer of
  ``DistributedDataParallel`` takes them from; that of ``FakeWork`` has none.
- ``_clear_sharding_prop_cache`` and its like: what DTensor has worked out for the meshes of another rank.
- ``pipelining.schedules._PipelineSchedule._warmup_p2p``, ``pipelining.stage.PipelineStage._recv_meta``: where
  a stage of a pipeline asks the other ranks whether shapes are given, and for shapes.
- ``Reducer._rebuild_buckets``: after its first backward pass, the reducer of ``DistributedDataParallel``
  sends the order of its buckets to the other ranks.  Its C++ code writes that into a new tensor on the CPU,
  by its address, so that this tensor must have memory.
- ``DistributedDataParallel._check_comm_hook``: asks which NCCL this PyTorch is built with.
- ``_random._rng_tracker``: DTensor's draws follow a tracker that refers to a mesh of the groups.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from .private_api import kernels_only

is_available: Callable[[], bool] = dist.is_available
"""Whether this PyTorch has ``torch.distributed``; if not, nothing else here may be called."""
FAKE = "fake"
_REDUCER: Any = getattr(dist, "Reducer", None)
_rebuild_buckets: Any = getattr(_REDUCER, "_rebuild_buckets", None)
PIPELINE_SCHEDULES = "torch.distributed.pipelining.schedules"
PIPELINE_STAGES = "torch.distributed.pipelining.stage"
PIPELINE_SCHEDULE = "_PipelineSchedule"
"""The base class of all schedules, in the first of these modules."""

_TABLES = (
    "_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag",
)  # fmt: skip


def c10d() -> Any:
    """The module that stores the groups."""
    return sys.modules["torch.distributed.distributed_c10d"]


class GroupTables:
    """All group tables of ``torch.distributed``; empty ones mean that nothing is initialized."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[Any, Any]] = {name: {} for name in _TABLES}
        self.count = 0
        self.default: Any = None
        self.init_method: Any = None
        self.coalescing: dict[Any, Any] = {}
        self.trackers: Any = None

    @property
    def names(self) -> list[tuple[str, Any]]:
        """Each group with the name by which collectives look it up."""
        return [(name, group) for group, name in self.tables["_pg_names"].items()]


def exchange(tables: GroupTables) -> GroupTables:
    """Set the group tables of ``torch.distributed`` to ``tables``; returns the previous ones."""
    module, state = c10d(), c10d()._world
    core: Any = torch._C._distributed_c10d
    before = GroupTables()
    for name in _TABLES:
        before.tables[name] = dict(getattr(module, name))
    before.count, before.init_method = module._group_count, module._default_pg_init_method
    before.default, before.coalescing = state._default_pg, dict(state._pg_coalesce_state)
    before.trackers = _tracker(None)
    for name, _ in before.names:
        core._unregister_process_group(name)
    for name in _TABLES:
        found = getattr(module, name)
        found.clear()
        found.update(tables.tables[name])
    module._group_count, module._default_pg_init_method = tables.count, tables.init_method
    state._default_pg = tables.default
    state._pg_coalesce_state.clear()
    state._pg_coalesce_state.update(tables.coalescing)
    for name, group in tables.names:
        core._register_process_group(name, group)
    _forget_shardings()
    if tables.default is not None:
        core._set_global_rank(tables.default.rank())
    _tracker(tables)
    return before


def _forget_shardings() -> None:
    """DTensor caches objects that refer to the groups of one rank by meshes, which are equal on all ranks."""
    if "torch.distributed.tensor._redistribute" in sys.modules:
        from torch.distributed.tensor import _redistribute
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
        _redistribute.clear_redistribute_planner_cache()
        _redistribute._gen_transform_infos.cache_clear()


def _tracker(tables: GroupTables | None) -> Any:
    """DTensor's tracker of random draws, if DTensor has been imported; with ``tables``, it is replaced by
    theirs.
    """
    module: Any = sys.modules.get("torch.distributed.tensor._random")
    if module is None:
        return None
    if tables is not None:
        module._rng_tracker = tables.trackers
    return module._rng_tracker


def patches() -> Iterable[tuple[Any, str, Any]]:
    """Owner, name, and value of patches that make every new group one without communication."""
    fsdp_parameter()  # its package registers a backend on import, which would be lost at the end of the block
    module = c10d()
    backend = module.Backend

    def backends(config: Any) -> dict[str, str]:
        return dict.fromkeys(("cpu", "cuda"), FAKE)

    # Registered one by one: PyTorch 2.14 searches for a backend without a plugin, and registers it with its
    # own type.
    names = (*backend.backend_type_map, FAKE)
    plugins = {
        **dict.fromkeys((name.upper() for name in names), backend._BackendPlugin(_fake_group, True)),
        **backend._plugins,
        FAKE.upper(): backend._BackendPlugin(_fake_group, True),
    }
    custom = module.ProcessGroup.BackendType.CUSTOM
    yield backend, "_plugins", plugins
    yield backend, "backend_type_map", dict.fromkeys(names, custom)
    yield module.BackendConfig, "get_device_backend_map", backends
    yield module, "_use_torchcomms_enabled", lambda: False
    yield sys.modules["torch.distributed.c10d_logger"], "_get_msg_dict", _no_log_entry
    yield _REDUCER, "_rebuild_buckets", _rebuild_buckets_in_memory
    if not isinstance(module.default_pg_nccl_timeout, timedelta):
        yield module, "default_pg_nccl_timeout", module.default_pg_timeout


_INTEGERS = (torch.int32, torch.int64)


class _WithHostMemory(TorchDispatchMode):
    """Allocates CPU integers immediately; other ops, such as those of buckets, go on to modes below."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        on_host = device is None or device.type == "cpu"
        if func is torch.ops.aten.empty.memory_format and on_host and kwargs.get("dtype") in _INTEGERS:
            with kernels_only():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _rebuild_buckets_in_memory(reducer: Any) -> bool:
    with _WithHostMemory():
        return _rebuild_buckets(reducer)


def _no_log_entry(name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Replaces what PyTorch logs about a failed collective: it would ask NCCL for its version."""
    return {"func_name": name}


def _fake_group(options: Any, backend_options: Any) -> Any:
    group = torch._C._distributed_c10d.FakeProcessGroup
    return group._create_internal(options.group_rank, options.group_size)


def start(rank: int, size: int, backend: str) -> None:
    """Initialize a world of ``size`` ranks of which this process is ``rank``; see :func:`patches`.

    ``backend`` is the return value of ``torch.distributed.get_backend``.
    """
    hook = sys.excepthook
    try:
        dist.init_process_group(
            backend, store=torch._C._distributed_c10d.HashStore(), rank=rank, world_size=size
        )
    finally:
        sys.excepthook = hook  # PyTorch prefixes it with the rank


def call_itself(function: Any) -> Any:
    """The function inside PyTorch's decorators, which log and time: code that has imported it calls the
    decorated one.
    """
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


INIT_PROCESS_GROUP: Any = call_itself(dist.init_process_group) if dist.is_available() else None


def name_backend(backend: str) -> None:
    """Let ``get_backend`` of the world's group, and of later groups, return ``backend``."""
    module = c10d()
    group = module._world._default_pg
    module._pg_map[group] = (module.Backend(backend), module._pg_map[group][1])


def backend_name() -> str:
    """The backend that was requested for the world's group."""
    module = c10d()
    return str(module._pg_map[module._world._default_pg][0])


def is_fake() -> bool:
    """Whether the world's group does not communicate."""
    group = c10d()._world._default_pg
    kind = torch._C._distributed_c10d.FakeProcessGroup
    try:
        return isinstance(group._get_backend(torch.device("cpu")), kind)
    except RuntimeError:  # it has no backend for the CPU
        return False


def done(tensors: list[Any]) -> Any:
    """The object that a collective on ``tensors`` returns for its caller to wait on, in the dispatcher's
    form.
    """
    future: Any = torch.futures.Future()
    future.set_result(tensors)
    core: Any = torch._C._distributed_c10d
    return core._create_work_from_future(future).boxed()


def unboxed(item: Any) -> Any:
    """The process group in an argument of an operator; ``None`` if it is not one."""
    kind = torch._C._distributed_c10d.ProcessGroup
    if isinstance(item, kind):
        return item
    if isinstance(item, torch.ScriptObject) and item._type().qualified_name().endswith("c10d.ProcessGroup"):
        return kind.unbox(item)
    return None


def group_named(name: str) -> Any:
    """The group that functional collectives find by this name."""
    core: Any = torch._C._distributed_c10d
    return core._resolve_process_group(name)


def ranks_of(group: Any) -> tuple[int, ...]:
    """The ranks in the world of a group's members, in the group's order."""
    found = c10d()._pg_group_ranks.get(group)
    return tuple(found) if found else tuple(range(group.size()))


def fsdp_parameter() -> Any:
    """FSDP2's own class for one sharded parameter."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    return FSDPParam


def sharding_propagator() -> Any:
    """The class with which DTensor computes the shapes and placements of results, with fake tensors."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    return ShardingPropagator


def random_state() -> tuple[Any, Any]:
    """The module in which DTensor asks whether draws follow a generator's state, and the class of what
    tracks that state: on creation it may compare the ranks' states, and each draw reads and sets them.
    """
    from torch.distributed.tensor import _dispatch, _random

    return _dispatch, _random.OffsetBasedRNGTracker


def wrapper_classes() -> tuple[type[torch.Tensor], ...]:
    """The tensor classes of ``torch.distributed`` that wrap other tensors."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

    return DTensor, AsyncCollectiveTensor
