"""Storages whose memory is read or written past every op: what is pending there runs first."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from .. import _torch_memory
from .order import closure
from .patches import Patches
from .pending import needs_absent
from .recorder import Tape

# The rest of a storage's methods call ops, or look at its size alone.
_METHODS = (
    "_byteswap",
    "_set_from_file",
    "_share_cuda_",
    "_share_fd_cpu_",
    "_share_filename_cpu_",
    "_swap_data_ptr_",
    "_write_file",
    "data_ptr",
)


def patch_storages(tape: Tape, patches: Patches) -> None:
    """Make access to a storage's memory that no op tells of a sync point."""
    cls = torch.UntypedStorage
    for name in _METHODS:
        if hasattr(cls, name):
            patches.set(cls, name, _after_accesses(tape, getattr(cls, name)))
    get_item = cls.__getitem__

    @functools.wraps(get_item)
    def __getitem__(storage: torch.UntypedStorage, index: Any) -> Any:
        if isinstance(index, slice):  # another storage on the same memory
            before_access(tape, storage)
        return get_item(storage, index)

    patches.set(cls, "__getitem__", __getitem__)
    write_record = _torch_memory.FILE_WRITER.write_record

    @functools.wraps(write_record)
    def write(writer: Any, name: str, content: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(content, torch.UntypedStorage):
            before_access(tape, content)
        return write_record(writer, name, content, *args, **kwargs)

    patches.set(_torch_memory.FILE_WRITER, "write_record", write)


def before_access(tape: Tape, storage: torch.UntypedStorage) -> None:
    """Evaluate what is pending on ``storage``, its readers too: who gets the memory may write it."""
    if not tape.pending or tape.shapes.inferring or tape.running == threading.get_ident():
        return
    tracked = tape.storages.get(storage._cdata)
    if tracked is None or not tracked.has_pending_access:
        return
    # Who reads it for an absent card never runs.
    readers = [node for node in tracked.readers if not needs_absent(closure([node]))]
    with tape.lock:
        needed = [node for node in (tracked.writer, *readers) if node is not None and node.state != "done"]
        if needed:
            tape.sync("storage access", needed, storage.nbytes())
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
