"""Bernoulli custom ops: random masks (dropout, bernoulli) whose numbers Inductor generates.

On a CPU it draws ``bernoulli_`` in place, and a kernel that reads the memory may be fused with the one that
fills it before the draw: a mask is then what was there before (seen with PyTorch 2.11 in a training
step with batch norm).  An operator of ours gives the numbers in memory of their own, so that whoever reads
them depends on the draw.  (Where the numbers are to be eager's:
:mod:`lazyviz.execute.compiler.rng_prologue`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_library = torch.library.Library("lazyviz", "DEF")
_TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.needs_exact_strides)
_library.define("bernoulli(Tensor like, float p, bool contiguous) -> Tensor", tags=_TAGS)
_library.define("bernoulli_of(Tensor like, Tensor p, bool contiguous) -> Tensor", tags=_TAGS)


def _empty(like: torch.Tensor, contiguous: bool) -> torch.Tensor:
    return torch.empty_like(
        like, memory_format=torch.contiguous_format if contiguous else torch.preserve_format
    )


def _bernoulli(like: torch.Tensor, p: Any, contiguous: bool) -> torch.Tensor:
    return _empty(like, contiguous).bernoulli_(p)


def _shape(like: torch.Tensor, p: Any, contiguous: bool) -> torch.Tensor:
    return _empty(like, contiguous)


for _name in ("bernoulli", "bernoulli_of"):
    _library.impl(_name, _bernoulli, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lazyviz::{_name}", _shape, lib=_library)

_IN_PLACE: Mapping[Any, Any] = {
    aten.bernoulli_.float: torch.ops.lazyviz.bernoulli.default,
    aten.bernoulli_.Tensor: torch.ops.lazyviz.bernoulli_of.default,
}


def drawn(
    graph: fx.Graph, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The call of ``op`` as ``graph`` is to have it; its own generator, if it has one, is the default one."""
    if op in _IN_PLACE:
        p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        return aten.copy_.default, (args[0], graph.call_function(_IN_PLACE[op], (args[0], p, False))), {}
    if op is aten.bernoulli.p:
        return torch.ops.lazyviz.bernoulli.default, (args[0], args[1], True), {}
    if op is aten.bernoulli.default:
        return torch.ops.lazyviz.bernoulli_of.default, (args[0], args[0], True), {}
    return op, args, kwargs
