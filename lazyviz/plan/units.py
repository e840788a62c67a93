"""Bytes as people read them."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(nbytes: int) -> str:
    """``1536`` -> ``"1.50 KiB"``; exact below one KiB, three significant digits above."""
    size = float(abs(nbytes))
    for unit in _UNITS:
        # 1023.5 would round to "1024 KiB", hence the margin.
        if size < 1023.5 or unit == _UNITS[-1]:
            break
        size /= 1024
    sign = "-" if nbytes < 0 else ""
    if unit == "B":
        return f"{sign}{int(size)} B"
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{sign}{size:.{digits}f} {unit}"
