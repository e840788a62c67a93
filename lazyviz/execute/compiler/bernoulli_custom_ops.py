"""Bernoulli custom ops: random masks (dropout, bernoulli) whose numbers Inductor generates.

On a CPU, Inductor draws ``bernoulli_`` in place, and may fuse a kernel that reads the memory with the one
that fills it before the draw.  The mask then has the previous contents of the memory (seen with PyTorch 2.11
in a training step with batch norm).  The custom operator returns the numbers in new memory, so that every
reader depends on the draw.  (If the numbers must equal those of eager mode, see
:mod:`lazyviz.execute.compiler.random_draws_up_front`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ...torch_internals.operator_registration import define

aten = torch.ops.aten

_TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.needs_exact_strides)


def _empty(like: torch.Tensor, contiguous: bool) -> torch.Tensor:
    return torch.empty_like(
        like, memory_format=torch.contiguous_format if contiguous else torch.preserve_format
    )


def _bernoulli(like: torch.Tensor, p: Any, contiguous: bool) -> torch.Tensor:
    return _empty(like, contiguous).bernoulli_(p)


def _shape(like: torch.Tensor, p: Any, contiguous: bool) -> torch.Tensor:
    return _empty(like, contiguous)


_BERNOULLI, _BERNOULLI_OF = (
    define(
        name,
        f"(Tensor like, {p} p, bool contiguous) -> Tensor",
        kernel=_bernoulli,
        shape=_shape,
        tags=_TAGS,
    )
    for name, p in (("bernoulli", "float"), ("bernoulli_of", "Tensor"))
)
_IN_PLACE: Mapping[Any, Any] = {
    aten.bernoulli_.float: _BERNOULLI,
    aten.bernoulli_.Tensor: _BERNOULLI_OF,
}


def drawn(
    graph: fx.Graph, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The call of ``op`` in ``graph``; a separate generator, if it has one, is replaced by the
    default one.
    """
    if op in _IN_PLACE:
        p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        return aten.copy_.default, (args[0], graph.call_function(_IN_PLACE[op], (args[0], p, False))), {}
    if op is aten.bernoulli.p:
        return _BERNOULLI, (args[0], args[1], True), {}
    if op is aten.bernoulli.default:
        return _BERNOULLI_OF, (args[0], args[0], True), {}
    return op, args, kwargs
