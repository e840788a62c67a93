"""Split runs: execution of a graph in micro-batches.

Whole nodes run as usual.  Between them, pieces run one after another, each with its own tensors, which are
freed at the end of the piece.  Results that are needed as a whole are summed or concatenated as they arrive.
The user's tensors and outside memory are not changed before a pass over all pieces is complete, so that an
interrupt or an out-of-memory error between two ops loses at most the current piece.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch

from ...graph.ir import Storage
from ...plan.batch.batch_dim_propagation import BatchAnalysis
from ...plan.batch.batch_placement import Partial, Piece, Shard
from ...plan.batch.passes_over_pieces import Pass, Schedule
from ...plan.batch.split_plan import SHOWN
from ...record.tape import Tape
from ...record.tracked_storages import TrackedNode, TrackedValue
from ...torch_internals import private_api
from ..compute_value_stats import Summaries
from ..eager_backend import (
    call_atomically,
    check_interrupts,
    deliver,
    free,
    kernel_level,
    recorded_modes,
    report_progress,
    run_node,
    seconds_of_statistics,
)
from ..kernel_errors import name_line
from ..measured_memory import ResidentMemory
from ..replay import node_passes
from . import run_on_workers
from .dropout_masks import Masks
from .piece_program import (
    ONEDNN_FAILED,
    Part,
    PassProgram,
    PieceRun,
    Step,
    compile_pass,
    cut,
    out_of_memory,
    place,
)
from .random_draws_of_pieces import Draw, Draws
from .ray_and_ipyparallel import Cluster

Progress = Callable[[int, int, TrackedNode], None]

_HALVES = (torch.float16, torch.bfloat16)


class SplitRun:
    """A split run, from its first op to its last; after an interrupt, ``run`` continues.

    The number of ``pieces`` increases if one did not fit into memory.
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
        # The plan refers to recorded objects: nodes and values with their tensors.
        self._whole = cast("list[list[TrackedNode]]", schedule.whole)
        bounds = [0]
        for size in sizes:
            bounds.append(bounds[-1] + size)
        self.pieces = [
            Piece(index, start, stop, analysis.size) for index, (start, stop) in enumerate(pairwise(bounds))
        ]
        self.out_of_memory = 0  # how often a piece was halved
        self.complete = False
        self._level = self.next_piece = 0  # the pass, and its current piece
        self._begun = self._over = -1  # the last pass that has begun, and the last one delivered
        self.piece = 0  # the piece of the last op, from 1; 0: a whole node
        self.draws = Draws(nodes)
        self._masks = Masks()
        self._sums: dict[TrackedValue, torch.Tensor] = {}
        self._weights: dict[TrackedValue, torch.Tensor] = {}  # divisors of means, from earlier passes
        self._added: dict[TrackedValue, int] = {}  # the sample up to which each sum is complete
        self._divided: set[TrackedValue] = set()  # sums that are already means
        self._last = self._last_levels()
        self._programs = [compile_pass(each, analysis) for each in schedule.passes]

    @property
    def total(self) -> int:
        """The number of node runs in total."""
        in_pieces = sum(len(each.steps) for each in self._programs) * len(self.pieces)
        return sum(map(len, self.schedule.whole)) + in_pieces

    @property
    def spread(self) -> set[TrackedNode]:
        """The nodes that pieces run."""
        return {node for each in self._programs for node in each.nodes}

    @property
    def has_begun_no_pass(self) -> bool:
        """Whether only whole nodes have run, as in a run without pieces, and none that draws."""
        draws = [node for node in self._whole[0] if node.draws is not None]
        return self._begun < 0 and all(node.state == "pending" for node in draws)

    def run(
        self,
        memory: ResidentMemory,
        *,
        progress: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
        cluster: Cluster | None = None,
        seen: Summaries | None = None,
        timed: bool = True,
    ) -> None:
        """Run to the end; with ``cluster``, pieces on its workers.

        Raises what :func:`lazyviz.execute.eager_backend.run` raises, and :class:`NoWorkersError`.
        """
        self._cluster, self.seen, self._timed = cluster, seen, timed
        if cluster is not None:
            cluster.workers(run_on_workers.on_cuda(self._programs))  # raises if there are none
        self._memory, self._progress, self.cancelled = memory, progress, cancelled
        self._done = 0
        with kernel_level(self.tape, self.nodes) as self.interrupted, ExitStack() as self._modes:
            while self._level < len(self.schedule.whole):
                level = self._level
                for node in self._whole[level]:
                    self._run_whole(node)
                    if self._last.get(node) == (level, True):  # only views need it, so it can be freed
                        self._finish(node)
                self._retire(level, before_pass=True)
                if level < len(self.schedule.passes):
                    if self._over < level:
                        self._run_pass(level)
                    self._retire(level, before_pass=False)
                self._level += 1
            for node in cast("list[TrackedNode]", self.schedule.idle):
                self._finish(node)
            self.draws.finish_all()
            self.complete = True

    # --- whole nodes ----------------------------------------------------------------

    def _run_whole(self, node: TrackedNode) -> None:
        if node.state == "done":
            return
        check_interrupts(self.interrupted, self.cancelled, "between two ops")
        blanks = []
        for value in cast("list[TrackedValue]", self.analysis.unread.get(node, [])):
            if value.real is None:
                meta = value.meta
                value.real = torch.empty_strided(
                    meta.shape, meta.stride, dtype=meta.dtype, device=meta.device
                )
                blanks.append(value)
        self._memory.step(node)
        with recorded_modes(node):
            if node in self.schedule.views:
                self._run_view(node)
            else:
                if node.draws is not None:
                    self.draws.begin(node)
                    node.draws.state = self.draws.state(node)
                spent, start = seconds_of_statistics(self.seen), time.perf_counter()
                run_node(node, self._memory, self.seen)
                if self._timed:
                    node.measured_seconds = (
                        time.perf_counter() - start - seconds_of_statistics(self.seen) + spent
                    )
                if node.draws is not None:
                    self.draws.end(node)
                self.tape.pending_ops.finished(node)
        for value in blanks:
            value.real = None
        self.report(node)

    def _run_view(self, node: TrackedNode) -> None:
        """Give collected values to the user and to whole nodes; spread nodes read them in another way."""
        args, kwargs = _whole(node.args), {name: _whole(item) for name, item in node.kwargs.items()}
        result = node.op(*args, **kwargs)
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        deliver({value: results[value.index] for value in node.outputs}, self._memory)

    def _last_levels(self) -> dict[TrackedNode, tuple[int, bool]]:
        """When a spread node is last needed: the level, and whether before its pass."""
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
            if node.draws is not None:  # after the last draw, sets the final generator state
                self.draws.finish(node)
            node.error = None
            call_atomically(partial(node_passes.note_used, (node,)), partial(setattr, node, "state", "done"))
            free(node, self._memory)
            self.tape.pending_ops.finished(node)
            self._drop_mask(node)

    def _drop_mask(self, node: TrackedNode) -> None:
        if nbytes := self._masks.nbytes(node):
            self._masks.drop(node)
            self._memory.add_extra(node.outputs[-1].storage, -nbytes)

    def report(self, node: TrackedNode, runs: int = 1, piece: int = 0) -> None:
        self._done += runs
        self.piece = piece
        if self._progress is not None:
            report_progress(self.interrupted, self._progress, self._done, self.total, node)

    # --- pieces -----------------------------------------------------------------------

    def _run_pass(self, level: int) -> None:
        program = self._programs[level]
        if self._begun < level:
            self.next_piece, self._added, self._divided, self._begun = 0, {}, set(), level
        if self.next_piece < len(self.pieces):
            if self._cluster is not None:
                run_on_workers.run_pass(self, program, self._cluster)
            else:
                self._run_pieces(program)
        self._publish_collected(self.schedule.passes[level])
        self._over = level
        for each in self.schedule.passes[level].collected:
            self._sums.pop(cast(TrackedValue, each.value), None)

    def _run_pieces(self, program: PassProgram) -> None:
        while self.next_piece < len(self.pieces):
            piece = self.pieces[self.next_piece]
            run = _PieceHere(self, piece, program)
            try:
                for number, step in enumerate(program.steps):
                    where = f"in piece {self.next_piece + 1} of {len(self.pieces)}"
                    check_interrupts(self.interrupted, self.cancelled, where)
                    self._memory.step(program.nodes[number], shown=self.next_piece < SHOWN)
                    added = step.adds is not None and self._add_product(program.values[step.adds], run, step)
                    if not added:
                        run.run(number, step)
                    for key in () if added else step.collects:
                        if self.collect(program.values[key], run.env[key], piece):
                            run.given(key)
                    run.free(step.frees)
                    self.report(program.nodes[number], piece=self.next_piece + 1)
            except Exception as error:
                run.drop()
                coming = self.pieces[self.next_piece + 1 :]
                if not out_of_memory(error) or not self.halve(piece, coming):
                    raise
                if ONEDNN_FAILED in str(error):
                    self._modes.enter_context(torch.backends.mkldnn.flags(enabled=False))
                del error
                continue
            run.drop()
            self.next_piece += 1

    def halve(self, piece: Piece, coming: Sequence[Piece]) -> bool:
        """Halve this piece, and the ``coming`` ones of the same size; ``False`` if it is the smallest."""
        group = self.analysis.group
        half = piece.samples // 2 // group * group
        if not half:
            return False
        self.out_of_memory += 1
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        cut_too = {piece.start, *(each.start for each in coming if each.samples >= piece.samples)}
        parts: list[tuple[int, int]] = []
        for each in self.pieces:
            if each.start not in cut_too:
                parts.append((each.start, each.stop))
            else:
                parts += [(each.start, each.start + half), (each.start + half, each.stop)]
        self.pieces = [Piece(index, *bounds, piece.total) for index, bounds in enumerate(parts)]
        return True

    def mask(self, node: TrackedNode, draw: Draw, shard: Shard, piece: Piece) -> torch.Tensor | None:
        """The piece's slice of a mask of zeros and ones; ``None`` if a dropout needs none."""
        samples = piece.start, piece.stop
        kept = self._masks.take(node, samples)
        if kept is not None:
            return kept
        self._drop_mask(node)
        self.draws.begin(node)
        whole = draw.numbers()
        self.draws.end(node)
        if whole is None:
            return None
        parts = {(each.start, each.stop): cut(whole, shard, each).bool() for each in self.pieces}
        if len(parts) > 1:
            self._masks.keep(node, parts)
            self._memory.add_extra(node.outputs[-1].storage, self._masks.nbytes(node))
        return parts[samples]

    def collect(self, value: TrackedValue, part: torch.Tensor, piece: Piece) -> bool:
        """Add a piece's summand, or copy its samples to their place; returns whether ``part`` has become the
        sum.
        """
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
            return False  # from before an out-of-memory error, or an interrupt
        if whole is None:
            dtype = torch.float32 if meta.dtype in _HALVES else meta.dtype
            if part.dtype == dtype and part.stride() == meta.stride and _alone(part):
                whole = part
            else:
                whole = torch.empty_strided(meta.shape, meta.stride, dtype=dtype, device=meta.device)
                whole.copy_(part)
            add: partial[Any] = partial(self._sums.__setitem__, value, whole)
            if whole is not part or self._cluster is not None:  # otherwise, it is counted for the piece
                self._memory.made(value.storage, whole)
        elif isinstance(placement, Partial) and placement.how == "any":
            add = partial(whole.logical_or_, part)
        elif isinstance(placement, Partial) and placement.how == "all":
            add = partial(whole.logical_and_, part)
        else:
            add = partial(whole.add_, part)
        call_atomically(add, partial(self._added.__setitem__, value, piece.stop))
        return whole is part

    def _add_product(self, value: TrackedValue, run: _PieceHere, step: Step) -> bool:
        """Add a piece's product to the sum without a separate tensor; returns whether a sum exists
        already.
        """
        whole = self._sums.get(value)
        piece = run.piece
        if whole is None or not isinstance(self.analysis.placements[value], Partial):
            return False
        if whole.dtype != value.dtype or self._added.get(value, 0) >= piece.stop:
            return False
        run.take(step)
        add = partial(whole.addmm_, *[run.read(item) for item in step.args])
        call_atomically(add, partial(self._added.__setitem__, value, piece.stop))
        return True

    def _publish_collected(self, work: Pass) -> None:
        """Publish the collected values, which are complete now. May be called again if it was interrupted."""
        results: dict[TrackedValue, torch.Tensor] = {}
        for each in work.collected:
            value = cast(TrackedValue, each.value)
            whole = self._sums[value]
            if whole.dtype != value.dtype:
                whole = whole.to(value.dtype)
            results[value] = self._sums[value] = whole
            if each.alone:
                self._weights[value] = whole
        for value, whole in results.items():
            placement = self.analysis.placements[value]
            if isinstance(placement, Partial) and placement.mean_of is not None:
                assert value.node is not None
                divisor = next(each for each in value.node.outputs if each.index == placement.mean_of)
                by = self._weights.get(divisor, results.get(divisor, divisor.real))
                assert by is not None
                if value not in self._divided:
                    call_atomically(partial(whole.div_, by), partial(self._divided.add, value))
        if self.seen is not None:
            for value, whole in results.items():
                if not isinstance(self.analysis.placements[value], Shard) or self._cluster is not None:
                    self.seen.whole(value, whole)
        deliver(results, self._memory)


class _PieceHere(PieceRun):
    """A piece run in this process, on the recorded values' own tensors."""

    def __init__(self, run: SplitRun, piece: Piece, program: PassProgram) -> None:
        super().__init__(piece, program.changes(piece))
        self._values, self._nodes = program.values, program.nodes
        self._own: dict[Storage, list[int]] = {}  # bytes, and number of values on it
        self._split, self._memory, self.draws = run, run._memory, run.draws

    def run(self, number: int, step: Step) -> None:
        node = self._nodes[number]
        seen = self._split.seen
        spent, start = seconds_of_statistics(seen), time.perf_counter()
        try:
            super().run(number, step)
        except Exception as error:
            if not out_of_memory(error):
                node.state, node.error = "failed", str(error)
                name_line(error, node)
            raise
        if self._split._timed:
            own = time.perf_counter() - start - seconds_of_statistics(seen) + spent
            node.measured_seconds = (node.measured_seconds or 0.0) + own

    def whole(self, key: int) -> torch.Tensor:
        return _real(self._values[key])

    def part(self, part: Part) -> torch.Tensor:
        return part.of(_real(self._values[part.key]), self.piece)

    def numbers(self, number: int, draw: Draw) -> torch.Tensor | None:
        self.draws.begin(self._nodes[number])
        whole = draw.numbers()
        self.draws.end(self._nodes[number])
        return whole

    def drawn(self, number: int, draw: Draw, shard: Shard) -> torch.Tensor | None:
        if draw.name in ("native_dropout", "bernoulli"):
            return self._split.mask(self._nodes[number], draw, shard, self.piece)
        return super().drawn(number, draw, shard)

    def before_draw(self, number: int) -> None:
        self.draws.go_on(self._nodes[number])

    def after_draw(self, number: int) -> None:
        self.draws.stop(self._nodes[number])

    # --- memory -----------------------------------------------------------------------

    def keep(self, key: int, result: torch.Tensor) -> None:
        self.env[key] = result
        value = self._values[key]
        if self._split.seen is not None:
            self._split.seen.part(value, result, self._split.analysis.placements.get(value))
        storage = value.storage
        own = self._own.get(storage)
        if own is not None:
            own[1] += 1
            return
        node = value.node
        view = node is not None and storage.created != node.index
        size = 0 if view else private_api.TensorBase.untyped_storage(result).nbytes()
        self._own[storage] = [size, 1]
        if size:
            self._memory.add_extra(storage, size)

    def given(self, key: int) -> None:
        """Record that the piece's tensor has become the sum."""
        storage = self._values[key].storage
        own = self._own[storage]
        if own[0]:
            self._memory.taken_over(storage, own[0])
        own[0] = 0

    def free(self, keys: Sequence[int]) -> None:
        env, own = self.env, self._own
        for key in keys:
            storage = self._values[key].storage
            if env.pop(key, None) is None or storage not in own:
                continue
            mine = own[storage]
            mine[1] -= 1
            if not mine[1]:
                del own[storage]
                if mine[0]:
                    self._memory.add_extra(storage, -mine[0])

    def drop(self) -> None:
        """Drop all tensors of the piece, which has run or failed."""
        for storage, (size, _) in self._own.items():
            if size:
                self._memory.add_extra(storage, -size)
        self._own.clear()
        self.env.clear()


def _real(value: TrackedValue) -> torch.Tensor:
    if value.real is None:
        raise RuntimeError(f"internal error: {value!r} was freed before its last use")
    return value.real


def _whole(item: Any) -> Any:
    if isinstance(item, TrackedValue):
        return _real(item)
    return type(item)([_whole(entry) for entry in item]) if type(item) in (list, tuple) else item


def _alone(tensor: torch.Tensor) -> bool:
    """Whether no other tensor can share the tensor's memory."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize and not tensor._is_view()
