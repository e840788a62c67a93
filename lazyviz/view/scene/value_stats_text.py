"""Value statistics of a result as text and histogram."""

from __future__ import annotations

from typing import Any

from ...graph.ir import Node
from ...graph.value_stats_data import Summary, share_text


def values_of(node: Node, position: int) -> dict[str, Any]:
    """The value statistics of an output for the page; empty if they were not computed."""
    summary = node.summaries[position] if position < len(node.summaries) else None
    return {"values": values_json(summary)} if summary is not None else {}


def values_json(summary: Summary) -> dict[str, Any]:
    """Facts as pairs of texts; a problem with a value as its kind."""
    facts = [
        [name, _number(value)]
        for name, value in (("least", summary.least), ("largest", summary.largest), ("mean", summary.mean))
        if value is not None
    ]
    for name, count, share in (
        ("NaN", summary.nan, summary.nan_share),
        ("+∞", summary.plus_inf, summary.plus_inf / max(summary.count, 1)),
        ("−∞", summary.minus_inf, summary.minus_inf / max(summary.count, 1)),
    ):
        if count:
            facts.append([name, f"{count:,} ({share_text(share)})"])
    if not summary.count:
        facts.append(["values", "none"])
    elif not summary.finite:
        facts.append(["finite", "none"])
    return {"facts": facts, "bins": list(summary.histogram), "words": histogram_text(summary)}


def histogram_text(summary: Summary) -> str:
    """A histogram as text: the bounds that contain most of the values."""
    bins = summary.histogram
    if not bins or summary.least is None or summary.largest is None:
        return ""
    total = sum(bins)
    width = (summary.largest - summary.least) / len(bins)
    # The shortest run of bins that has half of the values.
    best = (0, len(bins))
    for start in range(len(bins)):
        held = 0
        for stop in range(start, len(bins)):
            held += bins[stop]
            if 2 * held >= total:
                if stop + 1 - start < best[1] - best[0]:
                    best = (start, stop + 1)
                break
    low, high = summary.least + best[0] * width, summary.least + best[1] * width
    share = sum(bins[best[0] : best[1]]) / total
    return (
        f"Histogram from {_number(summary.least)} to {_number(summary.largest)}: "
        f"{share_text(share)} of the values between {_number(low)} and {_number(high)}"
    )


def _number(value: float) -> str:
    return f"{value:.4g}"
