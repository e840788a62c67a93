"""Memory that gloo's collectives take while they run, on the CPU (``ProcessGroupGloo.cpp``).

What is gathered arrives in one flat tensor, and is copied from there; what is scattered or reduced is copied
to one before it is sent.
"""

from __future__ import annotations

from ...graph.collective_info import collective_of
from ...graph.ir import Node
from .workspace_rule import Rule, exactly
from .workspace_size import NOTHING, Need


def _flat(node: Node, threads: int) -> Need:
    """The whole tensor again; of a rooted collective, on the root alone."""
    found = collective_of(node)
    if found is None or (found.root is not None and found.root != found.group.rank):
        return NOTHING
    return exactly(found.nbytes)


def _others(node: Node, threads: int) -> Need:
    """The parts of the other ranks: a list of tensors is reduced in one of its own."""
    found = collective_of(node)
    if found is None:
        return NOTHING
    return exactly(found.nbytes - found.nbytes // found.group.size)


TABLE: dict[str, Rule] = {
    "c10d::allgather_": _flat,
    "c10d::_allgather_base_": _flat,
    "_c10d_functional::all_gather_into_tensor": _flat,
    "_c10d_functional::all_gather_into_tensor_out": _flat,
    "c10d::_reduce_scatter_base_": _flat,
    "_c10d_functional::reduce_scatter_tensor": _flat,
    "_c10d_functional::reduce_scatter_tensor_out": _flat,
    "c10d::reduce_scatter_": _others,
    "c10d::scatter_": _flat,
    "c10d::gather_": _flat,
}
