"""Temporaries of elementwise CPU kernels that compute in another dtype: as the allocator sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lazyviz

from ..profiler import allocated_by

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

SHAPE = (40, 1000)
NUMBERS = 64  # bytes: Python numbers as tensors, which a plan leaves out
TWO_DTYPES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.float16),
    (torch.float16, torch.bfloat16),
    (torch.float16, torch.float64),
    (torch.float32, torch.int32),
    (torch.int32, torch.float32),
    (torch.int32, torch.uint8),
    (torch.bool, torch.float64),
    (torch.complex64, torch.float64),
]
ONE_DTYPE = [(torch.float32,), (torch.float16,), (torch.int32,), (torch.bool,), (torch.complex64,)]

PAIRS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "+": lambda a, b: a + b,
    "*": lambda a, b: a * b[0],
    "rsub": lambda a, b: torch.rsub(a, b),
    "/": lambda a, b: a / b,
    "div, trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "**": lambda a, b: a**b,
    "maximum": torch.maximum,
    "atan2": torch.atan2,
    "<": lambda a, b: a < b,
    "logical_and": torch.logical_and,
    "&": lambda a, b: a & b,
    "where": lambda a, b: torch.where(a != 0, a, b),
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "clamp": lambda a, b: a.clamp(b, b),
    "cat": lambda a, b: torch.cat([a, b, a]),
    "dist": torch.dist,
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": lambda a, b: F.smooth_l1_loss(a, b, reduction="none"),
    "huber_loss": F.huber_loss,
    "_foreach_add": lambda a, b: torch._foreach_add([a, a], [b, b]),
    "_foreach_div": lambda a, b: torch._foreach_div([a, a], [b, b]),
    "add_": lambda a, b: a.add_(b),
    "div_": lambda a, b: a.div_(b),
    "mul_ of a slice": lambda a, b: a[::2].mul_(b[::2]),
    "eq_": lambda a, b: a.eq_(b),
    "addcdiv_": lambda a, b: a.addcdiv_(b, b),
    "_foreach_mul_": lambda a, b: torch._foreach_mul_([a], [b]),
    "add, out": lambda a, b: torch.add(a, b, out=torch.empty(SHAPE, dtype=torch.complex128)),
    "gt, out": lambda a, b: torch.gt(a, b, out=torch.empty(SHAPE)),
}
ALONE: dict[str, Callable[[torch.Tensor], Any]] = {
    "+ 2": lambda a: a + 2,
    "+ 0.5": lambda a: a + 0.5,
    "* 1j": lambda a: a * 1j,
    "/ 2": lambda a: a / 2,
    "> 0.5": lambda a: a > 0.5,
    "+ a number in a tensor": lambda a: a + torch.tensor(2.5, dtype=torch.float64),
    "sqrt": torch.sqrt,
    "sigmoid": torch.sigmoid,
    "rad2deg": torch.rad2deg,
    "i0": torch.i0,
    "bessel_j0": torch.special.bessel_j0,
    "logsumexp": lambda a: a.logsumexp(1),
    "_foreach_sqrt": lambda a: torch._foreach_sqrt([a, a]),
    "_foreach_pow of a number": lambda a: torch._foreach_pow(2, [a, a]),
    "exp, out": lambda a: torch.exp(a, out=torch.empty(SHAPE, dtype=torch.complex128)),
    "where, number": lambda a: torch.where(a != 0, a, 2.5),
}


def scratch(call: Callable[..., Any], *dtypes: torch.dtype) -> tuple[int, int] | None:
    """The peak of the call, measured and planned, besides its operands; None: eager refuses these dtypes."""

    def operands() -> list[torch.Tensor]:
        return [torch.ones(SHAPE, dtype=dtype) for dtype in dtypes]

    try:
        call(*operands())
    except (RuntimeError, NotImplementedError):
        return None
    given = operands()
    measured, _ = allocated_by(lambda: call(*given))
    given = operands()
    with lazyviz.lazy() as graph:
        kept = call(*given)
    planned = graph.plan().eager_peak_bytes
    del kept
    used = {value.storage for node in graph.nodes for value in node.inputs if value.storage.external}
    return measured, planned - sum(storage.nbytes for storage in used)


def wrong(call: Callable[..., Any], cases: list[tuple[torch.dtype, ...]]) -> list[Any]:
    found = [(dtypes, scratch(call, *dtypes)) for dtypes in cases]
    assert any(sizes is not None for _, sizes in found)
    return [(d, sizes) for d, sizes in found if sizes is not None and abs(sizes[0] - sizes[1]) > NUMBERS]


@pytest.mark.parametrize("name", PAIRS)
def test_operands_of_two_dtypes_are_cast(name):
    assert not wrong(PAIRS[name], TWO_DTYPES)


def test_real_numbers_are_scaled_by_powers_of_two():
    real = [dtypes for dtypes in TWO_DTYPES if not dtypes[0].is_complex]
    assert not wrong(torch.ldexp, real)
    assert not wrong(torch.Tensor.ldexp_, real)


@pytest.mark.parametrize("name", ALONE)
def test_operands_of_one_dtype_are_cast_where_the_result_has_another(name):
    assert not wrong(ALONE[name], ONE_DTYPE)


def test_a_gpu_s_kernels_convert_elements_as_they_load_them():
    def program(device: str) -> int:
        with lazyviz.lazy(device="H100-80GB" if device == "cuda" else None) as graph:
            a = torch.zeros(SHAPE, device=device)
            b = torch.zeros(SHAPE, device=device, dtype=torch.float64)
            a.add_(b)
        return graph.plan().eager_peak_bytes

    both = 40_000 * (4 + 8)
    assert program("cuda") == both
    assert program("cpu") == both + 2 * 40_000 * 8  # the first operand, and the result


def test_remedies_of_an_optimizer_that_steps_by_lists_in_place_are_found():
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    with lazyviz.lazy() as graph:
        net(torch.randn(256, 64)).square().mean().backward()
        optimizer.step()
    assert any(node.op._schema.name == "aten::_foreach_addcmul_" for node in graph.nodes)
    assert "bf16" in {remedy.kind for remedy in graph.plan().remedies}
