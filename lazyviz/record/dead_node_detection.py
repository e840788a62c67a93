"""Dead node detection: which pending nodes compute nothing that a user's tensor could still show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from ..graph.ir import Failure, failure_of
from ..torch_internals.storage_ownership import are_alone
from .lazy_tensor import LazyTensor, is_lazy
from .tracked_storages import TrackedNode, TrackedStorage, TrackedValue


class Holders(Protocol):
    """Finds objects other than PyTorch tensors that share a tensor's memory."""

    def holder(self, tensor: torch.Tensor) -> str | None: ...


def observable_storages(
    pending: Iterable[TrackedNode], outside: Mapping[int, TrackedValue], holders: Holders
) -> set[TrackedStorage]:
    """The storages that ``pending`` nodes write and that a user's tensor may share, whether or not ops used
    it.

    ``outside`` are the user's tensors that ops used, by id.
    """
    nodes = list(pending)
    written = {storage for node in nodes for storage in node.writes}
    ours: dict[TrackedStorage, dict[int, torch.Tensor]] = {}
    for value in (*[value for node in nodes for value in node.inputs], *outside.values()):
        if value.real is not None and not value.storage.live and value.storage in written:
            ours.setdefault(value.storage, {})[id(value.real)] = value.real
    for storage, tensors in ours.items():
        aliases = list(tensors.values())
        if not storage.foreign and holders.holder(aliases[0]) is None and are_alone(aliases):
            written.discard(storage)
    return {storage for storage in written if storage.live or storage.external}


def writes_untracked_tensors(pending: Iterable[TrackedNode]) -> bool:
    """Whether pending nodes write memory whose tensors are not tracked, so that nothing reports their
    deletion.
    """
    writes = (storage for node in list(pending) for storage in node.writes)
    return any(storage.external and not storage.live for storage in writes)


def is_observable(node: TrackedNode, observable: set[TrackedStorage]) -> bool:
    """Whether a user's tensor, ``observable`` memory or a generator would show the effect of ``node``."""
    return (
        (node.draws is not None and node.state != "failed")
        or not observable.isdisjoint(node.writes)
        or any(value.tensor is not None for value in node.outputs)
    )


def drop_forgotten_gradients(met: Iterable[Any]) -> None:
    """Drop the forgotten gradients of these tensors, so that the next gradient is not added to them."""
    for value in met:
        tensor = value.tensor() if value.tensor is not None else None
        if tensor is None or not tensor.is_leaf:
            continue
        if is_lazy(tensor.grad) and _is_forgotten(tensor.grad):
            tensor.grad = None


def _is_forgotten(tensor: LazyTensor) -> bool:
    node = tensor._lazyviz.node
    return node is not None and failure_of(node.error) is Failure.FORGOTTEN
