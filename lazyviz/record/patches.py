"""Attributes of other people's modules and classes, and the code of their functions, replaced for a while."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from .. import _torch_random

MISSING = object()
_IMMUTABLE = 1 << 8  # of ``type.__flags__``: a static type of C, whose attributes cannot be set
# Names with underscores on both sides that are no slot of a type: Python need not be told of them one by one.
_NO_SLOTS = frozenset(
    {"__array__", "__cuda_array_interface__", "__deepcopy__", "__dlpack__", "__format__", "__reduce_ex__"}
)


class Change(NamedTuple):
    """What is replaced of one module or class: a name, what was there, and what comes in its place, of each.

    For each attribute that is set Python looks at the class and its subclasses.  So those that are no slots
    are put into its dictionary ``together``, and Python is told once.
    """

    owner: Any
    namespace: dict[str, Any]
    is_class: bool
    together: tuple[tuple[str, Any, Any], ...]
    alone: tuple[tuple[str, Any, Any], ...]


def _change(owner: Any, entries: Mapping[str, tuple[Any, Any]]) -> Change:
    """``entries``: what is there and what comes in its place, by name."""
    setter: Any = type(owner).__setattr__
    is_class = isinstance(owner, type)
    together: Collection[str] = ()
    if setter is ModuleType.__setattr__ or (is_class and owner.__flags__ & _IMMUTABLE):
        together = entries
    elif setter is type.__setattr__:
        together = [name for name in entries if not name.startswith("__") or name in _NO_SLOTS]
    rows = [(name in together, (name, *entry)) for name, entry in entries.items()]
    return Change(
        owner,
        _torch_random.dictionary_of(owner),
        is_class and bool(together),
        tuple([row for is_together, row in rows if is_together]),
        tuple([row for is_together, row in rows if not is_together]),
    )


def exchange(changes: tuple[Change, ...], back: bool) -> bool:
    """Put all of ``changes`` in place, or what was there before ``back``.

    False, and nothing is done, if what they are to stand in for is not there any more.
    """
    if not back:
        for change in changes:
            for name, before, _ in (*change.together, *change.alone):
                if change.namespace.get(name, MISSING) is not before:
                    return False
    for owner, namespace, is_class, together, alone in changes:
        for name, *values in together:
            if values[not back] is MISSING:
                namespace.pop(name, None)
            else:
                namespace[name] = values[not back]
        if is_class:
            _torch_random.has_changed(owner)
        for name, *values in alone:
            if values[not back] is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, values[not back])
    return True


class Patches:
    """Attributes replaced for a while."""

    exchange = staticmethod(exchange)  # which :mod:`.acceleration` has a compiled form of

    def __init__(self) -> None:
        self._set: list[tuple[Any, str, Any, Any]] = []  # owner, name, what was there, what is
        self._last: tuple[Change, ...] = ()
        self._again = False

    def set(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner).get(name, MISSING)
        self._set.append((owner, name, before, value))
        Patches.exchange((_change(owner, {name: (before, value)}),), False)

    def again(self) -> bool:
        """Set what was restored last, if what it stands in for has not changed since; False: it has."""
        self._again = bool(self._last) and Patches.exchange(self._last, False)
        return self._again

    def restore(self) -> None:
        if self._again:
            self._again = False
            Patches.exchange(self._last, True)
        elif self._set:
            owners: dict[int, tuple[Any, dict[str, tuple[Any, Any]]]] = {}
            for owner, name, before, value in self._set:
                _, entries = owners.setdefault(id(owner), (owner, {}))
                # Of several patches of one attribute what was there before the first, and what is now.
                entries[name] = entries.get(name, (before,))[0], value
            self._last = tuple([_change(owner, entries) for owner, entries in owners.values()])
            self._set = []
            Patches.exchange(self._last, True)

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
