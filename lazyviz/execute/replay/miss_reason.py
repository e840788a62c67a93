"""Miss reasons: the most similar cached program, and the first difference from it, as text."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeVar

from ...graph.ir import Node, SourceLine
from ...record.tracked_storages import TrackedValue
from ...torch_internals.private_api import OpOverload
from .program_key import Form, Key, Step, Subgraph

ENOUGH = 0.5  # of the ops in common: then the programs are versions of one


class Sketch(NamedTuple):
    """The basis for comparing programs: how often each operator is called, and the line of the first call."""

    ops: Counter[int]  # by identity: operators hash in Python
    line: SourceLine | None

    def similarity(self, other: Sketch) -> float:
        """The share of common ops, relative to the longer program."""
        return (self.ops & other.ops).total() / max(self.ops.total(), other.ops.total(), 1)

    def at_the_line_of(self, other: Sketch) -> bool:
        return self.line is not None and self.line == other.line


def sketch(ops: Iterable[OpOverload], line: SourceLine | None) -> Sketch:
    return Sketch(Counter([id(op) for op in ops]), line)


class HasSteps(Protocol):
    """The structure of a program: a description of each op, in order."""

    @property
    def steps(self) -> tuple[Any, ...]: ...


P = TypeVar("P", bound=HasSteps)
FIRST_OF_ITS_KIND = "the first program of its kind"
SHARED_OTHERWISE = "inputs share memory in another way"


def most_similar(new: HasSteps, drawn: Sketch, known: Iterable[tuple[P, Sketch]]) -> P | None:
    """The program in ``known``, the latest last, that ``new`` is a version of, if there is one."""
    nearest, best = None, (False, False, 0.0, 0)
    for other, its in known:
        similarity, here = drawn.similarity(its), drawn.at_the_line_of(its)
        if similarity < ENOUGH and not here:
            continue
        rank = (similarity >= ENOUGH, here, similarity, _same(other.steps, new.steps))
        if rank >= best:
            nearest, best = other, rank
    return nearest


def first_difference(
    old: HasSteps, new: HasSteps, nodes: Sequence[Node], differ: Callable[[Any, Any], str]
) -> str | None:
    """The first op that differs, as text; ``None`` if all are the same.

    ``differ`` describes how two steps differ.
    """
    same = _same(old.steps, new.steps)
    if same == len(new.steps) == len(old.steps):
        return None
    if same == len(new.steps):
        return f"it ends after {same:,} ops, but the cached program continues"
    if same == len(old.steps):
        return f"it continues with {place(nodes[same])}, but the cached program ends there"
    return f"{place(nodes[same])}: {differ(old.steps[same], new.steps[same])}"


def place(node: Node) -> str:
    """A node by name and line."""
    return f"{node.name} at {node.source}" if node.source is not None else node.name


def subgraph_difference(subgraph: Subgraph, drawn: Sketch, known: Iterable[tuple[Key, Sketch]]) -> str:
    """How ``subgraph`` differs from the most similar one in ``known``, the latest last."""
    key, nodes = subgraph.key, subgraph.nodes
    assert key is not None
    nearest = most_similar(key, drawn, known)
    if nearest is None:
        return FIRST_OF_ITS_KIND
    wired = _same(_wiring(nearest), _wiring(key))
    counts = accumulate(len(node.inputs) for node in nodes)
    otherwise = next((at for at, count in enumerate(counts) if count > wired), len(nodes))
    if otherwise < _same(nearest.steps, key.steps):
        return f"{place(nodes[otherwise])}: it has other inputs"
    return first_difference(nearest, key, nodes, _steps_differ) or _other_difference(nearest, key)


def _wiring(key: Key) -> list[int]:
    """The numbers of the inputs; those from outside count down from -1, independent of the number of created
    values.
    """
    made = key.made
    return [number if number < made else made - 1 - number for number in array("i", key.wiring)]


def _steps_differ(old: Step, new: Step) -> str:
    if old.op is not new.op:
        return f"{new.op}, was {old.op}"
    for was, now in zip(old.results, new.results):
        if was != now:
            return forms_differ(was, now)
    for was, now in zip(old.inputs, new.inputs):
        if was != now:
            return f"an input is {forms_differ(was, now)}"
    for name in {**new.arguments, **old.arguments}:
        before, given = (
            _readable(step.arguments[name]) if name in step.arguments else "not given" for step in (old, new)
        )
        if before != given:
            return f"{name} is {given}, was {before}"
    if list(new.arguments) != list(old.arguments):
        return "its keyword arguments are in another order"
    return "its results have another memory layout, or it was recorded in another mode"


def forms_differ(was: Form, now: Form) -> str:
    if str(was) != str(now):
        return f"{now}, was {was}"
    if was.stride != now.stride:
        return f"{now} with strides {list(now.stride)}, was {list(was.stride)}"
    return f"{now}, with another conjugate or negative bit"


def _readable(given: Any) -> Any:
    """An argument in the user's notation, without values that are not part of the structure."""
    if isinstance(given, type):
        return "a tensor" if given is TrackedValue else given.__name__
    cls, *entries = given
    return cls(_readable(entry) for entry in entries) if cls in (list, tuple) else entries[0]


def _same(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The length of the common prefix."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _other_difference(old: Key, new: Key) -> str:
    """The differences between subgraphs with the same ops."""
    for was, form in zip(old.outside, new.outside):
        if form != was:
            return f"an input is {forms_differ(was, form)}"
    if old.places != new.places:
        return SHARED_OTHERWISE
    if (old.later, old.kept, old.whole) != (new.later, new.kept, new.whole):
        return "the other pending ops differ"
    if old.sizes != new.sizes:
        return "the storage of an input has another size"
    if old.users != new.users or old.memory != new.memory:
        return "other results are still referred to"
    return "it was recorded in another mode or phase, or evaluated in another way"
