"""Batch rules: one operator call as a rule sees it, and the table of rules.

A rule computes the batch dimension of an operator's results from those of its arguments, and how the call
changes on a piece: slices of whole tensors, other sizes.  It raises :class:`Coupled` if samples are combined.
Without a rule, there is no split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...graph.ir import Node, Value
from ...torch_internals.private_api import OpOverload
from .batch_placement import PARTIAL, Part, Placement, Shard

Outputs = Sequence[Placement | None]
Rule = Callable[["Call"], "Outputs | Placement | None"]
"""Returns the placement of every output, or one for all of them."""


class Coupled(Exception):
    """The operator combines samples of the batch, so a piece cannot run it alone.

    ``outputs`` is the batch's placement in its results, if that is known nevertheless. ``pairs``: each sample
    is combined with each other one, as in a product of the batch with itself; later values are about pairs,
    and are computed for the whole batch.
    """

    def __init__(
        self, reason: str, outputs: Outputs | Placement | None = None, *, pairs: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.outputs = outputs
        self.pairs = pairs


_PAIRS = "it pairs samples of the batch"


class Call:
    """A node with the placements of its arguments; a rule fills in the rest.

    Attributes:
        slices: whole tensors of which a piece uses its slice.
        whole: values that were spread, and are whole when this node reads them.
        heads: whole tensors of which each piece uses the first part (``arange`` as an index of samples).
        sizes: arguments, by name, that depend on the number of samples of a piece.
        ranges: arguments, by name, that depend on the first and last sample of a piece.
        scaled: indices of outputs that are means of a piece, to be multiplied by its share of the samples.
        op: the operator to call on a piece, if it is another one.
        onto: the tensor that a sum over the samples is added to: zeros, or a partial sum itself.
    """

    def __init__(self, node: Node, total: int, placement: Callable[[Value], Placement | None]) -> None:
        self.node = node
        self.total = total
        self._placement = placement
        self._bound: dict[str, Any] | None = None
        self.outputs: tuple[Placement | None, ...] = ()
        self.slices: dict[Value, Shard] = {}
        self.whole: set[Value] = set()
        self.heads: dict[Value, Shard] = {}
        self.sizes: dict[str, Callable[[int], Any]] = {}
        self.ranges: dict[str, Callable[[int, int], Any]] = {}
        self.scaled: tuple[int, ...] = ()
        self.op: OpOverload | None = None
        self.onto: Value | None = None

    def __getitem__(self, name: str) -> Any:
        """The argument of that name, with its default."""
        if self._bound is None:
            arguments = self.node.op._schema.arguments
            self._bound = {argument.name: argument.default_value for argument in arguments}
            self._bound.update(zip((argument.name for argument in arguments), self.node.args))
            self._bound.update(self.node.kwargs)
        return self._bound[name]

    def has(self, name: str) -> bool:
        return any(argument.name == name for argument in self.node.op._schema.arguments)

    def shard(self, value: Any) -> Shard | None:
        """The batch dimension of ``value``; ``None`` if it is whole, or not a tensor."""
        found = self._placement(value) if isinstance(value, Value) else None
        return found if isinstance(found, Shard) else None

    @property
    def part(self) -> Part | None:
        """The part of the batch that the arguments contain; ``None`` if they contain all of it."""
        shards = (self.shard(value) for value in self.node.inputs)
        return next((shard.part for shard in shards if shard is not None), None)

    def batch_at(self, dim: int) -> Shard:
        """The placement of the arguments' samples in dimension ``dim``."""
        return Shard(dim, part=self.part)

    def placement(self, value: Value) -> Placement | None:
        return self._placement(value)

    def take(self, value: Any, shard: Shard) -> None:
        """Require ``value`` with this placement: it is sliced if it is whole, otherwise it must match."""
        if not isinstance(value, Value):
            return
        now = self.shard(value)
        if now is None:
            if value.shape[shard.dim] != shard.size(self.total):
                raise Coupled("its arguments have different sizes along the batch")
            if self.slices.setdefault(value, shard) != shard:
                raise Coupled("one argument is used in two different ways")
        elif now != shard:
            raise Coupled("the batch is in different dimensions of its arguments")

    def local(self, name: str, shard: Shard, full: Sequence[int]) -> None:
        """Set argument ``name`` to the sizes ``full``, with the piece's size in the batch dimension."""
        self.sizes[name] = lambda samples: shard.shape(full, samples)

    @property
    def tensors(self) -> list[Value]:
        """The distinct tensors among the arguments."""
        return list(dict.fromkeys(self.node.inputs))


RULES: dict[str, Rule] = {}
"""By ATen's name of the operator, without the underscore of in-place variants."""


def rule(names: str) -> Callable[[Rule], Rule]:
    """Register a rule for the operators with these names."""

    def register(function: Rule) -> Rule:
        for name in names.split():
            RULES[name] = function
        return function

    return register


def named(text: str) -> frozenset[str]:
    """Names of operators, separated by spaces."""
    return frozenset(text.split())


FACTORIES = named(
    """zeros ones empty full empty_strided new_zeros new_ones new_empty new_full new_empty_strided
    zeros_like ones_like empty_like full_like"""
)
"""Operators whose results are equal on all pieces, or uninitialized."""


def base_name(op: OpOverload) -> str:
    """``"add"`` for ``aten::add_.Tensor``; operators of other libraries keep their namespace."""
    namespace, _, name = op._schema.name.partition("::")
    name = name.rstrip("_")
    return name if namespace == "aten" else f"{namespace}::{name}"


def wrapped(dims: int | Iterable[int] | None, ndim: int) -> tuple[int, ...]:
    """Dimensions as non-negative numbers; if none are given, all of them."""
    if dims is None:
        return tuple(range(ndim))
    if isinstance(dims, int):
        dims = (dims,)
    found = tuple(dim % ndim if ndim else 0 for dim in dims)
    return found


def align(call: Call, values: Sequence[Any], ndim: int) -> Shard | None:
    """The batch placement in the broadcast of ``values``, which has ``ndim`` dimensions; takes slices as
    needed.

    If tensors have it in different dimensions of the broadcast, the result has pairs of samples.
    """
    found: Shard | None = None
    for value in values:
        shard = call.shard(value)
        if shard is None:
            continue
        here = shard.at(shard.dim + ndim - len(value.shape))
        if found is None:
            found = here
        elif found != here:
            if found.dim == here.dim:
                raise Coupled("it combines samples at different positions of the batch")
            raise Coupled(_PAIRS, pairs=True)
    if found is None:
        return None
    for value in values:
        if not isinstance(value, Value):
            continue
        dim = found.dim - (ndim - len(value.shape))
        if call.shard(value) is None and dim >= 0 and value.shape[dim] != 1:
            call.take(value, found.at(dim))
    return found


def labeled(
    call: Call, terms: Sequence[tuple[Any, str]], result: str, *, linear: bool = True
) -> Placement | None:
    """A product summed over the labels that ``result`` lacks, as in ``einsum``: mm is ``ik,kj->ij``.

    Raises :class:`Coupled` if the sum runs over the batch and ``linear`` is not set.
    """
    found: tuple[str, Shard] | None = None
    for value, labels in terms:
        shard = call.shard(value)
        if shard is None:
            continue
        here = labels[shard.dim]
        if found is None:
            found = here, shard
        elif here != found[0]:
            raise Coupled(_PAIRS, pairs=True)
        elif not shard.like(found[1]):
            raise Coupled("it combines samples at different positions of the batch")
    if found is None:
        return None
    label, shard = found
    for value, labels in terms:
        if isinstance(value, Value) and label in labels and call.shard(value) is None:
            call.take(value, shard.at(labels.index(label)))
    if label in result:
        return shard.at(result.index(label))
    if not linear:
        raise Coupled("it combines all samples")
    return PARTIAL
