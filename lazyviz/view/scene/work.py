"""How many floating-point operations ops take, by PyTorch's own formulas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...graph.ir import Node, Value


def flops_of(nodes: Iterable[Node], known: dict[int, int] | None = None) -> int:
    """Of what PyTorch's counter has a formula for: products, convolutions, attention; a multiply-add is two.

    ``known`` keeps each node's by its index, for the next time.
    """
    known = {} if known is None else known
    return sum(
        known[node.index] if node.index in known else known.setdefault(node.index, _flops(node))
        for node in nodes
    )


def _flops(node: Node) -> int:
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(getattr(node.op, "overloadpacket", None))
    if formula is None:
        return 0
    outputs = _outputs(node)
    given = {name: _shape(item) for name, item in node.kwargs.items()}
    try:
        out = outputs[0] if len(outputs) == 1 else tuple(outputs)
        return int(formula(*map(_shape, node.args), **given, out_val=out))
    except Exception:  # a formula of somebody else's operator, for arguments that it does not know
        return 0


def _outputs(node: Node) -> list[Any]:
    """The results' shapes, ``None`` for gradients that were not asked for."""
    shapes = [value.meta.shape for value in node.outputs]
    mask = dict(zip((argument.name for argument in node.op._schema.arguments), node.args)) | dict(node.kwargs)
    asked = mask.get("output_mask")
    if not isinstance(asked, (list, tuple)) or sum(map(bool, asked)) != len(shapes):
        return shapes
    left = iter(shapes)
    return [next(left) if wanted else None for wanted in asked]


def flops_text(flops: int) -> str:
    """``"537 MFLOP"``"""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if flops >= size:
            return f"{flops / size:.3g} {unit}FLOP"
    return f"{flops} FLOP"


def _shape(item: Any) -> Any:
    return item.meta.shape if isinstance(item, Value) else item
