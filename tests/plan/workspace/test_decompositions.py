"""Scratch memory of decompositions, fused attention and embedding bags, against the allocator's events."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz

from ..profiler import allocated_by

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")  # the profiler's own business

aten, linalg = torch.ops.aten, torch.linalg
SQUARE, DOUBLE, MANY = torch.randn(70, 70), torch.randn(20, 20).double(), torch.randn(3, 20, 20)
TALL, COMPLEX = torch.randn(100, 70), torch.randn(20, 20, dtype=torch.complex64)
FACTOR = linalg.cholesky(SQUARE @ SQUARE.mT + torch.eye(70))
LU, PIVOTS = linalg.lu_factor(MANY)
SYMMETRIC, SYMMETRIC_PIVOTS = linalg.ldl_factor(SQUARE + SQUARE.mT)
REFLECTORS, FACTORS = torch.geqrf(TALL)
TABLE, WORDS, BAGS = torch.randn(300, 32), torch.randint(0, 300, (200,)), torch.arange(0, 200, 10)
STEPS, CAUSAL = torch.randn(8, 32, 64), torch.ones(32, 32).triu(1).bool()
PADDING = torch.arange(32) >= torch.arange(25, 33)[:, None]

SIZED_BY_LAPACK = {
    "eig": lambda: linalg.eig(SQUARE),
    "eig of doubles": lambda: linalg.eig(DOUBLE),
    "eig of complex numbers": lambda: linalg.eig(COMPLEX),
    "eig of many": lambda: linalg.eig(MANY),
    "eigvals": lambda: linalg.eigvals(SQUARE),
    "eigvals of doubles": lambda: linalg.eigvals(DOUBLE),
    "eigvals of complex numbers": lambda: linalg.eigvals(COMPLEX),
    "geqrf": lambda: torch.geqrf(TALL),
    "householder product": lambda: linalg.householder_product(REFLECTORS, FACTORS),
    "eigh of complex numbers": lambda: linalg.eigh(COMPLEX),
    "eigh of small complex numbers": lambda: linalg.eigh(COMPLEX[:8, :8].contiguous()),
    "eigvalsh of complex numbers": lambda: linalg.eigvalsh(COMPLEX),
    "pseudo-inverse of symmetric matrices": lambda: linalg.pinv(MANY + MANY.mT, hermitian=True),
    "pseudo-inverse of a Hermitian matrix": lambda: linalg.pinv(COMPLEX + COMPLEX.mH, hermitian=True),
    "ldl factors": lambda: linalg.ldl_factor_ex(SQUARE),
}
OF_REFLECTORS = ("geqrf", "householder product")
SIZED_BY_ATEN = {
    "lu": lambda: linalg.lu(TALL),
    "lu of many": lambda: linalg.lu(MANY),
    "lu solve": lambda: linalg.lu_solve(LU, PIVOTS, MANY),
    "solve": lambda: linalg.solve(MANY, MANY),
    "determinant": lambda: linalg.det(DOUBLE.expand(40, 20, 20).contiguous()),
    "cholesky solve": lambda: torch.cholesky_solve(TALL.mT @ TALL, FACTOR),
    "ldl solve": lambda: linalg.ldl_solve(SYMMETRIC, SYMMETRIC_PIVOTS, SQUARE),
    "pseudo-inverse": lambda: linalg.pinv(TALL),
    "pseudo-inverse of many": lambda: linalg.pinv(MANY),
    "pseudo-inverse of complex numbers": lambda: linalg.pinv(TALL.cfloat()),
    "pseudo-inverse of wide complex numbers": lambda: linalg.pinv(MANY[:, :7].cdouble()),
    "dirichlet": lambda: aten._sample_dirichlet(torch.ones(32, 4, 2)),
    "likelihood of strided targets": lambda: nn.functional.nll_loss(MANY[0], WORDS[:40:2] % 20),
    "mean of bags": lambda: aten._embedding_bag(TABLE, WORDS, BAGS, False, 1),
    "maximum of bags": lambda: aten._embedding_bag(TABLE, WORDS, BAGS, False, 2),
    "small conjugated product": lambda: MANY[:, :4, :4].cfloat().mH @ MANY[:, :4, :4].cfloat(),
}


def scratch_of(call) -> tuple[int, int]:
    with torch.no_grad():
        call()
        return allocated_by(call)


def planned(call) -> tuple[int, tuple[int, int]]:
    with torch.no_grad(), lazyviz.lazy() as graph:
        kept = call()
    plan = graph.plan()
    outside = sum(storage.nbytes for storage in graph.ir.storages if storage.external)
    low, high = plan.eager_peak_range
    del kept
    lazyviz.reset()
    return plan.eager_peak_bytes - outside, (low - outside, high - outside)


@pytest.mark.parametrize("name", SIZED_BY_LAPACK)
def test_the_range_has_what_lapack_requests(name):
    measured, (low, high) = scratch_of(SIZED_BY_LAPACK[name])[0], planned(SIZED_BY_LAPACK[name])[1]
    assert low <= measured <= high
    # With several threads MKL selects other blocks of reflectors, by the shape.
    if torch.backends.mkl.is_available() and (torch.get_num_threads() == 1 or name not in OF_REFLECTORS):
        assert planned(SIZED_BY_LAPACK[name])[0] == pytest.approx(measured, abs=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize(
    "shape", [(20, 10), (33, 33), (64, 64), (100, 70), (70, 70), (400, 70), (2000, 16), (300, 200)]
)
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_range_of_reflectors_and_their_product_has_what_lapack_requests(threads, shape, dtype):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        matrix = torch.randn(shape, dtype=dtype)
        reflectors, factors = torch.geqrf(matrix)
        calls = [
            lambda: torch.geqrf(matrix),
            lambda: linalg.householder_product(reflectors, factors),
            lambda: linalg.qr(matrix),
            lambda: linalg.qr(matrix, "r"),
        ]
        for call in calls:
            low, high = planned(call)[1]
            assert low <= scratch_of(call)[0] <= high
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", SIZED_BY_ATEN)
def test_the_peak_of_a_kernel_is_the_measured_one(name):
    measured = scratch_of(SIZED_BY_ATEN[name])[0]
    assert planned(SIZED_BY_ATEN[name])[0] == pytest.approx(measured, abs=64)


@pytest.mark.parametrize("given", [{}, {"src_mask": CAUSAL}, {"src_key_padding_mask": PADDING}], ids=str)
@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("inner", [32, 256])
def test_the_peak_of_a_fused_encoder_layer_is_the_measured_one(first, inner, given):
    layer = nn.TransformerEncoderLayer(64, 4, inner, batch_first=True, norm_first=first).eval()
    assert planned(lambda: layer(STEPS, **given))[0] == scratch_of(lambda: layer(STEPS, **given))[0]


@pytest.mark.parametrize("options", [{}, {"need_weights": False}, {"average_attn_weights": False}], ids=str)
@pytest.mark.parametrize("heads", [1, 4])
def test_the_peak_of_fused_attention_is_the_measured_one(heads, options):
    attention = nn.MultiheadAttention(64, heads, batch_first=True).eval()

    def call():
        return attention(STEPS, STEPS, STEPS, **options)

    assert planned(call)[0] == pytest.approx(scratch_of(call)[0], abs=64)
