"""Module objects of ops and weights, attached to the names that are shown.

A node's ``root`` is the class of the outermost module that was called, its ``module`` the path in it, and the
name of a weight is also relative to that module.  Two models of one class have the same names.  Therefore,
both are strings with a reference to their module object, which later receives the user's variable name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """Facts about one module; ``parameters`` counts the elements of its parameters and those of its
    submodules.
    """

    kind: str  # name of its class
    parameters: int = 0
    settings: str = ""  # "64, 128, bias=False", for PyTorch's own layers


class ModuleRoot(str):
    """The class name of an outermost module, with a reference to the object; it compares equal to those of
    other modules of the class.

    ``variable`` is the user's expression for it (``"net"``) or for a module that contains it; in the latter
    case, ``prefix`` is its path there (``"0"`` for ``net[0]``). The keys of ``facts`` are paths in the
    variable's module.
    """

    __slots__ = ("_facts", "module", "number", "prefix", "variable")

    _numbers = itertools.count()

    def __new__(cls, kind: str, module: Callable[[], Any] | None = None) -> ModuleRoot:
        made = super().__new__(cls, kind)
        made.number = next(ModuleRoot._numbers)
        made.module = module
        made.variable = made.prefix = ""
        made._facts = {}
        return made

    number: int
    module: Callable[[], Any] | None  # a weak reference
    variable: str
    prefix: str
    _facts: dict[str, ModuleFacts]

    @property
    def facts(self) -> dict[str, ModuleFacts]:
        return self._facts

    def call(self, variable: str, prefix: str, facts: dict[str, ModuleFacts]) -> None:
        """Set the user's variable name of the module."""
        self.variable, self.prefix, self._facts = variable, prefix, facts

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


class OwnedName(str):
    """The name of a parameter or of a tensor that belongs to it, ``"h.0.weight.grad"``, or the path of a
    module, with its root.
    """

    __slots__ = ("root",)
    root: str

    def __new__(cls, name: str, root: str) -> OwnedName:
        made = super().__new__(cls, name)
        made.root = root
        return made

    def __add__(self, more: str) -> OwnedName:
        return OwnedName(str.__add__(self, more), self.root)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def root_name(root: str) -> str:
    """The name of a root: the user's expression (``"net"`` or ``"net.0"``), otherwise its class."""
    return ".".join(root_parts(root))


def has_variable(root: str) -> bool:
    """Whether one of the user's variables refers to it, or to a module that contains it."""
    return isinstance(root, ModuleRoot) and bool(root.variable)


def root_parts(root: str) -> list[str]:
    """The names of the modules from the outermost named one down to the root: ``["net", "0"]``."""
    if not isinstance(root, ModuleRoot) or not root.variable:
        return [str(root)] if root else []
    return [root.variable, *(root.prefix.split(".") if root.prefix else [])]


def root_key(root: str) -> object:
    """A key that is equal for two roots if and only if their outermost modules are the same object."""
    if not isinstance(root, ModuleRoot):
        return root
    return root.variable or root.number


def full_name(name: str) -> str:
    """``"0.weight"``, or the path ``"0"``, with the user's name of the model: ``"G.0.weight"``."""
    if not isinstance(name, OwnedName) or not has_variable(name.root):
        return str(name)
    return ".".join(part for part in (root_name(name.root), str(name)) if part)


class InModule(Protocol):
    """An op, recorded or rejected, with the module that called it."""

    @property
    def root(self) -> str: ...
    @property
    def module(self) -> str: ...


def module_path(op: InModule) -> str:
    """``"net.transformer.h.0.attn"``, beginning with the user's variable for the model; "" outside of
    modules.
    """
    return ".".join(part for part in (root_name(op.root), op.module) if part)


def known_path(op: InModule) -> str:
    """``"net.h.0"`` if a user's variable refers to the model, else the path in the model: ``"h.0"``."""
    return module_path(op) if has_variable(op.root) else op.module


class ModuleNames:
    """Names of modules in per-module totals: the path in the model, preceded by the user's name of the model
    if several models of a program have that path.

    Each of ``programs`` has the roots and paths of one program.
    """

    def __init__(self, *programs: Iterable[tuple[str, str]]) -> None:
        self._ambiguous: set[str] = set()
        for places in programs:
            models: dict[str, str] = {}
            for root, path in places:
                model = root_name(root) if has_variable(root) else ""
                if models.setdefault(path, model) != model:
                    self._ambiguous.add(str(path))

    def __call__(self, root: str, path: str) -> str:
        if path not in self._ambiguous or not has_variable(root):
            return str(path)
        return ".".join(part for part in (root_name(root), str(path)) if part)


def root_of(name: str) -> str:
    """The root that a name refers to; "" if it refers to none."""
    return name.root if isinstance(name, OwnedName) else ""


def facts_of(root: str, path: str) -> ModuleFacts | None:
    """The facts about the module at ``path``, relative to the named module, if there are any."""
    return root.facts.get(path) if isinstance(root, ModuleRoot) else None
