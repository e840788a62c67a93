"""Cache key of a subgraph: its structure, equal for subgraphs that can run the same code.

The structure is what generated code depends on: operators, connections, metadata, memory sharing, and static
arguments, in a form that is valid only in this process.  Half of it is known from recording: a node's entry
in the shape cache (``node.entry``) represents its operator, the metadata of its inputs and outputs, memory
sharing, and static arguments.  The key adds the connections: values numbered in order of first appearance.

Numbers that recording knows only by type (a learning rate, a step counter) are inputs, not structure, and so
is the offset of a batch in a larger tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...graph.ir import TensorMeta
from ...record.rng import rng_state
from ...record.shapes.inference import Inferred, OutputSpec
from ...record.storage import TrackedNode, TrackedStorage, TrackedValue
from ...record.tape import Tape
from ...torch_internals.private_api import OpOverload
from . import node_passes

MOST_STEPS = 50_000  # that are kept: one for each answer of the shape cache that was met here
_FLOATS = (float, complex)


MOVING: Mapping[str, tuple[int, ...]] = {
    "aten::select.int": (2,),
    "aten::slice.Tensor": (2, 3),
    "aten::as_strided": (3,),
    "aten::select_backward": (3,),
    "aten::slice_backward": (3, 4),
    "aten::select_scatter": (3,),
    "aten::slice_scatter": (3, 4),
}
"""Arguments that say where in a tensor something is: of a result of the same shape, an input."""


class Key(NamedTuple):
    """Equal for equal subgraphs.

    ``wiring`` has the numbers of all nodes' inputs, as the bytes of ints; so many values are ``made``, the
    others are from outside.  Of these ``outside`` has the forms, ``places`` the numbers of their storages,
    ``sizes`` the bytes of those, ``kept`` the positions of those that pending nodes beyond the subgraph need.
    ``users`` and ``later`` are the numbers of those values, ``memory`` which storages are kept and what they
    are for, ``graph_layout`` where a node is of another graph.
    """

    purpose: Hashable
    steps: tuple[Step, ...]
    wiring: bytes
    phases: tuple[str, ...]
    made: int
    outside: tuple[Form, ...]
    places: tuple[int, ...]
    sizes: tuple[int, ...]
    kept: tuple[int, ...]
    users: tuple[int, ...]
    later: tuple[int, ...]
    memory: tuple[Any, ...]
    graph_layout: tuple[Any, ...]
    inference: bool
    whole: bool

    def __hash__(self) -> int:  # of what tells most subgraphs apart: a hash of everything takes as long again
        return hash((self.purpose, self.steps, self.wiring, self.users, self.memory))

    @property
    def program(self) -> Key:
        """Without what the user still refers to, which decides when memory is freed and nothing else."""
        return self._replace(users=(), memory=())


class Form(NamedTuple):
    """A tensor's metadata but for where it begins in its storage: batches are cut from one tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    flags: int

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')} {self.device}"


def form_of(meta: TensorMeta) -> Form:
    return Form(meta.shape, meta.stride, meta.dtype, meta.device, meta.flags)


class Step:
    """What nodes of the same structure have in common; there is one of each in :class:`Steps`.

    ``args`` and ``kwargs`` are the arguments that are inputs, not structure.  ``inputs`` and ``results`` are
    the forms of the tensors that the operator takes and returns, ``arguments`` the structure of each argument
    that was given, by name.
    """

    __slots__ = ("args", "arguments", "call", "draws", "inputs", "kwargs", "op", "results", "special")

    def __init__(
        self,
        node: TrackedNode,
        args: list[int],
        kwargs: list[str],
        inputs: list[Form],
        results: list[Form],
        arguments: dict[str, Any],
    ) -> None:
        self.op = node.op
        self.draws = node.draws is not None
        self.args, self.kwargs = args, kwargs
        self.inputs, self.results = inputs, results
        self.arguments = arguments
        self.special = bool(args or kwargs or self.draws)
        self.call: Callable[..., Any] | None = None  # how its kernel is called, once that was asked for


class _Undescribed(Exception):
    """An argument has no structure that can be a key."""


def _structure(item: Any, by_type: frozenset[type]) -> tuple[Any, bool]:
    """The structure of an argument that holds no tensor, and whether it is an input."""
    cls = type(item)
    if cls is list or cls is tuple:
        parts = [_structure(entry, by_type) for entry in item]
        varies = any(part[1] for part in parts)
        if varies and any(entry is None or isinstance(entry, TrackedValue) for entry in item):
            raise _Undescribed
        return (cls, *[part[0] for part in parts]), varies
    if isinstance(item, TrackedValue):
        return TrackedValue, False
    # 0.0 and -0.0 are the same to the shape cache.
    if cls in by_type or (cls in _FLOATS and (cls is complex or item == 0)):
        return cls, True
    return (cls, item), False


class Subgraph:
    """Pending nodes that are to run, in program order, and what their replay is given.

    Attributes:
        key: equal for equal subgraphs; ``None`` where nothing can be said.
        values: those of the subgraph, in order of their numbers.
        outside: those of them that were there before, in order.
        storages: theirs and the others', in order of first appearance.
        users: values made here whose tensor the user has.
        live: the positions of the storages that the user has tensors on.
        later: values made here that pending nodes beyond the subgraph need.
        scalars: numbers that are inputs, in order of appearance.
        draws: positions of the nodes that draw random numbers.
        graphs: what the nodes are of, in order.
        whole: nothing else is pending.
        kept: the positions of those from outside that pending nodes beyond the subgraph need.
        fingerprint: what stands for the key as long as that is kept; ``None``: nothing does.
    """

    __slots__ = (
        "draws",
        "graphs",
        "kept",
        "key",
        "later",
        "live",
        "nodes",
        "outside",
        "scalars",
        "storages",
        "users",
        "values",
        "whole",
        "fingerprint",
    )

    def __init__(self, nodes: Sequence[TrackedNode]) -> None:
        self.nodes = nodes
        self.key: Key | None = None
        self.values: list[TrackedValue] = []
        self.outside: list[TrackedValue] = []
        self.storages: list[TrackedStorage] = []
        self.users: list[TrackedValue] = []
        self.later: list[TrackedValue] = []
        self.live: tuple[int, ...] = ()
        self.scalars: list[Any] = []
        self.draws: Sequence[int] = ()
        self.graphs: list[Any] = []
        self.kept: tuple[int, ...] = ()
        self.whole = False
        self.fingerprint: bytes | None = None

    @property
    def numbers(self) -> dict[TrackedValue, int]:
        """The values, each with its number."""
        return {value: number for number, value in enumerate(self.values)}

    @property
    def is_all_of_a_graph(self) -> bool:
        """Whether the nodes are all of a graph: its projection depends on nothing else."""
        return (
            len(self.graphs) == 1
            and len(self.graphs[0].nodes) == len(self.nodes)
            and all(storage.continues is None for storage in self.storages)
        )

    def deaths(self) -> dict[int, int]:
        """By number of a storage, the position of the last node that needs it: freed then if not live."""
        last: dict[Any, int] = {}
        for at, node in enumerate(self.nodes):
            for value in node.outputs:
                last.setdefault(value.storage, at)
            for value in node.inputs:
                last[value.storage] = at
        return {place: last[storage] for place, storage in enumerate(self.storages) if storage in last}


class _Forms(dict[TensorMeta, Form]):
    """The forms of values from outside, the same object each time: keys are compared sooner."""

    def __missing__(self, meta: TensorMeta) -> Form:
        form = self[meta] = form_of(meta)
        return form


class Steps:
    """The steps of all subgraphs so far."""

    def __init__(self) -> None:
        self._known: dict[Inferred, Step] = {}  # by the shape cache's answer
        self._alike: dict[Hashable, Step] = {}
        self._forms = _Forms()

    def of(self, node: TrackedNode) -> Step:
        """The step of a node of a subgraph that has a key."""
        return self._known[node.entry]  # type: ignore[index]

    def _learn(self, tape: Tape, nodes: Sequence[TrackedNode]) -> bool:
        """Describe those of ``nodes`` that are new; False if one of them cannot be."""
        if len(self._known) > MOST_STEPS:
            self._known.clear()
            self._alike.clear()
            self._forms.clear()
        for node in nodes:
            entry = node.entry
            if entry is None:
                return False
            if entry not in self._known:
                try:
                    self._known[entry] = self._step(node, entry, tape.shapes.info(node.op).by_type)
                except (_Undescribed, TypeError):  # an argument that has no hash
                    return False
        return True

    def _step(self, node: TrackedNode, entry: Inferred, by_type: frozenset[type]) -> Step:
        moves = moving(node.op)
        structure: list[Hashable] = [node.op, node.grad_mode, node.draws is not None, entry.container]
        args, kwargs = [], []
        arguments: dict[str, Any] = {}
        names = [argument.name for argument in node.op._schema.arguments]
        for at, item in enumerate(node.args):
            form, varies = (int, True) if at in moves and type(item) is int else _structure(item, by_type)
            structure.append(form)
            arguments[names[at]] = form
            if varies:
                args.append(at)
        for name, item in node.kwargs.items():
            form, varies = _structure(item, by_type)
            structure += (name, form)
            arguments[name] = form
            if varies:
                kwargs.append(name)
        inputs = [form_of(value.meta) for value in node.inputs]
        structure += inputs
        results = []
        for spec in entry.outputs:
            if type(spec) is OutputSpec:
                form = form_of(spec.meta)
                results.append(form)
                nbytes = spec.nbytes if spec.source is None else None
                structure += (form, spec.source, spec.itself, spec.fresh, nbytes)
            else:
                structure.append(("number", spec))
        structure += [(position, form_of(meta)) for position, meta in entry.restructured]
        key = tuple(structure)
        if key not in self._alike:
            self._alike[key] = Step(node, args, kwargs, inputs, results, arguments)
        return self._alike[key]

    def fingerprinted(self, tape: Tape, nodes: Sequence[TrackedNode], purpose: Hashable) -> Subgraph | None:
        """The structure of ``nodes`` as words, without its key; ``None``: only :meth:`structure_of` tells."""
        found = node_passes.fingerprint(nodes, self._known, self._forms, purpose, len(tape.pending))
        if found is None:
            return None
        subgraph = Subgraph.__new__(Subgraph)  # which has all of it
        subgraph.nodes, subgraph.key = nodes, None
        (
            subgraph.fingerprint,
            subgraph.values,
            subgraph.outside,
            subgraph.graphs,
            subgraph.users,
            subgraph.scalars,
            subgraph.draws,
            subgraph.storages,
            subgraph.live,
            subgraph.later,
            subgraph.kept,
            subgraph.whole,
        ) = found
        if subgraph.draws and any(nodes[at].op is rng_state for at in subgraph.draws):
            return None  # the generator's own record may need what it returns
        return subgraph

    def structure_of(self, tape: Tape, nodes: Sequence[TrackedNode], *, purpose: Hashable = None) -> Subgraph:
        """The structure of ``nodes``, closed under dependencies and in program order.

        ``purpose`` tells apart subgraphs that are alike but are looked at for something else.
        """
        subgraph = Subgraph(nodes)
        try:
            found = node_passes.survey(nodes, self._known)
        except KeyError:
            if not self._learn(tape, nodes):
                return subgraph
            found = node_passes.survey(nodes, self._known)
        if found is None:
            return subgraph
        steps, values, made, users, wiring, phases, graphs, scalars, draws = found
        subgraph.values, subgraph.outside, subgraph.graphs = values, values[made:], graphs
        subgraph.users = [values[number] for number in users]
        subgraph.scalars, subgraph.draws = scalars, draws

        graph_layout: list[Any] = []
        if len(graphs) > 1:
            graph_layout += [graphs.index(node.graph) for node in nodes]
        subgraph.whole = len(nodes) == len(tape.pending)
        memory, places, beyond = self._memory(subgraph, made, wiring, graph_layout)
        subgraph.later = [values[number] for number in beyond if number < made]
        subgraph.kept = tuple([number - made for number in beyond if number >= made])
        outside, forms = subgraph.outside, self._forms
        subgraph.key = Key(
            purpose,
            steps,
            wiring,
            phases,
            made,
            tuple([forms[value.meta] for value in outside]),
            places,
            tuple([value.storage.nbytes for value in outside]),
            subgraph.kept,
            users,
            tuple([number for number in beyond if number < made]),
            memory,
            tuple(graph_layout),
            nodes[0].inference_mode,
            subgraph.whole,
        )
        return subgraph

    @staticmethod
    def _memory(
        subgraph: Subgraph, made: int, wiring: bytes, graph_layout: list[Any]
    ) -> tuple[tuple[Any, ...], tuple[int, ...], Sequence[int]]:
        """What is told of storages that have anything to be told of, and those that outside values are on.

        And the numbers of the values that are needed later.
        """
        found = node_passes.storages_of(subgraph.values, made, wiring)
        storages, places, told, roles, live, continued, later, kept = found
        subgraph.storages, subgraph.live = storages, live
        if continued:
            origins: dict[Any, int] = {}
            for place, storage in enumerate(storages):
                if storage.external:
                    first = origins.setdefault(storage.origin, place)
                    if first != place or storage.continues is not None:
                        graph_layout.append(("continues", place, first))
        if subgraph.whole:
            later = kept = ()
        nodes = subgraph.nodes
        states = [value for at in subgraph.draws if nodes[at].op is rng_state for value in nodes[at].outputs]
        if states:  # the generator's own record may need them
            numbers = subgraph.numbers
            later = tuple(sorted({*later, *[numbers[value] for value in states]}))
            on = {value.storage for value in states}
            kept = tuple(sorted({*kept, *[place for place, each in enumerate(storages) if each in on]}))
        return (told, roles, *kept), places, later


node_passes.connect(Step)


@functools.cache
def moving(op: OpOverload) -> tuple[int, ...]:
    """The arguments of ``op`` that say where in a tensor something is, by position."""
    name = op._schema.overload_name
    return MOVING.get(f"{op._schema.name}.{name}" if name else op._schema.name, ())


def values_in(item: Any) -> Iterator[TrackedValue]:
    """The values in one recorded argument."""
    if isinstance(item, TrackedValue):
        yield item
    elif isinstance(item, (list, tuple)):
        for entry in item:
            yield from values_in(entry)
