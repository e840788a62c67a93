"""Module names: the user's variables for the modules of a block, and the module objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ...graph.modules import ModuleFacts, ModuleRoot

MAX_ITEMS = 1000  # total items of lists, dictionaries, and objects searched for modules
MAX_DEPTH = 3  # trainer.models["G"]
_PYTORCH_S = "torch.nn."  # their ``extra_repr`` runs no user code


def name_roots(roots: Iterable[ModuleRoot], variables: Mapping[str, Any]) -> None:
    """Name each root like the user's variable for it, or for the module that contains it.

    A root that no variable leads to keeps its name.
    """
    wanted = {id(module): root for root in roots if root.module and (module := root.module()) is not None}
    if not wanted:
        return
    found = list(_modules(variables))
    for expression, module in reversed(found):  # the first expression for a module counts
        if (root := wanted.get(id(module))) is not None and expression != root.variable:
            root.call(expression, "", root.facts)
    named = {id(module) for _, module in found}
    within: dict[int, tuple[str, str, torch.nn.Module]] = {}
    if any(key not in named for key in wanted):
        for expression, module in reversed(found):
            for path, part in _parts(module):
                if id(part) in wanted and path:
                    within[id(part)] = expression, path, module
    known: dict[int, dict[str, ModuleFacts]] = {}
    for key, root in wanted.items():
        variable, prefix = root.variable, root.prefix
        outer = root.module() if root.module else None
        if key not in named and key in within:
            variable, prefix, outer = within[key]
        if outer is None:
            continue
        facts = known.get(id(outer))
        if facts is None:
            facts = known[id(outer)] = facts_below(outer)
        if prefix and key not in within:  # the module that contained it has another name now
            facts = root.facts
        root.call(variable, prefix, facts)


def _holder(path: str, paths: Mapping[str, int]) -> str:
    """The path of the module that contains the one at ``path``; names may have dots in them."""
    while path:
        path = path.rpartition(".")[0]
        if path in paths:
            break
    return path


def facts_below(module: torch.nn.Module) -> dict[str, ModuleFacts]:
    """Facts about ``module`` and all modules in it, by path."""
    own: dict[str, int] = {}
    settings: dict[str, str] = {}
    kinds: dict[str, str] = {}
    for path, part in _parts(module):
        kinds[path] = type(part).__name__
        own[path] = sum(map(_elements, part._parameters.values()))
        if type(part).__module__.startswith(_PYTORCH_S):
            settings[path] = part.extra_repr()
    total = dict(own)
    for path in reversed(own):  # a module follows the one that contains it
        if path:
            total[_holder(path, total)] += total[path]
    return {path: ModuleFacts(kinds[path], total[path], settings.get(path, "")) for path in kinds}


def _parts(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """``named_modules``, even if the module's class overrides it."""
    return torch.nn.Module.named_modules(module)


def _elements(weight: Any) -> int:
    """The number of elements of an initialized weight."""
    counts = isinstance(weight, torch.Tensor) and not torch.nn.parameter.is_lazy(weight)
    return weight.numel() if counts else 0


def _modules(variables: Mapping[str, Any]) -> Iterator[tuple[str, torch.nn.Module]]:
    """(Expression, module) of modules that variables refer to, then of those inside of these."""
    level = [
        (name, content) for name, content in list(variables.items()) if name and not name.startswith("_")
    ]
    room = MAX_ITEMS
    seen: set[int] = set()
    for _ in range(MAX_DEPTH):
        below: list[tuple[str, Any]] = []
        for expression, content in level:
            if issubclass(type(content), torch.nn.Module):
                # Otherwise it was not initialized.
                if id(content) not in seen and "_modules" in vars(content):
                    seen.add(id(content))
                    yield expression, content
            elif room > 0 and id(content) not in seen:
                children = list(_items(expression, content))[:room]
                if children:
                    seen.add(id(content))
                    room -= len(children)
                    below += children
        level = below


def _attributes(content: Any) -> Any:
    """The content of the object, without calling user code."""
    try:
        return object.__getattribute__(content, "__dict__")
    except AttributeError:
        return None


def _items(expression: str, content: Any) -> Iterator[tuple[str, Any]]:
    """The content of a list, a dictionary or a plain object."""
    kind = type(content)
    if kind in (list, tuple):
        for index, item in enumerate(content[:MAX_ITEMS]):
            if not isinstance(item, (str, bytes, int, float, torch.Tensor)):
                yield f"{expression}[{index}]", item
    elif kind is dict:
        for key, item in list(content.items())[:MAX_ITEMS]:
            if isinstance(key, (str, int)):
                yield f"{expression}[{key!r}]", item
    elif kind.__module__ not in ("builtins", "torch") and not callable(content):
        attributes = _attributes(content)
        if type(attributes) is dict:
            for key, item in list(attributes.items())[:MAX_ITEMS]:
                # The name `self` in a method adds no information.
                yield (key if expression == "self" else f"{expression}.{key}"), item
