"""Notebook cells: which cell a line of code belongs to, according to IPython."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from types import CodeType
from typing import Any, NamedTuple

_NUMBER = re.compile(r"\[(\d+)\]")
_OF_A_TERMINAL = re.compile(r"<ipython-input-(\d+)-")


def running_shell() -> Any:
    """The ``InteractiveShell`` of this process; ``None`` if there is none."""
    ipython: Any = sys.modules.get("IPython")  # if IPython has not been imported, there is no cell
    get = getattr(ipython, "get_ipython", None)
    return get() if get is not None else None


def cell_number(filename: str) -> int | None:
    """The number of the cell, current or past, whose code IPython calls ``filename``: 7 for ``In [7]``."""
    shell = running_shell()
    label = shell.compile.format_code_name(filename) if shell is not None else None
    found = _NUMBER.search(label[1]) if label else _OF_A_TERMINAL.match(filename)
    return int(found[1]) if found else None


_OF_A_MAGIC = ("<timed exec>", "<timed eval>", "<magic-timeit>", "<string>")
"""The file name of the code that ``%%time``, ``%%timeit`` and ``%%prun`` run."""


class CellText(NamedTuple):
    """The running cell: line ``n`` of code that a magic in it runs is the cell's line ``n + shift``.

    ``above`` are the lines before that code; code of a line magic is entirely on the first line.
    """

    file: str
    number: int | None
    lines: Sequence[str]
    above: int
    shift: int = 0

    def has(self, code: CodeType) -> bool:
        """Whether ``code`` belongs to a magic whose lines are in the cell."""
        if code.co_filename not in _OF_A_MAGIC:
            return False
        last = max((line for _, _, line in code.co_lines() if line is not None), default=0)
        return last + self.shift > self.above

    def part(self, raw: str) -> CellText | None:
        """The same for ``raw``, if a magic in the cell runs it as a separate cell (``%%capture``)."""
        lines = raw.strip("\n").rstrip().split("\n")
        shift = len(self.lines) - len(lines)
        # There may be comments above them, in place of magics.
        pairs = zip(lines, self.lines[max(0, shift) :])
        same = all(line in (own, f"# {own}") for line, own in pairs)
        return self._replace(shift=shift) if shift >= 0 and same else None
