"""Text widths in pictures: estimated font metrics, in units of one Latin letter.

East Asian letters and emoji are about twice as wide as others; accents and vowel signs take no width and are
never separated from their letter.  The text is drawn by a browser, not a terminal, so these are not wcwidth's
cells, and the page must compute the same widths: ``cut`` in js/src/page/dom.ts.
"""

from __future__ import annotations

import unicodedata

_JOINER = "\u200d"


def letters(text: str) -> list[str]:
    """``text`` as grapheme clusters, which must not be split (approximately as in Unicode's annex 29)."""
    if text.isascii():
        return list(text)
    result: list[str] = []
    flag = False  # the last character was the first half of a flag
    for char in text:
        half = _is_half_flag(char)
        joined = bool(result) and (
            unicodedata.category(char) in ("Mn", "Mc", "Me")
            or char in (_JOINER, "\ufe0f")
            or "\U0001f3fb" <= char <= "\U0001f3ff"  # skin tone modifiers
            or result[-1].endswith(_JOINER)
            or (half and flag)
        )
        flag = half and not flag
        if joined:
            result[-1] += char
        else:
            result.append(char)
    return result


def _is_half_flag(char: str) -> bool:
    return "\U0001f1e6" <= char <= "\U0001f1ff"


def columns(letter: str) -> int:
    """The number of columns of a letter: 2 if it is wide, else 1."""
    wide = any(unicodedata.east_asian_width(char) in "WF" or char == "\ufe0f" for char in letter)
    return 2 if wide or _is_half_flag(letter[0]) else 1


def width(text: str) -> int:
    """The number of columns that ``text`` takes."""
    return len(text) if text.isascii() else sum(map(columns, letters(text)))


def cut(text: str, fits: int) -> str:
    """``text`` in at most ``fits`` columns (3 or more), truncated at its end."""
    fits = max(fits, 3)
    if width(text) <= fits:
        return text
    parts = letters(text)
    return f"{''.join(parts[: _taking(parts, fits - 1)])}…"


def _taking(parts: list[str], room: int) -> int:
    """The number of leading letters that fit into ``room`` columns."""
    used = 0
    for count, letter in enumerate(parts):
        used += columns(letter)
        if used > room:
            return count
    return len(parts)
