"""Atomic writes: a file is written next to its destination and renamed when complete."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``; on any failure, an existing file stays unchanged. Symbolic links are
    followed. An existing file keeps its permissions; a new one gets the default permissions of the process.
    If ``path`` is not a regular file (a pipe, a terminal), or its folder is not writable, it is written in
    place.

    Raises:
        OSError: the folder is missing, the disk is full, or permission is denied; no temporary file remains.
    """
    place = Path(os.path.realpath(path))
    try:
        mode: int | None = stat.S_IMODE((found := place.stat()).st_mode)
        if not stat.S_ISREG(found.st_mode):
            place.write_bytes(data)
            return
    except FileNotFoundError:
        mode = None
    try:
        number, name = tempfile.mkstemp(prefix=".lazyviz-", dir=place.parent)
    except PermissionError:
        if mode is None:
            raise
        place.write_bytes(data)
        return
    except OSError as error:  # name the file that was asked for, not the temporary one
        raise type(error)(error.errno, error.strerror, str(path)) from None
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode if mode is not None else 0o666 & ~_umask())
        os.replace(name, place)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


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
