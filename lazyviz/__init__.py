"""lazyviz: see what a PyTorch cell would do, and what memory it would take, before it runs."""

from __future__ import annotations

from .budget import assert_peak_below as assert_peak_below
from .execute.backend import Backend as Backend
from .execute.backend import register_backend as register_backend
from .execute.clusters import NoWorkersError as NoWorkersError
from .execute.eager import Interrupted as Interrupted
from .magic import load_ipython_extension as load_ipython_extension
from .magic import unload_ipython_extension as unload_ipython_extension
from .plan.devices import DeviceProfile as DeviceProfile
from .record.pending import AbsentDeviceError as AbsentDeviceError
from .record.pending import SyncError as SyncError
from .self_check import Diagnosis as Diagnosis
from .self_check import doctor as doctor
from .session import LazyGraph as LazyGraph
from .session import RecomputeError as RecomputeError
from .session import Report as Report
from .session import SplitError as SplitError
from .session import devices as devices
from .session import evaluate as evaluate
from .session import forbid_sync as forbid_sync
from .session import is_lazy as is_lazy
from .session import lazy as lazy
from .session import lazy_function as lazy_function
from .session import metrics as metrics
from .session import reset as reset
from .session import sync as sync
from .session import to_eager as to_eager
from .session import to_lazy as to_lazy
from .session import why as why

mark_step = sync

__version__ = "0.1.0"
