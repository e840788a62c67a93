"""Attribute patches: temporary replacement of attributes and function code of other modules."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from ...process.paths import PACKAGE
from ...torch_internals import generators

MISSING = object()
_IMMUTABLE = 1 << 8  # of ``type.__flags__``: a static type of C, whose attributes cannot be set
# Names with underscores on both sides that are no slot of a type: Python need not be told of them one by one.
_NO_SLOTS = frozenset(
    {"__array__", "__cuda_array_interface__", "__deepcopy__", "__dlpack__", "__format__", "__reduce_ex__"}
)


class Originals:
    """The originals before the first patch, by owner and name, which a reset restores."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[Any, Any]] = {}

    def note(self, owner: Any, name: str, value: Any) -> None:
        if not is_ours(value):
            self._known[id(owner), name] = owner, value

    def replaced(self) -> list[tuple[Any, str, Any]]:
        """Owner, name, and original of each attribute that is currently patched."""
        return [
            (owner, name, value)
            for (_, name), (owner, value) in self._known.items()
            if is_ours(vars(owner).get(name, MISSING))
        ]

    def put_back(self) -> None:
        for owner, name, value in self.replaced():
            exchange((_change(owner, {name: (value, None)}),), True)


def is_ours(value: Any) -> bool:
    """Whether an attribute is a function, a property or a class of this package."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    if isinstance(value, FunctionType):  # which `functools.wraps` has given another module's name
        module = value.__globals__.get("__name__")
    else:
        module = getattr(value if isinstance(value, type) else type(value), "__module__", "")
        if not _is_of_package(module):
            module = getattr(type(value), "__module__", "")
    return _is_of_package(module)


def _is_of_package(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] == __name__.partition(".")[0]


originals = Originals()
everything: weakref.WeakSet[Patches] = weakref.WeakSet()
_all_code: weakref.WeakSet[CodePatch] = weakref.WeakSet()


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
        generators.dictionary_of(owner),
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
            generators.has_changed(owner)
        for name, *values in alone:
            if values[not back] is MISSING:
                if name in namespace:
                    delattr(owner, name)
            else:
                setattr(owner, name, values[not back])
    return True


class Patches:
    """Attributes replaced for a while.

    What is replaced is noted before it is; putting things back may be interrupted, and done again.
    """

    exchange = staticmethod(exchange)  # which :mod:`lazyviz.record.native_recorder` has a compiled form of

    def __init__(self) -> None:
        self._set: list[tuple[Any, str, Any, Any]] = []  # owner, name, what was there, what is
        self._complete = False  # whether all of them are set
        self._last: tuple[Change, ...] = ()
        self._again = False
        everything.add(self)

    def set(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner).get(name, MISSING)
        originals.note(owner, name, before)
        self._set.append((owner, name, before, value))
        Patches.exchange((_change(owner, {name: (before, value)}),), False)

    def complete(self) -> None:
        """All are set, and may be set again as they are."""
        self._complete = True

    def reapply(self) -> bool:
        """Set what was restored last, if what it stands in for has not changed since; False: it has."""
        if self._last and not self._again:
            self._again = True
            self._again = Patches.exchange(self._last, False)
        return self._again

    def restore(self) -> None:
        if self._again:
            Patches.exchange(self._last, True)
            self._again = False
        elif self._set:
            owners: dict[int, tuple[Any, dict[str, tuple[Any, Any]]]] = {}
            for owner, name, before, value in self._set:
                _, entries = owners.setdefault(id(owner), (owner, {}))
                # Of several patches of one attribute what was there before the first, and what is now.
                entries[name] = entries.get(name, (before,))[0], value
            changes = tuple([_change(owner, entries) for owner, entries in owners.values()])
            Patches.exchange(changes, True)
            self._last = changes if self._complete else ()
            self._set, self._complete = [], False

    def rebase(self, owner: Any, name: str, before: Any) -> None:
        """An attribute is to become ``before`` when this is restored: somebody else has replaced it, too."""
        self._set = [
            (*entry[:2], before, entry[3]) if entry[0] is owner and entry[1] == name else entry
            for entry in self._set
        ]
        self._last = tuple(
            _change(owner, {**_entries(change), name: (before, _entries(change)[name][1])})
            if change.owner is owner and name in _entries(change)
            else change
            for change in self._last
        )

    def __bool__(self) -> bool:
        return self._again or bool(self._set)


def _entries(change: Change) -> dict[str, tuple[Any, Any]]:
    return {name: (before, value) for name, before, value in (*change.together, *change.alone)}


class CodePatch:
    """What a Python function does, replaced for a while.

    Whoever holds the function calls the replacement, too, and no class is changed: setting ``__call__`` of a
    class makes Python visit all its subclasses, of which ``nn.Module`` may have thousands.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        assert isinstance(function, FunctionType)
        self._function = function
        self._original = _parts(function)
        self._before: tuple[Any, Any, Any] | None = None
        # The last replacement: of what, by what, and its own.
        self._made: tuple[Any, Any, tuple[Any, Any, Any]] | None = None
        _all_code.add(self)

    def set(self, replacement_of: Callable[[FunctionType], FunctionType]) -> None:
        """Replace it by ``replacement_of(original)``: a function of the same arguments, and no closure.

        The same ``replacement_of`` is not asked again as long as the function stays what it was.
        """
        if self._before is not None:
            return
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

    @property
    def is_replaced(self) -> bool:
        """Whether the function is one of this package, whatever was noted."""
        return self._function.__code__.co_filename.startswith(PACKAGE)

    @property
    def name(self) -> str:
        return f"code of {self._function.__module__}.{self._function.__qualname__}"

    def put_back(self) -> None:
        """:meth:`restore`, past what was noted."""
        self.restore()
        if self.is_replaced:
            self._become(self._original)

    def _become(self, parts: tuple[Any, Any, Any]) -> None:
        function = self._function
        function.__code__, function.__defaults__, function.__kwdefaults__ = parts

    def __bool__(self) -> bool:
        return self._before is not None


@contextmanager
def out_of_place() -> Iterator[None]:
    """Context in which nothing of ours stands in for anything, in any thread.

    What has been replaced by others meanwhile is what our patches go back to later.
    """
    code = [(patch, _parts(patch._function)) for patch in _all_code if patch]
    changes = []
    for owner, name, original in originals.replaced():
        changes.append(_change(owner, {name: (original, vars(owner)[name])}))
    try:
        for patch, _ in code:
            if patch._before is not None:
                patch._become(patch._before)
        exchange(tuple(changes), True)
        yield
    finally:
        for change in changes:
            ((name, (before, value)),) = _entries(change).items()
            found = change.namespace.get(name, MISSING)
            if found is not before:
                originals.note(change.owner, name, found)
                for patches in list(everything):
                    patches.rebase(change.owner, name, found)
            exchange((_change(change.owner, {name: (found, value)}),), False)
        for patch, replacement in code:
            patch._become(replacement)


def _parts(function: FunctionType) -> tuple[Any, Any, Any]:
    return function.__code__, function.__defaults__, function.__kwdefaults__
