"""Results of foreach functions over lists of tensors, from the operator for one tensor."""

from __future__ import annotations

from typing import Any

from .kernel_probes import sharing
from .shape_rule_call import FLOATS, Call, Made, is_plain, new, one_dtype

_WRITE = {
    f"_foreach_{name}_"
    for name in (
        "add",
        "sub",
        "mul",
        "div",
        "lerp",
        "addcmul",
        "addcdiv",
        "sqrt",
        "neg",
        "maximum",
        "minimum",
        "zero",
    )
}
MAKE = {f"_foreach_{name}" for name in ("add", "sub", "mul", "div", "sqrt", "neg", "reciprocal")}


def writes(call: Call) -> bool:
    """Whether the call writes each tensor of its first list, and certainly changes no metadata."""
    return call.name in _WRITE and _are_alike(call)


def made(call: Call) -> Made:
    """The results of a call that writes nothing."""
    if not _are_alike(call):
        return None
    return [new(value.meta.shape, value.meta.dtype) for value in call.arguments["self"]]


def _are_alike(call: Call) -> bool:
    """Whether all lists have the same length, and all tensors at the same position have the same shape and
    default strides.

    A number or a zero-dimensional tensor may take the place of a list.
    """
    arguments = call.arguments
    first = arguments["self"]
    metas = [value.meta for value in call.inputs]
    if not first or one_dtype(metas, FLOATS) is None or not is_plain(*metas):
        return False
    if any(before < len(first) and before != at for at, before in enumerate(sharing(call.inputs))):
        return False  # written tensors are visited again
    return all(_fits(item, first) for item in arguments.values())


def _fits(item: Any, first: Any) -> bool:
    if type(item) in (int, float):
        return True
    if hasattr(item, "meta"):
        return item.meta.shape == ()
    if type(item) not in (list, tuple) or len(item) != len(first):
        return False
    return all(
        type(one) in (int, float) or (hasattr(one, "meta") and one.meta.shape == other.meta.shape)
        for one, other in zip(item, first)
    )
