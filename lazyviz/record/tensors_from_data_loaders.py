"""Tensors from data loaders, and other tensors that are created in a block without a recorded op.

A data loader's batch and ``torch.tensor(data)`` allocate memory that no operator shows.  For an op that uses
such a tensor, it is an outside tensor; a tensor that no op uses, such as the batch that a loader fetches
ahead, would not appear at all.
"""

from __future__ import annotations

import weakref
from itertools import islice
from typing import Any

import torch

from ..graph.ir import Fetch, Graph, Role, Storage
from ..torch_internals import private_api, storage_ownership

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MOST_PARTS = 1000  # maximum number of items of a list in a batch that are visited: all may be Python numbers
_FEW = 200  # number of arrivals up to which dead ones are not searched


class Arrival(weakref.ref[torch.Tensor]):
    """Weak reference to a tensor that was created, and its memory until an op uses it."""

    __slots__ = ("graph", "memory", "storage")

    graph: Graph
    memory: private_api.MemoryRef
    storage: Storage

    def __new__(cls, tensor: torch.Tensor, graph: Graph) -> Arrival:
        return super().__new__(cls, tensor, _on_death)

    def __init__(self, tensor: torch.Tensor, graph: Graph) -> None:
        super().__init__(tensor, _on_death)  # type: ignore[call-arg]
        self.graph = graph
        self.memory = private_api.MemoryRef(tensor)
        memory = private_api.TensorBase.untyped_storage(tensor)
        self.storage = Storage(memory.nbytes(), tensor.device, external=True, created=-1)
        self.storage.arrived = len(graph.nodes)
        self.storage.borrowed = not storage_ownership.is_allocated(tensor)

    @property
    def is_gone(self) -> bool:
        return self.memory.storage() is None


def _on_death(arrival: Arrival) -> None:
    arrival.storage.dropped = len(arrival.graph.nodes)


class Arrivals:
    """The arrivals of the open blocks that no op has used, by the address of their memory."""

    def __init__(self) -> None:
        self.unused: dict[int, Arrival] = {}
        self._fetched: list[Arrival] = []  # of data loaders
        self._most = _FEW

    def end(self) -> None:
        """Forget all arrivals, because nothing is being recorded."""
        self.unused.clear()
        self._fetched.clear()

    def note(
        self, tensor: torch.Tensor, graph: Graph, role: Role | None = None, name: str = ""
    ) -> Arrival | None:
        """Note that ``tensor`` was created while ``graph`` is recorded."""
        if type(tensor) not in _PLAIN or tensor.layout != torch.strided or tensor.device.type == "meta":
            return None
        if not private_api.has_storage(tensor) or not private_api.TensorBase.untyped_storage(tensor).nbytes():
            return None
        address = private_api.storage_address(tensor)
        if (found := self.unused.get(address)) is not None:  # it keeps the address from being reused
            return found if found() is tensor else None
        self.unused[address] = arrival = Arrival(tensor, graph)
        arrival.storage.role, arrival.storage.name = role, name
        graph.arrivals[arrival.storage] = None
        if len(self.unused) > self._most:
            self.unused = {at: each for at, each in list(self.unused.items()) if not each.is_gone}
            self._most = 2 * len(self.unused) + _FEW
        return arrival

    def note_batch(self, batch: Any, graph: Graph) -> None:
        """Note that a data loader returns ``batch``; variables still refer to the previous one."""
        self._fetched = [each for each in self._fetched if each() is not None]
        beside = tuple(dict.fromkeys([each.storage for each in self._fetched if each.graph is graph]))
        graph.fetches.append(Fetch(len(graph.nodes), beside))
        self._note_all(batch, graph, 4)

    def _note_all(self, items: Any, graph: Graph, depth: int) -> None:
        """Note every tensor in a batch: in lists, dictionaries, and attributes.  Calls none of its code."""
        if isinstance(items, torch.Tensor):
            if (arrival := self.note(items, graph)) is not None:
                self._fetched.append(arrival)
        elif depth and not isinstance(items, (str, bytes, type)):
            parts: list[Any] = []
            if isinstance(items, dict):  # other mappings may compute their values, and most have a dictionary
                parts += islice(dict.values(items), _MOST_PARTS)
            elif isinstance(items, (list, tuple, set)):
                parts += islice(items, _MOST_PARTS)
            if isinstance(attributes := getattr(items, "__dict__", None), dict):
                parts += islice(attributes.values(), _MOST_PARTS)
            for part in parts:
                self._note_all(part, graph, depth - 1)

    def forget(self, tensor: torch.Tensor) -> None:
        """Drop our reference to ``tensor``: PyTorch does not swap tensors that have weak references."""
        if self.unused and private_api.has_storage(tensor):
            self.unused.pop(private_api.storage_address(tensor), None)
        self._fetched = [each for each in self._fetched if each() is not tensor]

    def use(self, address: int, storage: Storage, graph: Graph) -> None:
        """Note that an op of ``graph`` uses the memory at ``address``, whose record is ``storage`` from now
        on.
        """
        arrival = self.unused.pop(address, None)
        if arrival is None or arrival.storage not in arrival.graph.arrivals:
            return
        del arrival.graph.arrivals[arrival.storage]
        if arrival.graph is graph:  # else positions of one graph say nothing about the other
            storage.arrived, arrival.storage = arrival.storage.arrived, storage
