"""Background run: kernels of a cached subgraph run on another thread while Python continues.

That thread only runs kernels: it never holds the interpreter lock, materializes no tensor of the user, and
does no bookkeeping.  Until the run is joined, its nodes are pending.  Therefore, anything that needs their
results, writes what they read, or reads what they write reaches a sync point.  That joins the run first, or
takes the results of its first nodes, up to the last one that is needed, while the others continue to run.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch

from ..process.deferred_signals import Deferred
from ..record.random_draw_order import state_of
from ..record.tracked_storages import DrawSequence, TrackedValue
from .replay import node_passes
from .replay.node_instructions import Code, Stopped
from .replay.program_key import Subgraph


@dataclass
class AsyncRun:
    """Kernels that run, or have run, on another thread; see ``AsyncRun`` of ``interpreter.cpp``.

    ``times`` has the start time, and after joining the end of each node, in seconds. ``generators`` are those
    that it draws from, instead of the program's.
    """

    handle: list[Any]  # its C++ object, once it has started
    times: array[float]
    generators: list[tuple[DrawSequence, torch.Generator]]
    later: list[TrackedValue] | None = None  # the subgraph's, when it started
    taken: int = 0  # number of nodes whose results were handed over, and that were marked as done

    @property
    def compiled(self) -> Any:
        return self.handle[0]

    @property
    def has_begun(self) -> bool:
        return bool(self.handle) and self.handle[0] is not None

    @property
    def is_over(self) -> bool:
        """Whether all kernels have ended."""
        return bool(self.compiled.is_over())

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds``; returns whether all kernels have ended."""
        return bool(self.compiled.wait(seconds))

    def stop(self, error: BaseException) -> None:
        """Stop it between two nodes; joining it then returns ``error``."""
        self.compiled.stop(error)

    @property
    def is_joined(self) -> bool:
        """Whether its results have been handed over."""
        return bool(self.compiled.is_joined())

    def joining(self, subgraph: Subgraph, arrived: Deferred) -> partial[Stopped | None]:
        """The call that waits until it is over and hands over its results, like the subgraph's code when it
        runs.

        It is a C call, so that no Python code runs between it and its bookkeeping.
        """
        later = self._later(subgraph)
        return partial(self.compiled.join, self.generators, subgraph.users, later, arrived, self.times)

    def _later(self, subgraph: Subgraph) -> list[TrackedValue]:
        """The values that its code hands over to nodes recorded before it began."""
        if self.later is None:
            later = subgraph.later
            # Nodes recorded since it began are pending, and may need any value that the user has a tensor of.
            subgraph.whole, subgraph.later = False, [*later, *subgraph.users]
            self.later = later
        return self.later

    def wait_for_first(self, count: int, seconds: float) -> int:
        """Wait at most ``seconds`` for ``count`` nodes or the end of the run; returns how many have run."""
        return int(self.compiled.wait_for_first(count, seconds))

    def take_first(self, subgraph: Subgraph, count: int) -> None:
        """Hand over the results of the first ``count`` nodes, which have run; can be called again.

        Generators from which no later node of the run draws get their final states.
        """
        self.compiled.hand_over_first(count, subgraph.users, self._later(subgraph), self.times)
        last = {subgraph.nodes[at].draws: at for at in subgraph.draws}
        for sequence, generator in self.generators:
            if last[sequence] < count:
                sequence.state = state_of(generator)


def part(subgraph: Subgraph) -> None:
    """Separate the subgraph's nodes, which have run, from those of the next step, recorded in the meantime.

    Outside memory that both use, and draw sequences that both belong to, would prevent the record from being
    freed with its owner.
    """
    for value in subgraph.outside:
        storage = value.storage
        if storage.readers:
            storage.readers = [node for node in storage.readers if node.state != "done"]
    parted: dict[DrawSequence, DrawSequence] = {}
    for at in subgraph.draws:
        node = subgraph.nodes[at]
        sequence = node.draws
        if sequence is None or sequence.last is None or sequence.last.state == "done":
            continue  # no later draw continues from it
        if sequence not in parted:
            parted[sequence] = DrawSequence(sequence.generator, sequence.state)
        node.draws = parted[sequence]
        parted[sequence].last = node


def async_obstacle(subgraph: Subgraph, code: Code) -> str | None:
    """Why ``code`` cannot run on another thread, for any such subgraph; ``None`` if it can."""
    assert subgraph.key is not None
    if not hasattr(code, "start"):
        return "its program is Python code"
    steps = subgraph.key.steps
    if others := [step.op for step in steps if step.op.namespace != "aten"]:
        return f"{others[0]} may need Python"
    if subgraph.draws and not code.takes_generators():  # type: ignore[attr-defined]
        return "an op can draw only from the user's generator"
    if subgraph.nodes[0].inference_mode:
        return "it was recorded in inference mode"
    if any(value.meta.device.type != "cpu" for value in subgraph.values):
        return "it uses other devices than the CPU; GPU kernels are queued asynchronously anyway"
    return None


def can_be_taken_in_parts(subgraph: Subgraph) -> bool:
    """Whether results may be used while later nodes of any such subgraph run.

    A node that changes the shape or strides of an earlier result in place would change what is being used.
    """
    return not any(node.entry is None or node.entry.restructured for node in subgraph.nodes)


def current_async_obstacle(subgraph: Subgraph) -> str | None:
    """Why this subgraph cannot run on another thread, although its code could; ``None`` if it can."""
    if not node_passes.active:
        return "its node passes run in Python"
    for at in subgraph.draws:
        draws = subgraph.nodes[at].draws
        if draws is not None and draws.awaits is not None:
            return "it draws from a generator state that was set after being read"
    return None


def prepared(subgraph: Subgraph, code: Code) -> tuple[AsyncRun, partial[Any]]:
    """The run of ``subgraph`` by its ``code``, and the call that starts it, which returns its handle."""
    times = array("d", [perf_counter()])
    tensors = [value.real for value in subgraph.outside]
    if any(tensor is None for tensor in tensors):
        raise RuntimeError("internal error: an input was freed before its last use")
    generators: dict[DrawSequence, torch.Generator] = {}
    draws = []
    for at in subgraph.draws:
        sequence = subgraph.nodes[at].draws
        assert sequence is not None
        if sequence not in generators:
            generators[sequence] = torch.Generator(sequence.generator.device)
            generators[sequence].set_state(sequence.state)
        draws.append(generators[sequence])
    begin = partial(code.start, tensors, subgraph.scalars, draws, times)  # type: ignore[attr-defined]
    return AsyncRun([], times, list(generators.items())), begin
