"""Scalar arguments of operators: which numbers are operands, which are sizes, and which are constants."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...graph.ir import Node, works_by_element
from ...graph.number_operands import operands
from ...torch_internals.private_api import OpOverload

# Arguments that optimizers recompute in each step (bias corrections, learning rates).
_VARYING = {"value", "alpha", "other", "scalar", "scalars"}
# Operators that fill a tensor with a number; they lack the tag of operators that compute with numbers.
_FILL = {"fill", "fill_", "full", "full_like", "new_full", "scalar_tensor"}


class Kind:
    """The role of ints among an operator's arguments: operands, sizes, or part of the program."""

    __slots__ = ("changes", "operands", "positional", "sizes", "zero_counts")

    def __init__(self, op: OpOverload) -> None:
        schema = op._schema
        name = schema.name.rpartition("::")[2]
        self.positional = [argument.name for argument in schema.arguments]
        numbers = {item.name for item in schema.arguments if "number" in str(item.type)}
        each = name.startswith("_foreach")
        self.operands = operands(op) | (numbers if each or name in _FILL else set())
        # Only the text of a schema shows sizes that may be symbols; those of ``arange`` are numbers.
        self.sizes = {*re.findall(r"SymInt[^ ]* (\w+)", str(schema)), *numbers} - self.operands
        self.changes = _VARYING if each or works_by_element(op) else set()
        self.zero_counts = "mul" in name  # Inductor simplifies a product with zero to zero, also for infinity


@functools.cache
def kind_of(op: OpOverload) -> Kind:
    """The roles of an operator's arguments."""
    return Kind(op)


class Numbers:
    """Finds the numbers among arguments; it is called in the order of ``Program``'s tuples."""

    def __init__(
        self,
        scalar: Callable[[float], Any],
        size: Callable[[int], Any],
        other: Callable[[Any], Any],
        call_atomically: Callable[[type, list[Any]], Any] = lambda cls, items: cls(items),
    ) -> None:
        self._scalar, self._size, self._other, self._together = scalar, size, other, call_atomically

    def call(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of ``node``, with replacements for each number and each other leaf."""
        kind = kind_of(node.op)
        names = kind.positional
        args = tuple([self._item(item, names[at], kind) for at, item in enumerate(node.args)])
        return args, {name: self._item(item, name, kind) for name, item in node.kwargs.items()}

    def _item(self, item: Any, name: str, kind: Kind) -> Any:
        cls = type(item)
        if _is_scalar(item, name, kind):
            return self._scalar(item)
        if cls is int and name in kind.sizes:
            return self._size(item)
        if cls is list or cls is tuple:
            return self._together(cls, [self._item(entry, name, kind) for entry in item])
        return self._other(item)


Place = tuple[int, int | str, int | None]  # a node, its argument by position or name, the position in a list


def places_of_scalars(nodes: Sequence[Node]) -> list[Place]:
    """The positions of the scalars of ``program_of(nodes, ...)``, in order; they never occur in
    nested lists.
    """
    places: list[Place] = []
    for at, node in enumerate(nodes):
        kind = kind_of(node.op)
        given: list[tuple[int | str, str, Any]] = [
            *[(number, kind.positional[number], item) for number, item in enumerate(node.args)],
            *[(name, name, item) for name, item in node.kwargs.items()],
        ]
        for key, name, item in given:
            if type(item) in (list, tuple):
                places += [(at, key, n) for n, each in enumerate(item) if _is_scalar(each, name, kind)]
            elif _is_scalar(item, name, kind):
                places.append((at, key, None))
    return places


def scalars_at(nodes: Sequence[Node], places: Sequence[Place]) -> list[Any]:
    """The scalars at these positions."""
    return [
        nodes[at].args[key] if number is None and type(key) is int else _scalar_in(nodes[at], key, number)
        for at, key, number in places
    ]


def _scalar_in(node: Node, key: int | str, number: int | None) -> Any:
    item = node.args[key] if isinstance(key, int) else node.kwargs[key]
    return item if number is None else item[number]


def _is_scalar(item: Any, name: str, kind: Kind) -> bool:
    cls = type(item)
    return cls is float or cls is complex or (cls is int and name in kind.operands)


def scalars_of(item: Any, name: str, kind: Kind) -> Iterator[float]:
    if _is_scalar(item, name, kind):
        yield item
    elif type(item) in (list, tuple):
        for entry in item:
            yield from scalars_of(entry, name, kind)
