"""Micro-batches on the workers of a cluster: the same program and the same sums as in one process.

Each worker receives the program of a pass once, with the tensors that all pieces share (such as weights), and
then one piece at a time, with its slice of the batch.  Results of pieces are summed here in the order of the
pieces, independent of the order in which they finish, so that the result does not depend on the speed of
workers.  If a worker is lost, its piece runs on another one.  A piece that does not fit in a worker's memory
is halved.  As in a run in this process, the user's tensors are not changed before a pass is complete.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ...plan.batch.batch_placement import Piece
from ...process.deferred_signals import Deferred
from ...record.tracked_storages import TrackedNode, TrackedValue
from ..eager_backend import check_interrupts
from ..kernel_errors import name_line
from . import message_framing
from . import worker as remote
from .message_types import Done, Drawing, Failed, PassWork, PieceWork, Prepared
from .piece_program import Part, PassProgram, Step, Whole
from .random_draws_of_pieces import Draws
from .ray_and_ipyparallel import Cluster as Cluster
from .ray_and_ipyparallel import IPyParallelBackend as IPyParallelBackend
from .ray_and_ipyparallel import LostWorkerError as LostWorkerError
from .ray_and_ipyparallel import NoWorkersError as NoWorkersError
from .ray_and_ipyparallel import RayBackend as RayBackend
from .tensor_serialization import pack, unpack

POLL_SECONDS = 0.05
"""How often a run that waits for workers checks for an interrupt."""

PATIENCE = 1800.0
"""Seconds after which a worker that has not responded counts as lost, unless its cluster has a
``patience``.
"""

MOST_LOSSES = 3
"""A piece that lost this many workers is halved, if possible, before another worker gets it."""

_NOBODY = "no worker is left: {reason}. To continue, evaluate again, with this or another backend"
_DEADLY = (
    "samples {piece.start} to {piece.stop} failed on {most} workers, last with: {error}. To continue, "
    "evaluate "
    "again, with another backend or other workers"
)


class PiecewiseRun(Protocol):
    """The run that a pass belongs to: its pieces, its progress, and its sums."""

    pieces: list[Piece]
    next_piece: int
    interrupted: Deferred
    cancelled: Callable[[], bool] | None
    draws: Draws

    def collect(self, value: TrackedValue, part: torch.Tensor, piece: Piece) -> bool: ...
    def report(self, node: TrackedNode, runs: int = 1, piece: int = 0) -> None: ...
    def halve(self, piece: Piece, others: Sequence[Piece]) -> bool: ...


def run_pass(run: PiecewiseRun, program: PassProgram, cluster: Cluster) -> None:
    """Run the remaining pieces of a pass, and collect their results.

    Raises:
        NoWorkersError: all are gone.
        Exception: the error of a kernel on a worker, with the recording line added.
    """
    _PassElsewhere(run, program, cluster).run()


def on_cuda(programs: Iterable[PassProgram]) -> bool:
    """Whether pieces have tensors on a GPU."""
    return any(value.device.type == "cuda" for each in programs for value in each.values.values())


class _PassElsewhere:
    """One pass on workers: the assignment of pieces to workers, and the results so far."""

    def __init__(self, run: PiecewiseRun, program: PassProgram, cluster: Cluster) -> None:
        self.owner, self.program, self.cluster = run, program, cluster
        self.cuda = on_cuda([program])
        self.token = uuid.uuid4().hex
        self.parts = list(dict.fromkeys(part for step in program.steps for part in _leaves(step, Part)))
        self.waiting: list[Piece] = run.pieces[run.next_piece :]
        self.idle: list[Any] = []
        self.asked: set[Any] = set()  # workers that received the program
        self.unfit: set[Any] = set()  # workers that did not have enough memory for it
        # By job: its worker and piece (None for a job that sends the program).
        self.jobs: dict[Any, tuple[Any, Piece | None]] = {}
        self.ended: dict[int, Done] = {}  # by first sample: results that wait for those of earlier pieces
        self.silent: set[Any] = set()  # workers that timed out; they may still respond
        self.begun: dict[Any, float] = {}  # when each job was submitted
        self.patience = float(getattr(cluster, "patience", PATIENCE))
        self.losses: Counter[int] = Counter()
        self.reason = "there were none"  # why the last worker was lost

    def run(self) -> None:
        run = self.owner
        shared = self.cluster.share(self._work())
        self.idle = list(self.cluster.workers(self.cuda))
        try:
            while run.next_piece < len(run.pieces):
                where = f"after {run.next_piece} of {len(run.pieces)} pieces"
                check_interrupts(run.interrupted, run.cancelled, where)
                self._assign_work(shared)
                if not self.jobs:
                    raise NoWorkersError(_NOBODY.format(reason=self.reason))
                for job in self.cluster.finished(list(self.jobs), POLL_SECONDS):
                    self._take(job)
                self._give_up()
                self._add_up()
        finally:
            for worker in self.asked | self.silent:
                try:
                    self._drop(self.cluster.submit(worker, remote.forget, self.token))
                except LostWorkerError:
                    pass
            for job in self.jobs:
                self._drop(job)

    # --- sending --------------------------------------------------------------------------

    def _work(self) -> bytes:
        """The program with the tensors that all pieces share."""
        program = self.program
        keys = {leaf.key for step in program.steps for leaf in _leaves(step, Whole)}
        whole = pack({key: self._real(key) for key in sorted(keys)})
        draws: dict[int, Drawing] = {}
        for number, step in enumerate(program.steps):
            node = program.nodes[number]
            if node.draws is None or (step.draw is None and not step.draws_itself):
                continue
            cuda = node.draws.generator.device.type == "cuda"
            if step.draw is None:
                draws[number] = Drawing(cuda, seed=self.owner.draws.seed(node))
            else:
                self.owner.draws.begin(node)
                state = self.owner.draws.state(node)
                draws[number] = Drawing(cuda, bytes(state.tolist()))
        work = PassWork(remote.portable(program.steps), whole, draws, remote.settings())
        return message_framing.dumps(work)

    def _piece(self, piece: Piece) -> bytes:
        parts = {part: part.of(self._real(part.key), piece) for part in self.parts}
        return message_framing.dumps(PieceWork(piece, pack(parts), self.program.changes(piece)))

    def _real(self, key: int) -> torch.Tensor:
        value = self.program.values[key]
        if value.real is None:
            raise RuntimeError(f"internal error: {value!r} was freed before its last use")
        return value.real

    # --- assigning work ---------------------------------------------------------------------

    def _assign_work(self, shared: Any) -> None:
        """Assign work to every idle worker; a worker gets the program before its first piece."""
        run = self.owner
        left = len(run.pieces) - run.next_piece
        for worker in sorted(self.idle, key=lambda worker: worker not in self.asked):
            piece: Piece | None = None
            call: tuple[Any, ...] = (remote.prepare, self.token, self.cluster.device(worker), shared)
            if worker in self.asked:
                turn = bool(self.waiting) and self.waiting[0].start == run.pieces[run.next_piece].start
                if not self.waiting or (not turn and len(self.ended) > 2 * len(self.asked)):
                    continue  # enough results already wait for the next piece in order
                piece = self.waiting.pop(0)
                call = (remote.run_piece, self.token, self._piece(piece))
            elif len(self.asked) >= left:
                continue
            self.idle.remove(worker)
            try:
                job = self.cluster.submit(worker, *call)
                self.jobs[job], self.begun[job] = (worker, piece), time.monotonic()
            except LostWorkerError as error:
                return self._lost(worker, piece, error)
            self.asked.add(worker)

    def _take(self, job: Any) -> None:
        """Handle the end of ``job``, successful or not."""
        worker, piece = self.jobs.pop(job)
        try:
            message = self.cluster.result(job)
        except LostWorkerError as error:
            self._lost(worker, piece, error)
            return
        if piece is None:
            begun = message_framing.answer(message, Prepared)
            if isinstance(begun, Failed):
                self._failed(worker, piece, begun)
            elif begun.token != self.token:
                raise message_framing.MessageError(f"worker {worker} returned the answer to another message")
            else:
                self.idle.append(worker)
            return
        result = message_framing.answer(message, Done)
        if isinstance(result, Failed):
            self._failed(worker, piece, result)
            return
        if (result.token, result.start, result.stop) != (self.token, piece.start, piece.stop):
            raise message_framing.MessageError(f"worker {worker} returned the answer to another message")
        due = {key for step in self.program.steps for key in step.collects}
        if result.collected.views.keys() != due:
            raise message_framing.MessageError(f"worker {worker} returned other values than requested")
        self.idle.append(worker)
        self.ended[piece.start] = result

    def _drop(self, job: Any) -> None:
        """Discard the result of ``job``."""
        drop = getattr(self.cluster, "drop", None)
        if drop is not None:
            drop(job)

    def _give_up(self) -> None:
        """Treat workers that have not responded for too long as lost: they get no more work."""
        now = time.monotonic()
        for job, (worker, piece) in list(self.jobs.items()):
            if now - self.begun[job] > self.patience:
                del self.jobs[job]
                self._drop(job)
                self.unfit.add(worker)
                self.silent.add(worker)
                self._lost(worker, piece, LostWorkerError(f"no answer within {self.patience:g} seconds"))

    def _lost(self, worker: Any, piece: Piece | None, error: LostWorkerError) -> None:
        """Handle the loss of ``worker``: other workers, including replacements, run its piece."""
        self.reason = str(error)
        self.asked.discard(worker)
        if piece is not None:
            self.losses[piece.start] += 1
            if self.losses[piece.start] < MOST_LOSSES:
                self._return(piece)
            # A system that ends a worker because it is out of memory does not report that.
            elif self._halve(piece):
                self.losses[piece.start] = 0
            else:
                raise NoWorkersError(_DEADLY.format(piece=piece, most=MOST_LOSSES, error=error))
        busy = {owner for owner, _ in self.jobs.values()}
        try:
            there = [each for each in self.cluster.workers(self.cuda) if each != worker]
        except NoWorkersError as nobody:
            self.reason, there = f"{error}; {nobody}", []
        self.idle = [each for each in there if each not in busy and each not in self.unfit]

    def _failed(self, worker: Any, piece: Piece | None, failure: Failed) -> None:
        error = failure.error
        if failure.out_of_memory and piece is not None and self._halve(piece):
            self.idle.append(worker)
            return
        if failure.out_of_memory and piece is None:
            self.reason = f"worker {worker} does not have enough memory for the weights: {error}"
            self.unfit.add(worker)
            return
        if failure.step is not None and failure.step < len(self.program.nodes):
            node = self.program.nodes[failure.step]
            if not failure.out_of_memory:
                node.state, node.error = "failed", str(error)
            name_line(error, node)
        raise error

    def _halve(self, piece: Piece) -> bool:
        """Halve ``piece`` and all unassigned pieces of its size; ``False`` if it is the smallest size."""
        if not self.owner.halve(piece, self.waiting):
            return False
        ranges = [(each.start, each.stop) for each in (piece, *self.waiting)]
        self.waiting = [
            each
            for each in self.owner.pieces
            if any(start <= each.start and each.stop <= stop for start, stop in ranges)
        ]
        return True

    def _return(self, piece: Piece) -> None:
        """Run ``piece`` as soon as a worker is idle."""
        self.waiting = sorted([piece, *self.waiting], key=lambda each: each.start)

    # --- receiving --------------------------------------------------------------------------

    def _add_up(self) -> None:
        run, program = self.owner, self.program
        while run.next_piece < len(run.pieces):
            piece = run.pieces[run.next_piece]
            done = self.ended.pop(piece.start, None)
            if done is None:
                return
            parts: Mapping[int, torch.Tensor] = unpack(done.collected, lambda device: device)
            for step in program.steps:
                for key in step.collects:
                    value = program.values[key]
                    run.collect(value, parts[key].to(value.device), piece)
            node: TrackedNode = program.nodes[0]
            for node, seconds in zip(program.nodes, done.seconds):
                node.measured_seconds = (node.measured_seconds or 0.0) + seconds
            run.next_piece += 1
            run.report(node, len(program.nodes), piece=run.next_piece)


def _leaves(step: Step, kind: type) -> Iterator[Any]:
    stack: list[Any] = [step.args, list(step.kwargs.values()), [part for _, part in step.takes]]
    while stack:
        item = stack.pop()
        if type(item) is kind:
            yield item
        elif type(item) in (list, tuple):
            stack.extend(item)
