"""Lowering to torch.fx: a segment of recorded nodes as a graph that a compiler accepts.

The lowered graph is still the recorded program: operators, order, in-place writes.  Only three things are
changed for compilers: operators whose schema hides writes are replaced by operators that declare them,
numbers that vary from run to run become inputs, and each new storage is returned once, in its original form.
Views of it are created afterwards (:func:`views_of`).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ...graph.ir import Node, Storage, TensorMeta, Value
from ..backend_protocol import Segment
from . import convolution_layouts
from .bernoulli_custom_ops import drawn
from .dynamic_shapes import Size, Sizes
from .random_draws_up_front import Draw, draw_all, draw_of, draws, serialized
from .scalar_arguments import Numbers

aten = torch.ops.aten


class NotLowered(ValueError):
    """A segment cannot be compiled; the message names the op and its line."""


def refuse(node: Node, why: str) -> NotLowered:
    where = f" at {node.source}" if node.source is not None else ""
    return NotLowered(f"{node.op}{where} {why}")


def made_storages(nodes: Sequence[Node]) -> dict[Storage, Value]:
    """The storages that ``nodes`` allocate, each with the value that it was created as."""
    made: dict[Storage, Value] = {}
    for node in nodes:
        fresh = set(node.made)
        for value in node.outputs:
            if value.node is node and value.storage in fresh:
                made.setdefault(value.storage, value)
    return made


_CUTS = (aten.select.int, aten.slice.Tensor)


def cut_first(segment: Segment) -> Segment:
    """The segment without views that slice its inputs: it gets these slices as inputs.

    Each step slices a batch at another position, which must not make it another program. A view reads
    nothing, so it can be computed before everything else. Slices of written memory stay in the segment,
    because a compiler has to see how they overlap.
    """
    written = {storage for node in segment.nodes for storage in node.writes}
    known = set(segment.inputs)
    rest: list[Node] = []
    for node in segment.nodes:
        cut = node.op in _CUTS and not node.kwargs and node.args[0] in known
        if cut and node.args[0].storage not in written:
            known.add(node.outputs[0])
        else:
            rest.append(node)
    inside = set(rest)
    inputs = dict.fromkeys(
        value for node in rest for value in node.inputs if value in known or value.node not in inside
    )
    return Segment(rest, list(inputs), segment.outputs)


def lower(
    nodes: Sequence[Node],
    inputs: Sequence[Value],
    results: Sequence[Value],
    groups: Sequence[Sequence[int]],
    sizes: Sizes | None = None,
    *,
    channels_last: bool = False,
    draws_first: bool = False,
) -> fx.GraphModule:
    """The module from ``inputs``, then a 0-d tensor for each of ``groups``, to ``results``.

    ``groups`` are positions among the scalars of ``nodes`` (``Program.scalars``) that are one input. With
    ``sizes``, the varying size is the first input, an int. ``channels_last`` sets that layout for
    convolutions and values that are computed from them, including results, but not for the gradients of
    weights. ``draws_first`` lets ATen's kernels draw all random numbers first, in program order, into memory
    with the recorded strides (:mod:`lazyviz.execute.compiler.random_draws_up_front`).

    Raises:
        NotLowered: one of the nodes cannot be.
    """
    lowering = _Lowering(inputs, groups, sizes)
    lowering.written = {storage for node in nodes for storage in node.writes}
    random = lowering.draw(nodes, inputs) if draws_first else {}
    for node in nodes:
        check(node)
        if node in random:
            lowering.drawn_before(node, random[node])
        else:
            lowering.add(node, channels_last=channels_last)
    return lowering.module(results)


class _Lowering:
    """The fx graph of a segment during construction: the fx node of each value, number, and size."""

    def __init__(self, inputs: Sequence[Value], groups: Sequence[Sequence[int]], sizes: Sizes | None) -> None:
        self.graph = fx.Graph()
        self.env: dict[Value, fx.Node] = {}
        self.sizes = sizes
        self.written: set[Storage] = set()
        self._varying = fx.Proxy(self.graph.placeholder("size")) if sizes is not None else None
        for number, value in enumerate(inputs):
            self.env[value] = self.graph.placeholder(f"input_{number}")
            if value.meta.flags:
                raise NotLowered("an input is a conjugate or negative view")
        self._numbers: dict[int, fx.Node] = {}
        given = [self.graph.placeholder(f"number_{number}") for number in range(len(groups))]
        for group, placeholder in zip(groups, given, strict=True):
            content = self.graph.call_function(aten._local_scalar_dense.default, (placeholder,))
            self._numbers.update(dict.fromkeys(group, content))
        self._functions = iter(sizes.arguments if sizes is not None else ())
        self._sized: dict[Size, Any] = {}
        self._positions = itertools.count()
        self._reader = Numbers(self._scalar, self._size, self._other)

    def _scalar(self, item: float) -> Any:
        return self._numbers.get(next(self._positions), item)

    def _size(self, item: int) -> Any:
        return self.sized(next(self._functions, item))

    def _other(self, item: Any) -> Any:
        if isinstance(item, torch.Generator):
            raise NotLowered("an op draws random numbers from its own generator")
        return self.env[item] if isinstance(item, Value) else item

    def sized(self, function: int | Size) -> Any:
        """A size, computed from the varying one if it depends on it."""
        if isinstance(function, int):
            return function
        if function not in self._sized:
            self._sized[function] = function(self._varying).node
        return self._sized[function]

    def draw(self, nodes: Sequence[Node], inputs: Sequence[Value]) -> dict[Node, fx.Node]:
        """Draw all random numbers first; returns the graph nodes for those of each node that draws."""
        random = _draws(nodes)
        if not random:
            return {}
        dimensions = _dimensions(nodes, inputs, self.sizes)
        every = [self.sized(item) for draw in random.values() for item in dimensions(draw.like)]
        source = self.graph.call_function(draw_all, (serialized(list(random.values())), every))
        return {
            node: self.graph.call_function(operator.getitem, (source, at)) for at, node in enumerate(random)
        }

    def drawn_before(self, node: Node, content: fx.Node) -> None:
        """Add a node whose random numbers exist already."""
        args, _ = self._reader.call(node)
        if any(isinstance(item, fx.Node) for item in args[len(node.inputs) :]):
            raise refuse(node, "draws random numbers with arguments that vary")
        self.env.update(_random(self.graph, node, content, args))

    def add(self, node: Node, *, channels_last: bool) -> None:
        """Add any other node."""
        graph = self.graph
        op, args, kwargs = drawn(graph, *adapted(node, *self._reader.call(node)))
        if channels_last:
            args = convolution_layouts.to_channels_last(graph, node, op, args)
            if op in convolution_layouts.RESHAPES and node.outputs[0].storage not in self.written:
                op = aten.reshape.default
        result = graph.call_function(op, args, kwargs)
        returns = op._schema.returns
        alone = len(returns) == 1 and str(returns[0].type) == "Tensor"
        for value in node.outputs:
            if value.node is node:
                own = result if alone else graph.call_function(operator.getitem, (result, value.index))
                if channels_last and convolution_layouts.is_to_be_row_major(node, value):
                    own = graph.call_function(convolution_layouts.row_major, (own,))
                self.env[value] = own

    def module(self, results: Sequence[Value]) -> fx.GraphModule:
        """The graph of the added nodes, with the outputs ``results``."""
        self.graph.output(tuple([self.env[value] for value in results]))
        return fx.GraphModule(torch.nn.Module(), self.graph, class_name="Segment")


def _draws(nodes: Sequence[Node]) -> dict[Node, Draw]:
    found: dict[Node, Draw] = {}
    for node in nodes:
        if draws(node):
            draw = draw_of(node)
            if draw is None:
                raise refuse(node, NEEDS_VALUES)
            found[node] = draw
    return found


NEEDS_VALUES = "draws random numbers inside its kernel, in an order that compiled code does not preserve"


def _dimensions(
    nodes: Sequence[Node], inputs: Sequence[Value], sizes: Sizes | None
) -> Callable[[Value], Sequence[int | Size]]:
    """The shape and strides of a value, as functions of the varying size."""
    if sizes is None:
        return lambda value: (*value.meta.shape, *value.meta.stride)
    found: dict[Value, Sequence[int | Size]] = {}
    at = 0
    for value in (*inputs, *[value for node in nodes for value in node.outputs if value.node is node]):
        rank = len(value.meta.shape)
        found[value] = sizes.every[at : at + 2 * rank]
        at += 2 * rank
    return found.__getitem__


def _random(graph: fx.Graph, node: Node, content: fx.Node, args: tuple[Any, ...]) -> dict[Value, fx.Node]:
    """The results of a node that draws ``content``, which is written where the node writes."""
    if node.writes:
        graph.call_function(aten.copy_.default, (args[0], content))
        return {}
    if node.op is not aten.native_dropout.default:
        return {node.outputs[0]: content}
    kept = 1 - node.args[1]
    product = graph.call_function(aten.mul.Tensor, (args[0], content))
    product = graph.call_function(aten.mul.Tensor, (product, 1 / kept if kept else 0.0))
    return {value: (product, content)[value.index] for value in node.outputs if value.node is node}


def check(node: Node) -> None:
    """Raises :class:`NotLowered` if a compiler cannot be given ``node``."""
    name = node.op._schema.name
    if "as_strided" in name:  # it depends on strides, which a compiler may change
        raise refuse(node, "depends on the exact strides of its input")
    # The value that created a tensor's memory determines how the memory is returned.
    if torch.Tag.inplace_view in node.op.tags:
        raise refuse(node, "changes the shape of a tensor in place")
    if "mkldnn_rnn" in name:  # Inductor checks it against a shape rule that the kernel does not follow
        raise refuse(node, "returns a workspace that only its kernel can read")
    own = [value for value in node.outputs if value.node is node]
    if (
        name != "aten::cat"  # it is lowered separately, below
        and any(not value.meta.nbytes for value in node.inputs)
        and any(value.meta.nbytes for value in own)
    ):
        raise refuse(node, "computes values from an empty tensor, which Inductor may replace by zeros")
    shown = any(
        item.alias_info is not None and item.alias_info.is_write for item in node.op._schema.arguments
    )
    if node.writes and not shown and (node.op is not aten.native_batch_norm.default or node.kwargs):
        raise refuse(node, "writes tensors that its schema does not mark as written")
    for value in (*node.inputs, *node.outputs):
        if value.meta.flags:
            raise refuse(node, "uses or creates a conjugate or negative view")
        if value.meta.device.type not in ("cpu", "cuda"):
            raise refuse(node, f"is on {value.meta.device}")


def adapted(
    node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The call in a form that compilers handle correctly."""
    if node.op is aten.native_batch_norm.default:
        return _batch_norm(args)
    if node.op is aten.cat.default:
        return _cat(node, args, kwargs)
    if node.op in _LERPS and isinstance(args[2], fx.Node) and node.inputs[0].dtype.is_floating_point:
        return _lerp(node, args)
    return _SPLITS.get(node.op, node.op), args, kwargs


# These are views that their schemas do not declare as views, so a compiler would lose writes to them.
_SPLITS = {
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}


def _batch_norm(args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Use an operator whose schema declares that running statistics are written.

    ``_native_batch_norm_legit`` is the same operator with these declarations (ATen's native_functions.yaml).
    """
    image, weight, bias, mean, variance, training, momentum, eps = args
    if mean is None or variance is None:
        return aten._native_batch_norm_legit.no_stats, (image, weight, bias, training, momentum, eps), {}
    return aten._native_batch_norm_legit.default, args, {}


_LERPS = (aten.lerp.Scalar, aten.lerp_.Scalar)


def _lerp(node: Node, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Pass a varying weight as a tensor. The weight selects one of two formulas (ATen's Lerp.h), and
    Inductor's rule for a number (``_lerp_scalar`` in torch/_inductor/decomposition.py) would select one at
    compile time.
    """
    start, end, weight = args
    graph, dtype, device = weight.graph, node.inputs[0].dtype, node.inputs[0].device
    wide = dtype if dtype.itemsize >= 4 else torch.float32  # the dtype in which ATen computes
    weight = graph.call_function(aten.full.default, ([], weight), {"dtype": wide, "device": device})
    if wide is not dtype:
        start, end = (
            graph.call_function(aten._to_copy.default, (item,), {"dtype": wide}) for item in (start, end)
        )
    if node.op is aten.lerp_.Scalar:
        return aten.copy_.default, (args[0], graph.call_function(aten.lerp.Tensor, (start, end, weight))), {}
    if wide is dtype:
        return aten.lerp.Tensor, (start, end, weight), {}
    result = graph.call_function(aten.lerp.Tensor, (start, end, weight))
    return aten._to_copy.default, (result,), {"dtype": dtype}


def _cat(
    node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Omit tensors of shape [0], which are compatible with every other shape. With one of them, Inductor's
    rule (``cat`` in torch/_inductor/decomposition.py) uses strides of the others that the kernel does not
    use.
    """
    given = [item for item in node.args[0] if isinstance(item, Value)]
    full = [number for number, value in enumerate(given) if value.meta.shape != (0,)]
    if len(full) in (0, len(given)):
        return node.op, args, kwargs
    if len(full) == 1:
        return aten.clone.default, (args[0][full[0]],), {"memory_format": torch.contiguous_format}
    return node.op, ([args[0][number] for number in full], *args[1:]), kwargs


def views_of(wanted: Sequence[Value], memory: Mapping[Storage, torch.Tensor]) -> list[torch.Tensor]:
    """The tensors for ``wanted``, each on the memory of its storage's tensor in ``memory``."""
    return [view_of(memory[value.storage], value.meta) for value in wanted]


def view_of(whole: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """The tensor with that metadata on the memory of ``whole``; ``whole`` itself if it has the same
    metadata.
    """
    if (
        whole.dtype is meta.dtype
        and whole.shape == meta.shape
        and whole.stride() == meta.stride
        and whole.storage_offset() == meta.offset
    ):
        return whole
    view = torch.empty(0, dtype=meta.dtype, device=whole.device)
    return view.set_(whole.untyped_storage(), meta.offset, meta.shape, meta.stride)
