"""Random numbers of a split run: drawn for the whole batch, from the states eager PyTorch would have had.

Every draw gets the state that the draws before it leave, whichever pass or piece comes first; a draw
whose turn is later is drawn ahead and thrown away to know that state, and drawn again when it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from ..graph.ir import is_dense
from ..plan.batch import separable
from ..plan.batch_call import base_name
from ..record.rng import DrawSequence, state_of
from ..record.storage import TrackedNode, TrackedValue


class Draws:
    """The pending draws of some nodes, in program order, and the states before those reached so far."""

    def __init__(self, nodes: Iterable[TrackedNode]) -> None:
        self._chains: dict[DrawSequence, list[TrackedNode]] = {}
        self._states: dict[TrackedNode, torch.Tensor] = {}  # before the draw
        self._next: dict[DrawSequence, int] = {}
        self._now: dict[DrawSequence, torch.Tensor] = {}  # before the next draw nobody has made
        self._own: dict[TrackedNode, torch.Tensor] = {}  # of draws that go on from piece to piece
        for node in nodes:
            if node.draws is not None:
                self._chains.setdefault(node.draws, []).append(node)

    def begin(self, node: TrackedNode) -> torch.Generator:
        """Bring the generator of ``node`` into the state before its draw."""
        sequence = node.draws
        assert sequence is not None
        generator = sequence.generator
        state = self._states.get(node)
        if state is None:
            if sequence not in self._now:
                self._now[sequence] = sequence.state
                self._next[sequence] = 0
            chain = self._chains[sequence]
            while chain[self._next[sequence]] is not node:
                ahead = chain[self._next[sequence]]
                generator.set_state(self._now[sequence])
                self._states[ahead] = self._now[sequence]
                draw_whole(ahead)
                self._now[sequence] = state_of(generator)
                self._next[sequence] += 1
            state = self._states[node] = self._now[sequence]
        generator.set_state(state)
        return generator

    def state(self, node: TrackedNode) -> torch.Tensor:
        """The state before the draw of ``node``, once begun."""
        return self._states[node]

    def end(self, node: TrackedNode) -> None:
        """``node`` has drawn: the next one begins where it ended."""
        sequence = node.draws
        assert sequence is not None
        chain = self._chains[sequence]
        if self._next[sequence] < len(chain) and chain[self._next[sequence]] is node:
            self._now[sequence] = state_of(sequence.generator)
            self._next[sequence] += 1

    def go_on(self, node: TrackedNode) -> torch.Generator:
        """As ``begin`` for a piece's own draw: the first begins there, the next where that ended."""
        generator = self.begin(node)
        if node in self._own:
            generator.set_state(self._own[node])
        return generator

    def stop(self, node: TrackedNode) -> None:
        assert node.draws is not None
        if node not in self._own:
            self.end(node)
        self._own[node] = state_of(node.draws.generator)

    def finish(self) -> None:
        """All have run, or need not: each sequence is in the state after its last draw."""
        for sequence, chain in self._chains.items():
            last = chain[-1]
            self.begin(last)
            if self._next[sequence] < len(chain):
                draw_whole(last)
                self.end(last)
            sequence.state = self._now[sequence]


def draw_whole(node: TrackedNode) -> torch.Tensor | None:
    """The numbers that ``node`` draws for its whole tensors; for dropout its mask, ``None`` if it has no use.

    The generator has to be in the right state.
    """
    name = base_name(node.op)
    if not node.inputs:  # a factory
        return node.op(*node.args, **node.kwargs)
    assert separable(node), "only draws that need no values are made ahead"
    value: TrackedValue = node.inputs[0]
    meta = value.meta
    if name == "native_dropout":
        return _dropout_mask(node)
    blank = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
    return node.op(blank, *node.args[1:], **node.kwargs)


def _dropout_mask(node: TrackedNode) -> torch.Tensor | None:
    probability, train = node.args[1], node.args[2] if len(node.args) > 2 else node.kwargs.get("train")
    value = node.inputs[0]
    mask = next((each for each in node.outputs if each.index == 1), None)
    if mask is None or train is False or not value.nbytes:
        return None
    meta = value.meta
    if meta.device.type == "cpu":
        # As native_dropout_cpu (ATen's Dropout.cpp) fills its mask.
        own = mask.meta
        blank = torch.empty_strided(own.shape, own.stride, dtype=own.dtype, device=own.device)
        return blank.bernoulli_(1 - probability) if probability < 1 else blank.zero_()
    blank = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
    return torch.ops.aten.native_dropout.default(blank, probability, train)[1]


class Masks:
    """Masks that a split run drew, a bit an element: drawing them again for each piece takes longer."""

    def __init__(self) -> None:
        self._kept: dict[TrackedNode, dict[tuple[int, int], _Bits]] = {}

    def keep(self, node: TrackedNode, parts: Mapping[tuple[int, int], torch.Tensor]) -> None:
        """Note the parts of a mask, by the samples' start and stop."""
        self._kept[node] = {samples: _Bits.of(part) for samples, part in parts.items()}

    def take(self, node: TrackedNode, samples: tuple[int, int]) -> torch.Tensor | None:
        """A part; ``None`` if it was not kept, as where pieces have been halved since."""
        bits = self._kept.get(node, {}).get(samples)
        return bits.mask() if bits is not None else None

    def drop(self, node: TrackedNode) -> None:
        self._kept.pop(node, None)

    def nbytes(self, node: TrackedNode) -> int:
        return sum(bits.packed.numel() for bits in self._kept.get(node, {}).values())


class _Bits(NamedTuple):
    packed: torch.Tensor
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, mask: torch.Tensor) -> _Bits:
        if not is_dense(mask.shape, mask.stride()):
            mask = mask.contiguous()
        flat = mask.as_strided((mask.numel(),), (1,), mask.storage_offset()).view(torch.uint8)
        rows = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(8, -1)
        packed = rows[0].clone()
        for row in range(1, 8):
            packed.bitwise_or_(rows[row] << row)
        return cls(packed, mask.shape, mask.stride())

    def mask(self) -> torch.Tensor:
        rows = torch.empty(8, self.packed.numel(), dtype=torch.uint8, device=self.packed.device)
        for row in range(8):
            torch.bitwise_and(self.packed >> row, 1, out=rows[row])
        return rows.view(torch.bool).flatten().as_strided(self.shape, self.stride)
