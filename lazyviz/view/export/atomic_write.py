"""Atomic writes: a file is written next to its destination and renamed when complete."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Make ``data`` the content of ``path``; whatever fails, the file that was there is as it was.

    A symbolic link is followed.  A file that was there keeps its permissions; a new one gets those that the
    process gives to new files.  What is not a file (a pipe, a terminal) is written to, and so is a file in
    a folder that takes no others.

    Raises:
        OSError: the folder is missing, or there is no room or no right to write; nothing is left behind.
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
    """What new files are not permitted; asking for it is setting it."""
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
