"""Allocation trace: a recorded program as editable steps that use and allocate memory.

The effect of a change to the user's code is not estimated: the change is applied to the steps (fewer uses,
other sizes, steps that run twice), and lifetimes and peak are computed again by the rules of
:mod:`lazyviz.plan.liveness.lifetimes`.  A lazyviz run frees memory after its last use; in eager PyTorch,
memory that user code refers to for longer stays until it is dropped.  Sizes are bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch

from ...graph.ir import Node, Storage
from .lifetimes import Lifetime, Run, formula_end

Key = int  # one allocation of the program; the recorded ones are numbered from 0


class Step(NamedTuple):
    """One operator: ``node`` is the recorded node, ``uses`` and ``makes`` are the allocations that it uses
    and creates.

    ``cast``: it converts a result of ``node``, after the backward formula that ``node`` belongs to.
    """

    node: Node
    uses: tuple[Key, ...]
    makes: tuple[Key, ...]
    cast: bool = False


class Hold(NamedTuple):
    """A reference beyond the last use: it is dropped before the recorded node at position ``until``.

    ``last`` is the position of the last use if only autograd holds the allocation, which keeps saved tensors
    until a backward formula is done. A change that removes this use ends the hold.
    """

    until: int
    last: int | None


_BEHIND_FORMULAS = {"_to_copy", "sum", "view"}
"""The last ops of a backward formula often do not belong to it: after the formula has returned, the engine
converts gradients to the shape and dtype of their tensors (``validate_outputs`` in
torch/csrc/autograd/engine.cpp).
"""


class Places(dict[Node, int]):
    """The positions of nodes in lifetimes; by default, their recorded positions."""

    def __missing__(self, node: Node) -> int:
        return node.index


@dataclass
class Program:
    """Steps in the order in which they run, and what is known of each allocation.

    Attributes:
        sizes: bytes of each allocation.
        dtypes: of the tensors in it; ``None`` if no tensor shows it.
        kept: those that stay to the end, since the user's code still refers to them.
        storages: the recorded storage of each; keys beyond them were added by a change.
        keys: of each storage that the nodes show; memory met again under another name has one key.
        makers: position of the node that made each recorded one, -1 if it is from outside.
        held: those that are referred to beyond their last use: see :class:`Hold`.
        entries: of those from outside that come with their first use, the position of that node.
        of: whose run it is, which decides when memory is given back.
        places: the position of each recorded node.
    """

    steps: list[Step]
    sizes: list[int]
    dtypes: list[torch.dtype | None]
    kept: set[Key]
    storages: Sequence[Storage]
    keys: Mapping[Storage, Key]
    makers: list[int] = field(default_factory=list)
    held: dict[Key, Hold] = field(default_factory=dict)
    entries: dict[Key, int] = field(default_factory=dict)
    of: Run = "lazyviz"
    places: Places = field(default_factory=Places)

    def key(self, like: Key, nbytes: int | None = None) -> Key:
        """A new allocation with the dtype of ``like``, and with its size unless ``nbytes`` is given."""
        self.sizes.append(self.sizes[like] if nbytes is None else nbytes)
        self.dtypes.append(self.dtypes[like])
        self.makers.append(self.makers[like])
        return len(self.sizes) - 1

    @property
    def scratch(self) -> list[Key]:
        """Memory that kernels allocate within one node: created by it, and not part of any tensor."""
        return [key for key, dtype in enumerate(self.dtypes) if dtype is None and self.makers[key] >= 0]

    def copy(self) -> Program:
        return Program(
            list(self.steps),
            list(self.sizes),
            list(self.dtypes),
            set(self.kept),
            self.storages,
            self.keys,
            list(self.makers),
            dict(self.held),
            dict(self.entries),
            self.of,
            self.places,
        )

    def peak(self) -> tuple[int, int]:
        """(Bytes, position of the first step that reaches them); (0, 0) without steps."""
        timeline = self.timeline()
        if not timeline:
            return 0, 0
        most = max(timeline)
        return most, timeline.index(most)

    def spans(self) -> dict[Key, tuple[int, int]]:
        """First and (exclusive) last position of each allocation; -1 if it is from outside."""
        count = len(self.steps)
        starts: dict[Key, int] = {}
        stops: dict[Key, int] = {}
        for position, step in enumerate(self.steps):
            for key in step.uses:
                stops[key] = position + 1
            for key in step.makes:
                stops[key] = position + 1
                starts.setdefault(key, position)
        if self.held or self.entries:
            places = self.places
            reached = list(accumulate((places[step.node] for step in self.steps), max))
            for key, (until, last) in self.held.items():
                stop = stops.get(key, 0)
                if last is None or (stop and places[self.steps[stop - 1].node] == last):
                    stops[key] = max(stop, bisect_left(reached, until - 1) + 1)  # before the inserted step
            for key, index in self.entries.items():
                starts.setdefault(key, bisect_left(reached, index))
        if self.of == "eager" and len(self.sizes) > len(self.storages):
            self._hold_unpacked(stops)
        for key in self.kept:
            stops[key] = count
        return {key: (starts.get(key, -1), stop) for key, stop in stops.items()}

    def _hold_unpacked(self, stops: dict[Key, int]) -> None:
        """Keep added allocations until the end of a backward formula that reads them.

        The formula's variables refer to all its arguments and unpacked tensors. For recorded allocations this
        is already known.
        """
        recorded = len(self.storages)
        formula: list[Key] = []
        forward: Node | None = None
        end = 0
        for position, step in enumerate(self.steps):
            node = step.node
            of = node.forward if node.phase == "backward" and not step.cast else None
            if of is not forward:
                stops.update((key, max(stops[key], end)) for key in formula)
                forward, formula = of, []
            if of is not None:
                formula += [key for key in step.uses if key >= recorded and key not in step.makes]
                if not formula or node.op._schema.name.rpartition("::")[2] not in _BEHIND_FORMULAS:
                    end = position + 1
        stops.update((key, max(stops[key], end)) for key in formula)

    def timeline(self) -> list[int]:
        """Bytes allocated during each step."""
        changes = [0] * (len(self.steps) + 1)
        for key, (start, stop) in self.spans().items():
            changes[max(start, 0)] += self.sizes[key]
            changes[stop] -= self.sizes[key]
        return list(accumulate(changes[:-1]))

    def calls(self) -> list[tuple[int, Hashable, int]]:
        """The allocations and frees in time order, as an allocator would see them: (position, name, bytes).

        The name is the recorded storage, or the key of an allocation that a change has added.
        """
        found: list[tuple[int, Hashable, int]] = []
        for key, (start, stop) in sorted(self.spans().items()):
            if size := self.sizes[key]:
                name = self.storages[key] if key < len(self.storages) else key
                found += [(start, name, size), (stop, name, -size)]
        found.sort(key=lambda call: (call[0], call[2] > 0))
        return found

    def replaced(self, mapping: Mapping[Key, Key]) -> None:
        """Replace each use of a key, except its creation, by the key that it is mapped to."""
        for position, step in enumerate(self.steps):
            if any(key in mapping for key in step.uses):
                uses = tuple(dict.fromkeys(mapping.get(key, key) for key in step.uses))
                self.steps[position] = step._replace(uses=uses)


def _belongs_to_user(span: Lifetime, count: int) -> bool:
    """Whether the model or the optimizer keeps it to the end, although its last use may be the last
    node's.
    """
    return span.lazy_stop >= count and span.storage.role is not None


def _hold(nodes: Sequence[Node], positions: Mapping[Node, int], places: Places, span: Lifetime) -> Hold:
    last = span.last_use
    if last is None or last.phase != "backward" or last.forward is None:
        return Hold(span.lazy_stop, None)
    if _belongs_to_user(span, len(nodes)):
        return Hold(span.lazy_stop, None)
    at = positions.get(last)
    final = last if at is None else nodes[formula_end(nodes, at) - 1]
    return Hold(span.lazy_stop, places[last] if span.lazy_stop <= places[final] + 1 else None)


def program_of(nodes: Sequence[Node], spans: Iterable[Lifetime], *, in_order: bool = False) -> Program:
    """The recorded program, with only the storages in ``spans``.

    ``nodes`` may be a part of the record. ``in_order`` says that the spans count the steps of ``nodes``, and
    not the nodes of the record.
    """
    spans = [span for span in spans if span.storage.nbytes]
    # For example, planned with another size.
    keys = {span.storage.origin: key for key, span in enumerate(spans)}
    keys |= {span.storage: key for key, span in enumerate(spans)}
    makes: dict[Node, list[Key]] = {}
    for key, span in enumerate(spans):
        if span.maker is not None:
            makes.setdefault(span.maker, []).append(key)
    dtypes: list[torch.dtype | None] = [None] * len(spans)
    steps = []
    positions = {node: position for position, node in enumerate(nodes)}
    places = Places(positions if in_order else ())

    find = keys.get
    for node in nodes:
        uses: dict[Key, None] = {}
        for values in (node.inputs, node.outputs):
            for value in values:
                storage = value.storage
                found = find(storage)
                if found is None:
                    found = find(storage.origin)
                    if found is None:
                        continue
                uses[found] = None
                if dtypes[found] is None:
                    dtypes[found] = value.dtype
        for storage in node.writes:
            found = find(storage, find(storage.origin))
            if found is not None:
                uses[found] = None
        steps.append(Step(node, tuple(uses), tuple(makes.get(node, ()))))
    kept = {key for key, span in enumerate(spans) if span.kept}
    held = {
        key: _hold(nodes, positions, places, span)
        for key, span in enumerate(spans)
        if not span.kept
        and (
            span.last_use is None
            or span.lazy_stop > places[span.last_use] + 1
            or _belongs_to_user(span, len(nodes))
        )
    }
    of: Run = next((span.of for span in spans), "lazyviz")
    entries = {key: span.start for key, span in enumerate(spans) if span.maker is None and span.start >= 0}
    return Program(
        steps,
        [span.storage.nbytes for span in spans],
        dtypes,
        kept,
        [span.storage for span in spans],
        keys,
        [places[span.maker] if span.maker is not None else -1 for span in spans],
        held,
        entries,
        of,
        places,
    )
