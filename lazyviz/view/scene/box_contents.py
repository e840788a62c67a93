"""Contents and size of a closed box: kind of layer, shapes, parameters, pixels."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from ...graph.ir import Value
from ..layout.text_width import width
from .boxes import Box, module_facts
from .small_ops import is_dropout, is_line, is_small_ops

SMALL = 0.01  # fraction of the peak below which a module's card has no bar
FEW_GRADIENTS = 2  # up to this many (weight and bias), the largest one is shown instead of a count
CARD = (190.0, 296.0)  # minimum and maximum width of a module's card
ROW = (150.0, 344.0)  # the same for an op's row: room for "max_pool2d_with_indices_backward" and its bytes
PILL = 420.0  # maximum width of a tensor's pill
CARD_HEIGHTS = (28.0, 44.0, 64.0)  # chip, small card, full card

# Layer kinds by class name; the first match counts.
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("attention", re.compile(r"Attention|Attn")),
    ("embedding", re.compile(r"Embedding")),
    ("loss", re.compile(r"Loss$|Criterion")),
    ("norm", re.compile(r"Norm|RMS")),
    ("dropout", re.compile(r"Dropout|DropPath|Identity|StochasticDepth")),
    ("linear", re.compile(r"[Ll]inear$|^(Lazy)?Conv(Transpose)?\d[dD]$")),
    ("activation", re.compile(r"LU\d?$|Activation$|^(Log)?(Sigmoid|Tanh|Soft\w+|Hard\w+|Mish|Threshold)")),
)


def layer_kind(box: Box) -> str:
    """``"linear"``, ``"attention"``, ...; ``"block"`` for any other class."""
    if box.phase == "optimizer":
        return "optimizer"
    facts = module_facts(box)
    name = facts.kind if facts is not None else "Dropout" if is_dropout(box) else ""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "block")


def count_text(count: int) -> str:
    """``"4.7 M"``"""
    for size, unit in ((1_000_000_000, " B"), (1_000_000, " M"), (1_000, " k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def through_text(box: Box, shape: Callable[[Value], str]) -> str:
    """Input and output shapes of a box: ``"8×128 → 8×128×256"``; "" if unknown."""
    if box.phase == "optimizer":
        return ""
    first, last = box, box
    while first.repeats > 1 and first.calls == 1 and first.children:
        first, last = first.children[0], last.children[-1]
    takes, gives = first.takes, last.gives
    whole = box.kind == "step" and not box.name and first.children and first.children[0].kind == "lane"
    if takes is None and not box.name and (box.phase == "other" or whole):
        return ""  # initialization without a data flow, or a whole training step
    if gives is None and box.phase == "backward" and box.name and (found := _gradients(last)):
        # No other layer reads a result of it: its outputs are the gradients of its weights.
        given = shape(found[0]) if len(found) <= FEW_GRADIENTS else f"{len(found)} gradients"
    else:
        gives = gives or _last(last)
        given = shape(gives) if gives is not None else ""
        if takes is not None and first.takes_data is not None and gives is not None:
            data = first.takes_data
            more = _shared(data, gives) - _shared(takes, gives)
            takes = data if more > 0 or (more == 0 and gives.shape) else takes
    return " → ".join(filter(None, [shape(takes) if takes is not None else "", given]))


def _shared(value: Value, other: Value) -> int:
    """The number of leading dimensions in which both shapes agree.

    It tells the input whose shape the result follows: node features rather than the edge index of a graph
    network, and tokens rather than the output of the encoder.
    """
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(value.shape, other.shape)))


def _gradients(box: Box) -> list[Value]:
    """The gradients that the ops in ``box`` create, one per storage, largest first."""
    found: dict[int, Value] = {}
    stack = [box]
    while stack:
        current = stack.pop()
        stack.extend(current.children)
        for value in current.node.outputs if current.node is not None else ():
            if value.storage.role == "gradient":
                found[value.storage.id] = value
    return sorted(found.values(), key=lambda value: (-value.nbytes, value.id))


def _last(box: Box) -> Value | None:
    """The last tensor that is created in ``box``."""
    while box.children:
        ops = [child for child in box.children if child.kind not in ("input", "output", "sync")]
        if not ops:
            return None
        box = ops[-1]
    return box.node.outputs[0] if box.node is not None and box.node.outputs else None


def card(box: Box, held: int, peak: int, through: str, sub: str = "") -> dict[str, Any]:
    """The content of a module's card besides its name: layer kind, shapes, parameters, and pixel size.

    ``through`` has its input and output shapes; if these are unknown, ``sub`` is its second line.
    """
    if is_small_ops(box):
        return {"size": [round(width(box.label) * 8.6 + 48), CARD_HEIGHTS[0]]}
    facts = module_facts(box)
    kind = layer_kind(box)
    repeats = box.repeats if box.calls == 1 else 1
    parameters = (facts.parameters if facts is not None else 0) * repeats
    small = held < SMALL * peak
    if small and kind in ("activation", "dropout") and box.repeats == 1:
        height = CARD_HEIGHTS[0]
    else:
        compact = small and box.kind == "module" and (box.name or is_line(box))
        height = CARD_HEIGHTS[1] if compact else CARD_HEIGHTS[2]
    name = width(box.label) * 8.6 + (width(facts.kind) * 8.6 + 8 if facts is not None else 0) + 12
    counted = f"{box.calls} calls" if box.calls > 1 else f"×{box.repeats}" if box.repeats > 1 else ""
    badge = len(counted) * 6.6 + 20 if counted else 0
    size = f"{count_text(parameters)} params" if parameters else f"{box.ops:,} ops"
    facts_line = width(size) + len(" · 1.00 GiB allocated") if height == CARD_HEIGHTS[2] else 0
    wide = max(name + badge, width(through or sub) * 7.3, facts_line * 6.4) + 32 + 24
    least = 130.0 if height == CARD_HEIGHTS[0] else CARD[0]
    # Loop statements and paths can be longer than layer names, so they may be wider; so may a card that
    # then has room for both its whole label and its class.
    alone = width(box.label) * 8.6 + badge + 68
    whole = alone + (width(facts.kind) * 7.6 if facts is not None else 0)
    most = ROW[1] if box.kind == "step" or alone > CARD[1] or whole <= ROW[1] else CARD[1]
    result: dict[str, Any] = {"layer": kind, "size": [round(min(max(wide, least), most)), height]}
    if through:
        result["through"] = through
    if parameters:
        result["params"] = f"{count_text(parameters)} param{'' if parameters == 1 else 's'}"
    return result


def row(box: Box, bytes_text: str) -> dict[str, Any]:
    """The size of an op's row, or of a tensor's pill."""
    if box.kind == "op":
        sizes = bytes_text.rpartition(" · ")[2]
        name = width(box.label) * 7.3 + 34
        wide = min(max(name + max(width(sizes), 8) * 6.4, ROW[0]), CARD[1])  # room for other batch sizes
        return {"size": [round(min(max(wide, name + width(sizes) * 6.4), ROW[1])), 28]}
    name = width(box.label) * 8.6 + 54
    wide = max(name + width(bytes_text) * 6.4, 110)
    most = min(max(name + width(bytes_text.partition(" · ")[0]) * 6.4 + 12, ROW[1]), PILL)  # whole name
    return {"size": [round(min(wide, most)), 28]}
