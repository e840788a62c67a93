"""Formatting and parsing of bytes, FLOPs, and changes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lazyviz
from lazyviz.plan.units import (
    format_bytes,
    format_deviation,
    format_range,
    format_share,
    looks_exact,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("12 GiB", 12 * 2**30),
        ("800 MB", 800_000_000),
        ("1.5GB", 1_500_000_000),
        ("1.5gib", 3 * 2**29),
        ("512", 512),
        ("512 B", 512),
        (" .5 KiB ", 512),
        ("2 tb", 2 * 10**12),
        (4096, 4096),
        (0, 0),
    ],
)
def test_sizes_are_read_as_people_write_them(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "1 2 GiB", "-1 GiB", "1e9", "1 Gi", "1,5 GB", -1, 2.0, True, None]
)
def test_what_is_no_size_is_a_value_error(text):
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)


@pytest.mark.parametrize("nbytes", [1, 1023, 1536, 10**6, 2**30, 5 * 2**40])
def test_what_is_written_can_be_read_again(nbytes):
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.006)


def test_a_range_names_its_unit_once_where_it_is_the_same():
    assert format_range(7 << 30, 23 << 30) == "7.00 to 23.0 GiB"
    assert format_range(900 << 20, 2 << 30) == "900 MiB to 2.00 GiB"
    assert format_range(0, 12) == "0 to 12 B"
    assert format_range(12, 12 << 20) == "12 B to 12.0 MiB"


def test_a_range_of_a_few_bytes_is_one_figure():
    assert looks_exact(0, 0) and looks_exact(500, 1500) and looks_exact(10**6, 10**6 + 9000)
    assert not looks_exact(500, 1600) and not looks_exact(10**6, 10**6 + 10001)


def test_digits_of_other_scripts_are_no_size():
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes("\u0663 GiB")


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0 %"),
        (1e-9, "<0.1 %"),
        (0.004, "0.4 %"),
        (0.0994, "9.9 %"),
        (0.0996, "10 %"),
        (0.208, "21 %"),
        (1, "100 %"),
    ],
)
def test_shares_have_one_format(share, text):
    assert format_share(share) == text


@pytest.mark.parametrize(("share", "text"), [(0, "+0 %"), (0.004, "+0.4 %"), (-0.208, "-21 %")])
def test_deviations_have_the_same_with_their_sign(share, text):
    assert format_deviation(share) == text


def test_no_share_that_is_shown_has_another_format():
    """Python's own format for a percentage has no space, and digits of its own."""
    package = Path(lazyviz.__file__).parent
    found = [
        path for path in package.rglob("*.py") if re.search(r"\{[^{}\n]*:[-+.0-9<>]*%\}", path.read_text())
    ]
    assert not found
