"""A capture device for tests without a GPU: records calls, and repeats them on the same memory.

It is as unforgiving as CUDA: what is captured does not run, and what runs later uses the addresses of that
time, whatever is there by then.  Memory that was freed, or resized, is an error instead of a wrong number.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

GARBAGE = 0xAB
PYTHON_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Python) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.PythonTLSSnapshot
)


class UseAfterFree(AssertionError):
    """Captured calls use memory that is not what it was."""


class Captures:
    """Captures on the CPU.  Tensors of half precision are taken for those of another device.

    ``forbidden`` operators cannot be captured; with ``broken`` no capture comes to a good end.
    """

    alignment = 64  # of PyTorch's allocator for the CPU

    def __init__(self):
        self.forbidden: set[str] = set()
        self.broken = False
        self.switch = 0  # a setting of the process
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.replays = 0

    def obstacle(self):
        return ""

    def takes(self, meta):
        return meta.device.type == "cpu" and meta.dtype is not torch.float16

    def settings(self):
        return self.switch

    def warm_up(self, device, run):
        return run()

    def capture(self, device, run):
        graph = Graph(self)
        state = torch.random.default_generator.get_state()
        guard = torch._C._ForceDispatchKeyGuard(
            torch._C._dispatch_tls_local_include_set(),
            torch._C._dispatch_tls_local_exclude_set() - PYTHON_KEYS,
        )
        try:
            with guard, Recording(graph, self.forbidden):
                run()
            if self.broken:
                raise RuntimeError("the capture was invalidated")
        finally:
            graph.undo()
            torch.random.default_generator.set_state(state)
        self.graphs.add(graph)
        return graph


class Place:
    """Where a tensor was, and what of it: an address, no more."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.reference = StorageWeakRef(storage)
        self.address = storage.data_ptr()
        self.form = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()

    def tensor(self) -> torch.Tensor:
        if 0 in self.form[2]:  # no kernel looks there
            return torch.empty_strided(self.form[2], self.form[3], dtype=self.form[0])
        storage = torch.UntypedStorage._new_with_weak_ptr(self.reference.cdata)
        if storage is None:
            raise UseAfterFree("captured calls use memory that was freed")
        if storage.data_ptr() != self.address:
            raise UseAfterFree("captured calls use memory that was resized")
        dtype, *form = self.form
        return torch.empty(0, dtype=dtype).set_(storage, *form)


class Graph:
    def __init__(self, captures: Captures) -> None:
        self.captures = captures
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.pool: dict[int, torch.UntypedStorage] = {}  # by address: the graph's own memory
        self.shown: dict[int, list[weakref.ref[torch.Tensor]]] = {}  # the tensors on it
        self.before: dict[
            int, tuple[torch.UntypedStorage, torch.UntypedStorage]
        ] = {}  # contents from outside

    def undo(self) -> None:
        """What is captured does not run."""
        for storage, content in self.before.values():
            storage.copy_(content)
        self.before = {}
        for storage in self.pool.values():
            storage.fill_(GARBAGE)

    def spoil(self) -> None:
        """Memory that no tensor shows is used by other graphs of the pool."""
        for address, storage in self.pool.items():
            if not any(reference() is not None for reference in self.shown[address]):
                storage.fill_(GARBAGE)

    def replay(self) -> None:
        self.captures.replays += 1
        for graph in list(self.captures.graphs):
            graph.spoil()
        for function, args, kwargs, results in self.calls:
            made = function(*real(args), **real(kwargs))
            for place, tensor in zip(results, listed(made), strict=True):
                if place is not None:
                    place.tensor().copy_(tensor)


class Recording(TorchDispatchMode):
    def __init__(self, graph: Graph, forbidden: set[str]) -> None:
        super().__init__()
        self.graph, self.forbidden = graph, forbidden

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function) in self.forbidden:
            raise RuntimeError("operation not permitted when stream is capturing")
        graph, kwargs = self.graph, kwargs or {}
        given = [
            item for item in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)
        ]
        known = set()
        for tensor in given:
            storage = tensor.untyped_storage()
            known.add(storage.data_ptr())
            if storage.data_ptr() not in graph.pool and storage.data_ptr() not in graph.before:
                graph.before[storage.data_ptr()] = storage, storage.clone()
        places = placed(args), placed(kwargs)
        made = function(*args, **kwargs)
        results: list[Place | None] = []
        for tensor in listed(made):
            if tensor is None:
                results.append(None)
                continue
            address = tensor.untyped_storage().data_ptr()
            fresh = address not in known
            if fresh:
                graph.pool[address] = tensor.untyped_storage()
            if address in graph.pool:
                graph.shown.setdefault(address, []).append(weakref.ref(tensor))
            results.append(Place(tensor) if fresh and tensor.numel() else None)
        graph.calls.append((function, *places, results))
        return made


def listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def placed(item: Any) -> Any:
    return torch.utils._pytree.tree_map(
        lambda each: Place(each) if isinstance(each, torch.Tensor) else each, item
    )


def real(item: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda each: each.tensor() if isinstance(each, Place) else each, item)
