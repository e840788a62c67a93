"""Random number sequences: deferred draws of each generator, in program order.

A pending draw must use the generator state that eager PyTorch would have had.  Reseeding a generator calls no
hook, so after a recorded draw the generator gets a special seed, its *marker*: the next read of the seed
shows whether the generator has been reseeded.  Draws between two reseedings form a :class:`DrawSequence`;
evaluating one of them evaluates the previous ones, each from the state that its predecessor left.

PyTorch code that only restores a state later (checkpointing, ``fork_rng``) gets a pending tensor for it: the
operator ``lazyviz::rng_state`` below is recorded in the order of the draws, and a sequence can begin with its
result.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..torch_internals import generators, operator_registration
from .tracked_storages import DrawSequence, TrackedNode, TrackedValue

# Methods that return the state of a generator.
READERS: dict[str, Callable[..., Any]] = {
    name: vars(torch.Generator)[name]
    for name in (
        "get_state",
        "graphsafe_get_state",
        "clone_state",
        "get_offset",
        "initial_seed",
        "__reduce__",
    )
}
# Methods that set it.
WRITERS: dict[str, Callable[..., Any]] = {
    name: vars(torch.Generator)[name]
    for name in ("manual_seed", "seed", "set_state", "graphsafe_set_state", "set_offset")
}
state_of = torch.Generator.get_state
set_state = torch.Generator.set_state
_seed_of = torch.Generator.initial_seed
_seed = torch.Generator.manual_seed

# CPU: the Mersenne Twister's; CUDA: a seed and an offset of 8 bytes each.
_STATE_NBYTES = {"cpu": state_of(torch.default_generator).numel(), "cuda": 16}
rng_state = operator_registration.define(
    "rng_state",
    "(Generator generator) -> Tensor",
    kernel=state_of,
    shape=lambda generator: torch.empty(
        _STATE_NBYTES[generator.device.type], dtype=torch.uint8, device="cpu"
    ),
    tags=(torch.Tag.nondeterministic_seeded,),
)
"""The state of ``generator``, after the draws recorded before."""

SavedStates = list[tuple[torch.Generator, torch.Tensor, "DrawSequence | None"]]
"""See :meth:`Generators.save`."""

# Markers are counted up from here: seeds that users are unlikely to choose (64-bit numbers with a fixed upper
# half).
_FIRST_MARKER = 0x4C5A_5631_0000_0000


class Generators:
    """The pending draws of every generator."""

    def __init__(self) -> None:
        self._markers = itertools.count(_FIRST_MARKER)
        # identity of the generator -> (its last marker, the sequence that the marker represents)
        self._tails: dict[int, tuple[int, DrawSequence]] = {}

    @staticmethod
    def default(device: torch.device) -> torch.Generator:
        if device.type == "cuda":
            index = device.index if device.index is not None else torch.cuda.current_device()
            return torch.cuda.default_generators[index]
        return torch.default_generator

    def pending(self, generator: torch.Generator) -> TrackedNode | None:
        """The draw after which the generator's state follows, if that draw is pending."""
        tail = self._tails.get(generators.generator_identity(generator))
        if tail is None or _seed_of(generator) != tail[0]:
            return None
        last = tail[1].newest
        return last if last is not None and last.state != "done" else None

    def continued(self, generator: torch.Generator) -> tuple[DrawSequence, TrackedNode | None] | None:
        """The sequence that the next draw of ``generator`` belongs to, and the node before that draw.

        ``None``: a new sequence has to begin.
        """
        tail = self._tails.get(generators.generator_identity(generator))
        if tail is None or _seed_of(generator) != tail[0]:
            return None
        return tail[1], tail[1].last or tail[1].awaits

    def record(self, node: TrackedNode, generator: torch.Generator) -> None:
        """Append a draw to the generator's program order."""
        known = self.continued(generator)
        sequence, before = known or (DrawSequence(generator, state_of(generator)), None)
        if before is not None:
            node.after = [*node.after, before]
        sequence.last = node
        node.draws = sequence
        if known is None:
            self._mark(sequence)

    def restart(self, generator: torch.Generator, state: TrackedValue) -> None:
        """The generator's state becomes the future result of ``state``'s pending ``rng_state`` node."""
        self._mark(DrawSequence(generator, state))

    def _mark(self, sequence: DrawSequence) -> None:
        marker = next(self._markers)
        _seed(sequence.generator, marker)
        self._tails[generators.generator_identity(sequence.generator)] = (marker, sequence)

    def seed_of(self, generator: torch.Generator) -> int:
        """The seed that the user would see: that of the state at the beginning of the sequence, not our
        marker.
        """
        seed = _seed_of(generator)
        tail = self._tails.get(generators.generator_identity(generator))
        if tail is None or seed != tail[0]:
            return seed
        scratch = torch.Generator(generator.device)
        set_state(scratch, tail[1].earlier_state)
        return _seed_of(scratch)

    def restore_finished(self) -> None:
        """Give generators their state back once all of their draws have run or been dropped."""
        for key, (marker, sequence) in list(self._tails.items()):
            last = sequence.newest
            if last is not None and last.state == "done" and _seed_of(sequence.generator) == marker:
                set_state(sequence.generator, sequence.state)
                self._tails.pop(key, None)

    def forget(self) -> None:
        """Pending draws will not happen: generators return to the state before them."""
        for key, (marker, sequence) in list(self._tails.items()):
            if sequence.last is None or sequence.last.state != "done":
                if _seed_of(sequence.generator) == marker:
                    set_state(sequence.generator, sequence.earlier_state)
                self._tails.pop(key, None)

    def save(self, nodes: Iterable[TrackedNode]) -> SavedStates:
        """Before running ``nodes``: the state of each generator that they draw from, and the sequence that is
        due.

        That is the sequence that the generator's marker represents. A failed draw has left the state before
        it: if the generator still has that state, the sequence of the failed draw is due.
        """
        drawing: dict[int, list[TrackedNode]] = {}
        for node in nodes:
            if node.draws is not None:
                key = generators.generator_identity(node.draws.generator)
                drawing.setdefault(key, []).append(node)
        saved: SavedStates = []
        for key, several in drawing.items():
            last = several[-1].draws
            assert last is not None
            generator = last.generator
            state, tail = state_of(generator), self._tails.get(key)
            sequence = tail[1] if tail is not None and tail[0] == _seed_of(generator) else None
            if tail is None and any(node.state == "failed" for node in several) and last.awaits is None:
                sequence = last if torch.equal(state, last.state) else None
            saved.append((generator, state, sequence))
        return saved

    def drawn_whole(self, nodes: Iterable[TrackedNode]) -> list[int] | None:
        """The generators from which ``nodes`` draw, by identity, if these are all of their pending draws.

        ``None`` if there are others, or if a generator has been reseeded since.
        """
        newest: dict[int, TrackedNode] = {}
        for node in nodes:
            assert node.draws is not None
            key = generators.generator_identity(node.draws.generator)
            if key in newest and newest[key].draws is not node.draws:
                return None
            newest[key] = node
        for key, node in newest.items():
            tail, sequence = self._tails.get(key), node.draws
            if tail is None or sequence is None or tail[1] is not sequence or sequence.last is not node:
                return None
            if sequence.awaits is not None or _seed_of(sequence.generator) != tail[0]:
                return None
        return list(newest)

    def forgetting(self, keys: Iterable[int]) -> tuple[Callable[[], object], ...]:
        """Functions that forget the draws of these generators, all of which have run; without Python code."""
        return tuple([functools.partial(self._tails.pop, key, None) for key in keys])

    def restore(self, saved: SavedStates) -> None:
        """After running draws: set the state that eager PyTorch would have left, or the previous one while
        draws are pending.
        """
        for generator, state, sequence in saved:
            if sequence is not None:
                last = sequence.newest
                if last is None or last.state == "done":
                    key = generators.generator_identity(generator)
                    if key in self._tails and self._tails[key][1] is sequence:
                        self._tails.pop(key, None)
                    state = sequence.state
            set_state(generator, state)
