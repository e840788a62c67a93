"""Passes over all nodes of a subgraph, in C++ (``node_passes.cpp``) if it was compiled.

Replays access nodes only in these passes, which take a large part of their time apart from kernels.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from ...record.pending_ops import unlink_tensors
from ...record.tape import tape
from ...record.tracked_storages import TrackedNode, TrackedStorage, TrackedValue
from ...torch_internals import native_module_loader


class Survey(NamedTuple):
    """The structure of nodes that may be a subgraph: see :class:`lazyviz.execute.replay.program_key.Subgraph`
    and its key.

    ``values`` are in the order of their numbers: first the ``made`` values that nodes create, then those from
    outside. ``users`` are the numbers of values whose tensor the user has, ``scalars`` the numbers that are
    inputs, ``draws`` the positions of the nodes that draw.
    """

    steps: tuple[Any, ...]
    values: list[TrackedValue]
    made: int
    users: tuple[int, ...]
    wiring: bytes
    phases: tuple[str, ...]
    graphs: list[Any]
    scalars: list[Any]
    draws: tuple[int, ...]


class Storages(NamedTuple):
    """The storages of a subgraph's values, in the order of their numbers.

    ``places`` are the numbers of the storages of outside values. For each storage with special properties,
    ``flags`` has three ints (its number, whether the user has tensors on it, and whether it was never
    dropped), and ``roles`` has its role. ``live`` are the numbers of storages with tensors; ``continued`` are
    outside storages that have the memory of an earlier one. ``later`` are the numbers of values that pending
    nodes outside of the subgraph need, ``beyond`` the numbers of such storages.
    """

    storages: list[TrackedStorage]
    places: tuple[int, ...]
    flags: bytes
    roles: tuple[str | None, ...]
    live: tuple[int, ...]
    continued: list[TrackedStorage]
    later: tuple[int, ...]
    beyond: tuple[int, ...]


class Fingerprinted(NamedTuple):
    """The data for running a subgraph that is found by its fingerprint, which identifies its key.

    Equal fingerprints mean equal keys as long as the objects whose addresses they contain are kept alive,
    which the key of one of them does. The other fields are as in
    :class:`lazyviz.execute.replay.program_key.Subgraph`.
    """

    fingerprint: bytes
    values: list[TrackedValue]
    outside: list[TrackedValue]
    graphs: list[Any]
    users: list[TrackedValue]
    scalars: list[Any]
    draws: tuple[int, ...]
    storages: list[TrackedStorage]
    live: tuple[int, ...]
    later: list[TrackedValue]
    kept: tuple[int, ...]
    whole: bool


class InPython:
    """The passes in Python."""

    @staticmethod
    def fingerprint(
        nodes: Sequence[TrackedNode],
        known: Mapping[Any, Any],
        forms: Mapping[Any, Any],
        purpose: Hashable,
        pending: int,
    ) -> Fingerprinted | None:
        """The fingerprint of ``nodes``, out of ``pending`` pending nodes in total; ``None``: use the key.

        ``known`` are the steps by the shape cache's answer, ``forms`` those by metadata.
        """
        return None

    @staticmethod
    def take(
        values: Sequence[TrackedValue], kept: Sequence[int], nodes: Iterable[TrackedNode] = ()
    ) -> list[Any] | None:
        """The tensors of ``values``; only the values at the positions ``kept`` still refer to them
        afterwards.

        ``None`` if one of ``nodes`` has run.
        """
        if any(node.state == "done" for node in nodes):
            return None
        tensors = [value.real for value in values]
        for tensor in tensors:
            if tensor is None:
                raise RuntimeError("internal error: an input was freed before its last use")
        for value in values:
            value.real = None
        for at in kept:
            values[at].real = tensors[at]
        return tensors

    @staticmethod
    def release_inputs(
        nodes: Iterable[TrackedNode],
        outside: Sequence[TrackedValue],
        later: Sequence[TrackedValue],
        pending: dict[TrackedNode, None],
    ) -> None:
        """Remove ``nodes``, which have run, from ``pending``, and free tensors that no node needs."""
        for value in (*outside, *later):
            if not value.uses:
                value.real = None
        for node in nodes if pending else ():
            pending.pop(node, None)

    @staticmethod
    def unfinished(nodes: Iterable[TrackedNode]) -> list[TrackedNode]:
        """The nodes that have not run."""
        return [node for node in nodes if node.state != "done"]

    @staticmethod
    def begin(nodes: Iterable[TrackedNode]) -> tuple[list[str], list[Any]]:
        """The known errors of ``nodes``, and their graphs, each once in order."""
        errors = [node.error for node in nodes if node.error is not None]
        return list(dict.fromkeys(errors)), list(dict.fromkeys([node.graph for node in nodes]))

    @staticmethod
    def survey(nodes: Sequence[TrackedNode], known: Mapping[Any, Any]) -> Survey | None:
        """The structure of ``nodes``; ``None`` if one has failed, runs again or has another mode.

        ``known`` are the steps by the shape cache's answer.

        Raises:
            KeyError: one of them is not known.
        """
        inference = nodes[0].inference_mode
        if [node for node in nodes if node.is_rematerialized or node.error is not None] or [
            node for node in nodes if node.inference_mode is not inference
        ]:
            return None
        steps = tuple([known[node.entry] for node in nodes])
        made = dict.fromkeys([value for node in nodes for value in node.outputs if value.node is node])
        values = [*dict.fromkeys([*made, *[value for node in nodes for value in node.inputs]])]
        numbers = {value: number for number, value in enumerate(values)}
        scalars: list[Any] = []
        for node, step in zip(nodes, steps):
            if step.special:
                scalars += [node.args[position] for position in step.args]
                scalars += [node.kwargs[name] for name in step.kwargs]
        return Survey(
            steps,
            values,
            len(made),
            tuple([number for number, value in enumerate(made) if value.tensor is not None]),
            array("i", [numbers[value] for node in nodes for value in node.inputs]).tobytes(),
            tuple([node.phase for node in nodes]),
            list(dict.fromkeys([node.graph for node in nodes])),
            scalars,
            tuple([at for at, step in enumerate(steps) if step.draws]),
        )

    @staticmethod
    def storages_of(values: Sequence[TrackedValue], made: int, wiring: bytes) -> Storages:
        """The storages of ``values``, in the order of :class:`Survey`, with the ``wiring``."""
        storages = list(dict.fromkeys([value.storage for value in values]))
        places = {storage: place for place, storage in enumerate(storages)}
        flags = array("i")
        roles: list[str | None] = []
        live: list[int] = []
        continued: list[TrackedStorage] = []
        for storage, place in places.items():
            if storage.live or storage.role is not None or storage.dropped is None or storage.external:
                flags.extend((place, storage.live > 0, storage.dropped is None))
                roles.append(storage.role)
                if storage.live:
                    live.append(place)
                if storage.external and storage.continues is not None:
                    continued.append(storage)
        outside = tuple([places[value.storage] for value in values[made:]])
        counts = Counter(memoryview(wiring).cast("i"))
        later = tuple([number for number, value in enumerate(values) if value.uses > counts[number]])
        inside: Counter[TrackedStorage] = Counter()
        for number, count in counts.items():
            inside[values[number].storage] += count
        beyond = tuple([place for place, each in enumerate(storages) if each.uses > inside[each]])
        return Storages(
            storages, outside, flags.tobytes(), tuple(roles), tuple(live), continued, later, beyond
        )

    @staticmethod
    def note_done(nodes: Iterable[TrackedNode], times: array[float] | None) -> None:
        """Record that the nodes have run, each between two successive entries of ``times``.

        Shadows of memory that they have written are dropped.
        """
        for at, node in enumerate(nodes):
            node.state = "done"
            if times is not None:
                node.measured_seconds = times[at + 1] - times[at]
            if node.after:
                node.after = ()
            if node.writes and not node.folded:
                for storage in node.writes:
                    storage.shadow = None

    @staticmethod
    def note_unused(values: Iterable[TrackedValue], storages: Iterable[TrackedStorage]) -> None:
        """Record that no pending node needs these values and storages."""
        for value in values:
            value.uses = 0
        for storage in storages:
            storage.uses = 0

    @staticmethod
    def note_used(nodes: Iterable[TrackedNode]) -> None:
        """Record that the nodes have run and no longer need their inputs.

        Atomic with respect to asynchronous exceptions.
        """
        counts: Counter[TrackedValue | TrackedStorage] = Counter()
        for node in nodes:
            for value in node.inputs:
                counts[value] += 1
                counts[value.storage] += 1
        left = [each.uses - count for each, count in counts.items()]
        deque(map(setattr, counts, repeat("uses"), left), maxlen=0)

    unlink_tensors = staticmethod(unlink_tensors)


def use(compiled: bool) -> bool:
    """Use the C++ passes from now on, or those in Python; returns which ones are active."""
    global \
        active, \
        unfinished, \
        begin, \
        survey, \
        storages_of, \
        note_done, \
        note_unused, \
        note_used, \
        fingerprint, \
        take, \
        release_inputs
    active = compiled and _module is not None
    chosen: Any = _module if active else InPython
    unfinished, begin = chosen.unfinished, chosen.begin
    survey, storages_of = chosen.survey, chosen.storages_of
    note_done, note_unused, note_used = chosen.note_done, chosen.note_unused, chosen.note_used
    fingerprint, take, release_inputs = chosen.fingerprint, chosen.take, chosen.release_inputs
    tape.pending_ops.unlink_tensors = chosen.unlink_tensors
    return active


def connect(step: type) -> None:
    """``step``: the class for the common parts of nodes with the same structure."""
    if _module is not None:
        _module.connect(TrackedNode, TrackedValue, TrackedStorage, step)
    use(True)


fingerprint, take, release_inputs = InPython.fingerprint, InPython.take, InPython.release_inputs
unfinished, begin = InPython.unfinished, InPython.begin
survey, storages_of = InPython.survey, InPython.storages_of
note_done, note_unused, note_used = InPython.note_done, InPython.note_unused, InPython.note_used
_module = native_module_loader.load("node_passes.cpp")
active = False  # until it is connected
