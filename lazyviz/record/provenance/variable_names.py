"""Variable names: the user's names for tensors, and tensors that only a variable keeps alive."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from ...process.install_paths import PACKAGE
from ...process.traced_frames import may_be_traced
from ...torch_internals import private_api, storage_ownership
from ..interception.register_optimizer_step_hooks import ValueFinder
from ..sparse.components import COMPONENTS, parts_of

if TYPE_CHECKING:
    from ..tracked_storages import TrackedStorage, TrackedValue

MAX_ITEMS = 10_000  # total searched; more names would add little
_MOST_PER_VARIABLE = 200  # items searched for one tensor
MAX_DEPTH = 5  # out.past_key_values.layers[0].keys
_ATOMS = (str, bytes, int, float, complex, type(None), torch.nn.Module, torch.optim.Optimizer, ModuleType)
# Exact types of objects that are not tensors and contain none, recognized without checking their bases.
_PLAIN = frozenset({str, bytes, int, bool, float, complex, type(None)})
_PLAIN_VARIABLES = _PLAIN | {ModuleType, FunctionType, BuiltinFunctionType, type}
_OURS = f"{__name__.partition('.')[0]}."  # a graph shows tensors, but does not contain any
_BETWEEN = (PACKAGE, contextlib.__file__)


class _Found:
    """One tensor object: the user's expressions for it, and how many references they account for."""

    __slots__ = ("alone", "expressions", "references", "tensor", "value")

    def __init__(self, tensor: torch.Tensor, value: TrackedValue) -> None:
        self.tensor = tensor
        self.value = value
        self.expressions: list[str] = []
        self.references = 0
        self.alone = True  # nothing else refers to the containers that it was found in


def variables_of(frame: FrameType | None) -> dict[str, Any]:
    """A copy of the variables where the block was opened: those of the first frame that is not ours."""
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    if frame is None:
        return {}
    variables = frame.f_locals
    copy = dict(variables)
    # Up to Python 3.12, a function's frame keeps this dictionary, and every tensor in it, alive. A dictionary
    # that the user requested (`locals()`) is the same object, and must not be changed.
    snapshot = frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(variables) is dict
    # References by the frame, this function and the argument.
    if snapshot and sys.getrefcount(variables) == 3 and not may_be_traced(frame):
        variables.clear()
    return copy


def global_models_of(frame: FrameType | None) -> dict[str, Any]:
    """The global variables for modules that the function reads in which the block was opened."""
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    if frame is None or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return {}
    found = ((name, frame.f_globals.get(name)) for name in frame.f_code.co_names)
    return {name: content for name, content in found if issubclass(type(content), torch.nn.Module)}


def variable_for(tensor: torch.Tensor, frame: FrameType) -> str | None:
    """The expression that code in ``frame`` has for ``tensor``, or else for its memory: a variable, or an
    item or attribute of one.
    """
    variables = {**frame.f_globals, **variables_of(frame)}
    named = [item for item in variables.items() if not item[0].startswith("_")]
    found = _expression_for(tensor, named)
    if found is None:
        named = [item for item in named if type(item[1]) not in _PLAIN_VARIABLES]
        items = (child for name, content in named for child in _children(name, content, _MOST_PER_VARIABLE))
        found = _expression_for(tensor, (child[:2] for child in items))
    return found


def _expression_for(tensor: torch.Tensor, named: Iterable[tuple[str, Any]]) -> str | None:
    address = private_api.storage_address(tensor)
    shares = None
    for name, content in named:
        if content is tensor:
            return name
        ordinary = type(content) is torch.Tensor or type(content) is torch.nn.Parameter
        if shares is None and ordinary and storage_ownership.address_of(content) == address:
            shares = name
    return shares


def name_tensors(value_of: ValueFinder, variables: Mapping[str, Any], *, copied: bool) -> None:
    """Name values like the user's variables; only names that do not begin with ``_``.

    If only such expressions refer to a storage, they are stored in it: deleting them would free it.
    ``copied``: ``variables`` is a copy, which holds its own reference to each of them.
    """
    found: dict[int, _Found] = {}
    for expression, tensor, references, alone in _tensors(variables, copied):
        value = value_of(tensor)
        if value is None:
            if tensor.layout in COMPONENTS and expression in variables:
                _name_components(value_of, expression, tensor)
            continue
        entry = found.get(id(tensor))
        if entry is None:
            entry = found[id(tensor)] = _Found(tensor, value)
        entry.expressions.append(expression)
        entry.references += references
        entry.alone &= alone
        if expression in variables and not value.name:
            value.name = expression
            if value.storage.external and not value.storage.name:
                value.storage.name = expression
    tensor = None  # type: ignore[assignment]  # the loop's reference would count
    by_storage: dict[TrackedStorage, list[_Found]] = {}
    for entry in found.values():
        by_storage.setdefault(entry.value.storage, []).append(entry)
    for storage, entries in by_storage.items():
        names = tuple(name for entry in entries for name in entry.expressions)
        storage.variables = names if _nothing_else_keeps(storage, entries) else ()


def _name_components(value_of: ValueFinder, expression: str, tensor: torch.Tensor) -> None:
    """Name the indices and values of a sparse tensor: ``edges.indices``."""
    for name, part in zip(COMPONENTS[tensor.layout], parts_of(tensor)):
        value = value_of(part)
        if value is not None and not value.name:
            value.name = f"{expression}.{name.removeprefix('_')}"
            if value.storage.external and not value.storage.name:
                value.storage.name = value.name


def name_earlier(values: Iterable[TrackedValue], variables: Mapping[str, Any]) -> None:
    """Name ``values`` that were computed at sync points like the variables that still refer to them.

    Values that have been computed are no longer in the tensor table, except for the tensor's own weak
    reference.
    """
    names: dict[int, str] = {}
    for name, content in variables.items():
        if issubclass(type(content), torch.Tensor) and not name.startswith("_"):
            names.setdefault(id(content), name)
    for value in values:
        if value.name or value.tensor is None:
            continue
        tensor = value.tensor()
        known = names.get(id(tensor)) if tensor is not None else None
        if known is not None:
            value.name = known
            if value.storage.external and not value.storage.name:
                value.storage.name = known


def _nothing_else_keeps(storage: TrackedStorage, entries: list[_Found]) -> bool:
    """Whether only the expressions keep the storage alive: neither autograd nor other containers do.

    A view keeps its base alive, which may be a tensor without a name (the result of a linear layer is a
    view).
    """
    views: dict[int, int] = {}
    named = {id(entry.tensor) for entry in entries}
    nameless: list[torch.Tensor] = []
    for entry in entries:
        base = private_api.base_of(entry.tensor)
        if base is not None:
            if id(base) not in named and id(base) not in views:
                nameless.append(base)
            views[id(base)] = views.get(id(base), 0) + 1
    base = None
    if len(entries) + len(nameless) != storage.live or not all(entry.alone for entry in entries):
        return False
    held = [(entry.tensor, entry.references + 1) for entry in entries] + [(each, 1) for each in nameless]
    for tensor, references in held:
        of_views = views.get(id(tensor), 0)
        # Our references are the list's, the loop's and the argument's; all references of C++ count as one.
        if sys.getrefcount(tensor) != references + 3 + (of_views > 0):
            return False
        if private_api.use_count(tensor) != 1 + of_views:
            return False
    return True


def tensors_under(content: Any) -> Iterator[torch.Tensor]:
    """The tensors in a container or plain object, as deep as ``MAX_DEPTH``."""
    for _, tensor, _, _ in _tensors({"content": content}, False):
        yield tensor


def _tensors(variables: Mapping[str, Any], copied: bool) -> Iterator[tuple[str, torch.Tensor, int, bool]]:
    """(Expression, tensor, references that it accounts for, whether its containers have only one reference).

    Searches lists, tuples, dictionaries and plain objects, up to a depth of ``MAX_DEPTH``.
    """
    queue: deque[tuple[str, Any, int, bool, int]] = deque(
        (name, content, 1 + copied, True, 0)
        for name, content in list(variables.items())
        if type(content) not in _PLAIN_VARIABLES and not name.startswith("_")
    )
    seen: set[int] = set()
    room = MAX_ITEMS
    while queue:  # variables first, then their content, so that the nearest names are found before the limit
        expression, content, references, alone, depth = queue.popleft()
        if issubclass(type(content), torch.Tensor):
            yield expression, content, references, alone
        elif depth < MAX_DEPTH and room > 0 and id(content) not in seen:
            children = _children(expression, content, room)
            if children:
                room -= len(children)
                seen.add(id(content))
                # The references of the local variable and of the argument are added.
                alone = alone and sys.getrefcount(content) == references + 2
                queue.extend((*child, alone, depth + 1) for child in children)
            del children  # they would count as references


def _children(expression: str, content: Any, most: int) -> list[tuple[str, Any, int]]:
    """(Expression, object, references) of the first objects in a container that may be, or contain,
    tensors.
    """
    kind = type(content)  # a proxy answers isinstance() for the object that it wraps
    if issubclass(kind, _ATOMS) or callable(content) or kind.__module__.startswith(_OURS):
        return []
    pairs: list[tuple[str, Any]] = []
    if issubclass(kind, (list, tuple)):
        pairs = [
            (f"{expression}[{index}]", item)
            for index, item in enumerate(content[:most])
            if type(item) not in _PLAIN
        ]
    else:
        # Attributes first, because a model's output has its tensors as items as well.
        try:
            attributes = content.__dict__
        except Exception:
            attributes = {}
        if issubclass(type(attributes), dict):
            pairs = [(f"{expression}.{key}", item) for key, item in islice(attributes.items(), most)]
        if issubclass(kind, dict):
            pairs += [(f"{expression}[{key!r}]", item) for key, item in islice(content.items(), most)]
    children: dict[int, tuple[str, Any, int]] = {}
    for name, item in pairs:
        if not issubclass(type(item), _ATOMS):
            first, _, references = children.get(id(item), (name, item, 0))
            children[id(item)] = first, item, references + 1
    return list(children.values())
