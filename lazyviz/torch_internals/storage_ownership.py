"""Private torch APIs for a storage's internals: who owns its memory, and other references to it.

In addition to :mod:`lazyviz.torch_internals.private_api`, for
:mod:`lazyviz.record.interception.observers_of_deferred_writes`.
``tests/torch_internals/test_private_apis.py`` checks each entry.

PyTorch has no public way to ask who owns a storage's memory.  The owner follows from the function that will
free it (the deleter) and that function's argument, which are fields of the C++ object.  Their offsets are
found by searching for known values; if the search fails, all memory that cannot be resized counts as shared.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

numpy: ModuleType | None
try:
    import numpy
except ImportError:  # without NumPy, no array can share a tensor's memory
    numpy = None

_WORD = ctypes.sizeof(ctypes.c_void_p)
_MOST_WORDS = 16
_TensorBase: Any = torch._C.TensorBase

# Of the C++ tensor, not of Python's object, so that no weak reference makes `swap_tensors` fail.
WeakTensor: Any = torch._C._WeakTensorRef  # type: ignore[attr-defined]
storage_address = torch._C._storage_address  # type: ignore[attr-defined]
WeakStorage: Any = StorageWeakRef  # of the C++ storage, which tensors may keep without Python's object


_OWN_REFERENCES = 3  # to a Python storage in a function that has just obtained it


class Memory(NamedTuple):
    """The address of a storage's memory, the function that frees it, and that function's argument."""

    data: int
    deleter: int
    context: int


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_size_t * count).from_address(address))


def _find_memory() -> int | None:
    """Offset of data, deleter and context in a ``StorageImpl``: the CPU's own allocator passes the data as
    context.

    The search starts at the front, because memory behind a storage may belong to another object, or to none.
    """
    probes = [torch.UntypedStorage(64), torch.UntypedStorage(4096)]
    known = [(probe._cdata, probe.data_ptr()) for probe in probes]
    for offset in range(0, (_MOST_WORDS - 2) * _WORD, _WORD):
        if [_words(address + offset, 1)[0] for address, _ in known] == [data for _, data in known]:
            found = [_words(address + offset, 3) for address, _ in known]
            return offset if all(data == last != free for data, free, last in found) else None
    return None


_MEMORY_OFFSET = _find_memory()


def memory_of(storage: int) -> Memory | None:
    """The memory of the storage at an address; ``None`` if it cannot be determined."""
    if _MEMORY_OFFSET is None or not storage:  # tensors of some devices have no storage
        return None
    return Memory(*_words(storage + _MEMORY_OFFSET, 3))


def _deleter(storage: torch.UntypedStorage) -> int | None:
    memory = memory_of(storage._cdata)
    return None if memory is None else memory.deleter


# Frees memory of the CPU's own allocator, into which files are read as well.
OWN = _deleter(torch.UntypedStorage(64))
# Releases another storage that this one is a part of, as safetensors and `torch.load(mmap=True)` slice files.
_PART = _deleter(torch.UntypedStorage(64)[0:8])
# A C++ function object with its captures: a Python object, if it is one of those below.
_CLOSURE = _deleter(torch.frombuffer(bytearray(8), dtype=torch.uint8).untyped_storage())
_CLOSURE_WORDS = 5  # the data, two captures, its manager, its caller


def _find_keepers() -> set[tuple[int, ...]]:
    """The code addresses of the closures with which tensors keep the Python object whose memory they
    share.
    """
    kept: list[Any] = [bytearray(8)]
    tensors = [torch.frombuffer(kept[0], dtype=torch.uint8)]
    if numpy is not None:
        kept.append(numpy.zeros(8, numpy.uint8))
        tensors.append(torch.from_numpy(kept[1]))
    found = set()
    for keeper, tensor in zip(kept, tensors):
        memory = memory_of(storage_address(tensor))
        if memory is not None and memory.deleter == _CLOSURE:
            words = _words(memory.context, _CLOSURE_WORDS)
            if words[1] == id(keeper):
                found.add(tuple(words[3:]))
    return found


_KEEPERS = _find_keepers()


def whole_of(memory: Memory) -> int | None:
    """The address of the storage that ``memory`` is a part of, if any."""
    return memory.context if memory.deleter == _PART else None


def wholes_of(storage: int) -> list[int]:
    """The addresses of the storages that the storage at an address is a part of, the largest last."""
    found: list[int] = []
    memory = memory_of(storage)
    while memory is not None and (whole := whole_of(memory)) is not None:
        found.append(whole)
        memory = memory_of(whole)
    return found


def is_kept_by_python(memory: Memory) -> bool:
    """Whether ``memory`` belongs to a Python object, such as a NumPy array."""
    return (
        bool(_KEEPERS)
        and memory.deleter == _CLOSURE
        and tuple(_words(memory.context, _CLOSURE_WORDS)[3:]) in _KEEPERS
    )


def keeper(memory: Memory) -> Any:
    """The Python object that owns the memory; only if :func:`is_kept_by_python`."""
    return ctypes.cast(_words(memory.context, 2)[1], ctypes.py_object).value


def _references_of_one() -> int:
    """``sys.getrefcount`` of an object that a tensor keeps and a variable refers to."""
    tensor = torch.frombuffer(bytearray(8), dtype=torch.uint8)
    memory = memory_of(storage_address(tensor))
    if memory is None or not is_kept_by_python(memory):
        return 0
    found = keeper(memory)
    return sys.getrefcount(found)


ALONE = _references_of_one()
"""``sys.getrefcount(variable)`` of an object that ``variable`` and one other object refer to."""


def _mapping_deleter() -> int | None:
    """The function that releases a mapped file: the deleter of a mapping of this file."""
    try:
        return _deleter(torch.UntypedStorage.from_file(__file__, False, 64))  # type: ignore[arg-type]
    except RuntimeError:  # in an archive
        return None


_MAPPED = _mapping_deleter()


def is_private_mapping(memory: Memory) -> bool:
    """Whether it is a private mapping of a file, whose writes nobody else sees.

    PyTorch reports the name of a shared mapping, but for a private one it reports nothing that would not also
    hold for a block of shared memory. The operating system knows; where it cannot be queried, the result is
    False.
    """
    if memory.deleter != _MAPPED:
        return False
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                place, rights = line.split(maxsplit=2)[:2]
                start, end = (int(number, 16) for number in place.split("-"))
                if start <= memory.data < end:
                    return rights.endswith("p")
    except OSError:
        pass
    return False


def shared_file(storage: torch.UntypedStorage) -> str | None:
    """The file in which others see writes to the storage, if there is one."""
    return storage._get_filename() or None


def _find_flag() -> int | None:
    """Offset of the byte that says whether a storage can be resized: creating an array changes it."""
    if numpy is None or torch._C._len_torch_dispatch_stack():
        return None
    for offset in range(_MOST_WORDS * _WORD):  # also from the front, each time with a new storage
        probe = torch.empty(2, device="cpu")
        flag = ctypes.c_ubyte.from_address(storage_address(probe) + offset)
        before, array = flag.value, probe.numpy()
        if (before, flag.value) == (1, 0):
            del array
            return offset
    return None


_FLAG_OFFSET = _find_flag()


def is_resizable(tensor: torch.Tensor) -> bool:
    """``tensor.untyped_storage().resizable()``, without creating the Python object of the storage."""
    if _FLAG_OFFSET is None:
        return _TensorBase.untyped_storage(tensor).resizable()
    return bool(ctypes.c_ubyte.from_address(storage_address(tensor) + _FLAG_OFFSET).value)


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether the memory is the CPU allocator's, and PyTorch has never passed it to NumPy."""
    memory = memory_of(storage_address(tensor))
    return (memory is None or memory.deleter == OWN) and is_resizable(tensor)


def is_allocated(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is the allocator's of its device, rather than NumPy's or a file's."""
    if _TensorBase.device.__get__(tensor).type != "cpu":
        return True
    memory = memory_of(storage_address(tensor))
    return memory is None or not memory.data or memory.deleter == OWN


def use_count(tensor: torch.Tensor) -> int:
    """C++ references to the tensor, including Python's."""
    return tensor._use_count()  # type: ignore[attr-defined]


def are_alone(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether only these tensors, which are on one storage, refer to it."""
    memory = _TensorBase.untyped_storage(tensors[0])
    others = torch._C._storage_Use_Count(memory._cdata) - 1 - len(tensors)
    return others == 0 and sys.getrefcount(memory) == _OWN_REFERENCES


def address_of(tensor: torch.Tensor) -> int | None:
    """Identity of the storage of an ordinary tensor on the CPU; ``None`` for any other kind."""
    if _TensorBase.layout.__get__(tensor) is not torch.strided:
        return None
    if _TensorBase.device.__get__(tensor).type != "cpu":
        return None
    try:
        return int(storage_address(tensor))
    except RuntimeError:  # nested, quantized per channel, ...
        return None


def referents_of(objects: Iterable[Any]) -> list[Any]:
    """The objects that ``objects`` refer to, according to the garbage collector: once for each reference."""
    return gc.get_referents(*objects)
