"""Table of the user's real tensors and their memory: the recorded value and storage of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..graph.ir import Graph
from ..torch_internals import private_api, storage_ownership
from .interception.attribute_dictionary import own_attributes
from .recording_state import RecordingState
from .sparse.components import parts_of
from .tensors_from_data_loaders import Arrivals
from .tracked_storages import TrackedNode, TrackedStorage, TrackedValue, note_drop, unlink

NOWHERE = 1  # not the address of any storage


class TensorTable:
    """Real tensors by identity, real storages by address.

    It has slots, because the compiled recorder reads them at every op.
    """

    __slots__ = (
        "_most_outside", "_most_results", "_recording", "arrivals", "components", "computed", "exported",
        "outside", "results", "storages",
    )  # fmt: skip

    def __init__(self, recording: RecordingState) -> None:
        self._recording = recording
        self.outside: dict[int, TrackedValue] = {}  # by id of the real tensor
        self.storages: dict[int, TrackedStorage] = {}  # by address of the real storage
        # Likewise, of what sync points of this block computed: the storage that it was.
        self.computed: dict[int, TrackedStorage] = {}
        # By address: the number of the sparse tensor's storage whose indices or values are there.
        self.components: dict[int, int] = {}
        # By id of the tensor: results of ops of this block that ran at a sync point.
        self.results: dict[int, TrackedValue] = {}
        self.arrivals = Arrivals()
        # By address: objects that were given the memory while recording; see `MemoryHolders`.
        self.exported: dict[int, list[tuple[Any, str]]] = {}
        # Number of these tensors at which dead ones are dropped next.
        self._most_outside = self._most_results = 200

    def value_of(self, tensor: torch.Tensor) -> TrackedValue | None:
        """The value recorded for a tensor, pending or from outside."""
        value = own_attributes(tensor).get("_lazyviz")
        if value is None:
            for values in (self.outside, self.results):
                value = values.get(id(tensor))
                if value is not None and value.tensor is not None and value.tensor() is tensor:
                    return value
            return None  # or the id of a tensor that has died since
        return value

    def forget_address(self, tensor: torch.Tensor) -> TrackedValue | None:
        """Forget ``tensor``, which has other memory from now on; returns its value, if it was an outside
        tensor.
        """
        made = self.results.pop(id(tensor), None)
        return self.outside.pop(id(tensor), made)

    def forget_outside(self, tensor: torch.Tensor) -> TrackedValue | None:
        """Called before ``tensor``'s metadata may change, because the record has its old form."""
        value = self.forget_address(tensor)
        if value is not None:
            release(value)
        return value

    def found_outside(self, tensor: torch.Tensor, storage: TrackedStorage, graph: Graph) -> None:
        """Note in ``storage``, the new record of the memory of ``tensor``, who allocated it and when."""
        storage.borrowed = not storage_ownership.is_allocated(tensor)
        self.arrivals.use(private_api.storage_address(tensor), storage, graph)

    def made_real(self, values: Iterable[TrackedValue]) -> None:
        """At a sync point: the rest of the block may use the memory of ``values`` again."""
        for value in values:
            tensor = value.tensor() if value.tensor is not None else None
            if tensor is not None:
                self.computed[private_api.storage_address(tensor)] = value.storage

    def forget_shadow(self, tensor: torch.Tensor) -> None:
        """Forget the shadow of ``tensor``, which an unrecorded op is about to write."""
        for part in [tensor] if tensor.layout == torch.strided else parts_of(tensor):
            storage = self.storages.get(private_api.storage_address(part))
            if storage is not None:
                storage.shadow = None

    def forget_storage(self, address: int, *, but_if_foreign: bool | None = None) -> list[TrackedNode]:
        """Forget real memory because its holders have changed; returns the nodes that must run before it is
        used.

        ``but_if_foreign``: forget nothing if the record already has this ``foreign`` flag.
        """
        storage = self.storages.get(address)
        if storage is not None and but_if_foreign is False:
            return []
        for key, value in list(self.outside.items()):
            if value.storage.address == address and value.storage.foreign is not but_if_foreign:
                del self.outside[key]
                release(value)
        if storage is None:
            return []
        del self.storages[address]
        accesses = [*storage.readers, *([storage.writer] if storage.writer is not None else [])]
        return [node for node in accesses if node.state != "done"]

    # --- after a run ---------------------------------------------------------------

    def release_after(self, ran: Iterable[TrackedNode]) -> None:
        """Forget memory that the nodes in ``ran`` use, and that no pending node uses any more."""
        for node in ran:
            for value in (*node.inputs, *node.outputs):
                storage = value.storage
                if value.real is None:
                    tensor = value.tensor() if value.node is None and value.tensor is not None else None
                    if tensor is not None and self.outside.get(id(tensor)) is value:
                        del self.outside[id(tensor)]
                elif value.uses and not storage.foreign:
                    self._set_address(storage, private_api.storage_address(value.real))
                if not storage.uses:
                    self._drop_storage(storage)
                if storage.external:
                    storage.count_held()

    def note_memory(self, values: Iterable[TrackedValue]) -> None:
        """Find the memory of ``values`` that are real by its address while pending nodes read it, through
        other values too.
        """
        for value in values:
            storage = value.storage
            if not storage.uses or storage.foreign or (value.node is not None and value.node.state != "done"):
                continue
            tensor = value.tensor() if value.tensor is not None else value.real
            if tensor is not None:
                self._set_address(storage, private_api.storage_address(tensor))

    def release_unread(self, pending: Iterable[TrackedNode]) -> None:
        """Forget all memory that no pending node uses any more."""
        storages = [storage for storage in list(self.storages.values()) if not storage.has_pending_access]
        for storage in storages:
            self._drop_storage(storage)
        TrackedStorage.held.clear()
        TrackedStorage.held_bytes = 0
        for value in _read_by(list(pending)):
            storage, real = value.storage, value.real
            storage.count_held()
            if real is not None and not storage.foreign:
                self._set_address(storage, private_api.storage_address(real))
        self.outside = {key: value for key, value in list(self.outside.items()) if value.real is not None}

    def forget_dead(self) -> None:
        """Drop entries of tensors that have died, whenever the number of tensors has doubled."""
        if len(self.outside) > self._most_outside:
            self.outside = {key: value for key, value in list(self.outside.items()) if value.real is not None}
            self._most_outside = 2 * len(self.outside) + 200
        if len(self.results) > self._most_results:
            self.results = {
                key: value for key, value in list(self.results.items()) if value.tensor is not None
            }
            self._most_results = 2 * len(self.results) + 200

    def release_all(self, *, recording: bool) -> None:
        """Forget all memory, because nothing is pending. A block that continues remembers its earlier
        storages.
        """
        if recording:
            for at, storage in list(self.storages.items()):
                if storage.live:
                    self.computed[at] = storage
        self.outside.clear()
        self.storages.clear()
        TrackedStorage.held.clear()
        TrackedStorage.held_bytes = 0

    def forget_unused(self) -> None:
        """Release outside tensors that no node reads and that the user has dropped."""
        values = TrackedStorage.unused[:]
        del TrackedStorage.unused[: len(values)]
        for value in values:
            if not value.uses:
                value.real = None
                if not value.storage.uses:
                    self._drop_storage(value.storage)

    def _set_address(self, storage: TrackedStorage, address: int) -> None:
        """Note that pending nodes read ``storage``, which is at ``address``."""
        if self.storages.setdefault(address, storage) is storage:
            storage.address = address

    def _drop_storage(self, storage: TrackedStorage) -> None:
        """Forget ``storage``, which no pending node uses; the block that is being recorded remembers it."""
        address = storage.address
        if self.storages.get(address) is storage:
            del self.storages[address]
            if self._recording.graph is not None and storage.live:
                self.computed[address] = storage
            storage.address = NOWHERE  # its values that no node has read yet must not be read now


def _read_by(nodes: Sequence[TrackedNode]) -> Iterable[TrackedValue]:
    """The values that pending ``nodes`` read, if they are real or outside tensors; each once."""
    graph = nodes[0].graph
    if nodes == graph.nodes:  # the common case of a block that has just ended: its nodes create the rest
        return [value for value in graph.inputs if value.uses]  # type: ignore[attr-defined, misc]
    return dict.fromkeys([value for node in nodes for value in node.inputs])


def release(value: TrackedValue, tensor: torch.Tensor | None = None) -> None:
    """Cut the link between a value and ``tensor``, or all of its tensors, because they have other
    values now.
    """
    for ref in list(value.refs()):
        if tensor is not None and ref() is not tensor:
            continue
        unlink(ref)
        storage = value.storage
        while storage.replaced_by is not None:
            storage = storage.replaced_by
        storage.live -= 1
        if storage.live == 0:
            note_drop(storage)
