"""Dtypes on an absent GPU: what CUDA supports is recorded, what it does not is refused like there."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db

import lazyviz
from lazyviz.record.shapes import unsupported_cuda_dtypes

from .entries import name_of

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")  # which PyTorch warns of once
DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float64, torch.complex64)
EACH = 6  # of these entries, one is recorded without --all


def on_gpu(*shape, dtype=torch.int64):
    return torch.ones(shape, dtype=dtype, device="cuda")


REFUSED = {
    "mm": (lambda: on_gpu(3, 4) @ on_gpu(4, 5), "addmm_cuda", "Long"),
    "linear": (lambda: F.linear(on_gpu(3, 4), on_gpu(5, 4), on_gpu(5)), "addmm_cuda", "Long"),
    "bmm": (lambda: torch.bmm(on_gpu(2, 3, 4), on_gpu(2, 4, 5)), "baddbmm_cuda", "Long"),
    "conv2d": (lambda: F.conv2d(on_gpu(2, 3, 8, 8), on_gpu(4, 3, 3, 3)), "convolution", "Long"),
    "softmax": (lambda: F.softmax(on_gpu(3, 4), -1), "softmax_cuda", "Long"),
    "cross_entropy": (lambda: F.cross_entropy(on_gpu(3, 4), on_gpu(3)), "log_softmax_cuda", "Long"),
    "gelu": (lambda: F.gelu(on_gpu(3, dtype=torch.int32)), "gelu_cuda", "Int"),
    "relu": (lambda: F.relu(on_gpu(3, dtype=torch.complex64)), "relu_cuda", "ComplexFloat"),
    "sort": (lambda: on_gpu(3, dtype=torch.complex64).sort(), "sort_cuda", "ComplexFloat"),
    "floor": (lambda: on_gpu(3, dtype=torch.complex64).floor(), "floor_cuda", "ComplexFloat"),
    "cholesky": (
        lambda: torch.linalg.cholesky(on_gpu(3, 3, dtype=torch.float16)),
        "linalg_cholesky_ex_cuda",
        "Half",
    ),
    "max_pool2d": (lambda: F.max_pool2d(on_gpu(2, 3, 8, 8), 2), "max_pool2d_with_indices_cuda", "Long"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_dtype_without_a_kernel_is_refused_at_its_line(name):
    program, kernel, dtype = REFUSED[name]
    with lazyviz.lazy(device="A100-40GB") as graph:
        kept = on_gpu(3).float()
        with pytest.raises(NotImplementedError, match=f"\"{kernel}.*not implemented for '{dtype}'"):
            program()
        assert graph.pending
    del kept


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dtype_that_cuda_supports_is_not_refused(dtype, everything):
    entries = [entry for entry in op_db if dtype in entry.dtypesIfCUDA]
    refused = {}
    for entry in entries if everything else entries[::EACH]:
        for sample in itertools.islice(entry.sample_inputs("cpu", dtype), None if everything else 1):
            if (text := refusal(entry, sample)) is not None:
                refused[name_of(entry)] = text
    assert not refused


def refusal(entry, sample):
    """The text of an error about the dtype; other errors have tests of their own."""
    try:
        with lazyviz.lazy(device="A100-40GB"):
            there = sample.transform(lambda item: item.cuda() if isinstance(item, torch.Tensor) else item)
            entry.op(there.input, *there.args, **there.kwargs)
    except NotImplementedError as error:
        return str(error) if "not implemented for" in str(error) else None
    except Exception:
        return None
    finally:
        lazyviz.reset()
    return None


def test_the_table_names_operators_and_dtypes_that_exist():
    table = unsupported_cuda_dtypes._table()
    assert len(table) > 100
    for name, dtypes in table.items():
        base, _, overload = name.removeprefix("aten::").partition(".")
        assert hasattr(getattr(torch.ops.aten, base), overload or "default")
        assert dtypes
