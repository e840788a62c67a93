"""PyTorch's operator database, every entry: bit-equal in a lazy block and in eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_map_only

from .compared_runs import compare
from .entries import backward, forward, forward_of_made_inputs, name_of
from .excepted_entries import BACKWARD, FORWARD, IN_PLACE, OUT, UNINITIALIZED

FURTHER_DTYPES = (torch.float64, torch.int64, torch.bool, torch.complex64, torch.bfloat16)


def supporting(dtype: torch.dtype) -> list[Any]:
    return [
        pytest.param(entry, id=name_of(entry)) for entry in op_db if dtype in entry.supported_dtypes("cpu")
    ]


@pytest.mark.parametrize("entry", supporting(torch.float32))
def test_forward(entry, judge, everything):
    def samples():
        return entry.sample_inputs("cpu", torch.float32, requires_grad=entry.supports_autograd)

    trials = compare(
        forward(entry), samples, None if everything else 2, uninitialized=name_of(entry) in UNINITIALIZED
    )
    judge("op forward float32", entry, trials, FORWARD, strict=False)  # its inputs are known


@pytest.mark.parametrize(
    ("dtype", "entry"),
    [
        pytest.param(dtype, *param.values, id=f"{str(dtype).removeprefix('torch.')}-{param.id}")
        for dtype in FURTHER_DTYPES
        for param in supporting(dtype)
    ],
)
def test_forward_of_further_dtypes(dtype, entry, judge, everything):
    # One dtype shows the sync points of all samples: of inputs made in the block nothing is known.
    telling = torch.float64 if torch.float64 in entry.supported_dtypes("cpu") else torch.int64
    trials = compare(
        forward_of_made_inputs(entry),
        lambda: entry.sample_inputs("cpu", dtype),
        1 if not everything else None if dtype == telling else 3,
        uninitialized=name_of(entry) in UNINITIALIZED,
    )
    suite = f"op forward {str(dtype).removeprefix('torch.')}"
    judge(suite, entry, trials, FORWARD, strict=dtype == telling)


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=name_of(entry))
        for entry in op_db
        if torch.float32 in entry.supported_backward_dtypes("cpu")
    ],
)
def test_backward(entry, judge, everything):
    def samples():
        return entry.sample_inputs("cpu", torch.float32, requires_grad=True)

    trials = compare(
        backward(entry), samples, None if everything else 2, uninitialized=name_of(entry) in UNINITIALIZED
    )
    judge("op backward float32", entry, trials, FORWARD, BACKWARD)


@pytest.mark.parametrize(
    "entry", [param for param in supporting(torch.float32) if param.values[0].inplace_variant is not None]
)
def test_in_place(entry, judge, everything):
    def program(sample: Any) -> Any:
        return entry.inplace_variant(sample.input, *sample.args, **sample.kwargs)

    def samples():
        return (sample for sample in entry.sample_inputs("cpu", torch.float32) if not sample.broadcasts_input)

    trials = compare(program, samples, 8 if everything else 1, uninitialized=name_of(entry) in UNINITIALIZED)
    judge("op in place", entry, trials, FORWARD, IN_PLACE)


@pytest.mark.parametrize(
    "entry", [param for param in supporting(torch.float32) if param.values[0].supports_out]
)
def test_out(entry, judge, everything):
    def samples():
        for sample in entry.sample_inputs("cpu", torch.float32):
            expected = entry(sample.input, *sample.args, **sample.kwargs)
            out = tree_map_only(torch.Tensor, lambda tensor: torch.full_like(tensor, 7), expected)
            sample.kwargs = {**sample.kwargs, "out": out}  # samples share their dictionaries
            yield sample

    trials = compare(
        forward(entry), samples, 4 if everything else 1, uninitialized=name_of(entry) in UNINITIALIZED
    )
    judge("op out=", entry, trials, FORWARD, OUT)


def test_no_more_than_one_entry_in_twenty_has_a_sync_point():
    entries = [name_of(entry) for entry in op_db if torch.float32 in entry.supported_dtypes("cpu")]
    assert sum(name in FORWARD for name in entries) <= len(entries) / 20


def test_every_exception_is_an_entry():
    entries = {name_of(entry) for entry in op_db}
    assert {*FORWARD, *BACKWARD, *IN_PLACE, *OUT, *UNINITIALIZED} <= entries
