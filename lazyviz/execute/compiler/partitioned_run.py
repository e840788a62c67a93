"""Partitioned runs: pending nodes run with a compiling backend, segment by segment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch

from ...graph.ir import Storage
from ...process.deferred_signals import Deferred
from ...process.global_state_transaction import complete
from ...record.random_draw_order import state_of
from ...record.tape import Tape
from ...record.tracked_storages import DrawSequence, TrackedNode, TrackedValue
from ...torch_internals import private_api
from ..backend_protocol import Backend, Compiled, Refused, Segment
from ..compute_value_stats import Summaries
from ..eager_backend import (
    Progress,
    check_interrupts,
    deliver,
    free,
    kernel_level,
    recorded_modes,
    report_progress,
    run_node,
)
from ..measured_memory import ResidentMemory
from ..replay import node_passes
from ..replay.program_key import Subgraph
from . import numerical_verification
from .compile_context import interruptible, progress_notices, without_active_modes
from .fx_lowering import views_of
from .output_metadata_checks import refuse_other_metadata
from .single_segment_runs import Reuse, cached_segments, name_segment, note_partial_write

_MOST_REASONS = 8


@dataclass(slots=True)
class Outcome:
    """The result of a run with a backend: ``share`` counts the ops that the backend itself ran.

    ``left`` counts ops of its segments that ran one by one.  ``hits`` and ``misses`` count segments with and
    without existing code; ``missed`` says what was new about the latter, ``fallbacks`` why ops ran op by op.
    ``seconds`` is the time for requesting code from the backend.
    """

    share: int = 0
    left: int = 0
    hits: int = 0
    misses: int = 0
    missed: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def ran(self, count: int, compiled: object) -> None:
        """Record that code for ``count`` ops has run."""
        left, why = (
            compiled.left() if isinstance(compiled, Compiled) and compiled.left is not None else (0, ())
        )
        self.share += count - left
        self.left += left
        for reason in why:
            self.note(self.fallbacks, reason)

    def note(self, reasons: list[str], reason: str) -> None:
        if reason not in reasons and len(reasons) < _MOST_REASONS:
            reasons.append(reason)


def run_with_backend(
    tape: Tape,
    nodes: Sequence[TrackedNode],
    backend: Backend,
    memory: ResidentMemory,
    *,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
    verify: bool = False,
    seen: Summaries | None = None,
    compiles: Callable[[str | None], None] | None = None,
    subgraph: Subgraph | None = None,
) -> Outcome:
    """Run pending ``nodes``, given in program order, with ``backend``.

    Random draws run in eager mode between its segments, unless it accepts them, so that their values and the
    generator states are those of eager mode.  A segment that it refuses is tried phase by phase, and then
    runs op by op.  ``memory`` counts the memory between segments.  With ``verify``, results of newly compiled
    segments are compared with those of the recorded ops, which are used if they differ by more than rounding.
    ``compiles`` is called repeatedly on a separate thread with what is being compiled, and with None
    afterwards. ``subgraph`` is the structure of ``nodes``, the key for later runs.

    Raises:
        Interrupted, KeyboardInterrupt: between two segments or while one is compiled; no segment is partially
        run.
        ValueError: the backend returned a different number of tensors than the segment has outputs.
        Exception: raised by the backend; the segment stays pending, unless it had started to write outside
            tensors: then it can never run again.
    """
    run = _Run(tape, backend, memory, len(nodes), progress, cancelled, verify, seen, compiles)
    with without_active_modes():
        subgraphs = list(_subgraphs(nodes, backend, run.outcome))
    run.segments = sum(taken for _, taken in subgraphs)
    for part, taken in subgraphs:
        if taken:
            run.number += 1
            run.segment(part)
        else:
            run.op_by_op(part)
    if subgraph is not None and run.reuse is not None and run.outcome.share + run.outcome.left == len(nodes):
        cached_segments.add(subgraph, backend, run.reuse)
    return run.outcome


class _Run:
    def __init__(
        self,
        tape: Tape,
        backend: Backend,
        memory: ResidentMemory,
        total: int,
        progress: Progress | None,
        cancelled: Callable[[], bool] | None,
        verifies: bool,
        seen: Summaries | None,
        compiles: Callable[[str | None], None] | None,
    ) -> None:
        self.tape = tape
        self.backend = backend
        self.memory = memory
        self.total = total
        self.progress = progress
        self.cancelled = cancelled
        self.verify = verifies
        self.seen = seen
        self.compiles = compiles
        self.number = self.segments = 0  # the current segment, and the number of segments
        self.reuse: Reuse | None = None  # finds the code for all nodes
        self.done = 0
        self.outcome = Outcome()

    def op_by_op(self, nodes: Sequence[TrackedNode]) -> None:
        with kernel_level(self.tape, nodes) as arrived:
            for node in nodes:
                self._check(arrived)
                self.memory.step(node)
                with recorded_modes(node):
                    run_node(node, self.memory, self.seen)
                self._finished([node], arrived)

    def segment(self, nodes: Sequence[TrackedNode]) -> None:
        segment = segment_of(nodes)
        inputs = [value.real for value in segment.inputs if isinstance(value, TrackedValue)]
        reals = [real for real in inputs if real is not None]
        start = time.perf_counter()
        try:
            _check_memory(segment, reals)
            compiled = self._compiled(segment, reals, nodes[0].inference_mode)
        except Refused as refusal:
            phases = list(_phases(nodes))
            if len(phases) > 1:
                for part in phases:
                    self.segment(part)
            else:
                self.outcome.note(self.outcome.fallbacks, str(refusal))
                self.op_by_op(nodes)
            return
        self.outcome.seconds += time.perf_counter() - start
        if isinstance(compiled, Compiled):
            self.outcome.hits += compiled.cache_hit
            self.outcome.misses += not compiled.cache_hit
            if compiled.cache_miss_reason is not None:
                self.outcome.note(self.outcome.missed, compiled.cache_miss_reason)
        try:
            with kernel_level(self.tape, nodes) as arrived, recorded_modes(nodes[0]):
                self._check(arrived)
                self.memory.step(nodes[-1])
                self._execute(nodes, segment, compiled, reals)
                self.outcome.ran(len(nodes), compiled)
                if len(nodes) == self.total and isinstance(compiled, Compiled):
                    self.reuse = compiled.reuse
                self._finished(nodes, arrived)
        except _NeverRan as failure:
            self.outcome.note(self.outcome.fallbacks, str(failure))
            self.op_by_op(nodes)

    def _compiled(
        self, segment: Segment, reals: Sequence[torch.Tensor], inference_mode: bool
    ) -> Callable[..., Sequence[torch.Tensor]]:
        where = (
            f"canceled while {len(segment.nodes):,} ops were being compiled, "
            f"after {self.done} of {self.total} ops"
        )
        tape = self.tape
        with ExitStack() as stack:
            stack.callback(setattr, tape.runs, "running", tape.runs.running)
            tape.runs.running = threading.get_ident()
            stack.enter_context(without_active_modes(inference_mode))
            if self.compiles is not None:
                what = f"segment {self.number} of {self.segments} ({len(segment.nodes):,} ops)"
                stack.enter_context(progress_notices(self.compiles, what))
            stack.enter_context(interruptible(self.cancelled, where))
            return self.backend.compile(segment, reals)

    def _execute(
        self,
        nodes: Sequence[TrackedNode],
        segment: Segment,
        compiled: Callable[..., Sequence[torch.Tensor]],
        reals: Sequence[torch.Tensor],
    ) -> None:
        draws: dict[DrawSequence, None] = {node.draws: None for node in nodes if node.draws is not None}
        check: _Expected | None = None
        fresh = not getattr(compiled, "cache_hit", False)
        before = numerical_verification.saved(segment, reals) if fresh else None
        verifies = self.verify or getattr(self.backend, "verifies", False)
        if verifies and fresh:
            check = self._expected(segment, reals, draws)
        for sequence in draws:
            sequence.generator.set_state(sequence.state)
        try:
            results = list(compiled(*reals))
            refuse_other_metadata(segment.outputs, results)
        except Refused as refusal:  # nothing has been written yet
            raise _NeverRan(str(refusal)) from refusal
        except BaseException as error:
            if before is None:
                note_partial_write(nodes, error)
                raise
            for at, content in before.items():  # undo its writes
                reals[at].untyped_storage().copy_(content)
            if isinstance(compiled, Compiled) and isinstance(error, Exception):
                # Code that fails when it first runs is wrong.
                self._forget(segment, f"{type(error).__name__}: {error}")
                raise _NeverRan(f"compiled code failed: {type(error).__name__}: {error}") from error
            name_segment(nodes, error)
            raise
        try:
            for sequence in draws:
                sequence.state = state_of(sequence.generator)
            if check is not None:
                results = self._verified(segment, reals, results, check)
            complete(partial(self._note, nodes, segment, results, []))
        except BaseException as error:
            if nodes[-1].state != "done":  # an asynchronous exception between the code and its bookkeeping
                note_partial_write(nodes, error)
            raise

    def _note(
        self,
        nodes: Sequence[TrackedNode],
        segment: Segment,
        results: Sequence[torch.Tensor],
        stage: list[None],
    ) -> None:
        """Bookkeeping after the segment has run; can be called again after an interrupt."""
        if not stage:
            for node in nodes:
                node.state, node.error = "done", None
            outputs = [value for value in segment.outputs if isinstance(value, TrackedValue)]
            if self.seen is not None:  # values inside the backend are not visible
                for value, real in zip(outputs, results):
                    self.seen.whole(value, real)
            deliver(dict(zip(outputs, results)), self.memory)
            stage[:] = map(node_passes.note_used, (nodes,))
        for node in nodes:
            free(node, self.memory)

    def _expected(
        self, segment: Segment, reals: Sequence[torch.Tensor], draws: Iterable[DrawSequence]
    ) -> _Expected:
        """The results of the recorded ops on copies of the inputs: the outputs, and the inputs afterwards."""
        untouched = numerical_verification.Copies(segment.inputs, reals)
        states = [(sequence.generator, sequence.state) for sequence in draws]

        def run(nudge: float = 0.0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            for generator, state in states:
                generator.set_state(state)
            copies = numerical_verification.Copies(segment.inputs, untouched.tensors, nudge=nudge).tensors
            return numerical_verification.run_recorded(segment, copies), copies

        outputs, inputs = run()
        ends = {sequence: state_of(sequence.generator) for sequence in draws}
        return _Expected(outputs, inputs, ends, lambda: run(numerical_verification.rounding(segment)))

    def _verified(
        self,
        segment: Segment,
        reals: Sequence[torch.Tensor],
        results: list[torch.Tensor],
        expected: _Expected,
    ) -> list[torch.Tensor]:
        """``results``, if they and all writes agree with eager mode; otherwise the eager results."""
        outputs, inputs = expected.outputs, expected.inputs
        changed = numerical_verification.written(segment)
        blank = numerical_verification.blank(segment)
        filled = [at for at, value in enumerate(segment.outputs) if value.storage not in blank]
        values = [*[segment.outputs[at] for at in filled], *[segment.inputs[at] for at in changed]]
        made = {value: value.node for value in segment.outputs if value.node is not None}
        ours = [*[results[at] for at in filled], *[reals[at] for at in changed]]
        theirs = [*[outputs[at] for at in filled], *[inputs[at] for at in changed]]
        mismatch = numerical_verification.first_mismatch(values, ours, theirs, made)
        if mismatch is not None:
            moved, moved_inputs = expected.nudged()
            mismatch = numerical_verification.first_mismatch(
                values,
                ours,
                theirs,
                made,
                [*[moved[at] for at in filled], *[moved_inputs[at] for at in changed]],
            )
        if mismatch is None:
            return results
        self.outcome.note(
            self.outcome.fallbacks, f"compiled code was wrong, so the eager results are used: {mismatch}"
        )
        self.outcome.share -= len(segment.nodes)
        self._forget(segment, mismatch)
        for sequence, state in expected.ends.items():
            sequence.state = state
        for at in changed:
            reals[at].copy_(inputs[at])
        memory = dict(zip([value.storage for value in segment.inputs], reals, strict=True))
        outside = [value for value in segment.outputs if value.storage in memory]
        return [
            views_of([value], memory)[0] if value in outside else tensor
            for value, tensor in zip(segment.outputs, outputs, strict=True)
        ]

    def _forget(self, segment: Segment, why: str) -> None:
        forget = getattr(self.backend, "forget", None)
        if forget is not None:
            forget(segment, why)

    def _check(self, arrived: Deferred) -> None:
        check_interrupts(arrived, self.cancelled, f"after {self.done} of {self.total} ops")

    def _finished(self, nodes: Sequence[TrackedNode], arrived: Deferred) -> None:
        for node in nodes:
            self.tape.pending_ops.finished(node)
        self.done += len(nodes)
        if self.progress is not None:
            report_progress(arrived, self.progress, self.done, self.total, nodes[-1])


@dataclass(frozen=True, slots=True)
class _Expected:
    """The results of the recorded ops on a segment's inputs, and the inputs afterwards.

    ``ends`` are the generator states afterwards.  ``nudged`` computes the first two for inputs that differ by
    one rounding.
    """

    outputs: list[torch.Tensor]
    inputs: list[torch.Tensor]
    ends: dict[DrawSequence, torch.Tensor]
    nudged: Callable[[], tuple[list[torch.Tensor], list[torch.Tensor]]]


class _NeverRan(Exception):
    """New code failed in its first run; its writes have been undone."""


def segment_of(nodes: Sequence[TrackedNode]) -> Segment:
    """``nodes`` with their outside inputs and the outputs that are needed later."""
    inside = set(nodes)
    uses: dict[TrackedValue, int] = {}
    for node in nodes:
        for value in node.inputs:
            uses[value] = uses.get(value, 0) + 1
    inputs = [value for value in uses if value.node not in inside]
    own = [value for node in nodes for value in node.outputs if value.node is node]
    outputs = [value for value in own if value.tensor is not None or value.uses > uses.get(value, 0)]
    return Segment(nodes, inputs, outputs)


def _check_memory(segment: Segment, reals: Sequence[torch.Tensor]) -> None:
    """Raise :class:`Refused` if inputs share memory in another way than recorded, because code depends on it.

    Kernels that ran immediately may not follow shape rules.
    """
    written = {storage for node in segment.nodes for storage in node.writes}
    places: dict[Storage, int] = {}
    storages: dict[int, Storage] = {}
    for value, real in zip(segment.inputs, reals, strict=True):
        storage = value.storage
        place = private_api.storage_address(real)
        other = storages.setdefault(place, storage)
        if places.setdefault(storage, place) != place:
            what = "does not share memory with another result, although it was recorded to"
        elif other is not storage and (storage in written or other in written):
            what = "shares memory, although it was not recorded to"
        else:
            continue
        where = f" at {value.node.source}" if value.node is not None and value.node.source is not None else ""
        name = f"the result of {value.node.name}{where}" if value.node is not None else f"{value.meta}"
        raise Refused(f"{name} {what}")


def _subgraphs(
    nodes: Sequence[TrackedNode], backend: Backend, outcome: Outcome
) -> Iterator[tuple[list[TrackedNode], bool]]:
    """``nodes`` partitioned into the longest runs that ``backend`` may take (True), and those in between."""
    takes_draws = getattr(backend, "draws", False)
    refuses: Callable[[TrackedNode], str | None] = getattr(backend, "refuses", lambda node: None)
    current: list[TrackedNode] = []
    compiles = False
    drawing: dict[torch.Generator, DrawSequence] = {}
    for node in nodes:
        takes = not node.is_rematerialized and node.op.namespace != "lazyviz"
        if takes and (reason := refuses(node)) is not None:
            outcome.note(outcome.fallbacks, reason)
            takes = False
        if node.draws is not None:
            takes = (
                takes
                and takes_draws
                and not any(isinstance(item, torch.Generator) for item in (*node.args, *node.kwargs.values()))
            )
        # A generator that was seeded in between starts another segment.
        reseeded = (
            takes
            and node.draws is not None
            and drawing.setdefault(node.draws.generator, node.draws) is not node.draws
        )
        # Results show whether they were made in inference mode.
        other_mode = bool(current) and node.inference_mode is not current[-1].inference_mode
        if current and (takes is not compiles or reseeded or other_mode):
            yield current, compiles
            current = []
        if not current:
            drawing = {node.draws.generator: node.draws} if takes and node.draws is not None else {}
        compiles = takes
        current.append(node)
    if current:
        yield current, compiles


def _phases(nodes: Sequence[TrackedNode]) -> Iterator[list[TrackedNode]]:
    current: list[TrackedNode] = []
    for node in nodes:
        if current and node.phase != current[-1].phase:
            yield current
            current = []
        current.append(node)
    yield current
