"""Attribute patches: temporary replacement of attributes and function code of other modules."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from ...process.install_paths import PACKAGE
from ...torch_internals import generators
from .torch_function import replacement_of

MISSING = object()
_IMMUTABLE = 1 << 8  # bit of ``type.__flags__``: a static C type, whose attributes cannot be set
# Dunder names that are not slots of a type: Python need not be notified of each of them.
_NO_SLOTS = frozenset(
    {"__array__", "__cuda_array_interface__", "__deepcopy__", "__dlpack__", "__format__", "__reduce_ex__"}
)


class Originals:
    """The originals before the first patch, by owner and name; a reset restores them."""

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
    if isinstance(value, FunctionType):  # `functools.wraps` has given it another module's name
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
    """The replacements in one module or class: for each, the name, the old and the new value.

    Whenever an attribute is set, Python updates the class and its subclasses. So names that are not slots are
    put into its dictionary ``together``, and Python is notified once.
    """

    owner: Any
    namespace: dict[str, Any]
    is_class: bool
    together: tuple[tuple[str, Any, Any], ...]
    alone: tuple[tuple[str, Any, Any], ...]


def _change(owner: Any, entries: Mapping[str, tuple[Any, Any]]) -> Change:
    """``entries``: the current value and its replacement, by name."""
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
    """Apply all of ``changes``, or with ``back`` restore the values before.

    Returns False, and changes nothing, if the values to be replaced are no longer there.
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
    """Temporarily replaced attributes.

    A replacement is noted before it is made. Restoring may be interrupted, and repeated.
    """

    exchange = staticmethod(exchange)  # :mod:`lazyviz.record.native_recorder` has a compiled form of it

    def __init__(self) -> None:
        self._set: list[tuple[Any, str, Any, Any]] = []  # owner, name, old value, new value
        self._complete = False  # whether all of them are set
        self._last: tuple[Change, ...] = ()
        self._again = False
        everything.add(self)

    def set(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner).get(name, MISSING)
        originals.note(owner, name, before)
        value = replacement_of(owner, getattr(owner, name, None), value)
        self._set.append((owner, name, before, value))
        Patches.exchange((_change(owner, {name: (before, value)}),), False)

    def complete(self) -> None:
        """Note that all are set, and can be set again in the same way."""
        self._complete = True

    def reapply(self) -> bool:
        """Set again what was restored last, if the replaced values have not changed since; False if they
        have.
        """
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
                # If an attribute has several patches: the value before the first, and the current one.
                entries[name] = entries.get(name, (before,))[0], value
            changes = tuple([_change(owner, entries) for owner, entries in owners.values()])
            Patches.exchange(changes, True)
            self._last = changes if self._complete else ()
            self._set, self._complete = [], False

    def rebase(self, owner: Any, name: str, before: Any) -> None:
        """Restoring will set an attribute to ``before``, because other code has replaced it as well."""
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
    """Temporary replacement of a Python function's code.

    Existing references to the function call the replacement, too, and no class is changed: setting
    ``__call__`` of a class makes Python visit all its subclasses, and ``nn.Module`` may have thousands of
    them.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        assert isinstance(function, FunctionType)
        self._function = function
        self._original = _parts(function)
        self._before: tuple[Any, Any, Any] | None = None
        # The last replacement: the original, the factory, and the result.
        self._made: tuple[Any, Any, tuple[Any, Any, Any]] | None = None
        _all_code.add(self)

    def set(self, replacement_of: Callable[[FunctionType], FunctionType]) -> None:
        """Replace it by ``replacement_of(original)``: a function with the same arguments, and without a
        closure.

        The same ``replacement_of`` is not called again as long as the function has not changed.
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
        """Whether the function's current code belongs to this package, regardless of the bookkeeping."""
        return self._function.__code__.co_filename.startswith(PACKAGE)

    @property
    def name(self) -> str:
        return f"code of {self._function.__module__}.{self._function.__qualname__}"

    def put_back(self) -> None:
        """Like :meth:`restore`, regardless of the bookkeeping."""
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
    """Context without any replacement of lazyviz, in all threads.

    If other code replaces attributes meanwhile, lazyviz's patches will later restore these replacements.
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
