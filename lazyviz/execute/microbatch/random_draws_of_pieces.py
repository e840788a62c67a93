"""Random numbers of a split run: drawn for the whole batch, from the states of eager mode.

Every draw gets the state that the previous draws leave, whatever the order of passes and pieces.  If a later
draw is needed first, the draws before it are made in advance and discarded to compute that state, and made
again when they run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ...graph.ir import Node, TensorMeta
from ...plan.batch.batch_dim_propagation import separable
from ...plan.batch.batch_rule import base_name
from ...record.random_draw_order import state_of
from ...record.tracked_storages import DrawSequence, TrackedNode


class Draws:
    """The pending draws of some nodes, in program order, and the generator state before each one so far."""

    def __init__(self, nodes: Iterable[TrackedNode]) -> None:
        self._chains: dict[DrawSequence, list[TrackedNode]] = {}
        self._states: dict[TrackedNode, torch.Tensor] = {}  # before the draw
        self._next: dict[DrawSequence, int] = {}
        self._now: dict[DrawSequence, torch.Tensor] = {}  # before the next draw that has not been made
        self._own: dict[TrackedNode, torch.Tensor] = {}  # state of draws that continue from piece to piece
        self._seeds: dict[TrackedNode, int] = {}
        for node in nodes:
            if node.draws is not None:
                self._chains.setdefault(node.draws, []).append(node)

    def begin(self, node: TrackedNode) -> torch.Generator:
        """Set the generator of ``node`` to the state before its draw."""
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
        """The state before the draw of ``node``, after ``begin``."""
        return self._states[node]

    def end(self, node: TrackedNode) -> None:
        """Record that ``node`` has drawn: the next draw begins in the resulting state."""
        sequence = node.draws
        assert sequence is not None
        chain = self._chains[sequence]
        if self._next[sequence] < len(chain) and chain[self._next[sequence]] is node:
            self._now[sequence] = state_of(sequence.generator)
            self._next[sequence] += 1

    def go_on(self, node: TrackedNode) -> torch.Generator:
        """Like ``begin``, for a draw inside a piece: the first piece starts in the state before the draw, a
        later one in the state that the previous piece left.
        """
        generator = self.begin(node)
        if node in self._own:
            generator.set_state(self._own[node])
        return generator

    def stop(self, node: TrackedNode) -> None:
        assert node.draws is not None
        if node not in self._own:
            self.end(node)
        self._own[node] = state_of(node.draws.generator)

    def seed(self, node: TrackedNode) -> int:
        """The seed for pieces that draw concurrently on workers."""
        if node not in self._seeds:
            generator = self.go_on(node)
            number = torch.randint(2**62, (), generator=generator, device=generator.device)
            self._seeds[node] = int(number)
            self.stop(node)
        return self._seeds[node]

    def finish(self, node: TrackedNode) -> None:
        """Record that ``node`` has run or is not needed; after the last node of its sequence, set the final
        state.
        """
        sequence = node.draws
        assert sequence is not None
        chain = self._chains[sequence]
        if node is not chain[-1]:
            return
        self.begin(node)
        if self._next[sequence] < len(chain):
            draw_whole(node)
            self.end(node)
        sequence.state = self._now[sequence]

    def finish_all(self) -> None:
        """Record that all nodes have run."""
        for chain in self._chains.values():
            self.finish(chain[-1])


@dataclass(frozen=True, slots=True)
class Draw:
    """A draw whose numbers do not depend on any tensor's values; ``name`` is the operator's (ATen's).

    ``like`` is the tensor that it would read or fill (``None``: a factory), ``mask`` is dropout's mask.
    """

    name: str
    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    like: TensorMeta | None = None
    mask: TensorMeta | None = None

    def numbers(self) -> torch.Tensor | None:
        """The random numbers for the whole tensors; for dropout its mask, ``None`` if it is not needed.

        The generator must be in the right state.
        """
        like = self.like
        if like is None:
            return self.op(*self.args, **self.kwargs)
        if self.name == "native_dropout":
            return self._dropout_mask(like)
        return self.op(_blank(like), *self.args[1:], **self.kwargs)

    def _dropout_mask(self, like: TensorMeta) -> torch.Tensor | None:
        probability = self.args[1]
        train = self.args[2] if len(self.args) > 2 else self.kwargs.get("train")
        if self.mask is None or train is False or not like.nbytes:
            return None
        if like.device.type == "cpu":
            # Filled like in native_dropout_cpu (ATen's Dropout.cpp).
            blank = _blank(self.mask)
            return blank.bernoulli_(1 - probability) if probability < 1 else blank.zero_()
        return self.op(_blank(like), probability, train)[1]


def draw_of(node: Node) -> Draw:
    """The draw of ``node``, which depends on no values."""
    name = base_name(node.op)
    if not node.inputs:  # a factory
        return Draw(name, node.op, node.args, node.kwargs)
    assert separable(node), "only draws that need no values are made in advance"
    mask = next((each.meta for each in node.outputs if each.index == 1), None)
    return Draw(name, node.op, (None, *node.args[1:]), node.kwargs, node.inputs[0].meta, mask)


def draw_whole(node: Node) -> None:
    """Make the draw of ``node`` for its whole tensors, to compute the state after it.

    A kernel that draws internally either draws nothing, or may use other random numbers.
    """
    if not node.inputs or separable(node):
        draw_of(node).numbers()


def _blank(meta: TensorMeta) -> torch.Tensor:
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
