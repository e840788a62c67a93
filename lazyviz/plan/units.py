"""Units: formatting and parsing of bytes, formatting of FLOPs and changes."""

from __future__ import annotations

import re
from collections.abc import Callable

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


def format_range(low: int, high: int) -> str:
    """``"7.70 to 23.2 GiB"``, ``"900 MiB to 1.20 GiB"``: the unit once where it is the same."""
    first, last = format_bytes(low), format_bytes(high)
    number, unit = first.split()
    return f"{number if last.endswith(f' {unit}') else first} to {last}"


def looks_exact(low: int, high: int) -> bool:
    """Whether a range is so narrow that one figure says the same: 1 KiB, or 1 %."""
    return high - low < max(1024, low // 100)


_FACTORS = {"B": 1} | {
    unit: base**power
    for power, letter in enumerate("KMGTP", 1)
    for unit, base in ((f"{letter}B", 1000), (f"{letter}IB", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")


def parse_bytes(size: int | str) -> int:
    """``"12 GiB"`` -> ``12 * 2**30``, ``"1.5GB"`` -> ``1_500_000_000``; a number is bytes.

    ``KiB`` to ``PiB`` are powers of 1024, ``kB`` to ``PB`` powers of 1000, in any case of letters.

    Raises ``ValueError`` for anything else, and below 0.
    """
    if isinstance(size, str):
        found = _SIZE.fullmatch(size) if size.isascii() else None  # `\d` takes the digits of any script
        factor = _FACTORS.get(found[2].upper() or "B") if found is not None else None
        if found is None or factor is None:
            raise ValueError(
                f"{size!r} is not a size: write bytes, or a number and a unit, such as '12 GiB' or '800 MB'"
            )
        return int(float(found[1]) * factor)
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise ValueError(f"{size!r} is not a size: use a whole number of bytes, or text such as '12 GiB'")
    return size


def format_flops(flops: int) -> str:
    """``"537 MFLOP"``"""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if flops >= size:
            return f"{flops / size:.3g} {unit}FLOP"
    return f"{flops} FLOP"


def format_share(share: float) -> str:
    """``"21 %"``, and below 10 % with a decimal; what is not zero is never ``"0 %"``."""
    return "<0.1 %" if 0 < share < 0.001 else f"{100 * share:.{_decimals(share)}f} %"


def format_deviation(share: float) -> str:
    """``"+21 %"``, ``"-0.4 %"``"""
    return f"{100 * share:+.{_decimals(share)}f} %"


def _decimals(share: float) -> int:
    return 1 if 0 < abs(share) < 0.0995 else 0


MANY_TIMES = 10  # growth from which a percentage is harder to read than a factor


def format_change(before: int, after: int, show: Callable[[int], str] = format_bytes) -> str:
    """``"+2.00 MiB (+33 %)"``, ``"+1.00 GiB (× 1,025)"``, or ``"the same"``."""
    if before == after:
        return "the same"
    text = f"{'+' if after > before else '-'}{show(abs(after - before))}"
    if not before:
        return text
    if after > MANY_TIMES * before:
        return f"{text} (× {after / before:,.0f})"
    return f"{text} ({format_deviation((after - before) / before)})"
