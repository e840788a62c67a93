"""PyTorch's databases of custom operators, autograd functions and higher-order operators."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.autograd_function_db import autograd_function_db
from torch.testing._internal.custom_op_db import custom_op_db
from torch.testing._internal.hop_db import hop_db

from .compared_runs import compare
from .entries import backward, forward, name_of
from .excepted_entries import OTHER

CUSTOM = "custom_op_db, autograd_function_db"

ENTRIES = [
    pytest.param(suite, entry, id=name_of(entry))
    for suite, database in ((CUSTOM, custom_op_db + autograd_function_db), ("hop_db", hop_db))
    for entry in database
]


@pytest.fixture(autouse=True)
def nothing_compiled():
    """What `torch.cond` compiled under any dispatch mode stays, and makes a later plain one fail."""
    torch.compiler.reset()


@pytest.mark.parametrize(("suite", "entry"), ENTRIES)
def test_forward(suite, entry, judge):
    trials = compare(forward(entry), lambda: entry.sample_inputs("cpu", torch.float32))
    judge(suite, entry, trials, OTHER, strict=not entry.supports_autograd)


@pytest.mark.parametrize(
    ("suite", "entry"), [param for param in ENTRIES if param.values[1].supports_autograd]
)
def test_backward(suite, entry, judge):
    trials = compare(backward(entry), lambda: entry.sample_inputs("cpu", torch.float32, requires_grad=True))
    judge(suite, entry, trials, OTHER)
