"""Collectives of a recorded rank: kind, process group, and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .ir import Node, Value

NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
"""Namespaces of the operators that ``torch.distributed`` and DTensor communicate with."""

_KINDS = {
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce", "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce", "all_reduce_coalesced": "all_reduce", "all_reduce_coalesced_": "all_reduce",
    "allgather_": "all_gather", "_allgather_base_": "all_gather", "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather", "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather", "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_": "reduce_scatter", "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter", "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall_": "all_to_all", "alltoall_base_": "all_to_all", "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "broadcast_": "broadcast", "broadcast": "broadcast", "reduce_": "reduce",
    "gather_": "gather", "scatter_": "scatter", "send": "send", "isend": "send",
    "recv_": "recv", "recv_any_source_": "recv", "irecv": "recv",
    "barrier": "barrier", "monitored_barrier_": "barrier",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Group:
    """The process group of a recorded collective.

    ``ranks`` are the global ranks of its members, ``rank`` is the rank of this process in the group.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"<group {self.name} of {self.size}: rank {self.rank}>"


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of one rank.

    ``kind`` is ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, ``"broadcast"``,
    ``"reduce"``, ``"gather"``, ``"scatter"``, ``"send"``, ``"recv"`` or ``"barrier"``.  ``nbytes`` is its
    size as PyTorch and NCCL count it: that of the whole tensor, which is the output of a gather and the input
    of a scatter. ``root`` is the root's rank in the group, ``None`` for collectives without a root.
    """

    kind: str
    group: Group
    nbytes: int
    root: int | None

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends, by the ring algorithm; see :mod:`lazyviz.plan.communication_bytes`."""
        size, kind = self.group.size, self.kind
        if size < 2 or kind in ("recv", "barrier"):
            return 0
        part = (size - 1) * self.nbytes // size
        if kind == "all_reduce":
            return 2 * (size - 1) * self.nbytes // size
        if kind in ("all_gather", "reduce_scatter", "all_to_all"):
            return part
        if kind == "scatter":
            return part if self.root == self.group.rank else 0
        if kind == "gather":
            return 0 if self.root == self.group.rank else self.nbytes // size
        return self.nbytes

    @property
    def label(self) -> str:
        """``"all_gather of 8"``."""
        return f"{self.kind} of {self.group.size}"


def kind_of(node: Node) -> str | None:
    """The kind of collective of a node; ``None`` if it does not communicate."""
    namespace, _, name = node.op._schema.name.partition("::")
    return _KINDS.get(name) if namespace in NAMESPACES else None


def collective_of(node: Node, size: Callable[[Value], int] | None = None) -> Collective | None:
    """The collective of a node; ``None`` if it does not communicate, or its group is unknown.

    ``size`` returns the bytes of a value, for sizes other than the recorded ones.
    """
    kind = kind_of(node)
    if kind is None:
        return None
    arguments = dict(zip([each.name for each in node.op._schema.arguments], node.args)) | node.kwargs
    group = next((item for item in arguments.values() if isinstance(item, Group)), None)
    if group is None:
        return None
    gathered = kind in ("all_gather", "gather")
    names = [name for name, item in arguments.items() if any(True for _ in values_in((item,)))]
    if kind == "barrier" or not names:
        return Collective(kind, group, 0, None)
    if len(names) > 1:  # written arguments come first
        chosen: Iterable[Value] = values_in((arguments[names[0 if gathered else 1]],))
    elif kind == "all_gather":
        chosen = node.outputs
    else:
        chosen = values_in((arguments[names[0]],))
    nbytes = sum(value.nbytes if size is None else size(value) for value in chosen)
    if kind == "gather" and len(names) == 1:  # not the root: it has only the tensor that it sends
        nbytes *= group.size
    root = arguments.get("root_rank", arguments.get("src"))
    return Collective(kind, group, nbytes, root if type(root) is int else None)


def values_in(items: Any) -> Iterable[Value]:
    """Every value among a node's arguments, lists included."""
    for item in items:
        if isinstance(item, Value):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from values_in(item)
