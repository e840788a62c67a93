"""Whether two graphs are the same program: a structural hash, and the first difference.

Structure is what a compiled version of the graph would depend on: the operators, which
value goes where, shapes, strides, dtypes, devices, who shares memory with whom, and static
arguments.  Python floats, and ints that only take part in arithmetic, are inputs, so that a
learning-rate schedule is one program.  Names, source lines, and which Python variables
still refer to a result are no structure.

Values and storages are numbered in order of first appearance, which makes two recordings
of the same code equal.
"""

from __future__ import annotations

import functools
import hashlib
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from ..torch_internals.private_api import OpOverload
from .ir import Graph, Node, Storage, TensorMeta, Value, works_by_element

_OPERANDS = ("Tensor", "number", "Optional[number]")


@functools.cache
def operands(op: OpOverload) -> frozenset[str]:
    """The arguments of ``op`` whose Python numbers are operands as tensors are."""
    # Not every int of a pointwise operator is an operand: round(decimals=2) is not.
    # A tensor's place may hold a number: x * 2 calls mul.Tensor.
    scalars = [item.name for item in op._schema.arguments if str(item.type) in _OPERANDS]
    return frozenset(scalars if works_by_element(op) else ())


class Signature(NamedTuple):
    """The structure of one node, in plain data; equal for nodes that do the same."""

    op: str
    args: tuple[Any, ...]
    outside: tuple[Any, ...]  # outside tensors met here first: (value, storage, metadata)
    outputs: tuple[Any, ...]  # (value, storage, metadata)
    writes: tuple[int, ...]


class Fingerprint:
    """Folds nodes, given in program order, into a hash."""

    def __init__(self) -> None:
        self._values: dict[Value, int] = {}
        self._storages: dict[Storage, int] = {}
        self._metas: dict[TensorMeta, tuple[Any, ...]] = {}
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, node: Node) -> None:
        """Take one more node in."""
        self._hash.update(repr(tuple(self.signature(node))).encode())

    def hexdigest(self) -> str:
        """The hash of all nodes so far, 32 hexadecimal digits."""
        return self._hash.hexdigest()

    def signature(self, node: Node) -> Signature:
        """The structure of ``node``, its values numbered after those of the nodes before."""
        names = operands(node.op)
        outside: list[Any] = []
        args = []
        for position, argument in enumerate(node.args):
            schema = node.op._schema.arguments
            name = schema[position].name if position < len(schema) else ""
            args.append(self._argument(argument, name in names, outside))
        for name, argument in node.kwargs.items():
            args.append((name, self._argument(argument, name in names, outside)))
        outputs = tuple([self._tensor(value) for value in node.outputs])
        writes = tuple(sorted(self._storages.setdefault(item, len(self._storages)) for item in node.writes))
        return Signature(str(node.op), tuple(args), tuple(outside), outputs, writes)

    def _argument(self, argument: Any, arithmetic: bool, outside: list[Any]) -> Any:
        if isinstance(argument, Value):
            if argument not in self._values:
                outside.append(self._tensor(argument))
            return ("value", self._values[argument])
        if isinstance(argument, (list, tuple)):  # never nested deeper than a list of lists
            return [self._argument(item, arithmetic, outside) for item in argument]
        if isinstance(argument, (float, complex)):
            return type(argument).__name__
        if isinstance(argument, bool) or argument is None or isinstance(argument, str):
            return argument
        if isinstance(argument, int):
            return "int" if arithmetic else argument
        if isinstance(argument, torch.Generator):
            return f"generator {argument.device}"
        if isinstance(argument, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
            return str(argument)
        # Unknown: only the very same object is the same.
        return f"{type(argument).__name__} {id(argument)}"

    def _tensor(self, value: Value) -> tuple[Any, ...]:
        number = self._values.setdefault(value, len(self._values))
        storage = self._storages.setdefault(value.storage, len(self._storages))
        meta = self._metas.get(value.meta)
        if meta is None:
            m = value.meta
            meta = self._metas[m] = (m.shape, m.stride, m.offset, str(m.dtype), str(m.device), m.flags)
        return (number, storage, *meta)


def fingerprint(graph: Graph) -> str:
    """The structural hash of ``graph``; equal for graphs that are the same program."""
    result = Fingerprint()
    for node in graph.nodes:
        result.add(node)
    return result.hexdigest()


_PARTS = ("shape", "strides", "offset", "dtype", "device", "conjugate or negative flags")


def first_difference(a: Graph, b: Graph) -> str | None:
    """The first place where two graphs are different programs, in words; ``None``: they are not."""
    in_a, in_b = Fingerprint(), Fingerprint()
    for node_a, node_b in zip_longest(a.nodes, b.nodes):
        if node_a is None or node_b is None:
            longer, shorter = (a, b) if node_b is None else (b, a)
            extra = longer.nodes[len(shorter.nodes)]
            which = "first" if node_b is None else "second"
            return f"the {which} graph goes on with {_place(extra)}, the other ends after {len(shorter)} ops"
        one, other = in_a.signature(node_a), in_b.signature(node_b)
        if one != other:
            return _compare(node_a, node_b, one, other)
    return None


def _compare(node_a: Node, node_b: Node, a: Signature, b: Signature) -> str:
    place = _place(node_a)
    if a.op != b.op:
        return f"{place}: {a.op} in one, {b.op} in the other ({_place(node_b)})"
    for what, ours, theirs in (("input", a.outside, b.outside), ("output", a.outputs, b.outputs)):
        for left, right in zip(ours, theirs, strict=False):
            for part, x, y in zip(_PARTS, left[2:], right[2:], strict=True):
                if x != y:
                    return f"{place}: {part} of an {what} is {_plain(x)} in one, {_plain(y)} in the other"
            if left[1] != right[1]:
                return f"{place}: an {what} shares memory with other tensors than in the other graph"
    if a.args != b.args:
        for x, y in zip_longest(a.args, b.args):
            if x == y:
                continue
            if _wires(x) or _wires(y):
                return f"{place}: works on other tensors than in the other graph"
            return f"{place}: argument {_plain(x)} in one, {_plain(y)} in the other"
    if a.writes != b.writes:
        return f"{place}: writes to other tensors than in the other graph"
    return f"{place}: makes {len(a.outputs)} tensors in one, {len(b.outputs)} in the other"


def _wires(argument: Any) -> bool:
    return isinstance(argument, (list, tuple)) and "value" in str(argument)


def _plain(item: Any) -> str:
    if isinstance(item, tuple):
        return str(list(item))
    return str(item).removeprefix("torch.")


def _place(node: Node) -> str:
    where = f" at {node.source}" if node.source is not None else ""
    return f"{node.name}{where}"
