"""Refused driver calls: functions of ``torch.cuda`` that call the driver, on an absent GPU.

Profiler marks and driver settings have no effect. Functions that need an answer of the driver raise an error
that names them, and an alternative if there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import profiler

from ...torch_internals import fake_cuda_devices
from ..sync_points import AbsentDeviceError
from .fake_gpus_protocol import Gpus

_WITHOUT_EFFECT = (
    (torch.cuda.profiler, "start"),
    (torch.cuda.profiler, "stop"),
    (torch.cuda, "_sleep"),
    (torch.cuda, "set_sync_debug_mode"),
    (profiler.emit_nvtx, "__enter__"),
    (profiler.emit_nvtx, "__exit__"),
)
_OF_SENSORS = [
    "utilization",
    "memory_usage",
    "device_memory_used",
    "temperature",
    "power_draw",
    "clock_rate",
    "list_gpu_processes",
]
_OF_HANDLES = ["current_blas_handle", "caching_allocator_alloc", "caching_allocator_delete", "cudart"]
_OF_TUNING = [
    "enable",
    "tuning_enable",
    "record_untuned_enable",
    "tune_gemm_in_file",
    "write_file",
    "read_file",
]
_OF_SNAPSHOTS = ["_record_memory_history", "_snapshot", "_dump_snapshot"]
_CLASSES = ["MemPool", "ExternalStream"]
_GRAPHS = "Plan the step without it."
_SNAPSHOTS = 'After the block, graph.save("memory.pickle") writes a snapshot of the plan.'


def install(gpus: Gpus) -> None:
    for owner, name in _WITHOUT_EFFECT:
        gpus.replace(owner, name, lambda *args, **kwargs: None)
    gpus.patches.set(*fake_cuda_devices.NVTX, _Marks())
    gpus.replace(torch.cuda, "get_sync_debug_mode", lambda: 0)
    for name in _OF_SENSORS:
        _refuse(gpus, torch.cuda, name, "")
    for owner in (torch.cuda, torch.cuda.memory):
        gpus.replace(owner, "get_allocator_backend", lambda: "native")
        for name in _OF_HANDLES:
            _refuse(gpus, owner, name, "")
        for name in _OF_SNAPSHOTS:
            _refuse(gpus, owner, name, _SNAPSHOTS)
        _refuse(gpus, owner, "use_mem_pool", "")
        for name in _CLASSES:
            if hasattr(owner, name):
                gpus.patches.set(owner, name, _refused_class(f"torch.cuda.{name}"))
    for owner in (torch.cuda, torch.cuda.graphs):
        gpus.patches.set(owner, "CUDAGraph", _refused_class("torch.cuda.CUDAGraph", _GRAPHS))
        _refuse(gpus, owner, "graph_pool_handle", _GRAPHS)
        _refuse(gpus, owner, "make_graphed_callables", _GRAPHS)
    for name in _OF_TUNING:
        _refuse(gpus, torch.cuda.tunable, name, "")
    _refuse(gpus, torch.cuda, "get_stream_from_external", "")
    gpus.patches.set(torch.backends.cuda, "cufft_plan_cache", _PlanCache())
    _refuse(gpus, torch.cuda.jiterator, "_create_jit_fn", "")
    _refuse(gpus, torch.cuda.jiterator, "_create_multi_output_jit_fn", "")


def refusal(what: str, instead: str = "") -> AbsentDeviceError:
    text = f"{what} is not supported for a GPU that is not on this machine."
    return AbsentDeviceError(f"{text} {instead}".rstrip())


def _refuse(gpus: Gpus, owner: Any, name: str, instead: str) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise refusal(f"{owner.__name__}.{name}", instead)

    gpus.replace(owner, name, refuse)


def _refused_class(what: str, instead: str = "") -> type:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        raise refusal(what, instead)

    return type(what.rpartition(".")[2], (), {"__init__": __init__, "__module__": __name__})


class _PlanCache:
    """Replaces cuFFT's plan cache."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise refusal(f"torch.backends.cuda.cufft_plan_cache.{name}")

    def __getitem__(self, device: Any) -> _PlanCache:
        return self


class _Marks:
    """Replaces the NVTX library, whose ranges and marks only a profiler sees."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *args, **kwargs: 0
