"""Stretches of nodes that were met before run as generated code, without a look at each node.

The first time a stretch runs op by op (:mod:`lazyviz.execute.eager`), and what memory it took is kept with
its structure.  The second time code is generated for it, which is what runs from then on.  The kernels,
their order, their arguments and the moments at which memory is freed are the same.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter

from .. import _torch
from ..graph.ir import Storage
from ..plan.alive import Category
from ..plan.collector import paused
from ..plan.projection import Peak
from ..record.recorder import Tape
from ..record.storage import TrackedNode
from . import sweeps
from .eager import check_interrupts, give, kernel_level, name_line
from .likeness import Sketch, sketch, what_is_new
from .lines import Code, name_of
from .memory import KnownMemory, Levels, Memory, ResidentMemory
from .straight_line import generate
from .stretch import Key, Steps, Stretch

LEAST_NODES = 4  # worth recognising
MOST_NODES = 100_000  # of one stretch
MOST_KEPT = 200_000  # nodes of all stretches that are kept
MOST_COMPARED = 16  # of those at the same line, and of the others, to say what is new about another

Progress = Callable[[int, int, TrackedNode], None]
Projection = tuple[Peak, Mapping[Storage, Category]]


@dataclass
class Known:
    """A stretch that has run: its code, once it was met again, and what memory it takes."""

    key: Key
    size: int  # nodes
    sketch: Sketch
    levels: Levels
    live: frozenset[int]  # the numbers of the storages that the user's tensors showed
    code: Code | None = None
    # What was projected of it and what it held of that, where both depend on nothing else.
    projected: Peak | None = None
    held: Peak | None = None

    def learn(self, stretch: Stretch, memory: Memory, projection: Projection | None) -> None:
        """What was projected of it, if that depends on nothing else."""
        if projection is not None and stretch.is_all_of_a_graph:
            self.projected = projection[0]
            self.held = memory.peak_on(self.projected.device, projection[1])


class Replays:
    """The stretches that this process has met, the least recently used dropped first."""

    def __init__(self) -> None:
        self.steps = Steps()
        self.hits = self.misses = self.generated = self.dropped = 0
        self.last_miss = ""  # what was new about it, in words
        self.not_looked_at = ""  # why the last nodes were nothing to recognise
        self._known: OrderedDict[Key, Known] = OrderedDict()
        self._latest: dict[Key, Key] = {}  # by program
        self._kept = 0  # nodes

    def __len__(self) -> int:
        return len(self._known)

    def look_at(self, tape: Tape, nodes: Sequence[TrackedNode], purpose: Hashable = None) -> Stretch | None:
        """The structure of ``nodes``, if they are worth it; as :meth:`Steps.look_at`, which see."""
        if not LEAST_NODES <= len(nodes) <= MOST_NODES:
            bound = f"fewer than {LEAST_NODES}" if len(nodes) < LEAST_NODES else f"more than {MOST_NODES:,}"
            self.not_looked_at = f"{bound} ops are not recognised"
            return None
        stretch = self.steps.look_at(tape, nodes, purpose=purpose)
        if stretch.key is not None:
            return stretch
        mixed = any(node.inference_mode is not nodes[0].inference_mode for node in nodes)
        self.not_looked_at = (
            "ops of inference mode and others are not recognised together"
            if mixed
            else "an op that has failed, runs once more or has an argument without a hash is not recognised"
        )
        return None

    def find(self, stretch: Stretch) -> Replay | None:
        """What runs the stretch, if it was met before."""
        assert stretch.key is not None
        known = self._known.get(stretch.key) or self._kept_otherwise(stretch)
        if known is None:
            self.misses += 1
            return None
        self.hits += 1
        self._known.move_to_end(known.key)  # its own: an equal one is compared once more
        if known.code is None:
            with paused():
                known.code = generate(stretch, self.steps, give)
            self.generated += 1
        return Replay(stretch, known, known.code)

    def learn(self, stretch: Stretch, memory: ResidentMemory, projection: Projection | None) -> str:
        """The stretch has run op by op; why it was not found, in words."""
        assert stretch.key is not None
        drawn = sketch([step.op for step in stretch.key.steps], stretch.nodes[0].source)
        self.last_miss = what_is_new(stretch, drawn, self._comparable(drawn))
        levels, live = memory.levels(stretch.storages), frozenset(stretch.live)
        known = Known(stretch.key, len(stretch.nodes), drawn, levels, live)
        known.learn(stretch, memory, projection)
        self._keep(known)
        return self.last_miss

    def _kept_otherwise(self, stretch: Stretch) -> Known | None:
        """The same program was met, with other results that the user still refers to."""
        assert stretch.key is not None
        before = self._known.get(self._latest.get(stretch.key.program))  # type: ignore[arg-type]
        if (
            before is None
            or not stretch.whole
            or any(storage.origin is not storage for storage in stretch.storages)
        ):
            return None
        live, deaths = frozenset(stretch.live), stretch.deaths()
        if not live ^ before.live <= deaths.keys():
            return None
        levels = before.levels.kept_otherwise(deaths, before.live - live, live - before.live)
        if levels is None:
            return None
        known = Known(stretch.key, before.size, before.sketch, levels, live)
        self._keep(known)
        return known

    def _keep(self, known: Known) -> None:
        key = known.key
        self._known[key] = known
        self._latest[key.program] = key
        self._kept += known.size
        while self._kept > MOST_KEPT:
            oldest, dropped = self._known.popitem(last=False)
            if self._latest.get(oldest.program) == oldest:
                del self._latest[oldest.program]
            self._kept -= dropped.size
            self.dropped += 1

    def _comparable(self, drawn: Sketch) -> list[tuple[Key, Sketch]]:
        """The latest that are known, the latest last: those recorded at the same line, and others."""
        here: list[tuple[Key, Sketch]] = []
        others: list[tuple[Key, Sketch]] = []
        for key, known in reversed(self._known.items()):
            into = here if drawn.at_the_line_of(known.sketch) else others
            if len(into) < MOST_COMPARED:
                into.append((key, known.sketch))
        return [*reversed(others), *reversed(here)]

    def clear(self) -> None:
        """Forget them all."""
        self._known.clear()
        self._latest.clear()
        self._kept = 0


replays = Replays()


class Replay:
    """A stretch that is to run by its code."""

    def __init__(self, stretch: Stretch, known: Known, code: Code) -> None:
        self.stretch = stretch
        self.memory = KnownMemory(known.levels, stretch, known.held)
        self.projection: Projection | None = (known.projected, {}) if known.projected is not None else None
        self._known, self._code = known, code

    def learn(self, projection: Projection | None) -> None:
        """It has run, and this was projected of it."""
        self._known.learn(self.stretch, self.memory, projection)

    def run(
        self,
        tape: Tape,
        *,
        progress: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
        timed: bool = False,
    ) -> None:
        """Run it; as :func:`lazyviz.execute.eager.run`, which see for the arguments and what it raises."""
        nodes = self.stretch.nodes
        with kernel_level(tape, [nodes[at] for at in self.stretch.draws], nodes) as arrived:
            check_interrupts(arrived, cancelled, f"after 0 of {len(nodes)} ops")
            mode = _torch.inference_mode(True) if nodes[0].inference_mode else nullcontext()
            with mode:
                self._run(tape, arrived, progress, cancelled, timed)

    def _run(
        self,
        tape: Tape,
        arrived: list[int],
        progress: Progress | None,
        cancelled: Callable[[], bool] | None,
        timed: bool,
    ) -> None:
        stretch, nodes = self.stretch, self.stretch.nodes
        outside = [value.real for value in stretch.outside]
        if any(real is None for real in outside):
            raise RuntimeError("internal error: an input was freed before its last use")
        for value in stretch.outside:
            value.real = None
        for at in stretch.key.kept:  # type: ignore[union-attr]
            stretch.outside[at].real = outside[at]
        times = array("d", [perf_counter()])
        watch = _Watch(nodes, times, self.memory, progress, cancelled) if progress or cancelled else None
        stopped = self._code(
            outside,
            stretch.scalars,
            [nodes[at].draws for at in stretch.draws],
            stretch.users,
            stretch.later,
            arrived,
            times,
            watch.done if watch is not None else None,
        )
        if stopped is None:
            finish(tape, stretch, nodes, times if timed else None)
            return
        finished = len(times) - 1
        finish(tape, stretch, nodes[:finished], times if timed else None)
        error, variables = stopped
        for number, value in enumerate(stretch.values):  # what the nodes that are left need
            if value.uses and value.real is None:
                value.real = variables.get(name_of(number))
        self.memory.stop(finished)
        if error is None:
            check_interrupts(arrived, cancelled, f"after {finished} of {len(nodes)} ops")
            return
        error = error.with_traceback(None)  # it holds the code's variables
        if watch is None or watch.raised is not error:
            failed = nodes[finished]
            failed.state, failed.error = "failed", str(error)
            if isinstance(error, Exception):
                name_line(error, failed)
        else:
            watch.raised = None
        try:
            raise error
        finally:  # this frame is in its traceback: nothing is to wait for the garbage collector
            del error, stopped, variables


class _Watch:
    """Is told after each node, for whoever follows the run or may cancel it."""

    def __init__(
        self,
        nodes: Sequence[TrackedNode],
        times: array[float],
        memory: KnownMemory,
        progress: Progress | None,
        cancelled: Callable[[], bool] | None,
    ) -> None:
        self._nodes, self._times, self._memory = nodes, times, memory
        self._progress, self._cancelled = progress, cancelled
        self.raised: BaseException | None = None  # not by a kernel

    def done(self) -> None:
        times, nodes = self._times, self._nodes
        count = len(times) - 1
        node = nodes[count - 1]
        node.state = "done"
        self._memory.reach(count)
        try:
            if self._progress is not None:
                node.seconds = times[count] - times[count - 1]
                self._progress(count, len(nodes), node)
            if count < len(nodes):
                check_interrupts([], self._cancelled, f"after {count} of {len(nodes)} ops")
        except BaseException as error:
            self.raised = error
            raise


def finish(tape: Tape, stretch: Stretch, ran: Sequence[TrackedNode], times: array[float] | None) -> None:
    """Note that the nodes in ``ran`` have run: what is pending, what is needed, how long they took."""
    sweeps.note_done(ran, times)
    graph = stretch.graphs[0]
    outside = stretch.outside
    several = len(stretch.graphs) > 1 or any(
        value.node is not None and value.node.graph is not graph for value in outside
    )
    if stretch.whole and ran is stretch.nodes and not stretch.later:
        sweeps.note_unused(stretch.values, stretch.storages)
        if not several:
            tape.pending.clear()
    else:
        sweeps.note_used(ran)
        for value in (*outside, *stretch.later):
            if not value.uses:
                value.real = None
    if several:
        for node in ran:
            tape.finished(node)
        return
    drop = tape.pending.pop
    for node in ran if tape.pending else ():
        drop(node, None)
    if tape.graph is not None:
        tape.made_real(value for value in stretch.users if value.node and value.node.state == "done")
