"""Running a graph in pieces of its batch.

Whole nodes run as ever.  Between them pieces run one after another, each with tensors of its own that
live no longer than the piece; what is needed whole is added up or put together as it comes.  Nothing
the user holds, and nothing outside, is touched before a pass over all pieces is complete, so that an
interruption or a lack of memory between two ops loses no more than the piece at hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, cast

import torch

from .. import _torch
from ..graph.ir import Node, Storage, Value
from ..plan.batch import BatchAnalysis, separable
from ..plan.batch_call import Call, base_name
from ..plan.batch_layers import total_weight
from ..plan.placement import Partial, Piece, Shard
from ..plan.schedule import Pass, Schedule
from ..record.recorder import Tape
from ..record.storage import TrackedNode, TrackedValue
from .draws import Draws, Masks, draw_whole
from .eager import check_interrupts, consumed, deliver, kernel_level, name_line, run_node
from .memory import ResidentMemory
from .parts import cut, place

Progress = Callable[[int, int, TrackedNode], None]

_HALVES = (torch.float16, torch.bfloat16)


class SplitRun:
    """A split run, from its first op to its last; interrupted, ``run`` goes on from there.

    ``pieces`` become more where memory did not suffice for one.
    """

    def __init__(
        self,
        tape: Tape,
        nodes: Sequence[TrackedNode],
        analysis: BatchAnalysis,
        schedule: Schedule,
        sizes: Sequence[int],
    ) -> None:
        self.tape, self.nodes, self.analysis, self.schedule = tape, nodes, analysis, schedule
        # What the plan has is what was recorded: nodes and values with their tensors.
        self._whole = cast("list[list[TrackedNode]]", schedule.whole)
        bounds = [0]
        for size in sizes:
            bounds.append(bounds[-1] + size)
        self.pieces = [
            Piece(index, start, stop, analysis.size) for index, (start, stop) in enumerate(pairwise(bounds))
        ]
        self.out_of_memory = 0  # how often a piece was halved
        self.complete = False
        self._level = 0
        self._next = 0  # piece of the pass at hand
        self.draws = Draws(nodes)
        self._masks = Masks()
        self._mask_names: dict[Node, Storage] = {}  # what the memory count calls them
        self._sums: dict[TrackedValue, torch.Tensor] = {}
        self._added: dict[TrackedValue, int] = {}  # up to which sample each sum goes
        self._last = self._last_levels()
        self._frees = [_last_uses(each) for each in schedule.passes]

    @property
    def total(self) -> int:
        """Runs of nodes, from first to last."""
        in_pieces = sum(len(each.nodes) for each in self.schedule.passes) * len(self.pieces)
        return sum(map(len, self.schedule.whole)) + in_pieces

    def run(
        self,
        memory: ResidentMemory,
        *,
        progress: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        """Run to the end.

        Raises what :func:`lazyviz.execute.eager.run` raises.
        """
        self._memory, self._progress, self._cancelled = memory, progress, cancelled
        self._done = 0
        with kernel_level(self.tape, self.nodes) as self._interrupted:
            while self._level < len(self.schedule.whole):
                level = self._level
                for node in self._whole[level]:
                    self._run_whole(node)
                self._retire(level, before_pass=True)
                if level < len(self.schedule.passes):
                    self._run_pass(self.schedule.passes[level], self._frees[level])
                    self._retire(level, before_pass=False)
                self._level += 1
            for node in cast("list[TrackedNode]", self.schedule.idle):
                self._finish(node)
            self.draws.finish()
            self.complete = True

    # --- whole nodes ----------------------------------------------------------------

    def _run_whole(self, node: TrackedNode) -> None:
        if node.state == "done":
            return
        check_interrupts(self._interrupted, self._cancelled, "between two ops")
        blanks = []
        for value in cast("list[TrackedValue]", self.analysis.unread.get(node, [])):
            if value.real is None:
                meta = value.meta
                value.real = torch.empty_strided(
                    meta.shape, meta.stride, dtype=meta.dtype, device=meta.device
                )
                blanks.append(value)
        self._memory.step()
        with _modes(node):
            if node in self.schedule.views:
                self._run_view(node)
            else:
                if node.draws is not None:
                    self.draws.begin(node)
                    node.draws.state = self.draws.state(node)
                run_node(node, self._memory)
                if node.draws is not None:
                    self.draws.end(node)
                self.tape.finished(node)
        for value in blanks:
            value.real = None
        self._report(node)

    def _run_view(self, node: TrackedNode) -> None:
        """Show the user, and whole nodes, what was collected: spread nodes read it in their own way."""
        args, kwargs = _whole(node.args), {name: _whole(item) for name, item in node.kwargs.items()}
        result = node.op(*args, **kwargs)
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        deliver({value: results[value.index] for value in node.outputs}, self._memory)

    def _last_levels(self) -> dict[TrackedNode, tuple[int, bool]]:
        """When a spread node is done with: the level, and whether before its pass."""
        last: dict[TrackedNode, tuple[int, bool]] = {}
        for level, each in enumerate(self.schedule.passes):
            for node in cast("list[TrackedNode]", each.nodes):
                last[node] = (level, False)
        for level, nodes in enumerate(self._whole):
            for node in nodes:
                if node in self.schedule.views and last.get(node, (-1, False))[0] < level:
                    last[node] = (level, True)
        return last

    def _retire(self, level: int, *, before_pass: bool) -> None:
        for node, when in self._last.items():
            if when == (level, before_pass):
                self._finish(node)

    def _finish(self, node: TrackedNode) -> None:
        if node.state != "done":
            node.state, node.error = "done", None
            consumed(node, self._memory)
            self.tape.finished(node)
            if node in self._mask_names:
                self._masks.drop(node)
                self._memory.freed(self._mask_names.pop(node))

    def mask(self, node: TrackedNode, shard: Shard, piece: Piece) -> torch.Tensor | None:
        """The piece's part of a mask of zeros and ones; ``None`` if a dropout needs none."""
        samples = piece.start, piece.stop
        kept = self._masks.take(node, samples)
        if kept is not None:
            return kept
        self.draws.begin(node)
        whole = draw_whole(node)
        self.draws.end(node)
        if whole is None:
            return None
        parts = {(each.start, each.stop): cut(whole, shard, each).bool() for each in self.pieces}
        if len(parts) > 1:
            self._masks.keep(node, parts)
            name = self._mask_names.get(node)
            if name is None:
                name = Storage(0, whole.device, external=False, created=-1)
                self._mask_names[node] = name
            self._memory.holds(name, self._masks.nbytes(node), node.outputs[-1].storage)
        return parts[samples]

    def _report(self, node: TrackedNode) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self.total, node)

    # --- pieces -----------------------------------------------------------------------

    def _run_pass(self, work: Pass, frees: Mapping[Node, Sequence[TrackedValue]]) -> None:
        collected: dict[Node, list[TrackedValue]] = {}
        for each in work.collected:
            if not each.alone:
                collected.setdefault(each.after, []).append(cast(TrackedValue, each.value))
        alone = [(cast(TrackedValue, each.value), each.after) for each in work.collected if each.alone]
        nodes = cast("list[TrackedNode]", work.nodes)
        while self._next < len(self.pieces):
            piece = self.pieces[self._next]
            run = _PieceRun(self, piece)
            try:
                for node in nodes:
                    where = f"in piece {self._next + 1} of {len(self.pieces)}"
                    check_interrupts(self._interrupted, self._cancelled, where)
                    self._memory.step()
                    run.node(node)
                    for value in collected.get(node, ()):
                        if self._collect(value, run.env[value], piece):
                            run.given(value.storage)
                    run.free(frees.get(node, ()))
                    self._report(node)
                for value, after in alone:
                    self._collect(value, run.total_weight(after), piece)
            except Exception as error:
                run.drop()
                if not _out_of_memory(error) or not self._halve(piece):
                    raise
                del error
                continue
            run.drop()
            self._next += 1
        self._next = 0
        self._added.clear()
        self._hand_over(work)

    def _halve(self, piece: Piece) -> bool:
        """Cut this piece, and those to come that are as large, in two; ``False`` if it is the smallest."""
        group = self.analysis.group
        half = piece.samples // 2 // group * group
        if not half:
            return False
        self.out_of_memory += 1
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        parts: list[tuple[int, int]] = []
        for each in self.pieces:
            if each.index < piece.index or each.samples < piece.samples:
                parts.append((each.start, each.stop))
            else:
                parts += [(each.start, each.start + half), (each.start + half, each.stop)]
        self.pieces = [Piece(index, *bounds, piece.total) for index, bounds in enumerate(parts)]
        return True

    def _collect(self, value: TrackedValue, part: torch.Tensor, piece: Piece) -> bool:
        """Add a piece's summand, or put its samples in their place; whether ``part`` has become the sum."""
        placement = self.analysis.placements[value]
        whole = self._sums.get(value)
        meta = value.meta
        if isinstance(placement, Shard):
            if whole is None:
                whole = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
                self._sums[value] = whole
                self._memory.made(value.storage, whole)
            target = place(whole, placement, piece)
            target.copy_(part.reshape(target.shape))
            return False
        if self._added.get(value, 0) >= piece.stop:
            return False  # before memory ran out, or an interruption
        if whole is None:
            dtype = torch.float32 if meta.dtype in _HALVES else meta.dtype
            if part.dtype == dtype and part.stride() == meta.stride and _alone(part):
                whole = part
            else:
                whole = torch.empty_strided(meta.shape, meta.stride, dtype=dtype, device=meta.device)
                whole.copy_(part)
            self._sums[value] = whole
            self._memory.made(value.storage, whole)
        elif isinstance(placement, Partial) and placement.how == "any":
            whole.logical_or_(part)
        elif isinstance(placement, Partial) and placement.how == "all":
            whole.logical_and_(part)
        else:
            whole.add_(part)
        self._added[value] = piece.stop
        return whole is part

    def _hand_over(self, work: Pass) -> None:
        """All pieces have run: what was collected is whole."""
        results: dict[TrackedValue, torch.Tensor] = {}
        for each in work.collected:
            value = cast(TrackedValue, each.value)
            whole = self._sums.pop(value)
            if whole.dtype != value.dtype:
                whole = whole.to(value.dtype)
            results[value] = whole
        for value, whole in results.items():
            placement = self.analysis.placements[value]
            if isinstance(placement, Partial) and placement.mean_of is not None:
                assert value.node is not None
                divisor = next(each for each in value.node.outputs if each.index == placement.mean_of)
                by = results.get(divisor, divisor.real)
                assert by is not None
                results[value] = whole.div_(by)
        deliver(results, self._memory)


class _PieceRun:
    """One piece on its way through a pass: ``env`` holds the tensors that it has of its own."""

    def __init__(self, run: SplitRun, piece: Piece) -> None:
        self._run, self._piece = run, piece
        self.env: dict[TrackedValue, torch.Tensor] = {}
        self._own: dict[Storage, tuple[Storage, int]] = {}  # what the memory count calls it, values on it
        self._memory = run._memory

    def node(self, node: TrackedNode) -> None:
        call = self._run.analysis.calls[node]
        start = time.perf_counter()
        try:
            with _modes(node):
                results = self._call(node, call)
        except Exception as error:
            if not _out_of_memory(error):
                node.state, node.error = "failed", str(error)
                name_line(error, node)
            raise
        share = self._piece.samples / self._piece.total
        for index in call.scaled:
            results[index] = results[index].mul_(share)
        for value in node.outputs:
            if value.node is node and results[value.index] is not None:
                self._keep(value, results[value.index])
        node.seconds = (node.seconds or 0.0) + time.perf_counter() - start

    def _call(self, node: TrackedNode, call: Call) -> list[Any]:
        if node.draws is not None and separable(node):
            return self._draw(node, call)
        args, kwargs = self.arguments(node, call)
        if node.draws is not None:
            self._run.draws.go_on(node)
        result = (call.op or node.op)(*args, **kwargs)
        if node.draws is not None:
            self._run.draws.stop(node)
        return list(result) if isinstance(result, (list, tuple)) else [result]

    def _draw(self, node: TrackedNode, call: Call) -> list[Any]:
        """Draw for the whole batch, and take the piece's part."""
        shard = call.outputs[0]
        assert isinstance(shard, Shard)
        value = self.read(node.inputs[0], node, call)
        if base_name(node.op) == "native_dropout":
            mask = self._run.mask(node, shard, self._piece)
            if mask is None:
                args, kwargs = self.arguments(node, call)
                return list(node.op(*args, **kwargs))
            keep = 1 - node.args[1]
            # As native_dropout_cpu (ATen's Dropout.cpp) scales what it keeps.
            return [value.mul(mask).mul_(1 / keep if keep else 0.0), mask]
        if base_name(node.op) == "bernoulli" and node.writes:
            mask = self._run.mask(node, shard, self._piece)
            assert mask is not None
            return [value.copy_(mask)]
        self._run.draws.begin(node)
        whole = draw_whole(node)
        self._run.draws.end(node)
        assert whole is not None
        part = cut(whole, shard, self._piece)
        return [value.copy_(part)] if node.writes else [part]

    def arguments(self, node: TrackedNode, call: Call) -> tuple[list[Any], dict[str, Any]]:
        """The call's arguments for this piece."""
        args = [self._local(item, node, call) for item in node.args]
        kwargs = {name: self._local(item, node, call) for name, item in node.kwargs.items()}
        if call.sizes or call.ranges:
            piece = self._piece
            changed = {name: size(piece.samples) for name, size in call.sizes.items()}
            changed |= {name: part(piece.start, piece.stop) for name, part in call.ranges.items()}
            if call.op is not None:
                own = [argument.name for argument in call.op._schema.arguments]
                return [args[0]], {name: item for name, item in changed.items() if name in own}
            for position, argument in enumerate(node.op._schema.arguments):
                if argument.name in changed:
                    if position < len(args):
                        args[position] = changed[argument.name]
                    else:
                        kwargs[argument.name] = changed[argument.name]
        return args, kwargs

    def _local(self, item: Any, node: TrackedNode, call: Call) -> Any:
        if isinstance(item, TrackedValue):
            return self.read(item, node, call)
        if type(item) in (list, tuple):
            return type(item)([self._local(entry, node, call) for entry in item])
        return item

    def read(self, value: TrackedValue, node: Node, call: Call) -> torch.Tensor:
        shard = call.slices.get(value)
        if shard is not None:
            return cut(_real(value), shard, self._piece)
        if value in call.heads:
            return _real(value).narrow(0, 0, call.heads[value].size(self._piece.samples))
        if value in call.whole or value in self._run.analysis.gathers.get(node, ()):
            return _real(value)
        if value in self.env:
            return self.env[value]
        root = self._run.analysis.roots.get(value)
        if root is not None:
            part = self.env[value] = cut(_real(value), root, self._piece)
            return part
        return _real(value)

    def total_weight(self, node: Node) -> torch.Tensor:
        call = self._run.analysis.calls[node]
        given = {
            name: self.read(call[name], node, call) if isinstance(call[name], Value) else call[name]
            for name in ("target", "weight", "ignore_index")
        }
        return total_weight(given, call["self"].dtype)

    # --- memory -----------------------------------------------------------------------

    def _keep(self, value: TrackedValue, part: torch.Tensor) -> None:
        self.env[value] = part
        own = self._own.get(value.storage)
        if own is None:
            name = Storage(0, value.storage.device, external=False, created=-1)
            view = value.node is not None and value.storage.created != value.node.index
            if not view:
                self._memory.made(name, part, value.storage)
            own = (name, 0)
        self._own[value.storage] = (own[0], own[1] + 1)

    def given(self, storage: Storage) -> None:
        """What the piece has in ``storage`` is no longer its own."""
        name, count = self._own[storage]
        self._memory.freed(name)
        self._own[storage] = (name, count)

    def free(self, values: Sequence[TrackedValue]) -> None:
        for value in values:
            if self.env.pop(value, None) is None or value.storage not in self._own:
                continue
            name, count = self._own[value.storage]
            if count == 1:
                self._memory.freed(name)
                del self._own[value.storage]
            else:
                self._own[value.storage] = (name, count - 1)

    def drop(self) -> None:
        """The piece has run, or failed: nothing of it stays."""
        for name, _ in self._own.values():
            self._memory.freed(name)
        self._own.clear()
        self.env.clear()


def _modes(node: TrackedNode) -> ExitStack:
    """The grad and inference modes that ``node`` was recorded under."""
    stack = ExitStack()
    if node.inference_mode != torch.is_inference_mode_enabled():
        stack.enter_context(_torch.inference_mode(node.inference_mode))
    if node.grad_mode != torch.is_grad_enabled():
        torch.set_grad_enabled(node.grad_mode)
    return stack


def _real(value: TrackedValue) -> torch.Tensor:
    if value.real is None:
        raise RuntimeError(f"internal error: {value!r} was freed before its last use")
    return value.real


def _whole(item: Any) -> Any:
    if isinstance(item, TrackedValue):
        return _real(item)
    return type(item)([_whole(entry) for entry in item]) if type(item) in (list, tuple) else item


def _alone(tensor: torch.Tensor) -> bool:
    """Whether nothing else can be in the tensor's memory."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize and not tensor._is_view()


def _out_of_memory(error: Exception) -> bool:
    """Whether it says that memory did not suffice; oneDNN's words for that say less."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    words = ("DefaultCPUAllocator: can't allocate memory", "could not create a primitive", "std::bad_alloc")
    return isinstance(error, RuntimeError) and any(each in str(error) for each in words)


def _last_uses(work: Pass) -> dict[Node, list[TrackedValue]]:
    """What a piece needs no more after each node of the pass."""
    last: dict[Value, Node] = {}
    collected: dict[Node, list[Value]] = {}
    for each in work.collected:
        collected.setdefault(each.after, []).append(each.value)
    for node in work.nodes:
        for value in (*node.inputs, *node.outputs, *collected.get(node, ())):
            last[value] = node
    for each in work.collected:
        if each.alone:
            for value in each.after.inputs:
                last.pop(value, None)
    result: dict[Node, list[TrackedValue]] = {}
    for value, node in last.items():
        result.setdefault(node, []).append(cast(TrackedValue, value))
    return result
