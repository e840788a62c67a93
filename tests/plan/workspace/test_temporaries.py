"""Temporaries inside of single CPU operators, in several layouts and dtypes: as the allocator sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lazyviz

from ..profiler import allocated_by

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.searchsorted:UserWarning"),
    pytest.mark.filterwarnings("ignore:index_reduce:UserWarning"),
]

NUMBERS = 64  # bytes: Python numbers as tensors, and `arange` of a few, which a plan leaves out
ROWS, COLUMNS = 50, 60
Operand = torch.Tensor
INDEX = torch.randint(0, ROWS, (ROWS, COLUMNS))
LABELS, CLASSES = torch.randint(0, COLUMNS, (ROWS,)), torch.randint(0, COLUMNS, (ROWS, COLUMNS))
TURNED_CLASSES, IS_TARGET = CLASSES.t().contiguous().t(), torch.zeros(ROWS, COLUMNS)
LINE, SCALAR = torch.arange(100.0), torch.ones(())
MASK = torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS) % 3 == 0
VALUES, ROWS_OF_MASK = torch.rand(int(MASK.sum())), int(MASK[:, 0].sum())
WINDOWS, WEIGHT = torch.rand(ROWS, 14, 8), torch.rand(7, 24, COLUMNS)
LEFT, RIGHT, GRADIENT = torch.rand(ROWS, 24), torch.rand(ROWS, COLUMNS), torch.rand(ROWS, 7)
aten = torch.ops.aten
IMAGE = torch.rand(1, 1, 20, 22)
POSITIONS = aten.fractional_max_pool2d(IMAGE, [2, 2], [9, 10], torch.rand(1, 1, 2))[1]


def layouts(x: Operand) -> Iterator[tuple[str, Operand]]:
    yield "contiguous", x
    yield "turned", x.t().contiguous().t()
    yield "half of its columns", torch.cat([x, x], 1)[:, : x.shape[1]]
    yield "expanded", x[:1].expand(x.shape)


ANY_DTYPE: dict[str, Callable[[Operand], Any]] = {
    "mvlgamma": lambda x: x.mvlgamma(3),
    "renorm of rows": lambda x: x.renorm(2, 0, 1.0),
    "renorm of columns": lambda x: x.renorm(2, 1, 1.0),
    "searchsorted": lambda x: torch.searchsorted(LINE, x),
    "searchsorted, rows": lambda x: torch.searchsorted(x, x),
    "bucketize": lambda x: torch.bucketize(x, LINE, out_int32=True),
    "count_nonzero": lambda x: torch.count_nonzero(x, 1),
    "argmax": torch.argmax,
    "gather": lambda x: torch.gather(x, 0, INDEX),
    "scatter": lambda x: torch.scatter(x, 0, INDEX, x),
    "scatter_add": lambda x: torch.scatter_add(x, 0, INDEX[:20], x),
    "scatter_reduce, mean": lambda x: torch.scatter_reduce(x, 0, INDEX[:20], x[:30], "mean"),
    "scatter_reduce, amax": lambda x: torch.scatter_reduce(x, 0, INDEX, x, "amax"),
    "cdist": lambda x: torch.cdist(x, x, 1.0),
    "masked_select": lambda x: torch.masked_select(x, MASK),
    "masked_select by a row": lambda x: torch.masked_select(x, MASK[:1]),
    "masked_scatter": lambda x: torch.masked_scatter(x, MASK, x),
    "masked_scatter in place": lambda x: torch.zeros_like(x).masked_scatter_(MASK, x),
    "masked_scatter_backward": lambda x: aten.masked_scatter_backward(x, x == x, [ROWS, COLUMNS]),
    "values put by a mask": lambda x: torch.index_put(x, (MASK,), VALUES.to(x.dtype)),
    "a number put by a mask": lambda x: torch.index_put(x, (MASK,), SCALAR.to(x.dtype)),
    "rows put by a mask": lambda x: torch.index_put(x, (MASK[:, 0],), x[:ROWS_OF_MASK]),
    "safe_softmax": lambda x: aten._safe_softmax(x, 1),
    "ldexp": lambda x: torch.ldexp(x, LINE[:COLUMNS]),
    "ldexp of doubles": lambda x: torch.ldexp(x, LINE[:COLUMNS].double().expand(ROWS, COLUMNS)),
    "ldexp of integers": lambda x: torch.ldexp(x, INDEX.int()),
}
REAL: dict[str, Callable[[Operand], Any]] = {
    "index_reduce, mean": lambda x: torch.index_reduce(x, 0, INDEX[0, :ROWS], x, "mean"),
    "index_select by a column": lambda x: torch.index_select(x, 0, INDEX[:, 0]),
    "index_add by a column": lambda x: torch.index_add(x, 0, INDEX[:, 0], x),
    "gelu_backward": lambda x: aten.gelu_backward(x, x),
    "gelu_backward of a contiguous operand": lambda x: aten.gelu_backward(x, x.contiguous()),
    "gelu_backward, tanh": lambda x: aten.gelu_backward(x, x, approximate="tanh"),
    "multi_margin_loss_backward": lambda x: aten.multi_margin_loss_backward(
        SCALAR, x, LABELS, 1, 1.0, None, 1
    ),
    "multilabel_margin_loss": lambda x: aten.multilabel_margin_loss_forward(x, CLASSES, 1),
    "multilabel_margin_loss of turned classes": lambda x: aten.multilabel_margin_loss_forward(
        x, TURNED_CLASSES, 1
    ),
    "multilabel_margin_loss_backward": lambda x: aten.multilabel_margin_loss_backward(
        SCALAR, x, TURNED_CLASSES, 1, IS_TARGET
    ),
    "soft_margin_loss_backward": lambda x: aten.soft_margin_loss_backward(SCALAR, x, x, 1),
    "unfold_backward": lambda x: aten.unfold_backward(WINDOWS, [ROWS, COLUMNS], 1, 8, 4),
    "unfold_backward of disjoint windows": lambda x: aten.unfold_backward(
        WINDOWS[:, :7], [ROWS, COLUMNS], 1, 8, 8
    ),
    "fractional_max_pool2d_backward": lambda x: aten.fractional_max_pool2d_backward(
        x[None, None, :9, :10], IMAGE, [2, 2], [9, 10], POSITIONS
    ),
    "max_pool1d": lambda x: F.max_pool1d(x, 3),
    "bmm": lambda x: torch.bmm(x.expand(3, -1, -1), x.t().expand(3, -1, -1)),
    "bmm of one row": lambda x: torch.bmm(x[:1].expand(3, -1, -1), x.t().expand(3, -1, -1)),
    "small bmm": lambda x: torch.bmm(x[:4, :5].expand(3, -1, -1), x[:5, :4].expand(3, -1, -1)),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
}


def wrong(call: Callable[[Operand], Any], dtypes: tuple[torch.dtype, ...]) -> dict[str, tuple[int, int]]:
    found, tried = {}, 0
    for dtype in dtypes:
        for layout, x in layouts((torch.rand(ROWS, COLUMNS) * 5 + 5).to(dtype)):
            try:
                call(x)
            except (RuntimeError, NotImplementedError):
                continue
            tried += 1
            measured, _ = allocated_by(lambda x=x: call(x))
            with lazyviz.lazy() as graph:
                kept = call(x)
            used = {value.storage for node in graph.nodes for value in node.inputs if value.storage.external}
            planned = graph.plan().eager_peak_bytes - sum(storage.nbytes for storage in used)
            if abs(planned - measured) > NUMBERS:
                found[f"{layout}, {dtype}"] = (planned, measured)
            del kept
            lazyviz.reset()
    assert tried
    return found


@pytest.mark.parametrize("name", ANY_DTYPE)
def test_an_operator_s_temporaries_are_counted(name: str) -> None:
    every = (torch.float32, torch.float64, torch.float16, torch.int32, torch.complex64)
    assert not wrong(ANY_DTYPE[name], every)


BILINEAR: dict[str, Callable[[], Any]] = {
    "result": lambda: aten._trilinear(LEFT, WEIGHT, RIGHT, [1, 3], [0], [1, 2], [2, 3]),
    "left gradient": lambda: aten._trilinear(GRADIENT, WEIGHT, RIGHT, [2, 3], [0], [1, 2], [1, 3]),
    "weight's gradient": lambda: aten._trilinear(LEFT, GRADIENT, RIGHT, [1, 3], [2, 3], [1, 2], [0]),
    "right gradient": lambda: aten._trilinear(LEFT, WEIGHT, GRADIENT, [1, 3], [0], [2, 3], [1, 2]),
}


@pytest.mark.parametrize("name", BILINEAR)
def test_bilinear_layers_multiply_two_operands_and_then_the_third(name: str) -> None:
    assert not wrong(lambda x: (BILINEAR[name](), x + 1)[0], (torch.float32,))


@pytest.mark.parametrize("name", REAL)
def test_temporaries_of_real_numbers_are_counted(name: str) -> None:
    assert not wrong(REAL[name], (torch.float32,))
