"""``lazyviz compare``: compare two plans written by ``lazyviz plan --json``."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..plan.node_formatting import category_text
from ..plan.runtime.gpu_timeline import duration
from ..plan.units import format_bytes, format_change
from ..view.printable_text import visible_in
from .plan_command import FINE, UsageError
from .plan_data import FORMAT, Data, is_incomplete, place_of
from .plan_tables import console, steps_taken, table, verdict_of

_MOST_LINES = 10
_LARGEST = 1 << 63  # exclusive upper limit of a plausible number
_FIGURES = {
    "needed_bytes": "needed",
    "eager_peak_bytes": "peak of the tensors",
    "eager_reserved_bytes": "reserved by the CUDA allocator",
    "ops": "operators",
}


def read(path: str) -> Data:
    """Read a plan from a file.

    Raises:
        UsageError: the file cannot be read, or is not a plan.
    """
    try:
        data: Any = visible_in(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):  # RecursionError: too deeply nested
        raise UsageError(f"{path} is not a JSON file: write plans with lazyviz plan --json FILE") from None
    if not isinstance(data, dict) or "format" not in data or "needed_bytes" not in data:
        raise UsageError(f"{path} does not contain a plan: write plans with lazyviz plan --json FILE")
    if data["format"] != FORMAT:
        raise UsageError(f"{path} was written by another version of lazyviz (format {data['format']})")
    if not _is_complete(data):
        raise UsageError(
            f"{path} contains only a part of a plan: write it again with lazyviz plan --json FILE"
        )
    return data


def _is_complete(data: Data) -> bool:
    """Whether ``data`` has all fields that are compared, with the right types, in case of a damaged file."""
    sizes, lines = data.get("by_category"), data.get("by_line")
    return (
        all(key in data and (data[key] is None or _is_count(data[key])) for key in _FIGURES)
        and all(isinstance(data.get(key), str) for key in ("device", "verdict"))
        and isinstance(data.get("script", ""), str)
        and _is_call(data)
        and isinstance(sizes, dict)
        and all(map(_is_count, sizes.values()))
        and isinstance(lines, list)
        and all(map(_is_line, lines))
    )


def _is_call(data: Data) -> bool:
    """Whether the optional fields for the script's arguments and the time of a step have the right types."""
    arguments, time = data.get("arguments", []), data.get("time")
    return (
        isinstance(arguments, list)
        and all(isinstance(each, str) for each in arguments)
        and (time is None or (isinstance(time, dict) and isinstance(time.get("seconds"), (int, float))))
    )


def _is_count(found: Any) -> bool:
    return isinstance(found, int) and abs(found) < _LARGEST


def _is_line(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and all(isinstance(found.get(key), str) for key in ("file", "text"))
        and all(_is_count(found.get(key)) for key in ("line", "bytes"))
    )


def compare(first: str, second: str) -> int:
    """Print the differences between two plans; return the exit code."""
    a, b = read(first), read(second)
    to = console()
    to.print(Text(f"{_name(a, first)} -> {_name(b, second)}", style="bold"))
    for data, path in ((a, first), (b, second)):
        if is_incomplete(data):
            to.print(f"{path} is not complete: {_extent(data)}.")
    _figures(a, b, to)
    _sizes("Alive at the peak", "what", _by_category(a), _by_category(b), to)
    _sizes("Lines that allocated it", "line", _by_line(a), _by_line(b), to)
    if verdict_of(a) != verdict_of(b):
        to.print()
        to.print(f"before: {verdict_of(a)}")
        to.print(f"after:  {verdict_of(b)}")
    return FINE


def _name(data: Data, path: str) -> str:
    """A plan's name in the output: ``"before.json (train.py --width 64, A100-40GB)"``."""
    call = shlex.join([data.get("script", "a plan"), *data.get("arguments", ())])
    return f"{path} ({call if 'script' in data else 'a plan'}, {data['device']})"


def _extent(data: Data) -> str:
    """Why and after how many steps the recording of an incomplete plan ended."""
    why = {
        "failed": "the script failed",
        "interrupted": "the script was interrupted",
        "out of reach": "a value was read that only the absent GPU could compute",
    }[data["end"]]
    return f"{why} after {steps_taken(data['steps'], data)}"


def _figures(a: Data, b: Data, to: Console) -> None:
    rows = []
    for key, name in _FIGURES.items():
        before, after = a[key], b[key]
        if before is None or after is None:
            continue
        show = format_bytes if key != "ops" else "{:,}".format
        rows.append((show(before), show(after), format_change(before, after, show), name))
    if a.get("time") and b.get("time"):
        before, after = (round(1e9 * data["time"]["seconds"]) for data in (a, b))
        change = format_change(before, after, _nanoseconds)
        rows.append((_nanoseconds(before), _nanoseconds(after), change, "time of a step"))
    to.print(table("", ("before", "after", "change", "what"), rows, 3))


def _nanoseconds(count: int) -> str:
    return duration(count / 1e9)


def _by_category(data: Data) -> dict[str, int]:
    return {category_text(name): size for name, size in data["by_category"].items()}


def _sizes(title: str, what: str, a: dict[str, int], b: dict[str, int], to: Console) -> None:
    changed = [name for name in {**a, **b} if a.get(name, 0) != b.get(name, 0)]
    changed.sort(key=lambda name: -abs(b.get(name, 0) - a.get(name, 0)))
    to.print()
    if not changed:
        to.print(f"{title}: no change.")
        return
    rows = [
        (
            format_bytes(a.get(name, 0)),
            format_bytes(b.get(name, 0)),
            format_change(a.get(name, 0), b.get(name, 0)),
            name,
        )
        for name in changed[:_MOST_LINES]
    ]
    to.print(table(title, ("before", "after", "change", what), rows, 3))


def _by_line(data: Data) -> dict[str, int]:
    """Bytes by file and text of each line, without line numbers, so that moved lines still match."""
    found: dict[str, int] = {}
    for line in data["by_line"]:
        key = f"{place_of(line).rpartition(':')[0]}: {line['text']}"
        found[key] = found.get(key, 0) + line["bytes"]
    return found
