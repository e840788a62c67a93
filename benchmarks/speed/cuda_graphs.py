"""On a GPU: the small transformer's step replayed as a CUDA Graph, beside eager PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

from .figures import Figure, Settings


def measure(settings: Settings) -> Iterator[Figure]:
    yield Figure("CUDA Graph replay / eager", "", None, note="not there yet")
