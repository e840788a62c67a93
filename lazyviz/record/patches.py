"""Attributes of other people's modules and classes, replaced for a while."""

from __future__ import annotations

from typing import Any

_MISSING = object()


class Patches:
    """Attributes replaced for a while."""

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._saved.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def restore(self) -> None:
        for owner, name, value in reversed(self._saved):
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._saved.clear()

    def __bool__(self) -> bool:
        return bool(self._saved)
