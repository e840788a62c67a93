"""Module variable names: the user's variables for the modules of a block, and the module objects."""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from ...graph.ir import Role
from ...graph.modules import ModuleFacts, ModuleRoot, OwnedName
from ..tracked_storages import TrackedStorage
from .source_lines import SourceFinder
from .variable_names import variables_of

MAX_ITEMS = 1000  # total items of lists, dictionaries, and objects searched for modules
MAX_DEPTH = 3  # trainer.models["G"]
_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
_PYTORCH_S = "torch.nn."  # their ``extra_repr`` runs no user code


def name_modules(called: Collection[ModuleRoot], variables: Mapping[str, Any]) -> None:
    """Name the modules that a block called, when it ends, like the variables that refer to them.

    A module that only a function's variable referred to gets a number if another module has that name now.
    """
    _name_roots(called, variables)
    found = {
        name: content for name, content in variables.items() if issubclass(type(content), torch.nn.Module)
    }
    for root in called:
        other = found.get(root.variable)
        if other is not None and not root.prefix and not (root.module and root.module() is other):
            root.call(_numbered(root.variable, {*found, *(each.variable for each in called)}), "", root.facts)


def _numbered(name: str, taken: Collection[str]) -> str:
    """``name``, with a number if it is the name of another module."""
    others = (f"{name} ({number})" for number in itertools.count(2))
    return next(each for each in itertools.chain([name], others) if each not in taken)


def _name_roots(roots: Iterable[ModuleRoot], variables: Mapping[str, Any]) -> None:
    """Name each root like the user's variable for it, or for the module that contains it.

    A root that no variable leads to keeps its name.
    """
    wanted = {id(module): root for root in roots if root.module and (module := root.module()) is not None}
    if not wanted:
        return
    found = _without_loop_variables(_until_found(_modules(variables), wanted), wanted)
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
        named -= _last_items(within, named)
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


def name_by_caller(
    root: ModuleRoot, module: torch.nn.Module, frame: FrameType, sources: SourceFinder, taken: Collection[str]
) -> None:
    """Name ``root`` like the variable for ``module`` in a function of the user's that is running.

    When the block ends, the function's variables no longer exist, and maybe the module does not either. Of
    functions that pass the module to each other, the outermost one counts; a parameter's name says nothing. A
    name that is ``taken`` by another module is numbered.
    """
    root.call(root.variable, root.prefix, root.facts or facts_below(module))
    if root.variable:
        return
    name = ""
    found = sources.users(frame)
    while found is not None:
        frame = found[0]
        if frame.f_code is sources.block or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            break  # the variables there are known when the block ends
        code = frame.f_code
        passed = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        expressions = (expression for expression, each, _ in _modules(variables_of(frame)) if each is module)
        name = next((each for each in expressions if each not in passed), name)
        found = sources.users(frame.f_back)
    if name:
        root.call(_numbered(name, taken), "", root.facts)


def name_weights(nameless: dict[int, TrackedStorage], variables: Mapping[str, Any]) -> None:
    """Name the storages of tensors, given by the identity of these, that are parameters or buffers of modules
    that variables refer to.
    """
    for expression, module, _ in _modules(variables):
        root: ModuleRoot | None = None
        for path, part in _parts(module):
            weights: tuple[tuple[Role, Mapping[str, Any]], ...] = (
                ("parameter", part._parameters),
                ("buffer", part._buffers),
            )
            for role, held in weights:
                for key, tensor in held.items():
                    storage = nameless.pop(id(tensor), None)
                    if storage is None:
                        continue
                    if root is None:
                        root = ModuleRoot(type(module).__name__, weakref.ref(module))
                        root.call(expression, "", facts_below(module))
                    storage.role = role
                    storage.name = OwnedName(f"{path}.{key}" if path else key, root)


def _until_found(
    modules: Iterable[tuple[str, torch.nn.Module, Any]], wanted: Iterable[int]
) -> list[tuple[str, torch.nn.Module, Any]]:
    """``modules`` until each of the ``wanted`` ones was among them; all of them if one is the item of a list,
    whose other items count as well.
    """
    found = []
    left = set(wanted)
    stops = True
    for each in modules:
        found.append(each)
        if id(each[1]) in left:
            left.remove(id(each[1]))
            stops &= each[2] is None
            if stops and not left:
                break
    return found


def _without_loop_variables(
    found: Iterable[tuple[str, torch.nn.Module, Any]], wanted: Iterable[int]
) -> list[tuple[str, torch.nn.Module]]:
    """One expression for each module: the first one, except for the last item of a loop, which is
    ``layers[2]``, not ``layer``, if the other items that ran have no variables.
    """
    first: dict[int, tuple[str, torch.nn.Module, Any]] = {}
    items: dict[int, list[tuple[str, torch.nn.Module, Any]]] = {}
    for each in found:
        first.setdefault(id(each[1]), each)
        if each[2] is not None:
            items.setdefault(id(each[1]), []).append(each)
    looped = {id(first[key][2]) for key in wanted if key in first and first[key][2] is not None}
    result = {}
    for key, each in first.items():
        item = next((item for item in items.get(key, ()) if id(item[2]) in looped), None)
        result[key] = item if each[2] is None and item is not None else each
    return [(expression, module) for expression, module, _ in result.values()]


def _last_items(within: Mapping[int, tuple[str, str, torch.nn.Module]], named: Collection[int]) -> set[int]:
    """The modules that have a variable because it was the variable of a loop over the items of a module.

    The other items that ran have none.
    """
    lists = {key: _list_of(*each) for key, each in within.items()}
    looped = {found for key, found in lists.items() if key not in named and found is not None}
    return {key for key, found in lists.items() if key in named and found in looped}


def _list_of(expression: str, path: str, module: torch.nn.Module) -> tuple[int, str] | None:
    """The list, dictionary or sequence of modules that has the part at ``path`` as an item."""
    outer = path.rpartition(".")[0]
    holder: Any = module
    for name in outer.split(".") if outer else ():
        holder = holder._modules.get(name) if holder is not None else None
    return (id(module), outer) if isinstance(holder, _LISTS) else None


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
    if type(weight) is torch.nn.Parameter:
        return weight.numel()
    counts = isinstance(weight, torch.Tensor) and not torch.nn.parameter.is_lazy(weight)
    return weight.numel() if counts else 0


def _modules(variables: Mapping[str, Any]) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    """(Expression, module, what has it as an item) of modules that variables refer to, then of those inside
    of lists, dictionaries, and objects that variables refer to.
    """
    level: list[tuple[str, Any, Any]] = [
        (name, content, None)
        for name, content in list(variables.items())
        if name and not name.startswith("_")
    ]
    room = MAX_ITEMS
    seen: set[int] = set()
    for depth in range(MAX_DEPTH):
        others: list[tuple[str, Any]] = []
        for expression, content, holder in level:
            if not issubclass(type(content), torch.nn.Module):
                others.append((expression, content))
            elif "_modules" in vars(content):  # otherwise it was not initialized
                yield expression, content, holder
        if depth == MAX_DEPTH - 1:
            return
        level = []
        for expression, content in others:  # only now, because nobody may need them
            if room > 0 and id(content) not in seen:
                children = list(_items(expression, content))[:room]
                if children:
                    seen.add(id(content))
                    room -= len(children)
                    # Each attribute of an object counts as a separate variable.
                    of = content if isinstance(content, (list, tuple, dict)) else None
                    level += [(*child, of) for child in children]


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
