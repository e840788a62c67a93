"""lazyviz: see what a PyTorch cell would do, and what memory it would take, before it runs."""

from __future__ import annotations

import typing as _typing
from importlib import import_module as _import_module

from .process import startup_interrupt as _startup_interrupt  # noqa: F401  # isort: skip
from .process import gc_pause as _gc_pause  # isort: skip

with _gc_pause.during_import():
    from . import torch_internals as _torch_internals  # noqa: F401  # isort: skip
    from .execute.backend_protocol import Backend
    from .execute.backend_registry import register_backend
    from .execute.eager_backend import Interrupted
    from .execute.microbatch.ray_and_ipyparallel import NoWorkersError
    from .execute.progress import Progress
    from .execute.run_report import Report
    from .graph.ir import Graph, Node, SourceLine, Storage, SyncPoint, TensorMeta, Value
    from .notebook.load_ext import load_ipython_extension, unload_ipython_extension
    from .plan.devices.device_lookup import Device, DeviceProfile, devices
    from .process.deferred_signals import deferred as _deferred
    from .record.sync_points import AbsentDeviceError, SyncError
    from .session.asynchronous.run_handle import Run
    from .session.asynchronous.training_loop_steps import steps
    from .session.connect_packages_and_exit_handlers import connect
    from .session.default_options import options
    from .session.lazy_graph import (
        LazyGraph,
        RecomputeError,
        SplitError,
        compare,
        evaluate,
        forbid_sync,
        is_lazy,
        lazy,
        lazy_function,
        metrics,
        reset,
        sync,
        to_eager,
        to_lazy,
        why,
    )
    from .session.mark_kv_cache import mark_kv_cache

if _typing.TYPE_CHECKING:
    from . import testing as testing
    from .plan.batch.split_plan import SplitPlan
    from .plan.device_timeline_and_verdict import DevicePlan
    from .plan.plan import Plan
    from .plan.remat.recompute_selection import RecomputePlan
    from .session.advice.advise import Advice, advise
    from .session.calibrate import Calibration, calibrate
    from .session.doctor import Diagnosis, doctor
    from .testing.peak_assertion import assert_peak_below

# Recording needs none of these modules; each is imported with its name's first use, since imports take time.
_MODULES = {
    "Advice": "session.advice.advise",
    "Calibration": "session.calibrate",
    "DevicePlan": "plan.device_timeline_and_verdict",
    "Diagnosis": "session.doctor",
    "Plan": "plan.plan",
    "RecomputePlan": "plan.remat.recompute_selection",
    "SplitPlan": "plan.batch.split_plan",
    "advise": "session.advice.advise",
    "assert_peak_below": "testing.peak_assertion",
    "calibrate": "session.calibrate",
    "doctor": "session.doctor",
}

__all__ = [
    "AbsentDeviceError",
    "Advice",
    "Backend",
    "Calibration",
    "Device",
    "DevicePlan",
    "DeviceProfile",
    "Diagnosis",
    "Graph",
    "Interrupted",
    "LazyGraph",
    "NoWorkersError",
    "Node",
    "Plan",
    "Progress",
    "RecomputeError",
    "RecomputePlan",
    "Report",
    "Run",
    "SourceLine",
    "SplitError",
    "SplitPlan",
    "Storage",
    "SyncError",
    "SyncPoint",
    "TensorMeta",
    "Value",
    "advise",
    "assert_peak_below",
    "calibrate",
    "compare",
    "devices",
    "doctor",
    "evaluate",
    "forbid_sync",
    "is_lazy",
    "lazy",
    "lazy_function",
    "load_ipython_extension",
    "mark_kv_cache",
    "mark_step",
    "metrics",
    "options",
    "register_backend",
    "reset",
    "steps",
    "sync",
    "to_eager",
    "to_lazy",
    "unload_ipython_extension",
    "why",
]


if not _typing.TYPE_CHECKING:  # which would take any name for one of lazyviz

    def __getattr__(name: str) -> _typing.Any:
        if name == "testing":  # a package that others' tests use without importing it
            return _import_module(".testing", __name__)
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with _deferred():  # a signal's handler may use it, for which half a module is not enough
            module = _import_module(f".{_MODULES[name]}", __name__)
        found = getattr(module, name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "testing"})


connect()
mark_step = sync

__version__ = "0.1.0"
