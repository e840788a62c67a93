"""Streams of operator calls that eager PyTorch makes, observed without changing them (``op_stream.cpp``).

Private:

- ``at::addThreadLocalCallback``, ``at::RecordFunction``: PyTorch's profiler observes calls through them, and
  there is no public way to do so.
"""

from __future__ import annotations

from typing import Any, NewType

from . import native_module_loader

Stream = NewType("Stream", object)
"""The calls of one observation, in order."""

_native: Any = native_module_loader.load("op_stream.cpp")

is_available: bool = _native is not None


def observed_thread() -> int:
    """The thread whose calls are being observed, or 0; only one observation is possible at a time."""
    return 0 if _native is None else int(_native.thread())


def observe(expected: Stream | None = None, *, tensors: bool = True) -> bool:
    """Observe the calls of this thread, and of backward passes that it starts, until :func:`end`.

    Returns False if calls are already being observed.

    With ``expected``, they are compared with that stream: by name and, with ``tensors``, by the shapes and
    dtypes of their tensors, which takes about twice the time.  Without it, they make a new stream.
    """
    return bool(_native.begin(expected, tensors))


def end() -> Stream | bool | None:
    """End the observation; the new stream, or whether the calls were those of the expected stream.

    ``None`` if nothing was being observed.
    """
    if _native is None:
        return None
    result: Stream | bool | None = _native.end()
    return result


def names(stream: Stream) -> list[str]:
    """The names of the calls of a stream, such as ``"aten::addmm"``, those inside of other calls included."""
    result: list[str] = _native.names(stream)
    return result
