"""Testing helpers: memory budgets, and test programs for backends."""

from __future__ import annotations

from .backends import PROGRAMS as PROGRAMS
from .backends import check_backend as check_backend
from .memory_budget import Budget as Budget
from .memory_budget import PeakExceeded as PeakExceeded
from .memory_budget import assert_peak_below as assert_peak_below
