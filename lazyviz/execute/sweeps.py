"""What is asked of all nodes of a stretch at once, and noted on them: in C++ (``_sweep.cpp``) where compiled.

A replay looks at no node by itself but for this: a good part of what it takes beside its kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .. import _compiled
from ..record.storage import TrackedNode, TrackedStorage, TrackedValue

Survey = tuple[
    list[Any],
    list[TrackedValue],
    list[TrackedValue],
    list[TrackedValue],
    tuple[str, ...],
    list[Any],
    int,
]
"""Of all nodes in order: the shape cache's answers, the values they make, the values they read, those of
the first whose tensor the user has, the phases, the graphs they are of (each once), the number of results."""


class InPython:
    """The sweeps in Python."""

    @staticmethod
    def survey(nodes: Sequence[TrackedNode]) -> Survey | None:
        """What is needed of all ``nodes``; ``None`` if one has failed, runs again or has another mode."""
        inference = nodes[0].inference_mode
        if [node for node in nodes if node.again or node.error is not None] or [
            node for node in nodes if node.inference_mode is not inference
        ]:
            return None
        made = [value for node in nodes for value in node.outputs if value.node is node]
        return (
            [node.entry for node in nodes],
            made,
            [value for node in nodes for value in node.inputs],
            [value for value in made if value.tensor is not None],
            tuple([node.phase for node in nodes]),
            list(dict.fromkeys([node.graph for node in nodes])),
            sum([len(node.outputs) for node in nodes]),
        )

    @staticmethod
    def storages_of(values: Iterable[TrackedValue]) -> tuple[list[TrackedStorage], list[TrackedStorage]]:
        """Those of ``values``, each once in order, and which of them there is anything to be told of."""
        storages = list(dict.fromkeys([value.storage for value in values]))
        told = [
            storage
            for storage in storages
            if storage.live or storage.role is not None or storage.dropped is None or storage.external
        ]
        return storages, told

    @staticmethod
    def note_done(nodes: Iterable[TrackedNode], times: Sequence[float] | None) -> None:
        """They have run; between two of ``times`` each, the first one's beginning first."""
        for at, node in enumerate(nodes):
            node.state = "done"
            if times is not None:
                node.seconds = times[at + 1] - times[at]
            if node.after:
                node.after = ()

    @staticmethod
    def note_unused(values: Iterable[TrackedValue], storages: Iterable[TrackedStorage]) -> None:
        """Nothing pending needs them."""
        for value in values:
            value.uses = 0
        for storage in storages:
            storage.uses = 0


def use(compiled: bool) -> bool:
    """Let C++ do it from now on, or Python; returns what came of it."""
    global active, survey, storages_of, note_done, note_unused
    active = compiled and _module is not None
    chosen: Any = _module if active else InPython
    survey, storages_of = chosen.survey, chosen.storages_of
    note_done, note_unused = chosen.note_done, chosen.note_unused
    return active


survey, storages_of = InPython.survey, InPython.storages_of
note_done, note_unused = InPython.note_done, InPython.note_unused
if (_module := _compiled.load("execute._sweep", "execute/_sweep.cpp")) is not None:
    _module.connect(TrackedNode, TrackedValue, TrackedStorage)
active = use(True)
