"""Attributes of other people's modules and classes, replaced for a while."""

from __future__ import annotations

from typing import Any

_MISSING = object()


class Patches:
    """Attributes replaced for a while."""

    def __init__(self) -> None:
        self._set: list[tuple[Any, str, Any, Any]] = []  # owner, name, what was there, what is
        self._last: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._set.append((owner, name, vars(owner).get(name, _MISSING), value))
        setattr(owner, name, value)

    def again(self) -> bool:
        """Set what was restored last, if what it stands in for has not changed since; False: it has."""
        if not self._last or any(
            vars(owner).get(name, _MISSING) is not before
            for (owner, name), before in self._first(self._last).items()
        ):
            return False
        self._set = self._last
        for owner, name, _, value in self._set:
            setattr(owner, name, value)
        return True

    def restore(self) -> None:
        for owner, name, before, _ in reversed(self._set):
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._set, self._last = [], self._set

    @staticmethod
    def _first(patches: list[tuple[Any, str, Any, Any]]) -> dict[tuple[Any, str], Any]:
        """What each attribute was before the first of its patches."""
        return {(owner, name): before for owner, name, before, _ in reversed(patches)}

    def __bool__(self) -> bool:
        return bool(self._set)
