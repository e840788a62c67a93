"""Random programs agree with eager PyTorch: values, gradients, generators, errors, shared memory."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from . import programs

pytestmark = pytest.mark.slow

FEW, MANY = 300, 20_000

names = [name for name, weight in programs.weights.items() for _ in range(weight)]
numbers = st.integers(0, 15)
instructions = st.tuples(st.sampled_from(names), numbers, numbers, numbers)
# Lists of lists come out longer than a list does, and shrink as well.
parts = st.lists(st.lists(instructions, max_size=12), max_size=12)


def test_random_programs(request):
    everything = request.config.getoption("--all")

    @settings(
        max_examples=int(os.environ.get("LAZYVIZ_RANDOM_PROGRAMS", MANY if everything else FEW)),
        derandomize=not everything,  # a change is to be blamed for what it breaks, not for what it finds
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(parts)
    def run(parts):
        program = [("open", 0, 0, 0), *(instruction for part in parts for instruction in part)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = programs.disagreement(program)
        assert found is None, f"{found}\n{program}"

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run()
    finally:
        torch.set_num_threads(threads)
