"""Atomic writes: a file is written next to its destination and renamed when complete."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import tempfile
import time
from functools import partial
from pathlib import Path

from ...process.deferred_signals import deferred
from ...process.global_state_transaction import complete

PATIENCE = 10.0
"""Seconds that a named pipe is given to get a reader."""


def write_whole(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``; on any failure, an existing file stays unchanged. Symbolic links are
    followed. An existing file keeps its permissions; a new one gets the default permissions of the process.
    If ``path`` is not a regular file (a pipe, a terminal), or its folder is not writable, it is written in
    place.

    Raises:
        OSError: the folder is missing, the disk is full, permission is denied, or nobody reads from a named
            pipe; no temporary file remains.
    """
    try:
        if _is_stream(path):
            _send(path, data)
        else:
            _write(Path(os.path.realpath(path)), data)
    except OSError as error:  # name the file that was asked for, not the temporary one
        raise OSError(error.errno, error.strerror, str(path)) from None


def _is_stream(path: Path) -> bool:
    """Whether ``path`` exists and is not a regular file.

    System links such as ``/dev/stdout`` may point to something without a path.
    """
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False


def _send(path: Path, data: bytes) -> None:
    with os.fdopen(_opened(path), "wb") as file:
        file.write(data)


def _opened(path: Path) -> int:
    """Open for writing; opening a named pipe would wait for a reader forever."""
    if not path.is_fifo():
        return os.open(path, os.O_WRONLY)
    end = time.monotonic() + PATIENCE
    while True:
        try:
            number = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if time.monotonic() >= end:
                raise OSError(errno.ENXIO, "nobody reads from this pipe", str(path)) from None
            time.sleep(0.01)
        else:
            os.set_blocking(number, True)
            return number


def _write(place: Path, data: bytes) -> None:
    try:
        mode: int | None = stat.S_IMODE(place.stat().st_mode)
        if not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
    except FileNotFoundError:
        mode = None
    name = ""
    try:
        try:
            with deferred():  # else the file may exist before its name is known
                number, name = tempfile.mkstemp(prefix=".lazyviz-", dir=place.parent)
        except PermissionError:
            if mode is None:
                raise
            _write_in_place(place, data)
            return
        with os.fdopen(number, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode if mode is not None else 0o666 & ~_umask())
        os.replace(name, place)
    except BaseException:
        if name:
            with contextlib.suppress(OSError):  # it was removed with its folder, or has been renamed already
                os.unlink(name)
        raise


def _write_in_place(place: Path, data: bytes) -> None:
    """Overwrite a file, and put its content back on failure."""
    with place.open("r+b", buffering=0) as file:
        before = file.read()
        try:
            _overwrite(file, data)
        except BaseException:
            complete(partial(_overwrite, file, before))
            raise


def _overwrite(file: io.FileIO, data: bytes) -> None:
    file.seek(0)
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
    file.truncate(len(data))
    os.fsync(file.fileno())


def _umask() -> int:
    """The umask of the process; it can be read only by setting it."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith("Umask:"):
                    return int(line.split()[1], 8)
    except OSError:
        pass
    before = os.umask(0o077)
    os.umask(before)
    return before
