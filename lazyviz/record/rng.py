"""Random numbers in program order, drawn later.

A pending draw must use the generator state eager PyTorch would have had.  Reseeding a
generator reaches no hook, so after each recorded draw the generator is given a seed of
ours, its *marker*: whoever reads the seed next sees whether somebody seeded it since.
Draws between two seedings form a :class:`DrawSequence`; evaluating one evaluates those
before it, each from the state its predecessor left.

Code of PyTorch's that only hands a state back later (checkpointing, ``fork_rng``) is
given a pending tensor for it: the operator ``lazyviz::rng_state`` below is recorded in
the draws' order, and a sequence can begin with what it will return.  A user who reads a
state past our patches (``Generator.get_state``) gets a marker's; set again, on whatever
generator, it stands for the state after the draw that it was made for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from .. import _torch
from .storage import TrackedNode, TrackedValue

# CPU: the Mersenne Twister's; CUDA: a seed and an offset of 8 bytes each.
_STATE_NBYTES = {"cpu": torch.default_generator.get_state().numel(), "cuda": 16}
torch.library.define(
    "lazyviz::rng_state", "(Generator generator) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)
torch.library.impl("lazyviz::rng_state", "CompositeExplicitAutograd", torch.Generator.get_state)
torch.library.register_fake(
    "lazyviz::rng_state",
    lambda generator: torch.empty(_STATE_NBYTES[generator.device.type], dtype=torch.uint8),
)
rng_state: _torch.OpOverload = torch.ops.lazyviz.rng_state.default
"""The state of ``generator``, after the draws recorded before."""

# Markers are counted up from here: seeds nobody types (a 64-bit number with a fixed upper half).
_FIRST_MARKER = 0x4C5A_5631_0000_0000


_MOST_MARKS = 256  # that are remembered after their draws: each keeps a state (CPU: 5 kB)


class Mark:
    """What a marker stands for: the state after the draw ``node``, known once that has run."""

    __slots__ = ("node", "state")

    def __init__(self, node: TrackedNode) -> None:
        self.node = node
        self.state: torch.Tensor | None = None


class DrawSequence:
    """Draws from one generator without a reseed in between.

    ``state`` is that before the next pending one; a value or a mark where another sequence
    has to be drawn first.
    """

    __slots__ = ("_state", "generator", "last", "marks")

    def __init__(self, generator: torch.Generator, state: torch.Tensor | TrackedValue | Mark) -> None:
        self.generator = generator
        self._state = state
        self.marks: dict[TrackedNode, list[Mark]] = {}  # of draws to come
        if isinstance(state, TrackedValue):
            state.uses += 1
        self.last: TrackedNode | None = None

    @property
    def awaits(self) -> TrackedNode | None:
        """The pending node that returns the state to begin with."""
        return self._state.node if isinstance(self._state, (TrackedValue, Mark)) else None

    @property
    def state(self) -> torch.Tensor:
        if isinstance(self._state, TrackedValue):
            value, real = self._state, self._state.real
            if real is None:
                raise RuntimeError("internal error: the generator's state has not been computed")
            self.state = real
            value.uses -= 1
            if not value.uses:
                value.real = None
            return real
        if isinstance(self._state, Mark):
            if self._state.state is None:
                raise RuntimeError("internal error: the generator's state has not been computed")
            return self._state.state
        return self._state

    @state.setter
    def state(self, state: torch.Tensor) -> None:
        self._state = state

    def drawn(self, node: TrackedNode, state: torch.Tensor) -> None:
        """``node`` has run and has left the generator in ``state``."""
        self._state = state
        for mark in self.marks.pop(node, ()):
            mark.state = state

    @property
    def earlier_state(self) -> torch.Tensor:
        """Of the same seed as ``state``, and known: the last one computed before it."""
        sequence = self
        while isinstance(sequence._state, (TrackedValue, Mark)):
            node = sequence._state.node
            assert node is not None and node.draws is not None
            if node.state == "done":
                return sequence.state
            sequence = node.draws
        return sequence._state


class Generators:
    """The pending draws of every generator."""

    def __init__(self) -> None:
        self._markers = itertools.count(_FIRST_MARKER)
        # identity of the generator -> (its last marker, the sequence the marker stands for)
        self._tails: dict[int, tuple[int, DrawSequence]] = {}
        self._marks: dict[int, Mark] = {}  # by marker
        self._marked: dict[int, torch.Generator] = {}  # by identity: those that may hold a marker

    @staticmethod
    def default(device: torch.device) -> torch.Generator:
        if device.type == "cuda":
            index = device.index if device.index is not None else torch.cuda.current_device()
            return torch.cuda.default_generators[index]
        return torch.default_generator

    def pending(self, generator: torch.Generator) -> TrackedNode | None:
        """The draw whose after-state the generator stands for now, if that draw is pending."""
        sequence = self._sequence(generator)
        if sequence is None:
            return None
        last = sequence.last or sequence.awaits
        if last is not None and last.state != "done":
            return last
        self._unmark(generator)
        return None

    def _sequence(self, generator: torch.Generator) -> DrawSequence | None:
        """The sequence that the generator's state, if a marker's, stands for the end of.

        Raises:
            RuntimeError: it is a marker's, but what it stood for is forgotten.
        """
        seed = generator.initial_seed()
        tail = self._tails.get(_torch.generator_identity(generator))
        if tail is not None and seed == tail[0]:
            return tail[1]
        if seed >> 32 != _FIRST_MARKER >> 32:
            return None
        mark = self._marks.get(seed)
        if mark is None:
            raise RuntimeError(
                "the generator was given a state that was read from one while its draws were pending; "
                "lazyviz no longer knows which: read it with torch.get_rng_state(), or after evaluation"
            )
        return DrawSequence(generator, mark)

    def _unmark(self, generator: torch.Generator) -> None:
        """Give the generator the state that its marker, set by the user, stands for, if that is known."""
        mark = self._marks.get(generator.initial_seed())
        if mark is not None and mark.state is not None:
            generator.set_state(mark.state)

    def record(self, node: TrackedNode, generator: torch.Generator) -> None:
        """Append a draw to the generator's program order."""
        sequence = self._sequence(generator)
        if sequence is None:
            sequence = DrawSequence(generator, generator.get_state())
        before = sequence.last or sequence.awaits
        if before is not None:
            node.after.append(before)
        sequence.last = node
        node.draws = sequence
        self._mark(sequence)

    def restart(self, generator: torch.Generator, state: TrackedValue) -> None:
        """The generator's state is what the pending ``rng_state`` node of ``state`` will return."""
        self._mark(DrawSequence(generator, state))

    def _mark(self, sequence: DrawSequence) -> None:
        marker = next(self._markers)
        sequence.generator.manual_seed(marker)
        identity = _torch.generator_identity(sequence.generator)
        self._tails[identity] = (marker, sequence)
        self._marked[identity] = sequence.generator
        last = sequence.last or sequence.awaits
        assert last is not None and last.draws is not None
        mark = self._marks[marker] = Mark(last)
        last.draws.marks.setdefault(last, []).append(mark)
        oldest = next(iter(self._marks))
        if len(self._marks) > _MOST_MARKS and self._marks[oldest].state is not None:
            del self._marks[oldest]

    def seed_of(self, generator: torch.Generator) -> int:
        """The seed the user would see: that of the state the sequence began with, not our marker."""
        seed = generator.initial_seed()
        tail = self._tails.get(_torch.generator_identity(generator))
        if tail is None or seed != tail[0]:
            return seed
        scratch = torch.Generator(generator.device)
        scratch.set_state(tail[1].earlier_state)
        return scratch.initial_seed()

    def forget(self) -> None:
        """Pending draws will not happen: generators go back to the state before them."""
        for key, (marker, sequence) in list(self._tails.items()):
            if sequence.last is None or sequence.last.state != "done":
                if sequence.generator.initial_seed() == marker:
                    sequence.generator.set_state(sequence.earlier_state)
                del self._tails[key]
        self._marks.clear()
        self._marked.clear()

    def save(self, nodes: Iterable[TrackedNode]) -> list[tuple[torch.Generator, torch.Tensor, bool]]:
        """Before running ``nodes``: the state of each generator they draw from; is it our marker?"""
        generators = {
            _torch.generator_identity(node.draws.generator): node.draws.generator
            for node in nodes
            if node.draws is not None
        }
        return [
            (
                generator,
                generator.get_state(),
                key in self._tails and self._tails[key][0] == generator.initial_seed(),
            )
            for key, generator in generators.items()
        ]

    def restore(self, saved: list[tuple[torch.Generator, torch.Tensor, bool]]) -> None:
        """After running draws: the state eager would have left, or what was there while draws are pending."""
        for generator, state, marked in saved:
            if marked:
                key = _torch.generator_identity(generator)
                sequence = self._tails[key][1]
                last = sequence.last or sequence.awaits
                if last is None or last.state == "done":
                    del self._tails[key]
                    state = sequence.state
            generator.set_state(state)
        for identity, generator in list(self._marked.items()):
            tail = self._tails.get(identity)
            if tail is not None and generator.initial_seed() != tail[0]:
                last = tail[1].last or tail[1].awaits
                if last is None or last.state == "done":
                    del self._tails[identity]  # another state has been set, and what came before has run
                    tail = None
            if tail is None:
                self._unmark(generator)
                if generator.initial_seed() not in self._marks:
                    del self._marked[identity]
