"""Cache of compiled programs by structure, with variants for sizes and numbers.

A :class:`Program` is what a compiled version of the subgraph depends on, with values numbered
in order of first appearance: operators, connections, kinds of tensors, memory sharing, and static
arguments.  Two parts are separate, because they change from step to step: Python numbers that only feed
arithmetic (``scalars``), and sizes (``shapes``).  The compiling backend decides which of them may vary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from ...graph.ir import Node, Storage, TensorMeta, Value
from ...torch_internals.private_api import OpOverload
from ..lru_cache import LRUCache
from ..replay.miss_reason import (
    FIRST_OF_ITS_KIND,
    SHARED_OTHERWISE,
    Sketch,
    first_difference,
    most_similar,
    place,
    sketch,
)
from .dynamic_shapes import Shapes, Sizes
from .scalar_arguments import Numbers, kind_of, scalars_of

Compiled = TypeVar("Compiled")
MOST_PROGRAMS = 64  # per backend; a program keeps its compiled code alive
MOST_VARIANTS = 8  # per program, for other values of its static numbers and sizes


Made = tuple[int, int]  # the position of a node, and the number of its output


class ProgramKey:
    """What all variants of a program have in common, hashed once: operators hash in Python."""

    __slots__ = ("_hash", "content")

    def __init__(self, *content: Hashable) -> None:
        self.content = content
        self._hash = hash(content)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, ProgramKey) and self.content == other.content)


@dataclass(frozen=True, slots=True)
class Program:
    """One subgraph of nodes as plain data.

    ``steps`` has an entry for each node, ``inputs`` the outside values in order of first use, ``scalars`` the
    numbers that take part in arithmetic in order of appearance, and ``varying`` the positions of those that
    change from step to step in a training loop. ``kept`` are the values that are returned, one for each
    storage that is created here and needed afterwards: the node, and the number of its output. ``settings``
    are the process's (:func:`settings`).
    """

    steps: tuple[tuple[Any, ...], ...]
    inputs: tuple[Any, ...]
    kept: tuple[Made, ...]
    scalars: tuple[float, ...]
    varying: tuple[int, ...]
    shapes: Shapes
    users: tuple[OpOverload, ...]  # for each scalar, the operator that uses it
    settings: Hashable

    @property
    def key(self) -> ProgramKey:
        return ProgramKey(self.settings, self.steps, self.inputs)

    def with_scalars(self, scalars: Sequence[float]) -> Program:
        """The same program with other numbers."""
        return replace(self, scalars=tuple(scalars))


def settings() -> Hashable:
    """Settings of the process that compilers build into their code."""
    deterministic: Any = torch.utils.deterministic
    return (
        torch.are_deterministic_algorithms_enabled(),
        deterministic.fill_uninitialized_memory,
        torch.get_float32_matmul_precision(),
    )


def program_of(nodes: Sequence[Node], outputs: Sequence[Value]) -> Program:
    """The structure of ``nodes`` whose results ``outputs`` are returned."""
    values: dict[Value, int] = {}
    storages: dict[Storage, int] = {}
    kinds: dict[TensorMeta, tuple[Any, ...]] = {}
    inputs: list[Any] = []
    given: list[TensorMeta] = []
    made: list[TensorMeta] = []
    scalars: list[float] = []
    sizes: list[int] = []
    varying: list[int] = []
    users: list[OpOverload] = []
    steps: list[tuple[Any, ...]] = []

    def of(meta: TensorMeta) -> tuple[Any, ...]:
        return kinds.setdefault(meta, (len(meta.shape), meta.dtype, meta.device, meta.flags))

    def scalar(item: float) -> Any:
        scalars.append(item)
        return type(item)

    def size(item: int) -> Any:
        sizes.append(item)
        return "size"

    def other(item: Any) -> Any:
        if isinstance(item, Value):
            number = values.get(item)
            if number is None:
                number = values[item] = len(values)
                inputs.append((number, storages.setdefault(item.storage, len(storages)), of(item.meta)))
                given.append(item.meta)
            return number
        # 1, 1.0 and True are equal as keys, but are different programs.
        return (type(item), item) if isinstance(item, Hashable) else (type(item), str(item))

    numbers = Numbers(scalar, size, other, lambda cls, items: (cls, *items))
    for node in nodes:
        before = len(scalars)
        kind = kind_of(node.op)
        args, kwargs = numbers.call(node)
        if len(scalars) > before:
            users += [node.op] * (len(scalars) - before)
            varying += _varying(node, kind, before, scalars)
        parts: list[Any] = [node.op, node.phase == "optimizer", args, *kwargs.items()]
        for value in node.outputs:
            if value.node is node:
                values[value] = len(values)
                storages.setdefault(value.storage, len(storages))
                parts.append(of(value.meta))
                made.append(value.meta)
        steps.append(tuple(parts))
    written = {storages[storage] for node in nodes for storage in node.writes if storage in storages}
    offsets = _offsets([place for _, place, _ in inputs], given, written)
    shapes = Shapes(tuple(given), tuple(made), offsets, tuple(sizes))
    kept = _kept(nodes, outputs)
    key = tuple(steps), tuple(inputs), kept, tuple(scalars), tuple(varying)
    return Program(*key, shapes, tuple(users), settings())


def _offsets(places: list[int], given: Sequence[TensorMeta], written: set[int]) -> tuple[int, ...]:
    """The offsets of inputs in memory that is written and that other inputs share."""
    return tuple(
        meta.offset for meta, place in zip(given, places) if place in written and places.count(place) > 1
    )


def _varying(node: Node, kind: Any, first: int, scalars: Sequence[float]) -> list[int]:
    """The positions, from ``first``, of those scalars of ``node`` that change from step to step."""
    if node.phase == "optimizer" and kind.changes:
        varying: list[int] = []
        at = first
        for name, item in (*zip(kind.positional, node.args), *node.kwargs.items()):
            count = sum(1 for _ in scalars_of(item, name, kind))
            if name in kind.changes:
                varying += range(at, at + count)
            at += count
        return varying
    return [at for at in range(first, len(scalars)) if scalars[at] == 0] if kind.zero_counts else []


def _kept(nodes: Sequence[Node], outputs: Sequence[Value]) -> tuple[tuple[int, int], ...]:
    """The results that are returned: the position of the node, and of the result among its own."""
    position = {value.node: -1 for value in outputs}
    position |= {node: at for at, node in enumerate(nodes) if node in position}
    found = {(position[value.node], value.node.outputs.index(value)) for value in outputs if value.node}
    return tuple(sorted(found))


@dataclass(slots=True, eq=False)
class Variant(Generic[Compiled]):
    """A compiled program for its static scalars only; the scalars of each of ``groups`` are one input.

    Its sizes are those of ``program``, or those that ``sizes`` allows, as far as ``holds`` is true. It
    returns everything that ``program`` keeps, even if less is needed.
    """

    program: Program
    groups: tuple[tuple[int, ...], ...]
    compiled: Compiled
    sizes: Sizes | None = None
    holds: Callable[[int], bool] | None = None  # whether the code is right for this varying size
    _static: list[int] = field(init=False)

    def __post_init__(self) -> None:
        free = {position for group in self.groups for position in group}
        self._static = [at for at in range(len(self.program.scalars)) if at not in free]

    def fits(self, program: Program) -> bool:
        """Whether the compiled program computes the same as ``program``, which has the same key."""
        return (
            set(program.kept) <= set(self.program.kept)
            and self.takes(program.scalars)
            and self._has_sizes_of(program.shapes)
        )

    def takes(self, scalars: Sequence[float]) -> bool:
        """Whether it takes these numbers as inputs, or was compiled for them."""
        mine = self.program.scalars
        return all(_same(mine[at], scalars[at]) for at in self._static) and all(
            _same(scalars[group[0]], scalars[at]) for group in self.groups for at in group[1:]
        )

    def _has_sizes_of(self, shapes: Shapes) -> bool:
        if self.sizes is None:
            return same_shapes(self.program.shapes, shapes)
        return self.sizes.fits(shapes) and (self.holds is None or self.holds(self.sizes.of(shapes)))


def _same(one: float, other: float) -> bool:
    """Whether two numbers of one type are identical: 0.0 and -0.0 are not, NaN and NaN are."""
    return str(one) == str(other) if one != other or not one or type(one) is complex else True


def same_shapes(one: Shapes, other: Shapes) -> bool:
    """Whether two recordings of a program have the same sizes; metadata is interned while it is in use."""
    return one == other or one.numbers() == other.numbers()


class Known(Generic[Compiled]):
    """A program that was compiled before: its variants for other numbers and sizes, the newest last."""

    def __init__(self, key: ProgramKey) -> None:
        self.key = key
        self.variants: list[Variant[Compiled]] = []
        self.dropped = False

    def find(self, program: Program) -> Variant[Compiled] | None:
        return next((each for each in self.variants if each.fits(program)), None)


class Programs(Generic[Compiled]):
    """Compiled programs, the least recently used dropped first."""

    def __init__(self, most: int = MOST_PROGRAMS) -> None:
        self._known: LRUCache[ProgramKey, Known[Compiled]] = LRUCache(most, on_drop=_note_dropped)

    def __len__(self) -> int:
        return sum(len(known.variants) for known in self._known.values())

    def known(self, program: Program) -> Known[Compiled] | None:
        return self._known.peek(program.key)

    def find(self, program: Program) -> Variant[Compiled] | None:
        known = self.known(program)
        found = known.find(program) if known is not None else None
        if known is not None and found is not None:
            self.use(known)
        return found

    def use(self, known: Known[Compiled]) -> None:
        """Mark it as used now."""
        self._known.use(known.key)

    def variants(self, program: Program) -> Sequence[Variant[Compiled]]:
        """The variants for other numbers and sizes of ``program``, newest last."""
        known = self.known(program)
        return () if known is None else tuple(known.variants)

    def groups(self, program: Program) -> tuple[tuple[int, ...], ...]:
        """The scalars that become inputs of a new variant: those that vary, grouped by equal values.

        Scalars that have varied before will vary again; scalars that have always been equal, for the same
        operator, stay equal.
        """
        known = [each.program.scalars for each in self.variants(program)]
        free = set(program.varying)
        for scalars in known:
            free.update(at for at, value in enumerate(program.scalars) if not _same(scalars[at], value))
        for variant in self.variants(program):
            free.update(position for group in variant.groups for position in group)
        # Cannot be an input of compiled code.
        free = {at for at in free if type(program.scalars[at]) is not complex}
        alike: dict[tuple[Any, ...], list[int]] = {}
        for position in sorted(free):
            values = [scalars[position] for scalars in (*known, program.scalars)]
            history = (program.users[position], *map(str, values))
            alike.setdefault(history, []).append(position)
        return tuple(map(tuple, alike.values()))

    def add(self, variant: Variant[Compiled]) -> Known[Compiled]:
        """Store it; returns its program."""
        key = variant.program.key
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = Known(key)
        known.variants.append(variant)
        del known.variants[:-MOST_VARIANTS]
        return known

    def drop(self, program: Program) -> None:
        """Forget every variant of ``program``."""
        known = self._known.pop(program.key)
        if known is not None:
            known.dropped = True

    def difference(self, program: Program, nodes: Sequence[Node]) -> str:
        """Why ``program`` was not found: the first difference from the most similar program."""
        variants = self.variants(program)
        if variants:
            # If only numbers differ, they are more informative than sizes.
            needed = set(program.kept)
            if all(needed - set(each.program.kept) for each in variants):
                at, _ = min(needed - set(variants[-1].program.kept))
                return f"{place(nodes[at])}: its result is needed later, and was not before"
            like = next((each for each in variants if same_shapes(each.program.shapes, program.shapes)), None)
            if like is None:
                return _shapes_differ(variants[-1].program, program, nodes)
            changed = next(
                _changed(like.program.scalars, program.scalars), "numbers that were equal now differ"
            )
            return f"a number that was compiled as a constant has changed: {changed}"
        known = [each.variants[-1].program for each in self._known.values()]
        nearest = most_similar(program, _sketch(program), [(other, _sketch(other)) for other in known])
        if nearest is None:
            return FIRST_OF_ITS_KIND
        differ = partial(_steps_differ, before=nearest, now=program)
        if (found := first_difference(nearest, program, nodes, differ)) is not None:
            return found
        if nearest.inputs != program.inputs:
            return SHARED_OTHERWISE
        return "PyTorch settings changed: deterministic algorithms, or matmul precision"


def _note_dropped(key: ProgramKey, known: Known[Any]) -> None:
    known.dropped = True


def _sketch(program: Program) -> Sketch:
    return sketch([step[0] for step in program.steps], None)


def _changed(old: Sequence[float], new: Sequence[float]) -> Iterator[str]:
    for before, now in zip(old, new):
        if str(before) != str(now):
            yield f"{now:g}, was {before:g}"


def _shapes_differ(old: Program, new: Program, nodes: Sequence[Node]) -> str:
    """The first tensor or argument, in program order, whose size differs."""
    given = iter(zip(old.shapes.inputs, new.shapes.inputs))
    made = iter(zip(old.shapes.made, new.shapes.made))
    sizes: list[int] = []
    reader = Numbers(lambda item: item, lambda item: sizes.append(item), lambda item: item)
    seen: set[Value] = set()
    for node in nodes:
        pairs = []
        for value in node.inputs:
            if value not in seen:
                seen.add(value)
                pairs.append(next(given))
        for value in node.outputs:
            if value.node is node:
                seen.add(value)
                pairs.append(next(made))
        for before, now in pairs:
            if before.shape != now.shape:
                return f"{place(node)}: {now}, was {before}"
            if before.stride != now.stride:
                return f"{place(node)}: strides {list(now.stride)}, were {list(before.stride)}"
        start = len(sizes)
        reader.call(node)
        for at in range(start, len(sizes)):
            if sizes[at] != old.shapes.arguments[at]:
                return f"{place(node)}: argument {sizes[at]}, was {old.shapes.arguments[at]}"
    return "inputs have other offsets in shared memory"


def _steps_differ(old: tuple[Any, ...], new: tuple[Any, ...], before: Program, now: Program) -> str:
    if old[0] is not new[0]:
        return f"{new[0]}, was {old[0]}"
    inputs = {number: meta for (number, *_), meta in zip(now.inputs, now.shapes.inputs)}
    known = {number: meta for (number, *_), meta in zip(before.inputs, before.shapes.inputs)}
    for one, other in zip(_flat(old[2:]), _flat(new[2:])):
        if isinstance(other, int) and isinstance(one, int):
            if inputs.get(other) is not known.get(other):
                return f"{inputs.get(other)}, was {known.get(other)}"
            if one != other:
                return "it has other inputs"
        elif one != other:
            return f"{other}, was {one}"
    return "it has other arguments"


def _flat(item: Any) -> Iterator[Any]:
    """The leaves of a step: each static argument, kind of a tensor, and number of a tensor is one."""
    if isinstance(item, tuple) and item and item[0] in (list, tuple):
        yield from _flat(item[1:])
    elif isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], type):
        yield f"argument {item[1]}"
    elif isinstance(item, tuple) and len(item) == 4 and isinstance(item[1], torch.dtype):
        yield f"{item[0]} dimensions {str(item[1]).removeprefix('torch.')} {item[2]}"
    elif isinstance(item, (list, tuple)):
        for entry in item:
            yield from _flat(entry)
    else:
        yield item
