"""The inductor backend: whole recorded segments, compiled by Inductor.

Recording happened below autograd, so forward, backward and optimizer of a step are one
program: it is made functional, fused and compiled as a whole.  A segment met again (the same
structure, :mod:`.programs`) runs the code that is there.  What cannot be compiled runs op by op, and
the report says why.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from .. import _torch, _torch_compile
from ..graph.ir import Node, Storage, Value
from .backend import Compiled, Refused, Segment
from .lowering import NotLowered, check, cut_first, lower, made_storages, views_of
from .programs import (
    MOST_VARIANTS,
    Known,
    Made,
    Program,
    Programs,
    Variant,
    places_of_scalars,
    program_of,
    same_shapes,
    scalars_at,
)
from .sizes import Sizes, follow
from .stretch import moving

Code = Callable[..., Sequence[torch.Tensor]]
MOST_REFUSED = 256
MOST_LIKELY = 8


class InductorBackend:
    """Compiles segments with Inductor, the compiler of ``torch.compile``.

    Args:
        exact_random: draw the numbers that eager PyTorch would draw (Inductor's ``fallback_random``).
        options: further settings of Inductor, by name.

    Results are eager's within rounding: fused code rounds in other places.  One program at a time
    is compiled, on any thread.
    """

    draws = True  # segments may hold random operators

    def __init__(self, *, exact_random: bool = True, options: Mapping[str, Any] | None = None) -> None:
        self.programs: Programs[Code] = Programs()
        self._options = {"fallback_random": exact_random, **(options or {})}
        self._lock = threading.Lock()
        self._refused: OrderedDict[Hashable, str] = OrderedDict()  # programs that are not to be tried again

    def refuses(self, node: Node) -> str | None:
        """Why ``node`` has to run by itself, or None."""
        try:
            check(node)
        except NotLowered as error:
            return str(error)
        return None

    def compile(self, segment: Segment, inputs: Sequence[torch.Tensor]) -> Compiled:
        """The segment as one function of its inputs.

        Raises:
            lazyviz.execute.backend.Refused: it cannot be compiled; the message says why.
        """
        cuts = _Cuts(segment, cut_first(segment))
        inner = cuts.inner
        if not inner.nodes:
            places = cuts.places()
            return Compiled(cuts.run, True, again=lambda other: Compiled(places.like(other).run, True))
        needed = _needed(inner)
        for value in needed:
            if not _shows_all(value):
                raise Refused(f"{value.meta} does not show all of its memory")
        program = program_of(inner.nodes, needed)
        with self._lock:
            if (why := self._refused.get(program.key)) is not None:
                raise Refused(why)
            variant = self.programs.find(program)
            reason = None
            if variant is None:
                reason = self.programs.difference(program, inner.nodes)
                if len(self.programs.variants(program)) >= MOST_VARIANTS:
                    raise Refused(f"it was compiled {MOST_VARIANTS} times, and is new again: {reason}")
                try:
                    variant, fixed = self._variant(inner, cuts.inputs(inputs), program)
                except Refused as refusal:
                    self._refuse(program, str(refusal))
                    raise
                reason = f"{reason} ({fixed})" if fixed else reason
                self.programs.add(variant)
            known = self.programs.known(program)
        assert known is not None
        again = _Again(self.programs, known, variant, program, cuts)
        return Compiled(_Run(cuts, variant, program.scalars), reason is None, reason, again)

    def forget(self, segment: Segment, why: str) -> None:
        """The code for ``segment`` is wrong: it is not to be run or made again."""
        inner = cut_first(segment)
        program = program_of(inner.nodes, _needed(inner))
        with self._lock:
            self.programs.drop(program)
            self._refuse(program, f"compiled code was not right: {why}")

    def _refuse(self, program: Program, why: str) -> None:
        self._refused[program.key] = why
        while len(self._refused) > MOST_REFUSED:
            self._refused.popitem(last=False)

    def _variant(
        self,
        segment: Segment,
        inputs: Sequence[torch.Tensor],
        program: Program,
    ) -> tuple[Variant[Code], str]:
        """New code: for all sizes and numbers that have changed where a compiler can, else for these.

        The second is why it is for these, or nothing.  It hands out what was needed before, too, and what
        is likely to be: which variables are alive is to cost no more than one compilation.
        """
        likely = set(_likely(segment.nodes))
        likely.update(*[variant.program.kept for variant in self.programs.variants(program)])
        nodes = segment.nodes
        more = {each for each in likely if _shows_all(nodes[each[0]].outputs[each[1]])}
        program = replace(program, kept=tuple(sorted({*program.kept, *more})))
        kept = [nodes[at].outputs[number] for at, number in program.kept]
        groups = self.programs.groups(program)
        certain = tuple(group for group in groups if set(group) <= set(program.varying))
        sizes = self._sizes(segment, program)
        why = ""
        for free, follows in dict.fromkeys([(groups, sizes), (groups, None), (certain, None)]):
            try:
                made = self._code(segment, inputs, kept, program, free, follows)
            except Refused as refusal:
                why = why or str(refusal)
                continue
            if follows and made.holds is not None and not made.holds(follows.of(program.shapes)):
                why = why or "the compiler wants these sizes alone"
                continue
            fixed = f"for these numbers and sizes alone: {why}" if why else ""
            return Variant(program, free, made.code, follows, made.holds), fixed
        raise Refused(why)

    def _sizes(self, segment: Segment, program: Program) -> Sizes | None:
        """What varies since an earlier recording of ``program``, if new code can follow it."""
        written = {storage for node in segment.nodes for storage in node.writes}
        memory = [value.storage for value in segment.inputs]
        if any(memory.count(storage) > 1 for storage in written):
            return None  # a compiler is told that inputs overlap by their own memory, at their own sizes
        for variant in reversed(self.programs.variants(program)):
            if not same_shapes(variant.program.shapes, program.shapes):
                sizes = follow(variant.program.shapes, program.shapes)
                # Compilers take a size of 1 for a number, since it broadcasts.
                return sizes if sizes is not None and sizes.of(program.shapes) > 1 else None
        return None

    def _code(
        self,
        segment: Segment,
        inputs: Sequence[torch.Tensor],
        kept: Sequence[Value],
        program: Program,
        groups: Sequence[Sequence[int]],
        sizes: Sizes | None,
    ) -> _torch_compile.Compiled:
        try:
            module = lower(segment.nodes, segment.inputs, kept, groups, sizes)
        except NotLowered as error:
            raise Refused(str(error)) from error
        numbers = [_number(program.scalars[group[0]]) for group in groups]
        try:
            if sizes is None:
                return _torch_compile.compile_graph(module, inputs, numbers, self._options)
            return _torch_compile.compile_graph(
                module, inputs, numbers, self._options, sizes.of(program.shapes), sizes.dimensions
            )
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            why = lines[0] if lines else type(error).__name__
            raise Refused(f"Inductor could not compile {len(segment.nodes):,} ops: {why}") from error


def _needed(segment: Segment) -> list[Value]:
    """Of each storage that the segment makes and that is needed afterwards, the value it is made as.

    In program order, whichever of the views on them are left: that is how code met again hands them out.
    """
    needed = {value.storage for value in segment.outputs}
    return [value for storage, value in made_storages(segment.nodes).items() if storage in needed]


def _shows_all(value: Value) -> bool:
    return value.meta.storage_nbytes == value.storage.nbytes


def _likely(nodes: Sequence[Node]) -> list[Made]:
    """Results that somebody may want to see in another run of the program: a loss, an accuracy.

    Those of one number, made in the forward pass, the last ones.
    """
    made = {value: storage for storage, value in made_storages(nodes).items()}
    found = [
        (at, number)
        for at, node in enumerate(nodes)
        if node.phase == "forward" or node.phase == "other"
        for number, value in enumerate(node.outputs)
        if value in made and not value.meta.shape and value.dtype.is_floating_point
    ]
    return found[-MOST_LIKELY:]


def _number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int64 if type(value) is int else torch.float64)


class _Places:
    """Where a segment's cuts are: of each input of the rest, whether it is one of the segment's, and which.

    Holds no recording alive.
    """

    def __init__(self, segment: Segment, inner: Segment) -> None:
        self._all = len(inner.nodes) == len(segment.nodes)
        inside = set(inner.nodes)
        self._rest = [at for at, node in enumerate(segment.nodes) if node in inside]
        whole = {value: at for at, value in enumerate(segment.inputs)}
        cut = {node.outputs[0]: at for at, node in enumerate(segment.nodes) if node not in inside}
        self._origins = [(value in whole, whole.get(value, cut.get(value, 0))) for value in inner.inputs]

    def like(self, segment: Segment) -> _Cuts:
        """The cuts of another recording of the same structure."""
        if self._all:
            return _Cuts(segment, segment)
        nodes = segment.nodes
        inputs = [segment.inputs[at] if whole else nodes[at].outputs[0] for whole, at in self._origins]
        return _Cuts(segment, Segment([nodes[at] for at in self._rest], inputs, segment.outputs))


class _Cuts:
    """The parts that a segment cuts out of its inputs, and the segment that works on them (``inner``)."""

    def __init__(self, segment: Segment, inner: Segment) -> None:
        self.segment = segment
        self.inner = inner

    def places(self) -> _Places:
        return _Places(self.segment, self.inner)

    def inputs(self, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The inputs of ``inner``, from those of the segment."""
        if len(self.inner.nodes) == len(self.segment.nodes):
            return given
        outside = dict(zip(self.segment.inputs, given, strict=True))
        memory = {value.storage: tensor for value, tensor in outside.items()}
        parts = views_of([value for value in self.inner.inputs if value not in outside], memory)
        cut = iter(parts)
        return [outside[value] if value in outside else next(cut) for value in self.inner.inputs]

    def run(self, *given: torch.Tensor) -> list[torch.Tensor]:
        """The outputs of a segment that does nothing else."""
        memory = {value.storage: tensor for value, tensor in zip(self.segment.inputs, given, strict=True)}
        return views_of(self.segment.outputs, memory)


class _Run:
    """One run of compiled code on a segment's inputs."""

    def __init__(self, cuts: _Cuts, variant: Variant[Code], scalars: Sequence[float]) -> None:
        self._cuts = cuts
        self._kept = variant.program.kept
        self._code = variant.compiled
        # The segment's sizes are the program's, or this input's says what they are.
        self._size = variant.sizes.dimension if variant.sizes is not None else None
        self._numbers = [scalars[group[0]] for group in variant.groups]

    def __call__(self, *given: torch.Tensor) -> list[torch.Tensor]:
        inputs = self._cuts.inputs(given)
        size = [] if self._size is None else [inputs[self._size[0]].shape[self._size[1]]]
        results = self._code(*size, *inputs, *[_number(value) for value in self._numbers])
        segment, nodes = self._cuts.segment, self._cuts.inner.nodes
        memory: dict[Storage, torch.Tensor] = {
            value.storage: tensor for value, tensor in zip(segment.inputs, given, strict=True)
        }
        taken: set[int] = {_torch.storage_address(tensor) for tensor in given}
        needed = {value.storage for value in segment.outputs}
        for (at, number), tensor in zip(self._kept, results, strict=True):
            value = nodes[at].outputs[number]
            if value.storage in needed:
                memory[value.storage] = _alone(value, tensor, taken)
        return views_of(segment.outputs, memory)


class _Again:
    """Finds the code for further recordings of one structure, by what that leaves open.

    That is numbers, and where in a tensor a part is (:data:`.stretch.MOVING`).
    """

    def __init__(
        self,
        programs: Programs[Code],
        known: Known[Code],
        variant: Variant[Code],
        program: Program,
        cuts: _Cuts,
    ) -> None:
        self._programs, self._known, self._variant, self._program = programs, known, variant, program
        self._cuts = cuts.places()
        segment = cuts.inner
        self._places = places_of_scalars(segment.nodes)
        self._scalars = scalars_at(segment.nodes, self._places)  # for which the variant was found
        self._moving = [at for at, node in enumerate(segment.nodes) if moving(node.op)]
        self._moves = self._moves_of(segment)

    def _moves_of(self, segment: Segment) -> list[Any]:
        """What is no input of the code, and may differ all the same."""
        nodes = segment.nodes
        moves: list[Any] = [
            nodes[at].args[place : place + 1] for at in self._moving for place in moving(nodes[at].op)
        ]
        if self._program.shapes.offsets:
            moves += [value.meta.offset for value in segment.inputs]
        return moves

    def __call__(self, segment: Segment) -> Compiled | None:
        known = self._known
        if known.dropped:
            return None
        cuts = self._cuts.like(segment)
        inner = cuts.inner
        if self._moves_of(inner) != self._moves:
            return None
        scalars = scalars_at(inner.nodes, self._places)
        variant = self._variant
        if scalars != self._scalars or 0 in scalars or variant not in known.variants:
            if variant not in known.variants or not variant.takes(scalars):
                found = known.find(replace(self._program, scalars=tuple(scalars)))
                if found is None:
                    return None
                self._variant = variant = found
            self._scalars = scalars
        self._programs.use(known)
        return Compiled(_Run(cuts, variant, scalars), cache_hit=True)


def _alone(value: Value, tensor: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """``tensor`` with the strides of the record, on memory that is its own and no larger."""
    meta = value.meta
    storage = tensor.untyped_storage()
    if (
        tensor.stride() == meta.stride
        and tensor.storage_offset() == meta.offset
        and storage.nbytes() == value.storage.nbytes
        and _torch.storage_address(tensor) not in taken
    ):
        taken.add(_torch.storage_address(tensor))
        return tensor
    own = torch.empty(0, dtype=meta.dtype, device=tensor.device)
    own.set_(
        torch.UntypedStorage(value.storage.nbytes, device=tensor.device), meta.offset, meta.shape, meta.stride
    )
    return own.copy_(tensor)
