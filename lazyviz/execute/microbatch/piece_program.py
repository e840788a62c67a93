"""Program of a piece: the nodes that a piece of the batch runs in one pass.

For every argument, the program says where a piece gets it: from its own results, from a whole tensor, or as a
slice of one.  It refers to values by number and holds no tensors, so that a piece can run in this process or,
sent with the tensors that it needs, in another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from ...graph.ir import Node, Value
from ...plan.batch.batch_dim_propagation import BatchAnalysis, separable
from ...plan.batch.batch_placement import Piece, Shard
from ...plan.batch.batch_rule import Call
from ...plan.batch.layer_rules import total_weight
from ...plan.batch.passes_over_pieces import Pass
from ...record.tracked_storages import TrackedNode, TrackedValue
from ...torch_internals import private_api
from .random_draws_of_pieces import Draw, draw_of


@dataclass(frozen=True, slots=True)
class Own:
    """An argument that the piece has created: the value with that number."""

    key: int


@dataclass(frozen=True, slots=True)
class Whole:
    """An argument that is the same for all pieces: the value with that number."""

    key: int


@dataclass(frozen=True, slots=True)
class Part:
    """A piece's slice of a whole tensor: at its samples, or (``first``) as many entries from the start."""

    key: int
    shard: Shard
    first: bool = False

    def of(self, tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
        if self.first:
            return tensor.narrow(0, 0, self.shard.size(piece.samples))
        return cut(tensor, self.shard, piece)


Changes = dict[int | str, Any]
"""Arguments of a step that depend on the piece, by position or name."""


@dataclass(slots=True)
class Step:
    """One call in a piece; tensor arguments are :class:`Own`, :class:`Whole` or :class:`Part`.

    Attributes: takes: slices of batch tensors that the piece holds from this step on, by number. keeps: pairs
        of result index and value number. scaled: indices of results that are means over the piece, to be
        multiplied by its share of the samples. draw: random numbers, drawn for the whole batch; ``drawn`` is
        the placement of the piece's slice. draws_itself: whether the kernel itself draws random numbers.
        in_place: a draw that is written into its argument. collects: values that are whole once all pieces
        have run this step. frees: values that the piece no longer needs after this step. adds: a product that
        is only needed for its sum, so that it can be accumulated directly.
    """

    op: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    keeps: Sequence[tuple[int, int]] = ()
    takes: Sequence[tuple[int, Part]] = ()
    scaled: Sequence[int] = ()
    draw: Draw | None = None
    drawn: Shard | None = None
    draws_itself: bool = False
    in_place: bool = False
    grad_mode: bool = False
    inference_mode: bool = False
    collects: list[int] = field(default_factory=list)
    frees: list[int] = field(default_factory=list)
    adds: int | None = None


@dataclass(slots=True)
class PassProgram:
    """What each piece runs in a pass; ``nodes``, ``values`` and ``varying`` stay in this process.

    Attributes:
        nodes: the node of each step.
        values: the value of each number.
        varying: per step, a function that computes arguments from the piece.
    """

    steps: list[Step]
    nodes: list[TrackedNode]
    values: dict[int, TrackedValue]
    varying: dict[int, Callable[[Piece], Changes]]

    def changes(self, piece: Piece) -> dict[int, Changes]:
        return {number: change(piece) for number, change in self.varying.items()}


def compile_pass(work: Pass, analysis: BatchAnalysis) -> PassProgram:
    """The program that every piece runs in ``work``."""
    return _Compiler(work, analysis).program()


class _Compiler:
    def __init__(self, work: Pass, analysis: BatchAnalysis) -> None:
        self.work, self.analysis = work, analysis
        self.made: set[Value] = set()  # the piece's own values so far
        self.taken: list[tuple[int, Part]] = []
        self.result = PassProgram([], cast("list[TrackedNode]", work.nodes), {}, {})

    def program(self) -> PassProgram:
        steps = self.result.steps
        collected: dict[Node, list[Value]] = {}
        for each in self.work.collected:
            if not each.alone:
                collected.setdefault(each.after, []).append(each.value)
        for number, node in enumerate(self.result.nodes):
            step = self.step(number, node, self.analysis.calls[node])
            step.collects = [self.key(value) for value in collected.get(node, ())]
            steps.append(step)
        for each in self.work.collected:
            if each.alone:
                steps.append(self.weight(each.after, self.key(each.value)))
                self.result.nodes = [*self.result.nodes, cast(TrackedNode, each.after)]
        last: dict[int, Step] = {}
        for step in steps:
            own = [key for key, _ in step.takes] + [key for _, key in step.keeps] + step.collects
            last.update(dict.fromkeys([*own, *_owned((*step.args, *step.kwargs.values()))], step))
        for key, step in last.items():
            step.frees.append(key)
        for step in steps:
            made = [key for _, key in step.keeps]
            if step.op is torch.ops.aten.mm.default and step.collects == made and made[0] in step.frees:
                step.adds = made[0]
        return self.result

    def key(self, value: Value) -> int:
        self.result.values[value.id] = cast(TrackedValue, value)
        return value.id

    def step(self, number: int, node: TrackedNode, call: Call) -> Step:
        self.taken = []
        separate = node.draws is not None and separable(node)
        args: list[Any] = [self.argument(item, node, call) for item in node.args]
        kwargs = {name: self.argument(item, node, call) for name, item in node.kwargs.items()}
        if call.sizes or call.ranges:
            if call.op is not None:
                args, kwargs = args[:1], {}
            self.result.varying[number] = _varying(node, call, len(args))
        keeps = [(value.index, self.key(value)) for value in node.outputs if value.node is node]
        self.made.update(value for value in node.outputs if value.node is node)
        drawn = call.outputs[0] if separate else None
        return Step(
            call.op or node.op,
            args,
            kwargs,
            keeps,
            self.taken,
            call.scaled,
            draw_of(node) if separate else None,
            drawn if isinstance(drawn, Shard) else None,
            node.draws is not None and not separate,
            separate and bool(node.writes),
            node.grad_mode,
            node.inference_mode,
        )

    def weight(self, node: Node, key: int) -> Step:
        """A loss's total weight, without its scores."""
        self.taken = []
        call = self.analysis.calls[node]
        given = [self.argument(call[name], node, call) for name in ("target", "weight", "ignore_index")]
        dtype = call["self"].dtype
        return Step(weight_alone, [*given, dtype], {}, [(0, key)], self.taken, collects=[key])

    def argument(self, item: Any, node: Node, call: Call) -> Any:
        if isinstance(item, Value):
            return self.source(item, node, call)
        if type(item) in (list, tuple):
            return type(item)([self.argument(entry, node, call) for entry in item])
        return item

    def source(self, value: Value, node: Node, call: Call) -> Own | Whole | Part:
        """Where the piece gets ``value`` from when ``node`` reads it."""
        key = self.key(value)
        if value in call.slices:
            return Part(key, call.slices[value])
        if value in call.heads:
            return Part(key, call.heads[value], first=True)
        if value in call.whole or value in self.analysis.gathers.get(node, ()):
            return Whole(key)
        if value not in self.made:
            root = self.analysis.roots.get(value)
            if root is None:
                return Whole(key)
            self.taken.append((key, Part(key, root)))
            self.made.add(value)
        return Own(key)


def _varying(node: Node, call: Call, positional: int) -> Callable[[Piece], Changes]:
    """How the arguments of ``node``, of which that many are positional, depend on the piece."""
    op = call.op or node.op
    places: dict[str, int | str] = {}
    for position, argument in enumerate(op._schema.arguments):
        places[argument.name] = position if call.op is None and position < positional else argument.name
    sizes = [(places[name], size) for name, size in call.sizes.items() if name in places]
    ranges = [(places[name], part) for name, part in call.ranges.items() if name in places]

    def changes(piece: Piece) -> Changes:
        found: Changes = {place: size(piece.samples) for place, size in sizes}
        found.update({place: part(piece.start, piece.stop) for place, part in ranges})
        return found

    return changes


def _owned(item: Any) -> list[int]:
    """The numbers of the piece's own values in an argument."""
    if type(item) is Own:
        return [item.key]
    return [key for entry in item for key in _owned(entry)] if type(item) in (list, tuple) else []


def weight_alone(target: Any, weight: Any, ignore_index: Any, dtype: torch.dtype) -> torch.Tensor:
    """:func:`lazyviz.plan.batch.layer_rules.total_weight` with plain arguments."""
    return total_weight({"target": target, "weight": weight, "ignore_index": ignore_index}, dtype)


class PieceRun:
    """One piece during a pass: ``env`` has its own tensors.

    Subclasses define where whole tensors, slices of them, and random numbers come from.
    """

    def __init__(self, piece: Piece, changes: Mapping[int, Changes]) -> None:
        self.piece = piece
        self.changes = changes
        self.env: dict[int, torch.Tensor] = {}

    def whole(self, key: int) -> torch.Tensor:
        raise NotImplementedError

    def part(self, part: Part) -> torch.Tensor:
        raise NotImplementedError

    def numbers(self, number: int, draw: Draw) -> torch.Tensor | None:
        """The random numbers of the step with that number, for the whole batch."""
        raise NotImplementedError

    def drawn(self, number: int, draw: Draw, shard: Shard) -> torch.Tensor | None:
        """The piece's slice of these random numbers."""
        whole = self.numbers(number, draw)
        return None if whole is None else cut(whole, shard, self.piece)

    def before_draw(self, number: int) -> None:
        """Called before the kernel of the step with that number draws."""
        raise NotImplementedError

    def after_draw(self, number: int) -> None:
        """Called after that kernel has drawn."""

    def keep(self, key: int, result: torch.Tensor) -> None:
        self.env[key] = result

    def free(self, keys: Sequence[int]) -> None:
        for key in keys:
            self.env.pop(key, None)

    def run(self, number: int, step: Step) -> None:
        if step.grad_mode != torch.is_grad_enabled():
            torch.set_grad_enabled(step.grad_mode)
        if step.inference_mode == torch.is_inference_mode_enabled():
            self._run(number, step)
        else:
            with private_api.inference_mode(step.inference_mode):
                self._run(number, step)

    def _run(self, number: int, step: Step) -> None:
        self.take(step)
        args = [self.read(item) for item in step.args]
        kwargs = {name: self.read(item) for name, item in step.kwargs.items()}
        for place, item in self.changes.get(number, {}).items():
            if isinstance(place, int):
                args[place] = item
            else:
                kwargs[place] = item
        results = self._draw(number, step, args, kwargs) if step.draw is not None else None
        if results is None:
            if step.draws_itself:
                self.before_draw(number)
            result = step.op(*args, **kwargs)
            if step.draws_itself:
                self.after_draw(number)
            results = list(result) if isinstance(result, (list, tuple)) else [result]
        share = self.piece.samples / self.piece.total
        for index in step.scaled:
            results[index] = results[index].mul_(share)
        for index, key in step.keeps:
            if results[index] is not None:
                self.keep(key, results[index])

    def take(self, step: Step) -> None:
        """Take the slices of the batch that the step needs and that the piece keeps."""
        for key, part in step.takes:
            self.env[key] = self.part(part)

    def read(self, item: Any) -> Any:
        cls = type(item)
        if cls is Own:
            return self.env[item.key]
        if cls is Whole:
            return self.whole(item.key)
        if cls is Part:
            return self.part(item)
        if cls is list or cls is tuple:
            return cls([self.read(entry) for entry in item])
        return item

    def _draw(self, number: int, step: Step, args: list[Any], kwargs: dict[str, Any]) -> list[Any] | None:
        """Draw for the whole batch, and return the piece's slice; ``None`` if nothing is to be drawn."""
        assert step.draw is not None and step.drawn is not None
        part = self.drawn(number, step.draw, step.drawn)
        if part is None:
            return None
        if step.draw.name == "native_dropout":
            keep = 1 - args[1]
            # Scaled like in native_dropout_cpu (ATen's Dropout.cpp).
            return [args[0].mul(part).mul_(1 / keep if keep else 0.0), part]
        return [args[0].copy_(part)] if step.in_place else [part]


def place(tensor: torch.Tensor, shard: Shard, piece: Piece) -> torch.Tensor:
    """The piece's samples in a whole tensor, as a view.

    If they are at several places of the dimension, it is viewed as three: ``(outer, samples, unit)``.
    """
    blocks, start, count = (
        piece.total // shard.group,
        piece.start // shard.group,
        piece.samples // shard.group,
    )
    if shard.outer == 1:
        return tensor.narrow(shard.dim, start * shard.unit, count * shard.unit)
    apart = tensor.unflatten(shard.dim, (shard.outer, blocks, shard.unit))
    return apart.narrow(shard.dim + 1, start, count)


def cut(tensor: torch.Tensor, shard: Shard, piece: Piece) -> torch.Tensor:
    """The piece's slice of a whole tensor, with the layout that kernels would have created: the same order of
    dimensions, dense. If it has that layout already, it is a view.
    """
    part = place(tensor, shard, piece)
    if shard.outer > 1:
        part = part.flatten(shard.dim, shard.dim + 2)
    own, full = tensor.stride(shard.dim), tensor.shape[shard.dim]
    stride = [step * part.shape[shard.dim] // full if step > own else step for step in tensor.stride()]
    if own == 0 or list(part.stride()) == stride:
        return part
    result = torch.empty_strided(part.shape, stride, dtype=part.dtype, device=part.device)
    return result.copy_(part)


ONEDNN_FAILED = "could not create a primitive"
"""The error message of oneDNN if its code generator got no memory; it then fails in this thread from
then on.
"""


def out_of_memory(error: BaseException) -> bool:
    """Whether a kernel failed because it was out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    words = ("DefaultCPUAllocator: can't allocate memory", ONEDNN_FAILED, "std::bad_alloc")
    return isinstance(error, RuntimeError) and any(each in str(error) for each in words)
