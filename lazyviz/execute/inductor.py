"""The inductor backend: whole recorded segments, compiled by Inductor, the compiler of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import _torch_compile
from ..graph.ir import Node, Value
from .backend import Refused, Segment
from .calls import number_tensor
from .compilers import SegmentCompiler
from .draws_first import draw_of, draws
from .lowering import NEEDS_VALUES, NotLowered, lower, refuse, wants_channels_last
from .programs import Program
from .sizes import Sizes


class InductorBackend(SegmentCompiler):
    """Compiles segments with Inductor, the compiler of ``torch.compile``.

    Args:
        exact_random: draw the numbers that eager PyTorch would draw (Inductor's ``fallback_random``).
        options: further settings of Inductor, by name.

    Results are eager's within rounding: fused code rounds in other places.
    """

    def __init__(self, *, exact_random: bool = True, options: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._options = {"fallback_random": exact_random, **(options or {})}

    def refuses(self, node: Node) -> str | None:
        """Why ``node`` has to run by itself, or None."""
        if self._options["fallback_random"] and draws(node) and draw_of(node) is None:
            return str(refuse(node, NEEDS_VALUES))
        return super().refuses(node)

    def _code(
        self,
        segment: Segment,
        inputs: Sequence[torch.Tensor],
        kept: Sequence[Value],
        program: Program,
        groups: Sequence[Sequence[int]],
        sizes: Sizes | None,
    ) -> _torch_compile.Compiled:
        layouts = (True, False) if wants_channels_last(segment.nodes) else (False,)
        for channels_last in layouts:
            try:
                return self._compiled(segment, inputs, kept, program, groups, sizes, channels_last)
            except Refused:
                if not channels_last:
                    raise
        raise AssertionError("the last layout gives code or is refused")

    def _compiled(
        self,
        segment: Segment,
        inputs: Sequence[torch.Tensor],
        kept: Sequence[Value],
        program: Program,
        groups: Sequence[Sequence[int]],
        sizes: Sizes | None,
        channels_last: bool,
    ) -> _torch_compile.Compiled:
        try:
            module = lower(
                segment.nodes,
                segment.inputs,
                kept,
                groups,
                sizes,
                channels_last=channels_last,
                draws_first=self._options["fallback_random"],
            )
        except NotLowered as error:
            raise Refused(str(error)) from error
        numbers = [number_tensor(program.scalars[group[0]]) for group in groups]
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
