"""Batch specification: the tensors or variable names that the user named as batch, as values of the graph."""

from __future__ import annotations

import difflib
import dis
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import CodeType
from typing import Any, TypeAlias

import torch

from ..graph.ir import Node, SourceLine, Value
from ..record.lazy_tensor import is_pending
from ..record.tape import Tape
from ..torch_internals import private_api

BatchLike: TypeAlias = str | torch.Tensor | Sequence[torch.Tensor] | Mapping[torch.Tensor, int]
"""The batch: tensors whose dimension 0 has the samples, ``{tensor: dim}``, or names as ``"x,y:1"``."""


class NamedBatch:
    """The tensors that the user calls the batch, and the dimension of each that has the samples.

    Given as tensors, or as names: the tensors that have these names when the block first uses them.
    """

    def __init__(self, given: BatchLike | None, variables: Callable[[], Mapping[str, Any]]) -> None:
        """``given``: a tensor, a list of them, ``{tensor: dim}``, or names as ``"x,y:1"``.

        Raises:
            ValueError: a dimension that a tensor lacks, tensors that differ in their number of samples.
            TypeError: anything else.
        """
        self.names: dict[str, int] = {}
        self.tensors: list[tuple[torch.Tensor, int]] = []
        self._variables = variables
        self.missing: list[str] = []  # names that were bound to no tensor when the block ended
        if isinstance(given, (list, tuple)) and given and all(isinstance(entry, str) for entry in given):
            given = ",".join(given)
        if isinstance(given, str):
            self.names = parse_names(given)
        elif isinstance(given, torch.Tensor):
            self.tensors = [(given, 0)]
        elif not isinstance(given, (Mapping, list, tuple)):
            raise TypeError(f"batch takes tensors, {{tensor: dim}} or names, not {type(given).__name__}")
        else:
            entries = given.items() if isinstance(given, Mapping) else [(entry, 0) for entry in given]
            for tensor, dim in entries:
                if not isinstance(tensor, torch.Tensor) or not isinstance(dim, int):
                    raise TypeError(
                        f"batch takes tensors, {{tensor: dim}} or names, not {type(tensor).__name__}"
                    )
                self.tensors.append((tensor, dim))
        for tensor, dim in self.tensors:
            dimension(tensor, dim, "a batch tensor")
        sizes = {tensor.shape[dim] for tensor, dim in self.tensors}
        if len(sizes) > 1:
            words = " and ".join(str(size) for size in sorted(sizes))
            raise ValueError(f"the tensors of the batch differ in their number of samples: {words}")

    def dim(self, tensor: torch.Tensor) -> int | None:
        """The batch dimension of ``tensor``; ``None`` if it does not belong to the batch."""
        for known, dim in self.tensors:
            if _same(known, tensor):
                return dimension(tensor, dim, "a batch tensor")
        if self.names:
            variables = self._variables()
            for name, dim in self.names.items():
                if _same(variables.get(name), tensor):
                    return dimension(tensor, dim, name)
        return None

    def begin(self, tape: Tape, graph: Any) -> None:
        """Note the values of tensors that pending blocks use or create; the tape calls :meth:`dim` for other
        tensors.
        """
        for tensor, dim, _ in self._named():
            value = tape.tensors.value_of(tensor)
            if value is not None and -tensor.dim() <= dim < tensor.dim():
                graph.batch[value] = dim % tensor.dim()

    def resolve(self, tape: Tape, graph: Any) -> None:
        """Note the values of tensors created in the block itself, and forget those that it did not use."""
        for tensor, dim, name in self._named():
            value = tape.tensors.value_of(tensor)
            if value is not None and value.node is not None and value.node.graph is graph:
                graph.batch[value] = dimension(tensor, dim, name)
                for earlier in _of_earlier_rounds(value, graph.nodes):
                    graph.batch[earlier] = graph.batch[value]
        variables = self._variables() if self.names else {}
        self.missing = [name for name in self.names if not isinstance(variables.get(name), torch.Tensor)]
        used = {value for node in graph.nodes for value in (*node.inputs, *node.outputs)}
        graph.batch = {value: dim for value, dim in graph.batch.items() if value in used}

    def _named(self) -> list[tuple[torch.Tensor, int, str]]:
        variables = self._variables() if self.names else {}
        found = [(variables.get(name), dim, name) for name, dim in self.names.items()]
        found += [(tensor, dim, "a batch tensor") for tensor, dim in self.tensors]
        return [(tensor, dim, name) for tensor, dim, name in found if isinstance(tensor, torch.Tensor)]


def _of_earlier_rounds(value: Value, nodes: Sequence[Node]) -> list[Value]:
    """What the line of code that created ``value`` created in earlier rounds of its loop, in its place.

    The variable was bound to these before. A round is a run of nodes of the line, without others between; its
    place is the same among nodes of the same operator and results of the same form.
    """
    node = value.node
    if node is None or node.source is None:
        return []

    def is_alike(other: Node) -> bool:
        metas = [(each.shape, each.dtype, each.device) for each in other.outputs]
        return other.op is node.op and metas == [
            (each.shape, each.dtype, each.device) for each in node.outputs
        ]

    rounds: list[list[Node]] = []
    before: SourceLine | None = None
    for each in nodes:
        if each.source == node.source:
            if before != node.source:
                rounds.append([])
            if is_alike(each):
                rounds[-1].append(each)
        before = each.source
    last = next((each for each in rounds if node in each), [])
    place = last.index(node) if last else 0
    return [
        each[place].outputs[value.index] for each in rounds if each is not last and len(each) == len(last)
    ]


def _same(known: Any, tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is the tensor that the user named, or autograd's copy of the tensor object."""
    if known is tensor:
        return True
    if not isinstance(known, torch.Tensor) or is_pending(known):
        return False
    alike = known.shape == tensor.shape and known.stride() == tensor.stride()
    return alike and private_api.storage_address(known) == private_api.storage_address(tensor)


def parse_names(text: str) -> dict[str, int]:
    """``"x,y:1"`` as ``{"x": 0, "y": 1}``.

    Raises ``ValueError`` if the text is not a list of names.
    """
    names: dict[str, int] = {}
    for entry in text.split(","):
        name, _, dim = entry.strip().partition(":")
        if not name.isidentifier() or (dim and not dim.lstrip("-").isdigit()):
            raise ValueError(f"write the batch as NAME or NAME:DIM, separated by commas, not {text!r}")
        names[name] = int(dim or 0)
    return names


def unknown_names(names: Iterable[str], variables: Mapping[str, Any], bound: Container[str]) -> str:
    """An error message for batch names that are bound to no tensor, neither before nor by the block; "" if
    none.
    """
    for name in names:
        if name in bound or isinstance(variables.get(name), torch.Tensor):
            continue
        if name in variables:
            return f"{name!r} is not a tensor but a {type(variables[name]).__name__}"
        tensors = [each for each, value in list(variables.items()) if isinstance(value, torch.Tensor)]
        close = difflib.get_close_matches(name, [each for each in tensors if not each.startswith("_")], 3)
        return f"there is no variable {name!r}" + (f"; did you mean {' or '.join(close)}?" if close else "")
    return ""


class _Anything(frozenset[str]):
    """The bound names of code that may bind any name, for example through ``exec``."""

    def __contains__(self, name: object) -> bool:
        return True


_BIND_ANYTHING = frozenset({"exec", "globals", "get_ipython"})
_STORE = frozenset({"STORE_NAME", "STORE_GLOBAL", "STORE_FAST", "STORE_DEREF"})


def bound_names(code: CodeType) -> Container[str]:
    """The variables that running ``code`` may bind in its own scope, or as globals from functions in it."""
    names: set[str] = set(code.co_varnames + code.co_cellvars + code.co_freevars)
    codes = [code]
    for each in codes:  # the loop appends to it
        if not _BIND_ANYTHING.isdisjoint(each.co_names):
            return _Anything()
        for instruction in dis.get_instructions(each):
            if instruction.opname == "IMPORT_STAR" or "import_star" in instruction.argrepr.lower():
                return _Anything()
            if instruction.opname in _STORE and (each is code or instruction.opname == "STORE_GLOBAL"):
                names.add(str(instruction.argval))
        codes += [constant for constant in each.co_consts if isinstance(constant, CodeType)]
    return names


def dimension(tensor: torch.Tensor, dim: int, name: str) -> int:
    """``dim`` counted from the front.

    Raises ``ValueError`` if the tensor lacks it.
    """
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"{name} has {tensor.dim()} dimensions, but no dimension {dim}")
    return dim % tensor.dim()
