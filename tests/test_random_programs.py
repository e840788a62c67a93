"""Random programs come out as in eager PyTorch: values, gradients, generators, errors, sharing of memory."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from . import programs

ALL = bool(os.environ.get("LAZYVIZ_TEST_ALL"))
PROGRAMS = int(os.environ.get("LAZYVIZ_RANDOM_PROGRAMS", 20_000 if ALL else 300))

names = [name for name, weight in programs.weights.items() for _ in range(weight)]
numbers = st.integers(0, 15)
instructions = st.tuples(st.sampled_from(names), numbers, numbers, numbers)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@settings(
    max_examples=PROGRAMS,
    derandomize=not ALL,
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(st.lists(instructions, max_size=12), max_size=12))  # lists of lists come out longer
def test_random_programs(parts):
    program = [("open", 0, 0, 0), *(instruction for part in parts for instruction in part)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = programs.disagreement(program)
    assert found is None, f"{found}\n{program}"
