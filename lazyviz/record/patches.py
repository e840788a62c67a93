"""Attributes of other people's modules and classes, and the code of their functions, replaced for a while."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from itertools import repeat
from types import FunctionType, ModuleType
from typing import Any

from .. import _torch_random

_MISSING = object()
_IMMUTABLE = 1 << 8  # of ``type.__flags__``: a static type of C, whose attributes cannot be set
# Names with underscores on both sides that are no slot of a type: Python need not be told of them one by one.
_NO_SLOTS = frozenset(
    {"__array__", "__cuda_array_interface__", "__deepcopy__", "__dlpack__", "__format__", "__reduce_ex__"}
)


class _Owner:
    """What is replaced of one module or class: all of it at once.

    For each attribute that is set Python looks at the class and its subclasses.  So they are put into its
    dictionary, which a class's read-only ``__dict__`` refers to, and the last is set: then Python looks.
    """

    def __init__(self, owner: Any, changes: Mapping[str, tuple[Any, Any]]) -> None:
        """``changes``: what is there and what comes in its place, by name."""
        self._owner = owner
        self._static = isinstance(owner, type) and bool(owner.__flags__ & _IMMUTABLE)
        self._namespace = _torch_random.dictionary_of(owner)
        one_by_one = list(changes)
        setter: Any = type(owner).__setattr__
        if self._static or setter is ModuleType.__setattr__:
            one_by_one = []
        elif setter is type.__setattr__:
            slots = [name for name in changes if name.startswith("__") and name not in _NO_SLOTS]
            one_by_one = slots or one_by_one[-1:]
        together = [name for name in changes if name not in one_by_one]
        self._before = {name: before for name, (before, _) in changes.items()}
        self._values = {name: changes[name][1] for name in together}
        self._present = {name: self._before[name] for name in together if self._before[name] is not _MISSING}
        self._absent = [name for name in together if self._before[name] is _MISSING]
        self._one_by_one = [(name, *changes[name]) for name in one_by_one]

    def is_unchanged(self) -> bool:
        """Whether what is there now is what was there before."""
        get = self._namespace.get
        return all(map(operator.is_, map(get, self._before, repeat(_MISSING)), self._before.values()))

    def replace(self) -> None:
        self._namespace.update(self._values)
        for name, _, value in self._one_by_one:
            setattr(self._owner, name, value)
        if self._static:
            _torch_random.has_changed(self._owner)

    def restore(self) -> None:
        self._namespace.update(self._present)
        for name in self._absent:
            del self._namespace[name]
        for name, before, _ in self._one_by_one:
            if before is _MISSING:
                delattr(self._owner, name)
            else:
                setattr(self._owner, name, before)
        if self._static:
            _torch_random.has_changed(self._owner)


class Patches:
    """Attributes replaced for a while."""

    def __init__(self) -> None:
        self._set: list[tuple[Any, str, Any, Any]] = []  # owner, name, what was there, what is
        self._last: list[_Owner] = []
        self._again = False

    def set(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner).get(name, _MISSING)
        self._set.append((owner, name, before, value))
        _Owner(owner, {name: (before, value)}).replace()

    def again(self) -> bool:
        """Set what was restored last, if what it stands in for has not changed since; False: it has."""
        if not self._last or not all(map(_Owner.is_unchanged, self._last)):
            return False
        for owner in self._last:
            owner.replace()
        self._again = True
        return True

    def restore(self) -> None:
        if self._again:
            for last in self._last:
                last.restore()
            self._again = False
        elif self._set:
            owners: dict[int, tuple[Any, dict[str, tuple[Any, Any]]]] = {}
            for owner, name, before, value in self._set:
                _, changes = owners.setdefault(id(owner), (owner, {}))
                # Of several patches of one attribute what was there before the first, and what is now.
                changes[name] = changes.get(name, (before,))[0], value
            self._last = [_Owner(owner, changes) for owner, changes in owners.values()]
            self._set = []
            for last in self._last:
                last.restore()

    def __bool__(self) -> bool:
        return self._again or bool(self._set)


class CodePatch:
    """What a Python function does, replaced for a while.

    Whoever holds the function calls the replacement, too, and no class is changed: setting ``__call__`` of a
    class makes Python visit all its subclasses, of which ``nn.Module`` may have thousands.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        assert isinstance(function, FunctionType)
        self._function = function
        self._before: tuple[Any, Any, Any] | None = None
        # The last replacement: of what, by what, and its own.
        self._made: tuple[Any, Any, tuple[Any, Any, Any]] | None = None

    def set(self, replacement_of: Callable[[FunctionType], FunctionType]) -> None:
        """Replace it by ``replacement_of(original)``: a function of the same arguments, and no closure.

        The same ``replacement_of`` is not asked again as long as the function stays what it was.
        """
        self._before = before = _parts(self._function)
        made = self._made
        if made is None or made[1] is not replacement_of or not all(map(operator.is_, made[0], before)):
            code, defaults, keywords = before
            original = FunctionType(code, self._function.__globals__, self._function.__name__, defaults)
            original.__kwdefaults__ = keywords
            made = self._made = before, replacement_of, _parts(replacement_of(original))
        self._become(made[2])

    def restore(self) -> None:
        if self._before is not None:
            self._become(self._before)
            self._before = None

    def _become(self, parts: tuple[Any, Any, Any]) -> None:
        function = self._function
        function.__code__, function.__defaults__, function.__kwdefaults__ = parts

    def __bool__(self) -> bool:
        return self._before is not None


def _parts(function: FunctionType) -> tuple[Any, Any, Any]:
    return function.__code__, function.__defaults__, function.__kwdefaults__
