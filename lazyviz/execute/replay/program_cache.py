"""Program cache: subgraphs that have run before run as generated code, without inspecting each node.

The first time, a subgraph runs op by op (:mod:`lazyviz.execute.eager_backend`), and its memory use is stored
with its structure.  The second time, code is generated for it, which is used from then on.  The kernels,
their order, their arguments, and the times at which memory is freed are the same.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any

import torch

from ...graph.ir import Storage
from ...plan.liveness.live_set_and_categories import Category
from ...plan.peak_of_one_run import Peak
from ...process.deferred_signals import Deferred
from ...process.gc_pause import paused
from ...process.global_state_transaction import complete
from ...record.interception.warning_routing import at_users_line, moved_to_users_line
from ...record.random_draw_order import state_of
from ...record.tape import Tape
from ...record.tracked_storages import TrackedNode
from ...torch_internals import private_api
from .. import kernels_on_background_thread
from ..eager_backend import check_interrupts, kernel_level, report_progress, store_result
from ..kernel_errors import note_failure
from ..lru_cache import LRUCache
from ..measured_memory import KnownMemory, Levels, Memory, ResidentMemory
from . import node_passes
from .miss_reason import Sketch, sketch, subgraph_difference
from .native_codegen import generate
from .node_instructions import Code, Stopped, name_of
from .program_key import Key, Steps, Subgraph
from .recent_programs import RecentPrograms

LEAST_NODES = 1  # minimum size of cached subgraphs
FEW_NODES = 4  # smaller subgraphs are cached when they run a second time
MOST_FEW = 10_000  # number of such subgraphs that are remembered
MOST_NODES = 100_000  # maximum size of a cached subgraph
MOST_KEPT = 200_000  # maximum number of nodes in all cached subgraphs
MOST_FINGERPRINTS = 8  # per subgraph: equal strings may be different objects

Progress = Callable[[int, int, TrackedNode], None]
Projection = tuple[Peak, Mapping[Storage, Category]]


@dataclass
class Known:
    """A subgraph that has run: its memory, and its code after it has run twice."""

    key: Key
    size: int  # nodes
    sketch: Sketch
    levels: Levels
    live: frozenset[int]  # the numbers of the storages that the user's tensors referred to
    code: Code | None = None
    # Its projected and measured memory, if both depend on nothing else.
    projected: Peak | None = None
    held: Peak | None = None
    # Each with the key that keeps it valid.
    fingerprints: list[tuple[bytes, Key]] = field(default_factory=list)
    found: bool = False  # looked up by its fingerprint since it was last considered for eviction
    seconds: float | None = None  # of the last complete run of its code
    in_one_go: bool | None = None  # whether its code can run in a single call; None: not checked yet
    not_async: str | None = (
        None  # why its kernels cannot run on another thread, "": they can; None: not checked yet
    )
    in_parts: bool | None = None  # whether results can be taken while later nodes run there; None: likewise

    def learn(self, subgraph: Subgraph, memory: Memory, projection: Projection | None) -> None:
        """Store its projection, if that depends on nothing else."""
        if projection is not None and subgraph.is_all_of_a_graph:
            self.projected = _without_storages(projection[0])
            self.held = _without_storages(memory.peak_on(self.projected.device, projection[1]))


def _without_storages(peak: Peak) -> Peak:
    """The peak without its storages, which would keep their graph alive."""
    return peak._replace(by_category=dict(peak.by_category))


class Replays:
    """The subgraphs that this process has run, the least recently used dropped first."""

    def __init__(self) -> None:
        self.steps = Steps()
        self.hits = self.misses = self.generated = self.dropped = 0
        self.last_miss = ""  # what was new about it, as text
        self.not_cacheable_reason = ""  # why the last nodes cannot be cached
        self._known: LRUCache[Key, Known] = LRUCache(
            MOST_KEPT, size=lambda known: known.size, on_drop=self._dropped
        )
        self._recent: RecentPrograms[Known] = RecentPrograms()
        self._latest: dict[Key, Key] = {}  # by program
        self._by_fingerprint: dict[bytes, Known] = {}  # those that have code
        self._few: set[bytes] = set()  # the fingerprints of small subgraphs that have run once

    def __len__(self) -> int:
        return len(self._known)

    def structure_of(
        self, tape: Tape, nodes: Sequence[TrackedNode], purpose: Hashable = None
    ) -> Subgraph | None:
        """The structure of ``nodes``, if it can be cached; see :meth:`Steps.structure_of`."""
        if not LEAST_NODES <= len(nodes) <= MOST_NODES:
            bound = f"fewer than {LEAST_NODES}" if len(nodes) < LEAST_NODES else f"more than {MOST_NODES:,}"
            self.not_cacheable_reason = f"subgraphs of {bound} ops are not cached"
            return None
        matched = self.steps.fingerprinted(tape, nodes, purpose)
        if matched is not None and (known := self._by_fingerprint.get(matched.fingerprint)) is not None:  # type: ignore[arg-type]
            matched.key = known.key
            return matched
        if len(nodes) < FEW_NODES and not self._ran_before(tape, nodes, purpose, matched):
            when = "when they run a second time" if node_passes.active else "with the compiled modules"
            self.not_cacheable_reason = f"subgraphs of fewer than {FEW_NODES} ops are cached only {when}"
            return None
        subgraph = self.steps.structure_of(tape, nodes, purpose=purpose)
        if subgraph.key is not None:
            subgraph.fingerprint = matched.fingerprint if matched is not None else None
            return subgraph
        mixed = any(node.inference_mode is not nodes[0].inference_mode for node in nodes)
        self.not_cacheable_reason = (
            "subgraphs that are only partly recorded in inference mode are not cached"
            if mixed
            else "subgraphs with failed or recomputed ops, or with unhashable arguments, are not cached"
        )
        return None

    def _ran_before(
        self,
        tape: Tape,
        nodes: Sequence[TrackedNode],
        purpose: Hashable,
        matched: Subgraph | None,
    ) -> bool:
        """Whether these few nodes have run before; most small subgraphs never run again."""
        if matched is None and node_passes.active:
            self.steps.structure_of(tape, nodes, purpose=purpose)  # whose steps are known from now on
            matched = self.steps.fingerprinted(tape, nodes, purpose)
        if matched is None or matched.fingerprint is None:
            return False
        if matched.fingerprint in self._few:
            return True
        if len(self._few) >= MOST_FEW:
            self._few.clear()
        self._few.add(matched.fingerprint)
        return False

    def find(self, subgraph: Subgraph) -> Replay | None:
        """The replay of the subgraph, if it has run before."""
        assert subgraph.key is not None
        fingerprint = subgraph.fingerprint
        known = self._by_fingerprint.get(fingerprint) if fingerprint is not None else None
        if known is not None and known.code is not None:
            self.hits += 1
            known.found = True
            return Replay(subgraph, known, known.code)
        known = self._known.peek(subgraph.key) or self._with_other_live(subgraph)
        if known is None:
            self.misses += 1
            return None
        self.hits += 1
        self._known.use(known.key)  # the identical object, which saves a comparison
        self._recent.use(known)
        if known.code is None:
            with paused():
                known.code = generate(subgraph, self.steps, store_result)
            self.generated += 1
        if fingerprint is not None:
            known.fingerprints.append((fingerprint, subgraph.key))
            self._by_fingerprint[fingerprint] = known
            if len(known.fingerprints) > MOST_FINGERPRINTS:
                del self._by_fingerprint[known.fingerprints.pop(0)[0]]
        return Replay(subgraph, known, known.code)

    def learn(self, subgraph: Subgraph, memory: ResidentMemory, projection: Projection | None) -> str:
        """The subgraph has run op by op; return why it was not found, as text."""
        assert subgraph.key is not None
        drawn = sketch([step.op for step in subgraph.key.steps], subgraph.nodes[0].source)
        self.last_miss = subgraph_difference(subgraph, drawn, self._recent.comparable(drawn))
        levels, live = memory.levels(subgraph.storages), frozenset(subgraph.live)
        known = Known(subgraph.key, len(subgraph.nodes), drawn, levels, live)
        known.learn(subgraph, memory, projection)
        self._keep(known)
        return self.last_miss

    def _with_other_live(self, subgraph: Subgraph) -> Known | None:
        """The same program was seen before, with other results that the user still refers to."""
        assert subgraph.key is not None
        before = self._known.peek(self._latest.get(subgraph.key.program))  # type: ignore[arg-type]
        if (
            before is None
            or not subgraph.whole
            or any(storage.origin is not storage for storage in subgraph.storages)
        ):
            return None
        live, deaths = frozenset(subgraph.live), subgraph.deaths()
        if not live ^ before.live <= deaths.keys():
            return None
        levels = before.levels.with_other_live(deaths, before.live - live, live - before.live)
        if levels is None:
            return None
        known = Known(subgraph.key, before.size, before.sketch, levels, live)
        self._keep(known)
        return known

    def _keep(self, known: Known) -> None:
        key = known.key
        self._latest[key.program] = key
        replaced = self._known.peek(key)
        if replaced is not None:
            self._recent.drop(replaced)
        self._recent.add(known)
        self._known[key] = known

    def _dropped(self, oldest: Key, known: Known) -> bool:
        """Called for the oldest entry: True keeps it, because it was recently found by its fingerprint."""
        if known.found:
            known.found = False
            self._recent.use(known)
            return True
        self._recent.drop(known)
        for fingerprint, _ in known.fingerprints:
            del self._by_fingerprint[fingerprint]
        if self._latest.get(oldest.program) == oldest:
            del self._latest[oldest.program]
        self.dropped += 1
        return False

    def clear(self) -> None:
        """Remove all programs."""
        self._known.clear()
        self._recent.clear()
        self._by_fingerprint.clear()
        self._few.clear()
        self._latest.clear()


replays = Replays()


class Replay:
    """A subgraph that runs by its generated code."""

    def __init__(self, subgraph: Subgraph, known: Known, code: Code) -> None:
        self.subgraph = subgraph
        self.memory = KnownMemory(known.levels, subgraph, known.held)
        self.projection: Projection | None = (known.projected, {}) if known.projected is not None else None
        self.known, self.code = known, code
        self.started: kernels_on_background_thread.AsyncRun | None = None  # on another thread

    def start(self) -> str | None:
        """Start the kernels on another thread; return the reason if that is not possible."""
        known = self.known
        if known.not_async is None:
            known.not_async = kernels_on_background_thread.async_obstacle(self.subgraph, self.code) or ""
        reason = known.not_async or kernels_on_background_thread.current_async_obstacle(self.subgraph)
        if reason is None:
            self.started, begin = kernels_on_background_thread.prepared(self.subgraph, self.code)
            self.started.handle[:] = map(partial.__call__, (begin,))  # started and stored entirely in C
            if not self.started.has_begun:
                self.started, reason = None, "PyTorch dispatch modes are active"
        return reason

    def take_first(self, tape: Tape, count: int, timed: bool) -> None:
        """Do the bookkeeping of the first ``count`` nodes, which have run on another thread, while it
        continues.
        """
        started = self.started
        assert started is not None
        nodes = self.subgraph.nodes
        ran = nodes[started.taken : count]
        drawing = [nodes[at] for at in self.subgraph.draws if started.taken <= at < count]
        with kernel_level(tape, drawing, ran):
            complete(partial(self._note_first, tape, started, ran, count, timed, []))

    def _note_first(
        self,
        tape: Tape,
        started: kernels_on_background_thread.AsyncRun,
        ran: Sequence[TrackedNode],
        count: int,
        timed: bool,
        stage: list[Any],
    ) -> None:
        """Can be called again if it was interrupted."""
        if started.taken == count:
            return
        subgraph, first = self.subgraph, started.taken
        started.take_first(subgraph, count)
        finish(tape, subgraph, ran, started.times[first : count + 1] if timed else None, stage)
        tape.tensors.note_memory(subgraph.users)
        started.taken = count

    def can_take_first(self) -> bool:
        """Whether results of its first nodes can be used while others run on another thread."""
        known = self.known
        if known.in_parts is None:
            known.in_parts = kernels_on_background_thread.can_be_taken_in_parts(self.subgraph)
        return known.in_parts

    def learn(self, projection: Projection | None) -> None:
        """After the run: store its projection."""
        self.known.learn(self.subgraph, self.memory, projection)

    def run(
        self,
        tape: Tape,
        *,
        progress: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
        timed: bool = False,
    ) -> None:
        """Run it; arguments and errors are those of :func:`lazyviz.execute.eager_backend.run`."""
        nodes = self.subgraph.nodes
        with kernel_level(tape, [nodes[at] for at in self.subgraph.draws], nodes) as arrived:
            check_interrupts(arrived, cancelled, f"after 0 of {len(nodes)} ops")
            mode = private_api.inference_mode(True) if nodes[0].inference_mode else nullcontext()
            with mode:
                self._run(tape, arrived, progress, cancelled, timed)

    def _run(
        self,
        tape: Tape,
        arrived: Deferred,
        progress: Progress | None,
        cancelled: Callable[[], bool] | None,
        timed: bool,
    ) -> None:
        subgraph, nodes = self.subgraph, self.subgraph.nodes
        outside: list[torch.Tensor] = []
        take: partial[Any] = partial(node_passes.take, subgraph.outside, subgraph.kept)
        before = None if node_passes.active else [value.real for value in subgraph.outside]
        started = self.started
        times = array("d", [perf_counter()]) if started is None else started.times
        watch = (
            _Watch(nodes, times, self.memory, arrived, progress, cancelled) if progress or cancelled else None
        )
        code = partial(
            moved_to_users_line(tape.scopes.sources, sys._getframe(), self.code),
            outside,
            subgraph.scalars,
            [nodes[at].draws for at in subgraph.draws],
            subgraph.users,
            subgraph.later,
            arrived,
            times,
            watch.done if watch is not None else None,
        )
        if started is not None:  # it holds its tensors until the bookkeeping is complete
            take, code, before = partial(list), started.joining(subgraph, arrived), []
        ran: list[Stopped | None] = []  # the result of the code, as soon as it has run
        note = partial(self.note, tape, times, timed, ran, [])
        try:
            outside.extend(chain.from_iterable(map(partial.__call__, (take,))))
            runs = partial(ran.__setitem__, slice(None), map(partial.__call__, (code,)))
            at_users_line(tape.scopes.sources, sys._getframe(), runs)
            complete(note)
        except BaseException:
            if ran:
                complete(note)
            else:
                for value, real in zip(subgraph.outside, before or outside):
                    value.real = real
            raise
        if ran[0] is not None:
            error, _, has_run, midway = ran.pop()  # type: ignore[misc]
            self.raise_from(arrived, len(times) - 1, error, has_run, midway)

    def raise_from(
        self, arrived: Deferred, finished: int, error: BaseException, has_run: bool, midway: bool
    ) -> None:
        """Raise the error that stopped the code: of a kernel, or another one."""
        nodes = self.subgraph.nodes
        error = error.with_traceback(None)  # it holds the code's variables
        of_a_kernel = error is not arrived.raised and not has_run and finished < len(nodes)
        if of_a_kernel:
            note_failure(nodes[finished], error, midway=midway)
        try:
            raise error
        finally:  # this frame is in its traceback: avoid waiting for the garbage collector
            del error

    def note(
        self,
        tape: Tape,
        times: array[float],
        timed: bool,
        ran: Sequence[Stopped | None],
        stage: list[Any],
    ) -> None:
        """Bookkeeping after the code has run or was stopped; can be called again if it was interrupted."""
        subgraph, nodes, stopped = self.subgraph, self.subgraph.nodes, ran[0]
        first = self.started.taken if self.started is not None else 0
        if stopped is None:
            left = nodes[first:] if first else nodes
            finish(tape, subgraph, left, times[first:] if timed else None, stage)
            self.known.seconds = times[-1] - times[0]
            return
        _, variables, has_run, _ = stopped
        finished = len(times) - 1
        if has_run:  # the kernel of one more node
            self._store_results(nodes[finished], variables)
            finished += 1
        seconds = array("d", [*times[first:], perf_counter()]) if timed else None
        finish(tape, subgraph, nodes[first:finished], seconds, stage)
        for number, value in enumerate(subgraph.values):  # values that the remaining nodes need
            if value.uses and value.real is None:
                value.real = variables.get(name_of(number))
        self.memory.stop(finished)

    def _store_results(self, node: TrackedNode, variables: Mapping[str, Any]) -> None:
        """Complete the bookkeeping of ``node``, whose kernel has run."""
        if node.draws is not None:
            node.draws.state = state_of(node.draws.generator)
        for value in node.outputs:
            if value.node is node and value.tensor is not None:
                store_result(value, variables.get(name_of(self.subgraph.numbers[value])))


class _Watch:
    """Called after each node, to report progress and to check for cancellation."""

    def __init__(
        self,
        nodes: Sequence[TrackedNode],
        times: array[float],
        memory: KnownMemory,
        arrived: Deferred,
        progress: Progress | None,
        cancelled: Callable[[], bool] | None,
    ) -> None:
        self._nodes, self._times, self._memory = nodes, times, memory
        self._arrived, self._progress, self._cancelled = arrived, progress, cancelled

    def done(self) -> None:
        times, nodes = self._times, self._nodes
        count = len(times) - 1
        node = nodes[count - 1]
        node.state = "done"
        self._memory.reach(count)
        try:
            if self._progress is not None:
                node.measured_seconds = times[count] - times[count - 1]
                report_progress(self._arrived, self._progress, count, len(nodes), node)
            if count < len(nodes):
                check_interrupts(self._arrived, self._cancelled, f"after {count} of {len(nodes)} ops")
        except BaseException as error:  # not raised by a kernel
            self._arrived.raised = error
            raise


def finish(
    tape: Tape,
    subgraph: Subgraph,
    ran: Sequence[TrackedNode],
    times: array[float] | None,
    stage: list[None],
) -> None:
    """Bookkeeping for the nodes in ``ran``: pending ops, needed values, times.

    Can be called again after an interrupt, with the same ``stage``, which stores what must be done only once.
    """
    node_passes.note_done(ran, times)
    graph = subgraph.graphs[0]
    outside = subgraph.outside
    several = len(subgraph.graphs) > 1 or any(
        value.node is not None and value.node.graph is not graph for value in outside
    )
    if subgraph.whole and ran is subgraph.nodes and not subgraph.later:
        node_passes.note_unused(subgraph.values, subgraph.storages)
        if not several:
            tape.pending.clear()
    else:
        if not stage:
            stage[:] = map(node_passes.note_used, (ran,))
        node_passes.release_inputs((), outside, subgraph.later, tape.pending)
    if several:
        for node in ran:
            tape.pending_ops.finished(node)
        return
    node_passes.release_inputs(ran, [], [], tape.pending)
    if tape.recording.graph is not None:
        tape.tensors.made_real(value for value in subgraph.users if value.node and value.node.state == "done")
