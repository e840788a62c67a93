"""Matching of source lines between two plans, as in a diff."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher

from ...graph.ir import SourceLine
from ...plan.node_formatting import line_text

LONGEST = 60  # maximum characters of a line's code
ALIKE = 0.5  # minimum similarity of a line before and after an edit


def names_of_lines(
    before: Iterable[SourceLine], after: Iterable[SourceLine]
) -> tuple[Mapping[SourceLine, str], Mapping[SourceLine, str]]:
    """Names for the lines of both plans; matched lines have the same name.

    Identical lines match.  Lines that only one plan has, such as those of an edited or copied cell, are
    matched by their text, in order; an edited line by its position between matched lines, if it is similar.
    """
    ours, theirs = dict.fromkeys(before), dict.fromkeys(after)
    alone = [_in_order(line for line in ours if line not in theirs)]
    alone.append(_in_order(line for line in theirs if line not in ours))
    texts = [[line.text.strip() for line in lines] for lines in alone]
    first = {line: _name(line) for line in ours}
    second = {line: first.get(line) or _name(line) for line in theirs}
    for tag, a, a_end, b, b_end in SequenceMatcher(None, texts[0], texts[1], autojunk=False).get_opcodes():
        if tag == "equal" or (tag == "replace" and a_end - a == b_end - b):
            for one, other in zip(alone[0][a:a_end], alone[1][b:b_end], strict=True):
                if tag == "replace" and not _alike(one, other):
                    continue
                first[one] = second[other] = _name_of_both(one, other)
    return first, second


def _alike(one: SourceLine, other: SourceLine) -> bool:
    """Whether the lines are similar enough to be one line before and after an edit."""
    return SequenceMatcher(None, one.text.strip(), other.text.strip(), autojunk=False).ratio() >= ALIKE


def _in_order(lines: Iterable[SourceLine]) -> list[SourceLine]:
    """The lines sorted by file, in order of their first cell, and by line number."""
    found = list(lines)
    files = list(dict.fromkeys(line.file for line in sorted(found, key=lambda line: line.cell or 0)))
    return sorted(found, key=lambda line: (files.index(line.file), line.line))


def _name(line: SourceLine) -> str:
    return f"{line_text(line)}{_code(line)}"


def _name_of_both(one: SourceLine, other: SourceLine) -> str:
    places = line_text(one), line_text(other)
    return f"{places[0]} → {places[1]}{_code(other)}" if places[0] != places[1] else _name(other)


def _code(line: SourceLine) -> str:
    text = line.text.strip()
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - 1]}…"
    return f": {text}" if text else ""
