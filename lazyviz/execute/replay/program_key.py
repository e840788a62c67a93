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
from ...record.random_draw_order import rng_state
from ...record.shapes.shape_inference_cache import Inferred, OutputSpec
from ...record.tape import Tape
from ...record.tracked_storages import TrackedNode, TrackedStorage, TrackedValue
from ...torch_internals.private_api import OpOverload
from . import node_passes

MOST_STEPS = 50_000  # kept steps: one for each answer of the shape cache that was used here
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
"""Arguments that are positions in a tensor: if the result's shape is the same, they are inputs of the
code.
"""


class Key(NamedTuple):
    """The key of a subgraph; equal for subgraphs that can run the same code.

    ``wiring`` has the numbers of all nodes' inputs, as the bytes of ints. The nodes create ``made`` values;
    the others are from outside. For outside values, ``outside`` has the forms, ``places`` the numbers of
    their storages, ``sizes`` the bytes of those, and ``kept`` the positions of those that pending nodes
    outside of the subgraph need. ``users`` and ``later`` are the numbers of these values, ``memory`` has the
    storages that are kept and their roles, ``graph_layout`` the nodes that belong to other graphs.
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

    # Only the fields that differ in most cases: a hash of everything would take twice as long.
    def __hash__(self) -> int:
        return hash((self.purpose, self.steps, self.wiring, self.users, self.memory))

    @property
    def program(self) -> Key:
        """The key without the user's references, which only affect when memory is freed."""
        return self._replace(users=(), memory=())


class Form(NamedTuple):
    """A tensor's metadata except its offset in the storage, because batches are slices of one tensor."""

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
    """The common parts of nodes with the same structure; :class:`Steps` has one object for each.

    ``args`` and ``kwargs`` are the arguments that are inputs, not structure. ``inputs`` and ``results`` are
    the forms of the operator's tensors, ``arguments`` is the structure of each given argument, by name.
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
        # The callable for its kernel, once it has been determined.
        self.call: Callable[..., Any] | None = None


class _Undescribed(Exception):
    """An argument has no structure that can be part of a key."""


def _structure(item: Any, by_type: frozenset[type]) -> tuple[Any, bool]:
    """The structure of an argument without tensors, and whether it is an input."""
    cls = type(item)
    if cls is list or cls is tuple:
        parts = [_structure(entry, by_type) for entry in item]
        varies = any(part[1] for part in parts)
        if varies and any(entry is None or isinstance(entry, TrackedValue) for entry in item):
            raise _Undescribed
        return (cls, *[part[0] for part in parts]), varies
    if isinstance(item, TrackedValue):
        return TrackedValue, False
    # 0.0 and -0.0 are equal in the shape cache.
    if cls in by_type or (cls in _FLOATS and (cls is complex or item == 0)):
        return cls, True
    return (cls, item), False


class Subgraph:
    """Pending nodes to run, in program order, and the data for their replay.

    Attributes:
        key: equal for equal subgraphs; ``None`` if it is not known.
        values: the values of the subgraph, in the order of their numbers.
        outside: those of them that existed before, in order.
        storages: the storages of all values, in order of first appearance.
        users: values created here whose tensor the user has.
        live: the positions of the storages that the user has tensors on.
        later: values created here that pending nodes outside of the subgraph need.
        scalars: numbers that are inputs, in order of appearance.
        draws: positions of the nodes that draw random numbers.
        graphs: the graphs of the nodes, in order.
        whole: whether nothing else is pending.
        kept: the positions of outside values that pending nodes outside of the subgraph need.
        fingerprint: identifies the key as long as that is kept alive; ``None`` if there is none.
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
        """Whether the nodes are all nodes of a graph, so that its projection depends on nothing else."""
        return (
            len(self.graphs) == 1
            and len(self.graphs[0].nodes) == len(self.nodes)
            and all(storage.continues is None for storage in self.storages)
        )

    def deaths(self) -> dict[int, int]:
        """By number of a storage, the position of the last node that needs it; it is freed there unless it is
        live.
        """
        last: dict[Any, int] = {}
        for at, node in enumerate(self.nodes):
            for value in node.outputs:
                last.setdefault(value.storage, at)
            for value in node.inputs:
                last[value.storage] = at
        return {place: last[storage] for place, storage in enumerate(self.storages) if storage in last}


class _Forms(dict[TensorMeta, Form]):
    """The forms of outside values, always the same object for equal ones, so that keys are compared
    faster.
    """

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
        """Describe those of ``nodes`` that are new; False if one of them cannot be described."""
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
                except (_Undescribed, TypeError):  # an unhashable argument
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
        """The subgraph of ``nodes`` with its fingerprint, but without its key; ``None``: use
        :meth:`structure_of`.
        """
        found = node_passes.fingerprint(nodes, self._known, self._forms, purpose, len(tape.pending))
        return self.subgraph_of(nodes, found) if found is not None else None

    def subgraph_of(self, nodes: Sequence[TrackedNode], found: node_passes.Fingerprinted) -> Subgraph | None:
        """The subgraph of ``nodes`` with the data ``found``."""
        subgraph = Subgraph.__new__(Subgraph)  # all attributes are set below
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
            return None  # the generator's own record may need its result
        return subgraph

    def structure_of(self, tape: Tape, nodes: Sequence[TrackedNode], *, purpose: Hashable = None) -> Subgraph:
        """The structure of ``nodes``, closed under dependencies and in program order.

        ``purpose`` distinguishes equal subgraphs that are looked up for different purposes.
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
        """The special properties of storages, and the storages of outside values.

        The third result has the numbers of the values that are needed later.
        """
        found = node_passes.storages_of(subgraph.values, made, wiring)
        storages, places, flags, roles, live, continued, later, kept = found
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
        return (flags, roles, *kept), places, later


node_passes.connect(Step)


@functools.cache
def moving(op: OpOverload) -> tuple[int, ...]:
    """The arguments of ``op`` that are positions in a tensor, by index."""
    name = op._schema.overload_name
    return MOVING.get(f"{op._schema.name}.{name}" if name else op._schema.name, ())


def values_in(item: Any) -> Iterator[TrackedValue]:
    """The values in one recorded argument."""
    if isinstance(item, TrackedValue):
        yield item
    elif isinstance(item, (list, tuple)):
        for entry in item:
            yield from values_in(entry)
