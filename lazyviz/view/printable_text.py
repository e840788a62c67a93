"""Printable text: the user's names and code without invisible or control characters.

Names of modules, variables, and files can contain anything: null characters, lone surrogates (which no
encoding accepts), and directional marks.  They are shown as Python escapes, such as ``\\x00``.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)


def visible(text: str) -> str:
    """``text`` with control characters, lone surrogates, and directional marks escaped."""
    if text.isprintable():
        return text
    return _UNSEEN.sub(_written_out, text.replace("\r\n", "\n"))


def _written_out(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


def visible_in(value: Any) -> Any:
    """JSON data with all strings, including keys, made :func:`visible`; unchanged parts are not copied."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        changed = {visible_in(key): visible_in(item) for key, item in value.items()}
        same = all(a is b and value[a] is changed[b] for a, b in zip(value, changed))
        return value if same else changed
    if isinstance(value, (list, tuple)):
        items = [visible_in(item) for item in value]
        return value if all(a is b for a, b in zip(value, items)) else items
    return value


# Characters and escapes that `visible_in` might change, in JSON text with as few escapes as possible.
_ESCAPED = re.compile(rf"{_UNSEEN.pattern}|\\[ubfr]")


def visible_json(value: Any, **options: Any) -> str:
    """``json.dumps(visible_in(value))``, but faster if nothing needs to be changed.

    ``options`` are those of ``json.dumps``; only characters that JSON requires to be escaped are.
    """
    text = json.dumps(value, ensure_ascii=False, **options)
    if _ESCAPED.search(text) is None:
        return text
    return json.dumps(visible_in(value), ensure_ascii=False, **options)


_CALL = re.compile(r"get_ipython\(\)\.(run_line_magic|run_cell_magic|system|getoutput)(\(.*\))")


def as_written(line: str) -> str:
    """A line of a cell as typed, such as ``"%time f()"``, which IPython transforms into a function call."""
    found = _CALL.search(line)
    if found is None:
        return line
    try:
        given = ast.literal_eval(found[2])
    except (ValueError, SyntaxError):  # not a call that IPython generated
        return line
    words = [given] if isinstance(given, str) else list(given)
    if found[1] in ("system", "getoutput"):
        shown = f"!{words[0]}"
    else:
        shown = f"{'%' if found[1] == 'run_line_magic' else '%%'}{' '.join(map(str, words[:2]))}".rstrip()
    return line[: found.start()] + shown + line[found.end() :]
