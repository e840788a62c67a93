"""Dynamic shapes: functions of one size, inferred from recordings of a program."""

from __future__ import annotations

import pytest
import torch

from lazyviz.execute.compiler.dynamic_shapes import Shapes, follow
from lazyviz.graph.ir import TensorMeta


def recording(size, number, rows=None):
    meta = TensorMeta((rows or size, 3), (3, 1), 0, torch.float32, torch.device("cpu"))
    return Shapes((meta,), (), (), (size, number))


@pytest.mark.parametrize(
    "function",
    [
        lambda n: 3 * n,
        lambda n: n * n,
        lambda n: 20 - n,
        lambda n: n // 2,
        lambda n: n - n // 2,
        lambda n: 5 * (n // 3),
        lambda n: (n - 3) // 2 + 1,
        lambda n: (n // 2) ** 2,
        lambda n: 20 - n // 2,
    ],
)
def test_a_size_is_followed_by_what_depends_on_it_as_soon_as_recordings_tell(function):
    known = [recording(n, function(n)) for n in (8, 11, 14, 17)]
    sizes = follow(known[:-1], known[-1])
    assert sizes is not None and sizes.dimension == (0, 0)
    assert all(sizes.fits(recording(n, function(n))) for n in range(4, 40))
    assert not sizes.fits(recording(9, function(9) + 1))


def test_a_size_among_the_arguments_is_followed_where_no_input_has_it():
    sizes = follow([recording(4, 8, rows=2)], recording(6, 12, rows=2))
    assert sizes is not None and sizes.dimension == 0
    assert sizes.fits(recording(5, 10, rows=2)) and sizes.of(recording(5, 10, rows=2)) == 5


def test_the_latest_recordings_count_where_all_together_follow_nothing():
    sizes = follow([recording(4, 7), recording(4, 8)], recording(6, 12))
    assert sizes is not None and sizes.fits(recording(5, 10))
    assert follow([recording(4, 7)], recording(4, 7)) is None
    assert follow([recording(4, 1)], recording(5, 100_003)) is not None  # a line goes through any two
    assert follow([recording(4, 1), recording(6, 9)], recording(10, 2**31 - 1)) is None
