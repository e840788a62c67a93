"""The dtype that elementwise kernels compute in, against ``torch.result_type``."""

from __future__ import annotations

import itertools
import warnings
from types import SimpleNamespace

import pytest
import torch

import lazyviz
from lazyviz.graph.ir import Value
from lazyviz.plan.workspace.elementwise_casts import common_dtype, promoted_dtype

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
)  # fmt: skip
OPERANDS = tuple(itertools.product(DTYPES, (False, True)))


@pytest.fixture(params=[torch.float16, torch.float32, torch.float64], ids=str)
def default(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # complex32 is experimental
        yield
    torch.set_default_dtype(before)


def sample(dtype: torch.dtype, has_dimensions: bool) -> torch.Tensor:
    return torch.empty((1,) * has_dimensions, dtype=dtype)


def test_two_tensors_are_promoted_as_in_pytorch(default):
    for left, right in itertools.product(OPERANDS, repeat=2):
        assert promoted_dtype([left, right]) == torch.result_type(sample(*left), sample(*right)), (
            left,
            right,
        )


def test_a_tensor_and_a_number_are_promoted_as_in_pytorch(default):
    for operand, number in itertools.product(OPERANDS, (True, 2, 1.5, 1j)):
        value = Value.__new__(Value)
        value.meta = SimpleNamespace(dtype=operand[0], shape=(1,) * operand[1])
        assert common_dtype([value, number]) == torch.result_type(sample(*operand), number), (operand, number)


def test_a_plan_within_a_block_records_nothing():
    x, y = torch.ones(8), torch.ones((), dtype=torch.float64)
    with lazyviz.lazy() as graph:
        z = x.mul_(y).ldexp(torch.ones(8))
        count = len(graph.nodes)
        graph.plan()
        assert len(graph.nodes) == count
    assert z.shape == (8,)
