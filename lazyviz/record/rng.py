"""Random numbers in program order, drawn later.

A pending draw must use the generator state eager PyTorch would have had.  Reseeding a
generator reaches no hook, so after each recorded draw the generator is given a seed of
ours, its *marker*: whoever reads the seed next sees whether somebody seeded it since.
Draws between two seedings form a :class:`DrawSequence`; evaluating one evaluates those
before it, each from the state its predecessor left.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from .storage import TrackedNode

# Markers are counted up from here: seeds nobody types (a 64-bit number with a fixed upper half).
_FIRST_MARKER = 0x4C5A_5631_0000_0000


class DrawSequence:
    """Draws from one generator without a reseed in between; ``state`` is that before the next pending one."""

    __slots__ = ("generator", "last", "state")

    def __init__(self, generator: torch.Generator, state: torch.Tensor) -> None:
        self.generator = generator
        self.state = state
        self.last: TrackedNode | None = None


class Generators:
    """The pending draws of every generator."""

    def __init__(self) -> None:
        self._markers = itertools.count(_FIRST_MARKER)
        # id of the generator -> (its last marker, the sequence the marker stands for)
        self._tails: dict[int, tuple[int, DrawSequence]] = {}

    @staticmethod
    def default(device: torch.device) -> torch.Generator:
        if device.type == "cuda":
            index = device.index if device.index is not None else torch.cuda.current_device()
            return torch.cuda.default_generators[index]
        return torch.default_generator

    def pending(self, generator: torch.Generator) -> TrackedNode | None:
        """The draw whose after-state the generator stands for now, if that draw is pending."""
        tail = self._tails.get(id(generator))
        if tail is None or generator.initial_seed() != tail[0]:
            return None
        last = tail[1].last
        return last if last is not None and last.state != "done" else None

    def record(self, node: TrackedNode, generator: torch.Generator) -> None:
        """Append a draw to the generator's program order."""
        tail = self._tails.get(id(generator))
        if tail is not None and generator.initial_seed() == tail[0]:
            sequence = tail[1]
        else:
            sequence = DrawSequence(generator, generator.get_state())
        if sequence.last is not None:
            node.after.append(sequence.last)
        sequence.last = node
        node.draws = sequence
        marker = next(self._markers)
        generator.manual_seed(marker)
        self._tails[id(generator)] = (marker, sequence)

    def seed_of(self, generator: torch.Generator) -> int:
        """The seed the user would see: that of the state the sequence began with, not our marker."""
        seed = generator.initial_seed()
        tail = self._tails.get(id(generator))
        if tail is None or seed != tail[0]:
            return seed
        scratch = torch.Generator(generator.device)
        scratch.set_state(tail[1].state)
        return scratch.initial_seed()

    def forget(self) -> None:
        """Pending draws will not happen: generators go back to the state before them."""
        for key, (marker, sequence) in list(self._tails.items()):
            if sequence.last is None or sequence.last.state != "done":
                if sequence.generator.initial_seed() == marker:
                    sequence.generator.set_state(sequence.state)
                del self._tails[key]

    def save(self, nodes: Iterable[TrackedNode]) -> list[tuple[torch.Generator, torch.Tensor, bool]]:
        """Before running ``nodes``: the state of each generator they draw from; is it our marker?"""
        generators = {
            id(node.draws.generator): node.draws.generator for node in nodes if node.draws is not None
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
                sequence = self._tails[id(generator)][1]
                if sequence.last is None or sequence.last.state == "done":
                    del self._tails[id(generator)]
                    state = sequence.state
            generator.set_state(state)
