"""Standard streams (stdin, stdout, stderr), which may be closed, or objects with fewer methods.

Imports only the standard library.
"""

from __future__ import annotations

import io
import sys
from typing import Any, TextIO


def is_terminal(stream: Any) -> bool:
    """Whether ``stream``, such as ``sys.stderr``, is a terminal.

    False for ``None``, a closed stream, and a replacement without the method, such as that of a script that
    copies its output to a file.
    """
    try:
        return bool(stream.isatty())
    except Exception:  # a replacement can raise anything, which is not worth an error
        return False


def flush(stream: Any) -> None:
    """Flush ``stream`` if it is open and can be flushed."""
    if is_open(stream) and hasattr(stream, "flush"):
        stream.flush()


def is_open(stream: Any) -> bool:
    """Whether text can still be written to ``stream``: it is not ``None``, closed, or detached."""
    try:
        return stream is not None and not getattr(stream, "closed", False)
    except ValueError:  # its buffer has been detached
        return False


class StandardStreams:
    """``sys.stdout`` and ``sys.stderr`` as they are now, for output after a script that may change them.

    A script may close or detach them, or assign others, such as one that also writes to the script's log.
    """

    def __init__(self) -> None:
        self._streams: dict[int, TextIO | None] = {1: sys.stdout, 2: sys.stderr}

    @property
    def stdout(self) -> TextIO:
        """Accepts characters that its encoding lacks; discards text if the process was started without the
        stream.
        """
        flush(sys.stdout)  # write output that the script has buffered first
        return self._usable(1)

    @property
    def stderr(self) -> TextIO:
        """Like :attr:`stdout`."""
        flush(sys.stderr)
        return self._usable(2)

    def _usable(self, number: int) -> TextIO:
        stream = self._streams[number]
        if stream is None:  # the descriptor may belong to another file by now
            stream = io.StringIO()
        elif not is_open(stream):
            stream = _reopened(number)
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
        self._streams[number] = stream
        return stream


def _reopened(number: int) -> TextIO:
    """The file under a closed stream; Python leaves it open for the three standard streams."""
    try:
        return open(number, "w", buffering=1, encoding="utf-8", closefd=False)
    except OSError:
        return io.StringIO()
