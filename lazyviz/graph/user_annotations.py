"""Annotations: the user's own numbers for nodes and modules, shown in pictures."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch

from .ir import Annotation, Graph, Node
from .modules import ModuleRoot, root_name, root_parts

LONGEST_NAME = 60  # characters


def annotation(
    graph: Graph, name: str, values: Mapping[Any, Any], pending: Callable[[torch.Tensor], bool]
) -> Annotation:
    """``values`` by node index and module name of ``graph``; ``pending`` says whether a tensor must not be
    read.

    Raises:
        TypeError: a key is not a node, a module, or a module's name, or a value is not a number.
        ValueError: a node of another graph, a module that ran no op here, NaN or infinity.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"values must be a mapping from nodes or modules to numbers, not {_kind(values)}")
    if not values:
        raise ValueError(f"no values for {name!r}; pass None to remove an annotation")
    names = module_names(graph)
    nodes: dict[int, float] = {}
    modules: dict[str, float] = {}
    for key, value in values.items():
        number = _number(key, value, pending)
        if isinstance(key, Node):
            if not (0 <= key.index < len(graph.nodes) and graph.nodes[key.index] is key):
                raise ValueError(f"{key!r} is not a node of this graph")
            nodes[key.index] = number
        elif isinstance(key, torch.nn.Module):
            modules[_of_object(graph, key, names)] = number
        elif isinstance(key, str):
            modules[_of_name(key, names)] = number
        else:
            raise TypeError(
                f"{_kind(key)} cannot be annotated: use nodes of the graph, modules, or names of modules"
            )
    return Annotation(name, nodes, modules)


def module_names(graph: Graph) -> dict[str, tuple[str, str]]:
    """The full names of all modules that ran an op, each with its root and its path in the root."""
    found: dict[str, tuple[str, str]] = {}
    # Roots of the same class compare equal as strings, even if they are different modules.
    calls = {(id(node.root), node.module): node.root for node in graph.nodes if node.root}
    for (_, path), root in calls.items():
        outer = root_parts(root)
        parts = [*outer, *(path.split(".") if path else [])]
        for count in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:count]), (root, ".".join(parts[len(outer) : count])))
    return found


def _number(key: Any, value: Any, pending: Callable[[torch.Tensor], bool]) -> float:
    of = f"the value of {_called(key)}"
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"{of} is a tensor of {_shape(value)} {value.dtype}, not a number")
        if pending(value):
            raise TypeError(f"{of} is a pending tensor; evaluate it first")
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{of} is {_kind(value)}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{of} is {'NaN' if math.isnan(number) else 'infinite'}")
    return number


def _of_object(graph: Graph, module: torch.nn.Module, names: Mapping[str, tuple[str, str]]) -> str:
    """The full name of a module object that was called, or is inside or around one that was called."""
    for root in {id(root): root for root, _ in names.values()}.values():
        called = root.module() if isinstance(root, ModuleRoot) and root.module is not None else None
        if called is None:
            continue
        outer = root_name(root)
        for path, part in called.named_modules(remove_duplicate=False):
            name = f"{outer}.{path}" if path else outer
            if part is module and name in names:
                return name
        for path, part in module.named_modules():
            if part is called and path and outer.endswith(f".{path}"):
                return outer[: -len(path) - 1]
    raise ValueError(f"this {type(module).__name__} ran no op in this graph")


def _of_name(name: str, names: Mapping[str, tuple[str, str]]) -> str:
    """The full name of a module, which ``name`` may abbreviate to the path in its model."""
    if name in names:
        return name
    found = [full for full, (_, path) in names.items() if path and path == name]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"several modules are called {name!r}: {', '.join(found[:5])}")
    paths = [path for _, path in names.values() if path]
    near = difflib.get_close_matches(name, [*names, *paths], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"no module called {name!r} ran an op in this graph{hint}")


def _called(key: Any) -> str:
    return f"this {type(key).__name__}" if isinstance(key, torch.nn.Module) else repr(key)


def _kind(value: Any) -> str:
    return f"{value!r:.40} of type {type(value).__name__}"


def _shape(tensor: torch.Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "no dimensions"
