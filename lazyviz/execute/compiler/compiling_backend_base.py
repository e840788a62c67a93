"""Base class of compiling backends: looks up code, compiles on a miss, remembers refusals.

Because recording happens below autograd, forward, backward, and optimizer of a step are one program.  A
segment of a known structure (:mod:`lazyviz.execute.compiler.compiled_program_cache`) runs existing code
(:mod:`lazyviz.execute.compiler.calling_convention`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...graph.ir import Node, Value
from ...torch_internals import dynamo
from ..backend_protocol import Compiled, Refused, Segment
from ..lru_cache import LRUCache
from .calling_convention import Call, Code, Cuts, Reuse
from .compiled_program_cache import MOST_VARIANTS, Made, Program, Programs, Variant, program_of, same_shapes
from .dynamic_shapes import Shapes, Sizes, follow
from .fx_lowering import NotLowered, check, cut_first, made_storages

MOST_REFUSED = 256
MAX_LIKELY_OUTPUTS = 8


@dataclass(frozen=True)
class Task:
    """The code to be compiled: from ``segment``'s inputs and a 0-d tensor for each of ``groups`` to ``kept``.

    ``inputs`` are examples. ``groups`` are positions among ``program.scalars``; those of a group have the
    same number. With ``sizes``, the code is for all sizes, and the varying size is its first argument.
    """

    segment: Segment
    inputs: Sequence[torch.Tensor]
    kept: Sequence[Value]
    program: Program
    groups: Sequence[Sequence[int]]
    sizes: Sizes | None

    @property
    def numbers(self) -> list[Any]:
        """The recorded number of each group."""
        return [self.program.scalars[group[0]] for group in self.groups]


class SegmentCompiler(ABC):
    """A backend that compiles segments as a whole, one program at a time, on any thread.

    Numbers that vary from run to run are inputs of the code. Nodes that cannot be compiled run op by op, and
    the report says why.
    """

    draws = True  # segments may contain random operators
    follows_sizes = True  # code can be for all sizes of one dimension

    def __init__(self) -> None:
        self.programs: Programs[Code] = Programs()
        self._lock = threading.Lock()
        # Programs that must not be tried again, each with the reason.
        self._refused: LRUCache[Hashable, str] = LRUCache(MOST_REFUSED)

    @abstractmethod
    def _code(self, task: Task) -> dynamo.Compiled:
        """Code for a segment, as ``task`` says.

        Raises:
            lazyviz.execute.backend_protocol.Refused: there can be none; the message says why.
        """

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
            lazyviz.execute.backend_protocol.Refused: it cannot be compiled; the message says why.
        """
        cuts = Cuts(segment, cut_first(segment))
        inner = cuts.inner
        if not inner.nodes:
            return cuts.slicing_only()
        needed = _needed(inner)
        for value in needed:
            if not _covers_storage(value):
                raise Refused(f"{value.meta} covers only a part of its storage")
        program = program_of(inner.nodes, needed)
        with self._lock:
            if (why := self._refused.get(program.key)) is not None:
                raise Refused(why)
            variant = self.programs.find(program)
            reason = None
            if variant is None:
                reason = self.programs.difference(program, inner.nodes)
                if len(self.programs.variants(program)) >= MOST_VARIANTS:
                    raise Refused(
                        f"it was compiled {MOST_VARIANTS} times already, and differs again: {reason}"
                    )
                try:
                    variant, fixed = self._variant(inner, cuts.inputs(inputs), program)
                except Refused as refusal:
                    self._refuse(program, str(refusal))
                    raise
                reason = f"{reason} ({fixed})" if fixed else reason
                self.programs.add(variant)
            known = self.programs.known(program)
        assert known is not None
        reuse = Reuse(self.programs, known, variant, program, cuts)
        return Compiled(Call(cuts, variant, program.scalars, program.shapes), reason is None, reason, reuse)

    def forget(self, segment: Segment, why: str) -> None:
        """Discard the wrong code for ``segment``: it must not be run or compiled again."""
        inner = cut_first(segment)
        program = program_of(inner.nodes, _needed(inner))
        with self._lock:
            self.programs.drop(program)
            self._refuse(program, f"compiled code was wrong: {why}")

    def _refuse(self, program: Program, why: str) -> None:
        self._refused[program.key] = why

    def _variant(
        self,
        segment: Segment,
        inputs: Sequence[torch.Tensor],
        program: Program,
    ) -> tuple[Variant[Code], str]:
        """New code: if the compiler can do it, for all sizes and numbers that have changed, otherwise for
        these.

        The second result is the reason if it is only for these. The code also returns values that were needed
        before, and values that are likely to be needed, so that differences in live variables cause at most
        one compilation.
        """
        likely = set(_likely_outputs(segment.nodes))
        likely.update(*[variant.program.kept for variant in self.programs.variants(program)])
        nodes = segment.nodes
        more = {each for each in likely if _covers_storage(nodes[each[0]].outputs[each[1]])}
        program = replace(program, kept=tuple(sorted({*program.kept, *more})))
        kept = [nodes[at].outputs[number] for at, number in program.kept]
        groups = self.programs.groups(program)
        certain = tuple(group for group in groups if set(group) <= set(program.varying))
        sizes = self._sizes(segment, program)
        why = ""
        for free, follows in dict.fromkeys([(groups, sizes), (groups, None), (certain, None)]):
            try:
                made = self._code(Task(segment, inputs, kept, program, free, follows))
            except Refused as refusal:
                why = why or str(refusal)
                continue
            if follows and made.holds is not None and not made.holds(follows.of(program.shapes)):
                why = why or "the compiler specialized on these sizes"
                continue
            fixed = f"only for these numbers and sizes: {why}" if why else ""
            return Variant(program, free, made.code, follows, made.holds), fixed
        raise Refused(why)

    def _sizes(self, segment: Segment, program: Program) -> Sizes | None:
        """What varies since an earlier recording of ``program``, if new code can support it."""
        if not self.follows_sizes:
            return None
        written = {storage for node in segment.nodes for storage in node.writes}
        memory = [value.storage for value in segment.inputs]
        if any(memory.count(storage) > 1 for storage in written):
            return None  # compilers specialize for the overlap of inputs, at their sizes
        known: list[Shapes] = []
        for variant in self.programs.variants(program):
            shapes = variant.program.shapes
            if not any(same_shapes(shapes, each) for each in (*known, program.shapes)):
                known.append(shapes)
        sizes = follow(known, program.shapes)
        # Compilers treat a size of 1 as a constant, because it broadcasts.
        return sizes if sizes is not None and sizes.of(program.shapes) > 1 else None


def _needed(segment: Segment) -> list[Value]:
    """For each storage that the segment creates and that is needed afterwards, the value that created it.

    In program order, whichever views of them exist, because cached code returns them in that order.
    """
    needed = {value.storage for value in segment.outputs}
    return [value for storage, value in made_storages(segment.nodes).items() if storage in needed]


def _covers_storage(value: Value) -> bool:
    """Whether ``value`` covers all computed content of its memory.

    Kernels that reduce a loss (``mse_loss``) first write every element into the tensor, and then shrink it;
    no compiled operator can read the remaining content.
    """
    meta, nbytes = value.meta, value.storage.nbytes
    return meta.storage_nbytes == nbytes or (meta.dense and not meta.offset and meta.storage_nbytes < nbytes)


def _likely_outputs(nodes: Sequence[Node]) -> list[Made]:
    """Results that another run of the program may need, such as a loss or an accuracy.

    They are the last single numbers that the forward pass computed.
    """
    made = {value: storage for storage, value in made_storages(nodes).items()}
    found = [
        (at, number)
        for at, node in enumerate(nodes)
        if node.phase == "forward" or node.phase == "other"
        for number, value in enumerate(node.outputs)
        if value in made and not value.meta.shape and value.dtype.is_floating_point
    ]
    return found[-MAX_LIKELY_OUTPUTS:]
