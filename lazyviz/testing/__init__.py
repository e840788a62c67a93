"""Testing helpers: memory budgets, and test programs for backends."""

from __future__ import annotations

from .backend_conformance_programs import PROGRAMS as PROGRAMS
from .backend_conformance_programs import check_backend as check_backend
from .peak_assertion import Budget as Budget
from .peak_assertion import PeakExceeded as PeakExceeded
from .peak_assertion import assert_peak_below as assert_peak_below
