"""Private torch APIs that functionalize a program, each with its reason.

``tests/execute/xla/test_xla.py`` checks them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode

aten = torch.ops.aten
Spec = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]
"""Shape, strides, element type and device of a tensor."""


def decompositions(more: Sequence[Any] = ()) -> dict[Any, Callable[..., Any]]:
    """PyTorch's decompositions into core operators, plus those of the operators in ``more``."""
    return {**core_aten_decompositions(), **get_decompositions(more)}


def functional_graph(
    function: Callable[..., Any],
    inputs: Sequence[Spec],
    numbers: Sequence[float],
    table: Mapping[Any, Callable[..., Any]],
) -> fx.GraphModule:
    """The ATen operators that ``function`` calls on tensors like ``inputs``, without in-place writes.

    A write to an input becomes an ``aten.copy_`` to that input, after everything else. After ``inputs``, it
    gets 0-d tensors whose values it may read: numbers of the types of ``numbers``. Nothing is computed.

    AOTAutograd is built on ``make_fx`` and ``torch.func.functionalize``; a shape environment gives the
    numbers their symbols.
    """
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", DeprecationWarning)  # warnings of torch about its own code
        with FakeTensorMode(shape_env=ShapeEnv()):
            fakes = [
                torch.empty_strided(shape, stride, dtype=dtype, device=device)
                for shape, stride, dtype, device in inputs
            ]
            fakes += [
                torch.empty((), dtype=torch.int64 if type(number) is int else torch.float64, device="cpu")
                for number in numbers
            ]
            functional = torch.func.functionalize(lambda *given: function(*given), remove="mutations")
            return make_fx(functional, decomposition_table=dict(table))(*fakes)
