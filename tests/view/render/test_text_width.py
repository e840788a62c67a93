"""Text widths: wide letters, accents, emoji."""

from __future__ import annotations

import pytest

from lazyviz.view.layout.text_width import cut, letters, width
from lazyviz.view.render.svg import shorten


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("relu", 4),
        ("層の重み", 8),
        ("ｶﾅ", 2),
        ("café", 4),
        ("cafe\u0301", 4),
        ("حساب", 4),
        ("नमस्ते", 4),
        ("👩\u200d👩\u200d👧", 2),
        ("🇩🇪🇫🇷", 4),
    ],
)
def test_what_a_text_takes(text, columns):
    assert width(text) == columns
    assert "".join(letters(text)) == text


def test_truncated_text_fits_its_width_in_every_script():
    for text in ("transformer_layer_attention", "変換器の層の注意機構の重み", "attention層の重みof変換器"):
        for fits in range(3, 30):
            short = cut(text, fits)
            assert width(short) <= fits
            assert (short == text) == (width(text) <= fits)
    assert cut("あいうえおかきくけこ", 10) == "あいうえ…"
    assert shorten("あいうえおかきくけこ", 100, 10) == "あいうえおかきく…"


def test_no_letter_is_cut_in_two():
    family = "👩‍👩‍👧"
    assert cut(family * 10, 9) == f"{family * 4}…"
    assert cut("e\u0301" * 20, 9).count("\u0301") == 8
