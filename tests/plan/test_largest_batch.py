"""The largest batch fits when recorded at that size, and one sample more does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import lazyviz

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import largest_batch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")


@pytest.fixture(autouse=True)
def reset():
    yield
    lazyviz.reset()


@pytest.mark.parametrize("card", ["RTX-3060", "A100-40GB"])
@pytest.mark.parametrize("name", largest_batch.MODELS)
def test_the_largest_batch_fits_and_one_sample_more_does_not(name, card):
    row = largest_batch.tried(name, card)
    assert row["largest"] > largest_batch.RECORDED
    assert row["fits"] and not row["fits with one more"], row


@pytest.mark.parametrize("name", largest_batch.MODELS)
@pytest.mark.parametrize("samples", [2, 3, 700])
def test_another_batch_size_is_planned_as_if_it_had_been_recorded(name, samples):
    replanned = largest_batch.recorded(name, "A100-40GB", 4, named=True).replan(batch_size=samples)
    actual = largest_batch.recorded(name, "A100-40GB", samples)
    assert replanned.peak_bytes == actual.peak_bytes
    assert replanned.reserved_bytes == actual.reserved_bytes
    assert replanned.fits is actual.fits


def test_how_attention_with_dropout_grows_is_known_though_it_cannot_be_split():
    plan = largest_batch.recorded("transformer", "RTX-3060", 4, named=True)
    assert plan.max_batch_size and plan.split.blocked_by
