"""Attributes of other people's modules and classes, and the code of their functions, replaced for a while."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

_MISSING = object()


class Patches:
    """Attributes replaced for a while."""

    def __init__(self) -> None:
        self._set: list[tuple[Any, str, Any, Any]] = []  # owner, name, what was there, what is
        self._last: list[tuple[Any, str, Any, Any]] = []
        self._expected: list[tuple[Any, str, Any]] = []  # namespace, name, what was there before `_last`

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._set.append((owner, name, vars(owner).get(name, _MISSING), value))
        setattr(owner, name, value)

    def again(self) -> bool:
        """Set what was restored last, if what it stands in for has not changed since; False: it has."""
        if not self._last:
            return False
        for namespace, name, before in self._expected:
            if namespace.get(name, _MISSING) is not before:
                return False
        self._set = self._last
        for owner, name, _, value in self._set:
            setattr(owner, name, value)
        return True

    def restore(self) -> None:
        if not self._set:
            return
        for owner, name, before, _ in reversed(self._set):
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        if self._set is not self._last:
            # Before the first of several patches of one attribute.
            first = {(owner, name): before for owner, name, before, _ in reversed(self._set)}
            self._expected = [(vars(owner), name, before) for (owner, name), before in first.items()]
        self._set, self._last = [], self._set

    def __bool__(self) -> bool:
        return bool(self._set)


class CodePatch:
    """What a Python function does, replaced for a while.

    Whoever holds the function calls the replacement, too, and no class is changed: setting ``__call__`` of a
    class makes Python visit all its subclasses, of which ``nn.Module`` may have thousands.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        assert isinstance(function, FunctionType)
        self._function = function
        self._before: tuple[Any, Any, Any] | None = None

    def set(self, replacement_of: Callable[[FunctionType], FunctionType]) -> None:
        """Replace it by ``replacement_of(original)``: a function of the same arguments, and no closure."""
        function = self._function
        self._before = (function.__code__, function.__defaults__, function.__kwdefaults__)
        original = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__
        )
        original.__kwdefaults__ = function.__kwdefaults__
        replacement = replacement_of(original)
        function.__defaults__, function.__kwdefaults__ = replacement.__defaults__, replacement.__kwdefaults__
        function.__code__ = replacement.__code__

    def restore(self) -> None:
        if self._before is not None:
            function = self._function
            function.__code__, function.__defaults__, function.__kwdefaults__ = self._before
            self._before = None

    def __bool__(self) -> bool:
        return self._before is not None
