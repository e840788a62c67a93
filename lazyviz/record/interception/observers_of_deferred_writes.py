"""Memory holders, or external aliases: objects besides PyTorch tensors that could observe a deferred write.

A NumPy array, a DLPack consumer, another process, or a shared file can read a tensor's memory without
PyTorch. Memory is *shared* while one of them exists: writes to it run immediately, and reads get a copy.  All
other memory is private to the program: private file mappings (safetensors, ``torch.load(mmap=True)``), memory
that a loader has read, and arrays that nothing refers to any more.

Arrays are detected by references.  An array made by ``Tensor.numpy()`` keeps a tensor object alive, so all
tensor objects on a storage are searched, and everything that refers to them; a reference that neither
containers nor variables explain may be an array.  A tensor made from an array keeps that array alive; if that
is the only reference, nothing else has the array.  Undecidable cases count as shared.  What a program
does with an address (``data_ptr``, extensions in C++) cannot be known.
"""

from __future__ import annotations

import gc
import inspect
import sys
import time
import types
import weakref
from array import array
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from itertools import compress
from typing import Any, Protocol

import torch

from ...process.traced_frames import is_traced
from ...torch_internals import private_api, storage_ownership
from ...torch_internals.storage_ownership import Memory, WeakTensor, memory_of
from .storage_overlap_cache import HolderCache, HolderInfo

NUMPY = "a NumPy array"
DLPACK = "a DLPack consumer"
_OTHER_STORAGE = "another storage"
_SHARED_MEMORY = "shared memory"
_SHARED_FILE = "a shared file mapping"
_UNKNOWN_OWNER = "another library"
_BUFFER = "a Python buffer"
UNKNOWN = "something unknown"
"""Result of :meth:`MemoryHolders.holder` for memory that :meth:`MemoryHolders.examine` may find out about."""

_WORKAROUNDS = {
    NUMPY: "drop the array, or give it a copy (.numpy().copy())",
    DLPACK: "drop what was exported, or export a clone()",
    _SHARED_MEMORY: "clone() it",
    _SHARED_FILE: "clone() it, or map the file for this process alone (shared=False)",
}
# Searches in a block for released references: a call that uses a tensor refers to it as well.
_MAX_SEARCHES = 2
_MAY_TAKE = 0.05  # fraction of the process's time that may be spent on repeated searches in the next block
_FEW = 128  # number of exports and cache entries up to which dead ones are not searched
_HELD_BY_NOTHING = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    type,
    weakref.ref,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
)
"""Types of objects that do not refer to tensors or arrays themselves; their dictionaries are separate
objects.
"""


class Unexamined(Exception):
    """It must first be found out whether the memory of an argument is shared."""


def workaround_for(holder: str) -> str:
    return _WORKAROUNDS.get(holder, "clone() it")


class KnownMemory(Protocol):
    """Known memory, by its address."""

    exported: dict[int, list[tuple[Any, str]]]

    def forget_storage(self, address: int, *, but_if_foreign: bool | None = None) -> list[Any]: ...


class Recording(Protocol):
    """What is being recorded."""

    def paused(self) -> AbstractContextManager[Any]: ...


class Runs(Protocol):
    """Runs of pending nodes."""

    def sync(self, cause: str, needed: Iterable[Any]) -> None: ...


def are_ordinary(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all are tensors on the CPU with memory that only PyTorch has had."""
    return all(
        storage_ownership.address_of(tensor) is not None and storage_ownership.is_ordinary(tensor)
        for tensor in tensors
    )


class MemoryHolders:
    """The holders of the memory of the program's tensors.

    ``exported`` has the exports that were observed, by address of the storage: weak references to the
    exported tensors.
    """

    are_ordinary = staticmethod(are_ordinary)  # :mod:`lazyviz.record.native_recorder` has a compiled form

    def __init__(self, memory: KnownMemory, recording: Recording, runs: Runs) -> None:
        self._memory, self.recording, self._runs = memory, recording, runs
        self._cache = HolderCache()
        self.exported = memory.exported
        self._most = _FEW  # exports and cache entries, before the dead ones are forgotten
        self.lasting = False  # some known state must stay valid after the block
        self._born = time.perf_counter()
        self._examined_for = 0.0  # seconds

    # --- queries ------------------------------------------------------------------

    def holder(self, tensor: torch.Tensor) -> str | None:
        """The holder of the memory of an ordinary tensor, ``None``, or ``UNKNOWN``."""
        if private_api.TensorBase.device.__get__(tensor).type != "cpu":
            return None
        address = private_api.storage_address(tensor)
        if self.exported and (who := self._exported_to(address)) is not None:
            return who
        if storage_ownership.is_ordinary(tensor):
            return None
        memory = memory_of(address)
        if not private_api.TensorBase.untyped_storage(tensor).nbytes():
            return None
        if memory is None:
            return _UNKNOWN_OWNER
        info = self._info(address)
        if info is not None:
            if info.holder is not None and info.ties and all(tie.expired() for tie in info.ties):
                info.holder = None
            return info.holder
        return _owner(tensor, memory) or UNKNOWN

    def may_be_resolved(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether another search may show that nothing else holds the memory of one of ``tensors``."""
        for tensor in tensors:
            holder = self.holder(tensor)
            if holder is UNKNOWN:
                return True
            if holder is None or private_api.storage_address(tensor) in self.exported:
                continue
            info = self._info(private_api.storage_address(tensor))
            if info is not None and info.searches < _MAX_SEARCHES:
                return True
        return False

    def note_module_call(self, module: torch.nn.Module) -> None:
        """A block calls an outermost module for the first time, so no call refers to its parameters yet."""
        with private_api.no_function_modes():
            tensors = [
                tensor
                for part in torch.nn.Module.modules(module)
                for held in (part._parameters, part._buffers)
                for tensor in held.values()
                if tensor is not None
            ]
            if self.are_ordinary(tensors):
                return
            for tensor in tensors:
                if storage_ownership.address_of(tensor) is not None and self.holder(tensor) is UNKNOWN:
                    self.examine([])
                    return

    def begin_block(self) -> None:
        """Note that a block begins: holders that were found before may no longer exist."""
        if self._examined_for < _MAY_TAKE * (time.perf_counter() - self._born):
            for info in self._cache.values():
                info.searches = 0

    def overlapped(self, tensor: torch.Tensor) -> list[int]:
        """Addresses of other known storages whose memory overlaps that of ``tensor``."""
        memory = memory_of(private_api.storage_address(tensor))
        if memory is None or memory.deleter == storage_ownership.OWN:
            return []
        if not memory.data:
            return []  # a tensor of a tracer: the size of its storage may be symbolic
        return self.beside(private_api.TensorBase.untyped_storage(tensor))

    def beside(self, storage: torch.UntypedStorage) -> list[int]:
        """Addresses of the storages that ``storage`` is a part of, and of other known ones that overlap
        it.
        """
        address = storage._cdata
        memory = memory_of(address)
        if memory is None or memory.deleter == storage_ownership.OWN:
            return []
        found = storage_ownership.wholes_of(address)
        if self._cache:
            found += self._cache.overlapping(memory.data, memory.data + storage.nbytes())
        return [other for other in dict.fromkeys(found) if other != address]

    def _exported_to(self, address: int) -> str | None:
        exports = self.exported.get(address)
        if exports is None:
            return None
        alive = [export for export in exports if not export[0].expired()]
        if not alive:
            del self.exported[address]
            return None
        self.exported[address] = alive
        return alive[-1][1]

    def _info(self, address: int) -> HolderInfo | None:
        info = self._cache.get(address)
        if info is not None and info.memory.storage() is None:
            self._cache.remove(address)
            return None
        return info

    # --- recording exports --------------------------------------------------------

    def note_export(self, tensor: torch.Tensor, who: str, *, traced: bool) -> None:
        """``who`` has received memory, and with it a reference to ``tensor``.

        ``traced``: nothing had received it before, because it could be resized.
        """
        address = storage_ownership.address_of(tensor)
        if address is None:
            return
        self.exported.setdefault(address, []).append((WeakTensor(tensor), who))
        if traced:
            self._cache.put(address, HolderInfo(tensor, None, ()))
        self._memory.forget_storage(address)
        if len(self._cache) + len(self.exported) > self._most:
            self.forget_dead()
            self._most = max(2 * (len(self._cache) + len(self.exported)), _FEW)

    def note_part(self, part: torch.UntypedStorage) -> None:
        """While ``part`` exists, which is a part of another storage, writes to the latter are seen in it.

        Only for memory of PyTorch's allocator; other memory is searched for overlapping tensors.
        """
        wholes = storage_ownership.wholes_of(part._cdata)
        memory = memory_of(wholes[-1]) if wholes else None
        if memory is None or memory.deleter != storage_ownership.OWN:
            return
        exports = self.exported.setdefault(wholes[-1], [])
        if not any(getattr(export[0], "cdata", None) == part._cdata for export in exports):
            exports.append((storage_ownership.WeakStorage(part), _OTHER_STORAGE))
            self._memory.forget_storage(wholes[-1])

    def lasts(self) -> bool:
        """Whether some known state is only valid while exports are recorded."""
        self.forget_dead()
        self.lasting = self.lasting and bool(self._cache)
        return self.lasting

    def begin_gap(self) -> None:
        """Stop tracking exports: afterwards, the known state is no longer certain."""
        self._cache.clear()
        self.lasting = False
        self.forget_dead()

    def forget_dead(self) -> None:
        """Forget memory that no longer exists."""
        for address in self._cache.addresses():
            self._info(address)
        for address in list(self.exported):
            self._exported_to(address)

    # --- searching ----------------------------------------------------------------

    def examine(self, operands: list[torch.Tensor]) -> None:
        """Find the holders of all memory that may be shared.

        ``operands`` are those of the call that is being recorded, which adds one reference to each, unless
        the autograd engine calls.
        """
        start = time.perf_counter()
        self.forget_dead()
        with private_api.no_function_modes():
            _ReferenceScan(operands).judge(self._cache)
            for tensor in operands:  # what cannot be decided now is not searched again
                if storage_ownership.address_of(tensor) is not None and self.holder(tensor) is UNKNOWN:
                    info = HolderInfo(tensor, _UNKNOWN_OWNER, (), _MAX_SEARCHES)
                    self._cache.put(private_api.storage_address(tensor), info)
        self.lasting = True
        self._examined_for += time.perf_counter() - start
        pending = []
        for address, info in self._cache.items():
            pending += self._memory.forget_storage(address, but_if_foreign=info.holder is not None)
        if pending:
            self._runs.sync(f"use of {_OTHER_STORAGE}", pending)


class _ReferenceScan:
    """All tensors of the process whose memory may be shared, and everything that refers to them."""

    def __init__(self, operands: list[torch.Tensor]) -> None:
        engine = private_api.current_autograd_node() is not None
        self._operands = {id(tensor): not engine for tensor in operands}
        local, self._arrays = _in_variables(sys._getframe(2))
        objects = gc.get_objects()
        classes = list(map(type, objects))
        found = {cls for cls in set(classes) if issubclass(cls, torch.Tensor)}
        tensors = [
            tensor
            for tensor in compress(objects, map(found.__contains__, classes))
            if storage_ownership.address_of(tensor) is not None
        ]
        holders = {cls for cls in set(classes) if not issubclass(cls, _HELD_BY_NOTHING)}
        referents = storage_ownership.referents_of(compress(objects, map(holders.__contains__, classes)))
        names = {id(tensor) for tensor in tensors}
        visible = Counter(filter(names.__contains__, map(id, referents)))
        if storage_ownership.numpy is not None:
            found = set(map(type, referents))
            shows = {cls for cls in found if issubclass(cls, storage_ownership.numpy.ndarray)}
            self._arrays += compress(referents, map(shows.__contains__, map(type, referents)))
        del referents
        counts = _references(tensors)
        del objects  # this includes owners of an array's memory
        self._places: list[int] = []
        self._tensors: list[torch.Tensor] = []
        self.unexplained: list[int] = []
        for tensor, count in zip(tensors, counts):
            address = storage_ownership.address_of(tensor)
            if address is not None and _may_be_shared(tensor, address):
                self._places.append(address)
                self._tensors.append(tensor)
                explained = _LISTS + visible[id(tensor)] + local[id(tensor)]
                self.unexplained.append(count - explained - (storage_ownership.use_count(tensor) > 1))

    def judge(self, cache: HolderCache) -> None:
        """Judge all memory, except memory that is known to have no holder, whose exports are recorded."""
        ties: dict[int, list[Any]] = {}
        tensors: dict[int, torch.Tensor] = {}
        for address, tensor, unexplained in zip(self._places, self._tensors, self.unexplained):
            tensors[address] = tensor
            tied = ties.setdefault(address, [])
            if unexplained > self._operands.get(id(tensor), 0):
                tied.append(WeakTensor(tensor))
        ranges = []
        for address, tensor in tensors.items():
            info = cache.get(address)
            if info is None or info.holder is not None:
                searches = 0 if info is None else info.searches
                info = HolderInfo(tensor, NUMPY if ties[address] else None, ties[address], searches + 1)
                cache.put(address, info)
            ranges.append((info.start, info.end, info))
        ranges.sort(key=lambda entry: entry[0])
        end, longest = 0, None  # among those visited so far, the one that ends last
        for start, stop, info in ranges:
            if longest is not None and start < end:
                longest.holder = info.holder = _OTHER_STORAGE
                longest.ties = info.ties = ()
            if longest is None or stop > end:
                end, longest = stop, info
        for low, high in map(_bounds, self._arrays):
            for start, end, info in ranges:
                if low < end and start < high and info.holder is None:
                    info.holder, info.ties = NUMPY, ()


def _may_be_shared(tensor: torch.Tensor, address: int) -> bool:
    memory = memory_of(address)
    if memory is None or not memory.data or storage_ownership.is_ordinary(tensor):
        return False
    return _owner(tensor, memory) is None


def _owner(tensor: torch.Tensor, memory: Memory) -> str | None:
    """The certain holder of the memory besides PyTorch; ``None``: it is a part of memory that only PyTorch
    holds.
    """
    if memory.deleter == storage_ownership.OWN:
        return None
    whole = storage_ownership.whole_of(memory)
    if whole is not None:
        while whole is not None:
            found = memory_of(whole)
            assert found is not None
            memory, whole = found, storage_ownership.whole_of(found)
        if memory.deleter == storage_ownership.OWN:
            return _OTHER_STORAGE  # its tensors are examined without considering parts
    if storage_ownership.is_private_mapping(memory):
        return None
    if storage_ownership.is_kept_by_python(memory):
        return _keeper(memory)
    storage = private_api.TensorBase.untyped_storage(tensor)
    if storage_ownership.shared_file(storage):
        return _SHARED_FILE
    return _SHARED_MEMORY if storage.is_shared() else _UNKNOWN_OWNER


def _keeper(memory: Memory) -> str | None:
    """The holder of the Python object that owns the memory, besides the storage."""
    kept = storage_ownership.keeper(memory)
    array_class = storage_ownership.numpy.ndarray if storage_ownership.numpy is not None else ()
    held = NUMPY if isinstance(kept, array_class) else _BUFFER
    while True:
        if sys.getrefcount(kept) != storage_ownership.ALONE or weakref.getweakrefcount(kept):
            return held
        if array_class and type(kept) is array_class:
            if kept.base is None:
                return None
            kept = kept.base
        elif type(kept) is memoryview:
            kept = kept.obj
        elif isinstance(kept, torch.Tensor):
            return held  # another storage on the same memory
        else:
            return None if type(kept) in (bytes, bytearray, array) else _UNKNOWN_OWNER


def _in_variables(frame: types.FrameType | None) -> tuple[Counter[int], list[Any]]:
    """How often running functions refer to each tensor, by identity; and the arrays that they refer to.

    The garbage collector does not see these references.
    """
    counts: Counter[int] = Counter()
    arrays: list[Any] = []
    shows = storage_ownership.numpy.ndarray if storage_ownership.numpy is not None else ()
    given: list[Any] = []  # frames among the variables of the function that was called
    while frame is not None:
        code = frame.f_code
        traced = is_traced(frame, given)
        given = []
        if code.co_flags & inspect.CO_OPTIMIZED:
            variables = frame.f_locals
            for name in code.co_varnames:
                if name in code.co_cellvars:
                    continue  # it is in a cell, which is a separate object
                content = variables.get(name)
                if issubclass(type(content), torch.Tensor):
                    counts[id(content)] += 1
                elif shows and issubclass(type(content), shows):
                    arrays.append(content)
                elif type(content) is types.FrameType:
                    given.append(content)
            content = None
            # Up to Python 3.12, the frame keeps this dictionary, and all its content, alive; see
            # `variables_of`.
            if type(variables) is dict and sys.getrefcount(variables) == 3 and not traced:
                variables.clear()
            del variables
        frame = frame.f_back
    return counts, arrays


def _bounds(shown: Any) -> tuple[int, int]:
    """The address range of an array's elements."""
    low = high = shown.__array_interface__["data"][0]
    for size, stride in zip(shown.shape, shown.strides):
        if stride < 0:
            low += (size - 1) * stride
        else:
            high += (size - 1) * stride
    return (low, high + shown.itemsize) if shown.size else (low, low)


def _references(tensors: list[torch.Tensor]) -> list[int]:
    return [sys.getrefcount(tensor) for tensor in tensors]


def _references_of_lists() -> int:
    """The `_references` count of a tensor that only its list and one other object refer to."""
    made = [torch.empty(0, device="cpu")]
    other = list(made)
    (count,) = _references(made)
    del other
    return count


_LISTS = _references_of_lists()
