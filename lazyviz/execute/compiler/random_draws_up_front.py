"""RNG prologue of compiled code: eager kernels draw all random numbers first, in program order.

Which random number an element gets depends on the order of the draws, on the strides that a kernel receives,
and on the processor.  Inductor changes strides, drops unused draws, and may reorder them.  In compiled code,
one operator makes all draws of a segment, because none of them needs the values of a tensor.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...graph.ir import Node, Value
from ...plan.batch.batch_dim_propagation import draws_nothing
from ...torch_internals.operator_registration import define

aten = torch.ops.aten

_FILLS = {
    aten.bernoulli_.float,
    aten.uniform_.default,
    aten.normal_.default,
    aten.exponential_.default,
    aten.geometric_.default,
    aten.cauchy_.default,
    aten.log_normal_.default,
    aten.random_.default,
    getattr(aten.random_, "from"),
    aten.random_.to,
}
# For factories: the operator with which ATen fills an empty tensor (TensorFactories.cpp), and its numbers.
_MAKES: dict[Any, tuple[str, Callable[..., list[Any]]]] = {
    aten.rand.default: ("uniform_.default", lambda size: [0, 1]),
    aten.randn.default: ("normal_.default", lambda size: [0, 1]),
    aten.randint.default: ("random_.from", lambda high, size: [0, high]),
    aten.randint.low: ("random_.from", lambda low, high, size: [low, high]),
    aten.normal.float_float: ("normal_.default", lambda mean, std, size: [mean, std]),
    aten.rand_like.default: ("uniform_.default", lambda like: [0, 1]),
    aten.randn_like.default: ("normal_.default", lambda like: [0, 1]),
    aten.randint_like.default: ("random_.from", lambda like, high: [0, high]),
    aten.randint_like.low_dtype: ("random_.from", lambda like, low, high: [low, high]),
    aten.randperm.default: ("randperm.out", lambda n: []),
}


class Draw(NamedTuple):
    """``op`` with ``numbers`` on an empty tensor like ``like``, as text for generated code."""

    op: str
    numbers: list[Any]
    like: Value


def draws(node: Node) -> bool:
    """Whether ``node`` draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in node.op.tags or draws_nothing(node):
        return False
    return node.op is not aten.native_dropout.default or node.args[2] is not False


def draw_of(node: Node) -> Draw | None:
    """The draw of ``node``, if it needs no tensor's values; None if it does, or if that is unknown."""
    if any(isinstance(item, torch.Generator) for item in node.kwargs.values()):
        return None
    op = node.op
    if op in _FILLS:
        if set(node.kwargs) - {"generator"}:
            return None
        return Draw(
            op._schema.name.removeprefix("aten::") + f".{op._overloadname}", [*node.args[1:]], node.args[0]
        )
    if op is aten.native_dropout.default:
        return Draw("native_dropout.default", [node.args[1], True], node.args[0])
    if op in _MAKES:
        fill, numbers = _MAKES[op]
        return Draw(fill, numbers(*node.args), node.outputs[0])
    return None


def serialized(found: Sequence[Draw]) -> str:
    """``found`` in the form for the operator below."""
    return json.dumps(
        [
            [draw.op, draw.numbers, len(meta.shape), str(meta.dtype).removeprefix("torch."), str(meta.device)]
            for draw, meta in ((draw, draw.like.meta) for draw in found)
        ]
    )


@functools.lru_cache(64)
def _read(words: str) -> list[tuple[Any, list[Any], int, torch.dtype, torch.device]]:
    found = []
    for op, numbers, rank, dtype, device in json.loads(words):
        name, _, overload = op.partition(".")
        kernel = getattr(getattr(aten, name), overload or "default")
        found.append((kernel, numbers, rank, getattr(torch, dtype), torch.device(device)))
    return found


def _drawn(words: str, dimensions: Sequence[int], fill: bool = True) -> list[torch.Tensor]:
    """The random numbers, one tensor for each draw; ``dimensions`` are the shape and the strides of each."""
    results = []
    at = 0
    for kernel, numbers, rank, dtype, device in _read(words):
        shape, strides = dimensions[at : at + rank], dimensions[at + rank : at + 2 * rank]
        at += 2 * rank
        blank = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        if kernel is aten.native_dropout.default:  # the mask
            blank = kernel(blank, *numbers)[1] if fill else torch.empty_like(blank, dtype=torch.bool)
        elif fill and kernel is aten.randperm.out:
            kernel(blank.numel(), out=blank)
        elif fill:
            kernel(blank, *numbers)
        results.append(blank)
    return results


draw_all = define(
    "drawn",
    "(str words, SymInt[] dimensions) -> Tensor[]",
    kernel=_drawn,
    shape=functools.partial(_drawn, fill=False),
    tags=(torch.Tag.nondeterministic_seeded,),
)
