"""Recognising a stretch of nodes that has been met before, and what is kept for it.

A :class:`Program` is what a compiled version of the stretch depends on, with values numbered
in order of first appearance: operators, wiring, metadata, who shares memory, and static
arguments.  Python floats stand apart (``scalars``), so that a learning-rate schedule is one
program; which of them may vary is for whoever compiles.  This is the structure of
:mod:`lazyviz.graph.fingerprint` in a form that costs a few microseconds an op and means
something in this process alone: interned metadata is compared by identity.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ..graph.ir import Node, Storage, Value

Compiled = TypeVar("Compiled")
MOST_PROGRAMS = 64  # kept for each backend; a program keeps its compiled code alive
MOST_VARIANTS = 8  # of one program, for other values of its static scalars


@dataclass(frozen=True, slots=True)
class Program:
    """One stretch of nodes as plain data.

    ``steps`` has an entry for each node, ``inputs`` the values from outside in order of first
    use, ``scalars`` the floats in order of appearance and ``varying`` the positions of those that
    change from step to step in a training loop.  ``kept`` are the storages made here
    that are needed afterwards, by number.
    """

    steps: tuple[tuple[Any, ...], ...]
    inputs: tuple[Any, ...]
    kept: tuple[int, ...]
    scalars: tuple[float, ...]
    varying: tuple[int, ...]

    @property
    def key(self) -> Hashable:
        return self.steps, self.inputs, self.kept


# Arguments that optimizers compute anew in each step (bias corrections, learning rates).
_VARYING = {"value", "alpha", "other", "scalar", "scalars"}


def program_of(nodes: Sequence[Node], outputs: Sequence[Value]) -> Program:
    """The structure of ``nodes``, of whose results ``outputs`` are needed afterwards."""
    numbers: dict[Value, int] = {}
    storages: dict[Storage, int] = {}
    inputs: list[Any] = []
    scalars: list[float] = []
    varying: list[int] = []
    steps: list[tuple[Any, ...]] = []

    def argument(item: Any) -> Any:
        if isinstance(item, Value):
            number = numbers.get(item)
            if number is None:
                number = numbers[item] = len(numbers)
                inputs.append((number, storages.setdefault(item.storage, len(storages)), item.meta))
            return number
        cls = type(item)
        if cls is float:
            scalars.append(item)
            return float
        if cls is list or cls is tuple:
            return (cls, *[argument(entry) for entry in item])
        # 1, 1.0 and True are equal as keys, and other programs.
        return (cls, item) if isinstance(item, Hashable) else (cls, str(item))

    for node in nodes:
        parts: list[Any] = [node.op, node.phase == "optimizer"]
        changing = node.phase == "optimizer" and torch.Tag.pointwise in node.op.tags
        names = [schema.name for schema in node.op._schema.arguments] if changing else ()
        for position, item in enumerate(node.args):
            before = len(scalars)
            parts.append(argument(item))
            if changing and names[position] in _VARYING:
                varying += range(before, len(scalars))
        for name, item in node.kwargs.items():
            before = len(scalars)
            parts += (name, argument(item))
            if changing and name in _VARYING:
                varying += range(before, len(scalars))
        for value in node.outputs:
            if value.node is node:
                numbers[value] = len(numbers)
                storages.setdefault(value.storage, len(storages))
                parts.append(value.meta)
        steps.append(tuple(parts))
    kept = tuple(sorted({numbers[value] for value in outputs}))
    return Program(tuple(steps), tuple(inputs), kept, tuple(scalars), tuple(varying))


@dataclass(slots=True)
class Variant(Generic[Compiled]):
    """A compiled program for these values of its static scalars; ``groups`` of the others are equal."""

    program: Program
    groups: tuple[tuple[int, ...], ...]
    compiled: Compiled

    def fits(self, scalars: Sequence[float]) -> bool:
        """Whether the compiled program computes what one with these scalars would."""
        free = {position for group in self.groups for position in group}
        mine = self.program.scalars
        return all(
            position in free or (mine[position] == value and str(mine[position]) == str(value))
            for position, value in enumerate(scalars)
        ) and all(len({str(scalars[position]) for position in group}) == 1 for group in self.groups)


class Programs(Generic[Compiled]):
    """Compiled programs, the least recently used dropped first."""

    def __init__(self, most: int = MOST_PROGRAMS) -> None:
        self._most = most
        self._entries: OrderedDict[Hashable, list[Variant[Compiled]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def find(self, program: Program) -> Variant[Compiled] | None:
        variants = self._entries.get(program.key)
        found = next((each for each in variants or () if each.fits(program.scalars)), None)
        if found is not None:
            self._entries.move_to_end(program.key)
        return found

    def groups(self, program: Program) -> tuple[tuple[int, ...], ...]:
        """Which scalars are to be inputs of a new variant: those that vary, by equal values.

        What has varied before varies again.
        """
        known = [each.program.scalars for each in self._entries.get(program.key, ())]
        free = set(program.varying)
        for scalars in known:
            free.update(at for at, value in enumerate(program.scalars) if str(scalars[at]) != str(value))
        for variant in self._entries.get(program.key, ()):
            free.update(position for group in variant.groups for position in group)
        alike: dict[tuple[str, ...], list[int]] = {}
        for position in sorted(free):
            history = (*(str(scalars[position]) for scalars in known), str(program.scalars[position]))
            alike.setdefault(history, []).append(position)
        return tuple(map(tuple, alike.values()))

    def add(
        self, program: Program, groups: tuple[tuple[int, ...], ...], compiled: Compiled
    ) -> Variant[Compiled]:
        variant = Variant(program, groups, compiled)
        variants = self._entries.setdefault(program.key, [])
        variants.append(variant)
        del variants[:-MOST_VARIANTS]
        self._entries.move_to_end(program.key)
        while len(self._entries) > self._most:
            self._entries.popitem(last=False)
        return variant

    def drop(self, program: Program) -> None:
        """Forget every variant of ``program``."""
        self._entries.pop(program.key, None)

    def difference(self, program: Program, nodes: Sequence[Node]) -> str:
        """Why ``program`` was not found: the first difference from the program that is most like it."""
        variants = self._entries.get(program.key)
        if variants:
            changed = next(_changed(variants[-1].program.scalars, program.scalars), None)
            return f"a number that was compiled as a constant is another: {changed}" if changed else "scalars"
        known = [each[-1].program for each in self._entries.values()]
        if not known:
            return "the first program of its kind"
        nearest = max(known, key=lambda other: _alike(other.steps, program.steps))
        same = _alike(nearest.steps, program.steps)
        if same == len(nodes):
            if len(nearest.steps) > same:
                return f"it ends after {same:,} ops, the one known goes on"
            if nearest.inputs != program.inputs:
                return _inputs_differ(nearest, program)
            return "other results are needed afterwards"
        node = nodes[same]
        where = f" at {node.source}" if node.source is not None else ""
        if same >= len(nearest.steps):
            return f"it goes on with {node.name}{where}, the one known ends there"
        old, new = nearest.steps[same], program.steps[same]
        return f"{node.name}{where}: {_words(old, new, nearest, program)}"


def _alike(left: Sequence[Any], right: Sequence[Any]) -> int:
    """How many steps from the first on are equal."""
    for number, (one, other) in enumerate(zip(left, right)):
        if one != other:
            return number
    return min(len(left), len(right))


def _changed(old: Sequence[float], new: Sequence[float]) -> Iterator[str]:
    for before, now in zip(old, new):
        if str(before) != str(now):
            yield f"{now:g}, was {before:g}"


def _inputs_differ(old: Program, new: Program) -> str:
    for (_, memory, meta), (_, other_memory, other_meta) in zip(old.inputs, new.inputs):
        if meta is not other_meta:
            return f"an input is {other_meta}, was {meta}"
        if memory != other_memory:
            return "inputs share memory otherwise"
    return "it has other inputs"


def _words(old: tuple[Any, ...], new: tuple[Any, ...], before: Program, now: Program) -> str:
    if old[0] is not new[0]:
        return f"{new[0]}, was {old[0]}"
    inputs = {number: meta for number, _, meta in now.inputs}
    known = {number: meta for number, _, meta in before.inputs}
    for one, other in zip(old, new):
        if one == other:
            if isinstance(other, int) and inputs.get(other) is not known.get(other):
                return f"{inputs.get(other)}, was {known.get(other)}"
            continue
        if hasattr(other, "shape") and hasattr(one, "shape"):
            return f"{other}, was {one}"
        if isinstance(other, tuple) and isinstance(one, tuple) and len(other) == 2 == len(one):
            return f"argument {other[1]}, was {one[1]}"
        return "it works on other tensors"
    return "it has other arguments"
