"""What a stretch of pending nodes is, as a key that an equal stretch has again.

The structure of :mod:`lazyviz.graph.fingerprint`, in a form that costs less than a microsecond an op and
means something in this process alone.  Half of it is known since recording: the shape cache's answer of a
node (``node.entry``) stands for its operator, the metadata of its inputs and outputs, who shares memory with
whom, and its static arguments.  What is added is the wiring: values numbered in order of first appearance.

Numbers that recording knows by their type alone (a learning rate, a step counter) are inputs, not structure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ..graph.ir import TensorMeta
from ..record.recorder import Tape
from ..record.rng import rng_state
from ..record.shapes import Inferred, OutputSpec
from ..record.storage import TrackedNode, TrackedStorage, TrackedValue

MOST_STEPS = 50_000  # that are kept: one for each answer of the shape cache that was met here
_FLOATS = (float, complex)


class Key(NamedTuple):
    """Equal for equal stretches.

    ``wiring`` has the entry of each node and the numbers of its inputs after it, ``outside`` the values from
    outside, ``users`` and ``later`` the numbers of those values, ``memory`` which storages are kept and what
    they are for, ``turns`` where the phase or the graph is another.
    """

    purpose: Hashable
    wiring: tuple[Any, ...]
    outside: tuple[tuple[int, TensorMeta, int, int, bool], ...]
    users: tuple[int, ...]
    later: tuple[int, ...]
    memory: tuple[Any, ...]
    turns: tuple[Any, ...]
    inference: bool
    whole: bool


class Step:
    """What all nodes with the same answer of the shape cache have in common.

    ``args`` and ``kwargs`` are the arguments that are inputs, not structure.  ``outputs`` is the number of
    values that the operator returns, ``known`` whether a node's structure is described at all.
    """

    __slots__ = ("args", "call", "draws", "entry", "kwargs", "known", "op", "outputs")

    def __init__(self, node: TrackedNode, entry: Inferred, by_type: frozenset[type]) -> None:
        self.entry, self.op = entry, node.op
        self.call: Callable[..., Any] | None = None  # how its kernel is called, once that was asked for
        self.draws = node.draws is not None
        self.outputs = sum(type(spec) is OutputSpec for spec in entry.outputs)
        self.known = True
        self.args = [at for at, item in enumerate(node.args) if self._varies(item, by_type)]
        self.kwargs = [name for name, item in node.kwargs.items() if self._varies(item, by_type)]

    def _varies(self, item: Any, by_type: frozenset[type]) -> bool:
        cls = type(item)
        if cls is list or cls is tuple:
            varying = [self._varies(entry, by_type) for entry in item]
            if any(varying) and any(type(entry) is TrackedValue or entry is None for entry in item):
                self.known = False
            return any(varying)
        # 0.0 and -0.0 are the same to the shape cache.
        return cls in by_type or (cls in _FLOATS and (cls is complex or item == 0))


class _Numbers(dict[TrackedValue, int]):
    """Values in order of first appearance; one that nothing in the stretch has made is from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[TrackedValue] = []

    def __missing__(self, value: TrackedValue) -> int:
        number = self[value] = len(self)
        self.outside.append(value)
        return number


class Stretch:
    """Pending nodes that are to run, in program order, and what their replay is given.

    Attributes:
        key: equal for equal stretches; ``None`` where nothing can be said.
        numbers: the values of the stretch, each with its number.
        outside: those that were there before, in order.
        storages: theirs and the others', in order of first appearance.
        users: values made here whose tensor the user has.
        later: values made here that pending nodes beyond the stretch need.
        scalars: numbers that are inputs, in order of appearance.
        draws: positions of the nodes that draw random numbers.
        graphs: what the nodes are of, in order.
        whole: nothing else is pending.
    """

    __slots__ = (
        "draws",
        "graphs",
        "key",
        "later",
        "nodes",
        "numbers",
        "outside",
        "scalars",
        "storages",
        "users",
        "whole",
    )

    def __init__(self, nodes: Sequence[TrackedNode]) -> None:
        self.nodes = nodes
        self.key: Key | None = None
        self.numbers = _Numbers()
        self.outside = self.numbers.outside
        self.storages: list[TrackedStorage] = []
        self.users: list[TrackedValue] = []
        self.later: list[TrackedValue] = []
        self.scalars: list[Any] = []
        self.draws: list[int] = []
        self.graphs: list[Any] = []
        self.whole = False

    @property
    def is_all_of_a_graph(self) -> bool:
        """Whether the nodes are all of a graph: its projection depends on nothing else."""
        return (
            len(self.graphs) == 1
            and len(self.graphs[0].nodes) == len(self.nodes)
            and all(storage.continues is None for storage in self.storages)
        )


class Steps:
    """The steps that were met so far."""

    def __init__(self) -> None:
        self._known: dict[Inferred, Step] = {}

    def of(self, node: TrackedNode) -> Step | None:
        """The step of ``node``, if the shape cache could answer for it."""
        entry = node.entry
        return None if entry is None else self._known.get(entry)

    def look_at(self, tape: Tape, nodes: Sequence[TrackedNode], *, purpose: Hashable = None) -> Stretch:
        """The structure of ``nodes``, closed under dependencies and in program order.

        ``purpose`` tells apart stretches that are alike but are looked at for something else.
        """
        stretch = Stretch(nodes)
        stretch.whole = len(nodes) == len(tape.pending)
        later: set[TrackedValue] = set()
        if not stretch.whole:
            inside = set(nodes)
            later = {value for node in tape.pending if node not in inside for value in node.inputs}
        if len(self._known) > MOST_STEPS:
            self._known.clear()
        steps = self._known
        wiring: list[Any] = []
        places_of_users: list[int] = []
        turns: list[Any] = []  # where the phase or the graph is another, or a node has further values
        numbers, users, scalars = stretch.numbers, stretch.users, stretch.scalars
        number_of = numbers.__getitem__
        phase, inference = nodes[0].phase, nodes[0].inference_mode
        graph = nodes[0].graph
        stretch.graphs.append(graph)
        for at, node in enumerate(nodes):
            entry = node.entry
            step = steps.get(entry)  # type: ignore[arg-type]
            if step is None:
                if entry is None:
                    return stretch
                step = steps[entry] = Step(node, entry, tape.shapes.info(node.op).by_type)
            if not step.known or node.error is not None or node.again or node.inference_mode is not inference:
                return stretch
            wiring.append(entry)
            if node.inputs:
                wiring += map(number_of, node.inputs)
            if step.args:
                args = node.args
                scalars += [args[position] for position in step.args]
            if step.kwargs:
                scalars += [node.kwargs[name] for name in step.kwargs]
            if step.draws:
                stretch.draws.append(at)
                if node.op is rng_state:  # the generator's own record may need it
                    later.update(node.outputs)
            if node.phase is not phase:
                phase = node.phase
                turns.append((at, phase))
            if node.graph is not graph:
                graph = node.graph
                if graph not in stretch.graphs:
                    stretch.graphs.append(graph)
                turns.append((at, stretch.graphs.index(graph)))
            outputs = node.outputs
            if len(outputs) != step.outputs:  # `p.data = result` has made one more value of a result
                turns.append((at, "values", *[value.index for value in outputs]))
            for value in outputs:
                if value.node is node and value not in numbers:
                    numbers[value] = number = len(numbers)
                    if value.tensor is not None:
                        users.append(value)
                        places_of_users.append(number)
        places: dict[TrackedStorage, int] = {}
        for value in numbers:
            places.setdefault(value.storage, len(places))
        stretch.storages = list(places)
        kept: set[TrackedStorage] = set()
        if later:
            given = set(stretch.outside)
            stretch.later = [value for value in numbers if value in later and value not in given]
            kept = {value.storage for value in later}
        memory: list[Any] = []
        origins: dict[Any, int] = {}
        for storage, place in places.items():
            live, role, needed = storage.live > 0, storage.role, storage in kept
            dropped = storage.dropped is not None
            if live or needed or role is not None or not dropped:
                memory += (place, live, needed, role, dropped)
            if storage.external:
                first = origins.setdefault(storage.origin, place)
                if first != place or storage.continues is not None:
                    turns.append((place, "continues", first))
        stretch.key = Key(
            purpose,
            tuple(wiring),
            tuple(
                [
                    (numbers[value], value.meta, places[value.storage], value.storage.nbytes, value in later)
                    for value in stretch.outside
                ]
            ),
            tuple(places_of_users),
            tuple([numbers[value] for value in stretch.later]),
            tuple(memory),
            tuple(turns),
            inference,
            stretch.whole,
        )
        return stretch

    def difference(self, known: Iterable[Key], stretch: Stretch) -> str:
        """What is new about a stretch: how it differs from the one of ``known`` that is most like it."""
        key = stretch.key
        assert key is not None
        nearest, same = None, -1
        for other in known:
            alike = _alike(other.wiring, key.wiring)
            if alike > same:
                nearest, same = other, alike
        if nearest is None:
            return "the first program of its kind"
        if same == len(key.wiring) == len(nearest.wiring):
            return _beside_wiring(nearest, key)
        at = 0  # of a node's entry in the wiring
        for node in stretch.nodes:
            if at + 1 + len(node.inputs) > same:
                break
            at += 1 + len(node.inputs)
        else:
            return f"it ends after {len(stretch.nodes):,} ops, the one known goes on"
        where = f"{node.name} at {node.source}" if node.source is not None else node.name
        if same >= len(nearest.wiring):
            return f"it goes on with {where}, the one known ends there"
        if at != same:
            return f"{where}: it works on other tensors"
        return f"{where}: {self._words(nearest.wiring[same], key.wiring[same])}"

    def _words(self, before: Inferred, now: Inferred) -> str:
        old, new = self._known.get(before), self._known[now]
        if old is not None and old.op is not new.op:
            return f"{new.op}, was {old.op}"
        for one, other in zip(before.outputs, now.outputs):
            if type(one) is OutputSpec and type(other) is OutputSpec and one.meta is not other.meta:
                return f"{other.meta}, was {one.meta}"
        return "other arguments"


def values_in(item: Any) -> Iterator[TrackedValue]:
    """The values in one recorded argument."""
    if isinstance(item, TrackedValue):
        yield item
    elif isinstance(item, (list, tuple)):
        for entry in item:
            yield from values_in(entry)


def _alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items from the first on are equal."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _beside_wiring(old: Key, new: Key) -> str:
    """What differs in stretches of the same ops."""
    for (_, was, place, *_), (_, meta, other, *_) in zip(old.outside, new.outside):
        if meta is not was:
            return f"an input is {meta}, was {was}"
        if place != other:
            return "inputs share memory otherwise"
    if (old.later, old.whole) != (new.later, new.whole):
        return "other ops are pending beside it"
    if old.outside != new.outside:
        return "the memory that inputs are in is of another size"
    if old.users != new.users or old.memory != new.memory:
        return "other results are still referred to"
    return "it was recorded in another mode or phase, or evaluated otherwise"
