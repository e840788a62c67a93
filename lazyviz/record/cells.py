"""Which cell of a notebook a line of code is in, as IPython tells."""

from __future__ import annotations

import re
import sys
from typing import Any

_NUMBER = re.compile(r"\[(\d+)\]")
_OF_A_TERMINAL = re.compile(r"<ipython-input-(\d+)-")


def running_shell() -> Any:
    """The ``InteractiveShell`` of this process; ``None`` where there is none."""
    ipython: Any = sys.modules.get("IPython")  # where nobody has imported it, there is no cell
    get = getattr(ipython, "get_ipython", None)
    return get() if get is not None else None


def cell_number(filename: str) -> int | None:
    """The number that the cell has, or had, whose code IPython calls ``filename``: 7 of ``In [7]``."""
    shell = running_shell()
    label = shell.compile.format_code_name(filename) if shell is not None else None
    found = _NUMBER.search(label[1]) if label else _OF_A_TERMINAL.match(filename)
    return int(found[1]) if found else None
