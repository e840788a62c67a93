"""Small hidden CPU tensors: converted Python numbers, and flags and counters inside of kernels.

A Python number becomes a tensor of 8 bytes (16 if it is complex) where an operator takes a tensor, and
autograd keeps it until the backward pass: ``x * 0.5`` saves the factor.  Kernels hold a few more, such as the
status of a decomposition.  The plan does not include them, so the real peak may be higher by their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from ...graph.ir import Node
from ...torch_internals.private_api import OpOverload

IN_A_KERNEL = 64
"""Allowance for small tensors that a kernel may hold while it runs, in bytes: a few undocumented numbers and
flags."""

_NUMBERS = (bool, int, float, complex)


def of_numbers(nodes: Sequence[Node]) -> list[int]:
    """Upper bound of the bytes of small tensors during each node, including numbers saved by autograd."""
    changes = [0] * (len(nodes) + 1)
    kept: dict[Node, tuple[int, int]] = {}  # position and bytes
    last: dict[Node, int] = {}
    for at, node in enumerate(nodes):
        phase = node.phase
        if phase == "backward":
            if node.forward is not None:
                last[node.forward] = at
        elif phase != "optimizer":
            args = node.args
            for position in _takes_tensors(node.op):
                if position < len(args) and isinstance(args[position], _NUMBERS):
                    nbytes = kept[node][1] if node in kept else 0
                    kept[node] = at, nbytes + (16 if type(args[position]) is complex else 8)
    for node, (at, nbytes) in kept.items():
        changes[at] += nbytes
        # Without a backward pass, the recorder does not know when the user drops the autograd graph.
        changes[last.get(node, len(nodes) - 1) + 1] -= nbytes
    del changes[len(nodes)]
    return [total + IN_A_KERNEL for total in accumulate(changes)]


@cache
def _takes_tensors(op: OpOverload) -> tuple[int, ...]:
    """The positions of arguments that are tensors."""
    arguments = op._schema.arguments
    return tuple(at for at, argument in enumerate(arguments) if str(argument.type) in ("Tensor", "Tensor?"))
