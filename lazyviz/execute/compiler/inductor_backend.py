"""Inductor backend: segments compiled by Inductor, the compiler of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...graph.ir import Node
from ...torch_internals import dynamo
from ..backend_protocol import Refused, first_line
from .calling_convention import number_tensor
from .compiling_backend_base import SegmentCompiler, Task
from .convolution_layouts import wants_channels_last, weights_outweigh_images
from .fx_lowering import NEEDS_VALUES, NotLowered, lower, refuse
from .random_draws_up_front import draw_of, draws


class InductorBackend(SegmentCompiler):
    """Compiles segments with Inductor, the compiler of ``torch.compile``.

    Args:
        exact_random: draw the numbers that eager PyTorch would draw (Inductor's ``fallback_random``).
        options: further settings of Inductor, by name.

    Results equal eager's within rounding, because fused code rounds at other points.
    """

    def __init__(self, *, exact_random: bool = True, options: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._options = {"fallback_random": exact_random, **(options or {})}

    def refuses(self, node: Node) -> str | None:
        """Why ``node`` has to run by itself, or None."""
        if self._options["fallback_random"] and draws(node) and draw_of(node) is None:
            return str(refuse(node, NEEDS_VALUES))
        return super().refuses(node)

    def _code(self, task: Task) -> dynamo.Compiled:
        options: Mapping[str, Any] = self._options
        layouts: tuple[bool, ...] = (False,)
        if wants_channels_last(task.segment.nodes):
            if weights_outweigh_images(task.segment.nodes):
                options = {"layout_optimization": False, **options}
            else:
                layouts = (True, False)
        for channels_last in layouts:
            try:
                return self._compiled(task, options, channels_last)
            except Refused:
                if not channels_last:
                    raise
        raise AssertionError("the last layout returns code or raises")

    def _compiled(self, task: Task, options: Mapping[str, Any], channels_last: bool) -> dynamo.Compiled:
        nodes, sizes = task.segment.nodes, task.sizes
        try:
            module = lower(
                nodes,
                task.segment.inputs,
                task.kept,
                task.groups,
                sizes,
                channels_last=channels_last,
                draws_first=self._options["fallback_random"],
            )
        except NotLowered as error:
            raise Refused(str(error)) from error
        numbers = [number_tensor(number) for number in task.numbers]
        varying = () if sizes is None else (sizes.of(task.program.shapes), sizes.dimensions)
        try:
            return dynamo.compile_graph(module, task.inputs, numbers, options, *varying)
        except Exception as error:
            raise Refused(f"Inductor could not compile {len(nodes):,} ops: {first_line(error)}") from error
