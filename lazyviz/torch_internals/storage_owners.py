"""Private torch APIs for the ownership of a storage's memory, and other references to it.

Beside :mod:`lazyviz.torch_internals.private_api`, for :mod:`lazyviz.record.interception.memory_holders`.
``tests/test_torch_internals.py`` checks each entry.  PyTorch has no public way to ask who owns a storage's
memory: the function that will free it tells, and what that function is given, which are words of the C++
object.  Where they are is found by looking for known ones; where that fails, all memory that cannot be
resized counts as shared.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

numpy: ModuleType | None
try:
    import numpy
except ImportError:  # without it no array can show a tensor's memory
    numpy = None

_WORD = ctypes.sizeof(ctypes.c_void_p)
_MOST_WORDS = 16
_TensorBase: Any = torch._C.TensorBase

# To the C++ tensor, not to Python's object: no weak reference that `swap_tensors` would refuse.
WeakTensor: Any = torch._C._WeakTensorRef  # type: ignore[attr-defined]
storage_address = torch._C._storage_address  # type: ignore[attr-defined]


_OWN_REFERENCES = 3  # to a Python storage in a function that has just asked for it


class Memory(NamedTuple):
    """Where a storage's memory is, which function frees it, and what that is given."""

    data: int
    deleter: int
    context: int


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_size_t * count).from_address(address))


def _find_memory() -> int | None:
    """Offset of data, deleter and context in a ``StorageImpl``: the CPU's own allocator is given the data.

    It is looked for from the front: what is behind a storage may be another's memory, or none.
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
    """What the storage at an address says of its memory; ``None``: there is no telling."""
    return None if _MEMORY_OFFSET is None else Memory(*_words(storage + _MEMORY_OFFSET, 3))


def _deleter(storage: torch.UntypedStorage) -> int | None:
    memory = memory_of(storage._cdata)
    return None if memory is None else memory.deleter


# Frees what the CPU's own allocator has given, which files are read into, too.
OWN = _deleter(torch.UntypedStorage(64))
# Lets go of another storage that this one is a part of, as safetensors and `torch.load(mmap=True)` cut files.
_PART = _deleter(torch.UntypedStorage(64)[0:8])
# A function object of C++ with what it refers to: an object of Python, if it is one of those below.
_CLOSURE = _deleter(torch.frombuffer(bytearray(8), dtype=torch.uint8).untyped_storage())
_CLOSURE_WORDS = 5  # the data, two of what it refers to, its manager, its caller


def _find_keepers() -> set[tuple[int, ...]]:
    """The code of the closures by which tensors keep a Python object, whose memory they show."""
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
    """The address of the storage that ``memory`` is a part of, if it is one."""
    return memory.context if memory.deleter == _PART else None


def is_kept_by_python(memory: Memory) -> bool:
    """Whether ``memory`` is that of a Python object, such as a NumPy array."""
    return (
        bool(_KEEPERS)
        and memory.deleter == _CLOSURE
        and tuple(_words(memory.context, _CLOSURE_WORDS)[3:]) in _KEEPERS
    )


def keeper(memory: Memory) -> Any:
    """The Python object whose memory it is; only where :func:`is_kept_by_python`."""
    return ctypes.cast(_words(memory.context, 2)[1], ctypes.py_object).value


def _references_of_one() -> int:
    """What ``sys.getrefcount`` says of an object that a tensor keeps and a variable has been given."""
    tensor = torch.frombuffer(bytearray(8), dtype=torch.uint8)
    memory = memory_of(storage_address(tensor))
    if memory is None or not is_kept_by_python(memory):
        return 0
    found = keeper(memory)
    return sys.getrefcount(found)


ALONE = _references_of_one()
"""``sys.getrefcount(variable)`` of an object that ``variable`` and one other refer to."""


def _mapping_deleter() -> int | None:
    """What lets go of a file in memory: that of a mapping of this one."""
    try:
        return _deleter(torch.UntypedStorage.from_file(__file__, False, 64))  # type: ignore[arg-type]
    except RuntimeError:  # in an archive
        return None


_MAPPED = _mapping_deleter()


def is_private_mapping(memory: Memory) -> bool:
    """Whether it is a mapped file's, of which nobody else sees what is written to it.

    PyTorch tells a shared mapping's name, but nothing of a private one that a block of shared memory would
    not say, too; the operating system knows.  Where it cannot be asked nothing is known.
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
    """The file that others see what is written to the storage in, if there is one."""
    return storage._get_filename() or None


def _find_flag() -> int | None:
    """Offset of the byte that says whether a storage can be resized: what making an array changes."""
    if numpy is None or torch._C._len_torch_dispatch_stack():
        return None
    for offset in range(_MOST_WORDS * _WORD):  # from the front, too: each time with a storage of its own
        probe = torch.empty(2, device="cpu")
        flag = ctypes.c_ubyte.from_address(storage_address(probe) + offset)
        before, array = flag.value, probe.numpy()
        if (before, flag.value) == (1, 0):
            del array
            return offset
    return None


_FLAG_OFFSET = _find_flag()


def is_resizable(tensor: torch.Tensor) -> bool:
    """``tensor.untyped_storage().resizable()``, without the Python object that stays with the storage."""
    if _FLAG_OFFSET is None:
        return _TensorBase.untyped_storage(tensor).resizable()
    return bool(ctypes.c_ubyte.from_address(storage_address(tensor) + _FLAG_OFFSET).value)


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether the memory is the CPU allocator's, and PyTorch has never given it to NumPy."""
    memory = memory_of(storage_address(tensor))
    return (memory is None or memory.deleter == OWN) and is_resizable(tensor)


def use_count(tensor: torch.Tensor) -> int:
    """References of C++ to the tensor, Python's one included."""
    return tensor._use_count()  # type: ignore[attr-defined]


def are_alone(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether nothing but these tensors, which are on one storage, refers to it."""
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
    """What each of ``objects`` refers to, as far as the garbage collector knows: once for each reference."""
    return gc.get_referents(*objects)
