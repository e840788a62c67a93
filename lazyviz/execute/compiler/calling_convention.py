"""Calling convention of compiled code: from a segment's input tensors to its outputs, by position.

Code returns each new storage once, in its original form.  How the outputs of the segment are derived from
these storages is determined when the code is looked up, so that a call needs no recording, and keeps none
alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...graph.ir import Storage, TensorMeta
from ...torch_internals import private_api
from ..backend_protocol import Compiled, Segment
from ..replay.program_key import moving
from .compiled_program_cache import Known, Program, Programs, Variant, settings
from .dynamic_shapes import Shapes
from .fx_lowering import view_of, views_of
from .scalar_arguments import places_of_scalars, scalars_at

Code = Callable[..., Sequence[torch.Tensor]]


class Cuts:
    """The slices that a segment takes of its inputs, and the segment that uses them (``inner``)."""

    def __init__(self, segment: Segment, inner: Segment) -> None:
        self.segment = segment
        self.inner = inner

    def places(self) -> Places:
        return Places(self.segment, self.inner)

    def inputs(self, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The inputs of ``inner``, derived from those of the segment."""
        if len(self.inner.nodes) == len(self.segment.nodes):
            return given
        outside = dict(zip(self.segment.inputs, given, strict=True))
        memory = {value.storage: tensor for value, tensor in outside.items()}
        parts = iter(views_of([value for value in self.inner.inputs if value not in outside], memory))
        return [outside[value] if value in outside else next(parts) for value in self.inner.inputs]

    def slicing_only(self) -> Compiled:
        """The code of a segment that only slices its inputs."""
        return Compiled(Call(self), True, reuse=Views(self.places()))


class Places:
    """The positions of a segment's slices: for each input of ``inner``, whether it is an input of the
    segment, and which.

    It keeps no recording alive.
    """

    def __init__(self, segment: Segment, inner: Segment) -> None:
        self._all = len(inner.nodes) == len(segment.nodes)
        inside = set(inner.nodes)
        self._rest = [at for at, node in enumerate(segment.nodes) if node in inside]
        whole = {value: at for at, value in enumerate(segment.inputs)}
        cut = {node.outputs[0]: at for at, node in enumerate(segment.nodes) if node not in inside}
        self._origins = [(value in whole, whole.get(value, cut.get(value, 0))) for value in inner.inputs]

    def like(self, segment: Segment) -> Cuts:
        """The slices of another recording with the same structure."""
        if self._all:
            return Cuts(segment, segment)
        nodes = segment.nodes
        inputs = [segment.inputs[at] if whole else nodes[at].outputs[0] for whole, at in self._origins]
        return Cuts(segment, Segment([nodes[at] for at in self._rest], inputs, segment.outputs))


class Views:
    """Finds the code for further recordings of a segment that only slices its inputs."""

    def __init__(self, places: Places) -> None:
        self._places = places

    def __call__(self, segment: Segment) -> Compiled:
        return Compiled(Call(self._places.like(segment)), True)


class Call:
    """One way to call code: with these numbers and sizes, for a segment with slices at these positions.

    ``variant`` is the code; without one, there is nothing to compute.
    """

    def __init__(
        self,
        cuts: Cuts,
        variant: Variant[Code] | None = None,
        scalars: Sequence[float] = (),
        shapes: Shapes | None = None,
    ) -> None:
        segment, nodes = cuts.segment, cuts.inner.nodes
        own = {value: at for at, value in enumerate(segment.inputs)}
        memory: dict[Storage, int] = {value.storage: at for at, value in enumerate(segment.inputs)}
        self._variant = variant
        self._parts: list[tuple[int, TensorMeta | None]] | None = None
        if variant is not None and len(nodes) != len(segment.nodes):
            self._parts = [
                (own[value], None) if value in own else (memory[value.storage], value.meta)
                for value in cuts.inner.inputs
            ]
        needed = {value.storage for value in segment.outputs}
        kept = variant.program.kept if variant is not None else ()
        # The number of the result, its metadata, its size.
        self._results: list[tuple[int, TensorMeta, int]] = []
        for number, (at, output) in enumerate(kept):
            value = nodes[at].outputs[output]
            if value.storage in needed:
                memory[value.storage] = len(own) + len(self._results)
                self._results.append((number, value.meta, value.storage.nbytes))
        self._outputs = [(memory[value.storage], value.meta) for value in segment.outputs]
        varies = variant.sizes if variant is not None else None
        self._size = [varies.of(shapes)] if varies is not None and shapes is not None else []
        self._numbers = [scalars[group[0]] for group in variant.groups] if variant is not None else []

    def __call__(self, *given: torch.Tensor) -> list[torch.Tensor]:
        memory = list(given)
        if self._variant is not None:
            inputs: Sequence[torch.Tensor] = given
            if self._parts is not None:
                inputs = [given[at] if meta is None else view_of(given[at], meta) for at, meta in self._parts]
            numbers = [number_tensor(value) for value in self._numbers]
            made: list[Any] = list(self._variant.compiled(*self._size, *inputs, *numbers))
            taken = {private_api.storage_address(tensor) for tensor in given} if self._results else set()
            for at, meta, nbytes in self._results:
                # Results are copied one at a time, so that only one of them exists twice.
                result, made[at] = made[at], None
                memory.append(_alone(result, meta, nbytes, taken))
        return [view_of(memory[at], meta) for at, meta in self._outputs]


class Reuse:
    """Finds the call for further recordings of one structure, by the parts that the structure does not fix.

    These are numbers, and positions of slices in a tensor
    (:data:`lazyviz.execute.replay.program_key.MOVING`).
    """

    def __init__(
        self,
        programs: Programs[Code],
        known: Known[Code],
        variant: Variant[Code],
        program: Program,
        cuts: Cuts,
    ) -> None:
        self._programs, self._known, self._variant, self._program = programs, known, variant, program
        self._places = cuts.places()
        segment = cuts.inner
        self._scalar_places = places_of_scalars(segment.nodes)
        # Those for which the variant was found.
        self._scalars = scalars_at(segment.nodes, self._scalar_places)
        self._has_complex = any(type(each) is complex for each in self._scalars)  # 1+0j equals 1-0j
        self._moving = [at for at, node in enumerate(segment.nodes) if moving(node.op)]
        self._moves = self._moves_of(segment)
        self._last: tuple[Any, Compiled] | None = None

    def _moves_of(self, segment: Segment) -> list[Any]:
        """The parts that are not inputs of the code, but may still differ."""
        nodes = segment.nodes
        moves: list[Any] = [
            nodes[at].args[place : place + 1] for at in self._moving for place in moving(nodes[at].op)
        ]
        if self._program.shapes.offsets:
            moves += [value.meta.offset for value in segment.inputs]
        return moves

    def __call__(self, segment: Segment) -> Compiled | None:
        known, variant = self._known, self._variant
        if known.dropped or self._program.settings != settings():
            return None
        if self._last is not None and self._last[0] == segment.open and variant in known.variants:
            self._programs.use(known)
            return self._last[1]
        cuts = self._places.like(segment)
        inner = cuts.inner
        if self._moves_of(inner) != self._moves:
            return None
        scalars = scalars_at(inner.nodes, self._scalar_places)
        if scalars != self._scalars or 0 in scalars or self._has_complex or variant not in known.variants:
            if variant not in known.variants or not variant.takes(scalars):
                found = known.find(self._program.with_scalars(scalars))
                if found is None:
                    return None
                self._variant = variant = found
            self._scalars = scalars
        self._programs.use(known)
        compiled = Compiled(Call(cuts, variant, scalars, self._program.shapes), cache_hit=True)
        if segment.open is not None:
            self._last = segment.open, compiled
        return compiled


def number_tensor(value: float) -> torch.Tensor:
    """A number in the form in which code receives it."""
    return torch.tensor(value, dtype=torch.int64 if type(value) is int else torch.float64, device="cpu")


def _alone(tensor: torch.Tensor, meta: TensorMeta, nbytes: int, taken: set[int]) -> torch.Tensor:
    """``tensor`` with the recorded strides, on its own memory of ``nbytes``."""
    address = private_api.storage_address(tensor)
    if (
        tensor.stride() == meta.stride
        and tensor.storage_offset() == meta.offset
        and tensor.untyped_storage().nbytes() == nbytes
        and address not in taken
    ):
        taken.add(address)
        return tensor
    own = torch.empty(0, dtype=meta.dtype, device=tensor.device)
    own.set_(torch.UntypedStorage(nbytes, device=tensor.device), meta.offset, meta.shape, meta.stride)
    return own.copy_(tensor)
