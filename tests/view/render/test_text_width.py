"""Words are measured by what is seen: wide letters, accents, emoji."""

from __future__ import annotations

import pytest

from lazyviz.view.layout.text_width import letters, shortened, width
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


def test_a_shortened_text_keeps_to_its_room_whatever_its_script():
    for text in ("transformer_layer_attention", "変換器の層の注意機構の重み", "attention層の重みof変換器"):
        for fits in range(4, 30):
            short = shortened(text, fits)
            assert width(short) <= fits
            assert (short == text) == (width(text) <= fits)
    assert shortened("あいうえおかきくけこ", 10) == "あ…くけこ"
    assert shorten("あいうえおかきくけこ", 100, 10) == "あいう…かきくけこ"


def test_no_letter_is_cut_in_two():
    family = "👩‍👩‍👧"
    assert shortened(family * 10, 9) == f"{family}…{family * 2}"
    assert shortened("e\u0301" * 20, 9).count("\u0301") == 8
