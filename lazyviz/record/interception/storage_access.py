"""Storage access without an op (``data_ptr``, ``untyped_storage``, addresses): pending ops run first."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from ...process.tracebacks import shorten, shortened
from ...torch_internals import dispatcher_bypasses, fake_cuda_devices, private_api, storage_ownership
from .. import native_recorder
from ..dependency_closure import closure
from ..eager_fallback import note_copies
from ..intercept_ops_outside_blocks import refuse_forgotten, tensors_in
from ..sync_points import needs_absent
from ..tape import Tape
from ..tracked_storages import TrackedStorage
from .attribute_patches import Patches
from .torch_function import sees_calls
from .warning_routing import at_users_line

RAW_ACCESS = "raw memory access"
# Methods of tensors that hand out or replace a storage, with the cause that a sync point shows.
TENSOR_METHODS = {
    "data_ptr": "data_ptr",
    "untyped_storage": "storage access",
    "storage": "storage access",
    "_typed_storage": "storage access",
    "share_memory_": "share_memory_",
    "is_shared": "storage access",
    "set_": "set_",
    "resize_": "resize_",
}
# The other methods of a storage call ops, or only read its size.
_METHODS = (
    "_byteswap",
    "_set_from_file",
    "_share_cuda_",
    "_share_fd_cpu_",
    "_share_filename_cpu_",
    "_swap_data_ptr_",
    "_write_file",
    "data_ptr",
    "resize_",
)


class Addresses:
    """Accesses of C++ code to addresses of tensors, by any caller; only the compiled modules detect them."""

    def __init__(self, tape: Tape, before_read: Callable[[torch.Tensor, str], None]) -> None:
        self._tape = tape
        self._before_read = before_read

    def begin(self) -> None:
        native_recorder.watch_access(self._before_access)
        native_recorder.watch_calls(self._before_call)

    def end(self) -> None:
        """Restore the functions; accesses to pending tensors are still detected."""
        native_recorder.watch_calls(None)

    def _before_access(self, tensor: torch.Tensor) -> None:
        """Called before code takes a pending tensor's address, to read it, write it, or pass it on."""
        self._before_read(tensor, RAW_ACCESS)
        if not self._tape.shapes.inferring and self._tape.runs.running != threading.get_ident():
            refuse_forgotten(self._tape, (tensor,))

    def _before_call(self, number: int, args: Any, kwargs: Any) -> None:
        """Called before a C function reads the memory of its arguments, including tensors in lists."""
        if self._tape.pending:
            items = [*args, *(kwargs or {}).values()]
            if number >= len(dispatcher_bypasses.EXPORTS):
                items = [item for item in items if isinstance(item, (list, tuple))]
            for tensor in tensors_in(items):
                self._before_read(tensor, RAW_ACCESS)


def patch_numbers(tape: Tape, patches: Patches, before_read: Callable[[torch.Tensor, str], None]) -> None:
    """Make code that reads numbers in lists wait for the pending writes to them."""

    def reading(original: Callable[[torch.Tensor], Any]) -> Any:
        @functools.wraps(original)
        def method(tensor: torch.Tensor) -> Any:
            try:
                if sees_calls(tensor):
                    is_redispatched = private_api.is_redispatched(tensor)
                    before_read(tensor, RAW_ACCESS)
                    return (private_api.redispatching(original) if is_redispatched else original)(tensor)
                if tape.pending and dispatcher_bypasses.bypasses_modes():
                    before_read(tensor, RAW_ACCESS)
                traced = torch.jit.is_tracing()  # type: ignore[attr-defined]
                if traced or (tensor.requires_grad and tensor.numel() == 1):  # PyTorch warns
                    sources = tape.scopes.sources
                    return at_users_line(sources, sys._getframe(1), functools.partial(original, tensor))
                return original(tensor)
            except BaseException as error:
                shorten(error)
                raise

        return method

    for name in dispatcher_bypasses.NUMBERS:
        patches.set(torch.Tensor, name, reading(getattr(torch.Tensor, name)))


def patch_storages(tape: Tape, patches: Patches) -> None:
    """Turn accesses to a storage's memory that call no op into sync points."""
    cls = torch.UntypedStorage
    for name in _METHODS:
        if hasattr(cls, name):
            patches.set(cls, name, _after_accesses(tape, getattr(cls, name)))
    get_item = cls.__getitem__

    @functools.wraps(get_item)
    def __getitem__(storage: torch.UntypedStorage, index: Any) -> Any:
        if isinstance(index, slice) or storage_ownership.wholes_of(storage._cdata):
            before_access(tape, storage)
        with tape.recording.paused():  # indexing with a number reads by ops, from a tensor created for that
            result = get_item(storage, index)
        if isinstance(index, slice):  # another storage on the same memory
            tape.memory_holders.note_part(result)
        return result

    patches.set(cls, "__getitem__", __getitem__)
    write_record = dispatcher_bypasses.FILE_WRITER.write_record

    @functools.wraps(write_record)
    def write(writer: Any, name: str, content: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(content, torch.UntypedStorage):
            before_access(tape, content)
        return write_record(writer, name, content, *args, **kwargs)

    patches.set(dispatcher_bypasses.FILE_WRITER, "write_record", write)
    utils, rebuild = fake_cuda_devices.REBUILD_TENSOR
    patches.set(utils, rebuild, _loaded_immediately(tape, getattr(utils, rebuild)))
    for owner, name in dispatcher_bypasses.SCRIPT_WRITERS:
        patches.set(owner, name, _run_immediately(tape, getattr(owner, name), writes=True))
    for owner, name in dispatcher_bypasses.SCRIPT_READERS:
        patches.set(owner, name, _run_immediately(tape, getattr(owner, name), writes=False))


def before_access(tape: Tape, storage: torch.UntypedStorage) -> None:
    """Evaluate pending nodes on ``storage``, including readers: code that gets the memory may write it."""
    if not tape.pending or tape.shapes.inferring or tape.runs.running == threading.get_ident():
        return
    for address in (storage._cdata, *tape.memory_holders.beside(storage)):
        tracked = tape.tensors.storages.get(address)
        if tracked is not None and tracked.has_pending_access:
            _run_accesses(tape, tracked, storage.nbytes())


def _run_accesses(tape: Tape, tracked: TrackedStorage, nbytes: int) -> None:
    # Readers on an absent GPU never run.
    readers = [node for node in tracked.readers if not needs_absent(closure([node]))]
    with tape.runs.lock:
        needed = [node for node in (tracked.writer, *readers) if node is not None and node.state != "done"]
        if needed:
            tape.runs.sync("storage access", needed, nbytes)
    tracked.shadow = None


def _after_accesses(tape: Tape, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        before_access(tape, storage)
        for item in args:
            if isinstance(item, torch.UntypedStorage):
                before_access(tape, item)
        return original(storage, *args, **kwargs)

    return method


def _run_immediately(tape: Tape, original: Callable[..., Any], *, writes: bool) -> Callable[..., Any]:
    """A C++ function that accesses the memory of results of its own ops and, with ``writes``, any other
    memory.
    """

    @functools.wraps(original)
    @shortened
    def function(*args: Any, **kwargs: Any) -> Any:
        if writes and tape.pending and tape.runs.running != threading.get_ident():
            tape.runs.sync(f"TorchScript's {original.__name__}", [*tape.pending])
        with tape.recording.paused():
            return original(*args, **kwargs)

    return function


def _loaded_immediately(tape: Tape, original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that creates a tensor from a storage that was read from a file: it is not deferred."""

    @functools.wraps(original)
    def rebuild_tensor(*args: Any, **kwargs: Any) -> Any:
        with tape.recording.paused():
            made = original(*args, **kwargs)
        note_copies(tape, made)
        return made

    return rebuild_tensor
