"""GitHub Actions annotations: the peak of a plan, and what would lower it, at lines of a pull request."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..plan.units import format_bytes
from .plan_data import HERE, Data
from .plan_tables import cheapest_of_kinds


def github_lines(data: Data, budget: int | None) -> list[str]:
    """GitHub Actions annotations for lines of code: the peak, and what would lower it."""
    above = budget is not None and data["needed_bytes"] > budget
    text = f"{format_bytes(data['needed_bytes'])} needed on {data['device']}"
    if budget is not None:
        text += f", {'above' if above else 'within'} the budget of {format_bytes(budget)}"
    found = [_annotation("error" if above else "notice", data["peak_line"], "Projected peak", text)]
    for remedy in cheapest_of_kinds(data["remedies"]) if above else ():
        text = f"{remedy['text']}: saves {format_bytes(remedy['saves_bytes'])}; costs {remedy['costs']}"
        found.append(_annotation("notice", remedy["line"], "Would lower the peak", text))
    return found


def _annotation(kind: str, line: Mapping[str, Any] | None, title: str, text: str) -> str:
    properties = {"title": f"lazyviz: {title}"}
    if line is not None:
        properties = {"file": _in_workspace(line["file"]), "line": str(line["line"]), **properties}
    inside = ",".join(f"{name}={_escaped(item, ':,')}" for name, item in properties.items())
    return f"::{kind} {inside}::{_escaped(text)}"


def _escaped(text: str, more: str = "") -> str:
    for sign in "%\r\n" + more:
        text = text.replace(sign, f"%{ord(sign):02X}")
    return text


def _in_workspace(file: str) -> str:
    root = os.environ.get("GITHUB_WORKSPACE") or HERE
    path = os.path.relpath(file, root)
    return file if path.startswith(os.pardir) else path
