"""lazyviz: see what a PyTorch cell would do, and what memory it would take, before it runs."""

from __future__ import annotations

from .execute.backend import Backend as Backend
from .execute.backend import register_backend as register_backend
from .execute.eager import Interrupted as Interrupted
from .execute.microbatch.clusters import NoWorkersError as NoWorkersError
from .notebook.magic import load_ipython_extension as load_ipython_extension
from .notebook.magic import unload_ipython_extension as unload_ipython_extension
from .plan.devices.devices import DeviceProfile as DeviceProfile
from .record.pending_ops import AbsentDeviceError as AbsentDeviceError
from .record.pending_ops import SyncError as SyncError
from .session.lazy_graph import LazyGraph as LazyGraph
from .session.lazy_graph import RecomputeError as RecomputeError
from .session.lazy_graph import Report as Report
from .session.lazy_graph import SplitError as SplitError
from .session.lazy_graph import devices as devices
from .session.lazy_graph import evaluate as evaluate
from .session.lazy_graph import forbid_sync as forbid_sync
from .session.lazy_graph import is_lazy as is_lazy
from .session.lazy_graph import lazy as lazy
from .session.lazy_graph import lazy_function as lazy_function
from .session.lazy_graph import metrics as metrics
from .session.lazy_graph import reset as reset
from .session.lazy_graph import sync as sync
from .session.lazy_graph import to_eager as to_eager
from .session.lazy_graph import to_lazy as to_lazy
from .session.lazy_graph import why as why
from .session.self_check import Diagnosis as Diagnosis
from .session.self_check import doctor as doctor
from .testing.memory_budget import assert_peak_below as assert_peak_below

mark_step = sync

__version__ = "0.1.0"
