"""Plot of a run: each figure relative to its criterion, and cost by number of operators."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure as Canvas

from .figures import Figure, number, without_the_rest

MET, MISSED = "#2f7d5b", "#c2452d"
LINES = ("#33608c", "#b5762a", "#2f7d5b", "#7a4f9a")
# For reproducible output: the salt for hashed names of glyphs and clips; no date is written.
STYLE: Any = {"svg.hashsalt": "lazyviz", "svg.fonttype": "none", "font.size": 8}


def save(parts: Mapping[str, Any], path: Path) -> None:
    """Draw the results of ``parts`` into the SVG at ``path``."""
    found = [Figure.from_json(data) for part in parts.values() for data in part["figures"]]
    judged = without_the_rest([each for each in found if each.criterion and each.value is not None])
    growth = [each for each in found if "per op" in each.detail]
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=(9, 1.2 + 0.19 * max(len(judged), 8)), layout="constrained")
        left, right = canvas.subplots(1, 2, width_ratios=(1.5, 1))
        _draw_ratios(left, judged)
        _draw_growth(right, growth)
        canvas.savefig(path, metadata={"Date": None})


def _draw_ratios(axes: Any, judged: list[Figure]) -> None:
    """Draw a bar for each figure: its cost relative to its limit, on a logarithmic scale."""
    shares = []
    for each in judged:
        assert each.value is not None
        sign, _, limit = each.criterion.partition(" ")
        shares.append(float(limit) / each.value if sign == ">=" else each.value / float(limit))
    heights = range(len(judged))
    colors = [MET if each.met else MISSED for each in judged]
    axes.barh(heights, [share - 1 for share in shares], left=1, color=colors)
    for height, each, share in zip(heights, judged, shares):
        assert each.value is not None
        text = f" {number(each.value)} (wanted {each.criterion}) "
        axes.text(max(share, 1), height, text, va="center", fontsize=6)
    labels = [f"{each.name}: {each.case}" for each in judged]
    axes.set_yticks(
        list(heights), [label if len(label) < 66 else f"{label[:64]}…" for label in labels], fontsize=6
    )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.margins(x=0.35)
    axes.set_xlabel("of what the criterion allows (less is better)")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_growth(axes: Any, growth: list[Figure]) -> None:
    """Draw microseconds per operator by number of operators."""
    for each, color in zip(growth, LINES):
        counts = [int(count) for count in each.detail["per op"]]
        axes.plot(counts, list(each.detail["per op"].values()), marker="o", color=color, label=each.case)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("operators in one block")
    axes.set_ylabel("microseconds an operator")
    axes.spines[["top", "right"]].set_visible(False)
    if growth:
        axes.legend(frameon=False)
