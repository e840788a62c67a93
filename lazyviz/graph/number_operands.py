"""Number operands: the Python numbers that take part in an operator's arithmetic as tensors do."""

from __future__ import annotations

import functools

from ..torch_internals.private_api import OpOverload
from .ir import works_by_element

_OPERANDS = ("Tensor", "number", "Optional[number]")


@functools.cache
def operands(op: OpOverload) -> frozenset[str]:
    """The arguments of ``op`` in which Python numbers are operands, like tensors."""
    # Not every int of a pointwise operator is an operand: round(decimals=2) is not.
    # A tensor argument may be a number: x * 2 calls mul.Tensor.
    scalars = [item.name for item in op._schema.arguments if str(item.type) in _OPERANDS]
    return frozenset(scalars if works_by_element(op) else ())
