"""The composition root: the public ``LazyGraph`` and the functions over every pending graph.

Only this module and ``magic`` see all stages.  It gives recording an evaluator (a sync
point must be able to run what it needs), and graphs their plan, picture and run.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from . import absence, evaluation
from ._tracebacks import shorten_block, shortened
from .batching import NamedBatch, bound_names, unknown_names
from .batching import SplitError as SplitError
from .choices import Choices
from .diagnostics import metrics as metrics
from .diagnostics import why as why
from .evaluate_all import run_all
from .execute import sweeps
from .execute.backend import find_backend
from .execute.clusters import is_cluster
from .execute.report import Report as Report
from .execute.split import SplitRun
from .graph.ir import Graph, Node, SyncPoint
from .plan.collector import Patient
from .plan.devices import devices as devices
from .plan.split import check_split
from .recomputing import Recompute, check_combination, levers, recompute_option
from .recomputing import RecomputeError as RecomputeError
from .record import half_done
from .record.host_copies import give_back
from .record.names import name_tensors, variables_of
from .record.order import closure
from .record.ownership import Owned, release_held
from .record.pending import HELD_BYTES_LIMIT
from .record.recorder import tape
from .record.storage import Lost, TrackedNode, TrackedStorage
from .record.tensor import is_pending
from .showing import Shown

if TYPE_CHECKING:
    from .plan.memory import Plan


class LazyGraph(Choices, Shown):
    """A recorded block: what was recorded, what it would cost, and the means to run it.

    Displaying it shows the widget; its ``repr`` is one line.  Neither evaluates anything.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        device: Any = None,
        backend: str = "eager",
        code: str = "",
        batch: NamedBatch | None = None,
        split: int | str = "off",
        recompute: Recompute = "off",
    ) -> None:
        super().__init__(graph, backend, batch, split, recompute)
        self.device = device
        self.split_run: SplitRun | None = None  # one that was interrupted, to be gone on with
        self.code = code
        self.title = "lazyviz"
        self.report: Report | None = None
        self.error: BaseException | None = None
        self._done = 0  # so many nodes from the first are known to have run
        self._owned = Owned(graph)  # the last: attributes go in this order

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_ending():
            return  # modules have lost their names by then
        self.ir.lost = True
        if Lost.look is not None and tape.pending and sweeps.unfinished(self.nodes):
            Lost.look()

    def __repr__(self) -> str:
        syncs = len(self.sync_points)
        return (
            f"<LazyGraph: {len(self.nodes)} ops, {self.pending} pending, "
            f"{syncs} sync point{'' if syncs == 1 else 's'}>"
        )

    # --- what was recorded --------------------------------------------------------

    @property
    def nodes(self) -> Sequence[TrackedNode]:
        return self.ir.nodes  # type: ignore[return-value]

    @property
    def graph(self) -> Graph:
        return self.ir

    @property
    def pending(self) -> int:
        """Number of ops not yet run."""
        return sum(node.state != "done" for node in self.ir.nodes)

    @property
    def has_pending(self) -> bool:
        """Whether some op has not run: no node is looked at twice as long as there are such."""
        nodes, at = self.ir.nodes, self._done
        while at < len(nodes) and nodes[at].state == "done":
            at += 1
        self._done = at
        # A recomputing run that ends early may leave nodes pending that had run.
        return at < len(nodes) or bool(sweeps.unfinished(self.nodes))

    @property
    def sync_points(self) -> Sequence[SyncPoint]:
        return self.ir.sync_points

    @property
    def state(self) -> str:
        """``pending``, ``running``, ``done``, ``failed`` or ``interrupted``."""
        if self._state is not None:
            return self._state
        return "pending" if self.has_pending else "done"

    # --- planning -----------------------------------------------------------------

    def plan(
        self,
        device: Any = None,
        batch_size: int | None = None,
        split: Any = None,
        backend: str | None = None,
        *,
        recompute: Any = None,
    ) -> Plan:
        """Project the memory of running the whole graph.  Runs nothing.

        Args:
            device: a device, a profile or its name; default: the one the block was given, else where it runs.
            batch_size: plan for another number of samples than the batch recorded.
            split: pieces of the batch, ``"auto"`` for the fewest that fit; default: as the block was given.
            recompute: bytes (or a size as ``"2 GiB"``) that the peak is to stay below by dropping activations
                and computing them again, ``"auto"`` for what the device has free; default: as the block.

        Raises:
            ValueError: unknown device, or something this version cannot plan.
        """
        from .plan.planner import make_plan

        device = self.device if device is None else device
        split, recompute = levers(self, split, recompute, backend or "eager")
        with evaluation.metrics.timer("plan"):
            return make_plan(
                self.ir,
                device=device,
                batch_size=batch_size,
                split=split,
                backend=backend,
                recompute=recompute,
            )

    # --- running ------------------------------------------------------------------

    def _unfinished(self) -> list[TrackedNode]:
        """Its nodes that have not run, in program order."""
        pending = list(tape.pending)
        if pending == self.ir.nodes:  # as is usual, and sooner seen than what each of them is
            return pending
        return sweeps.unfinished(self.nodes)

    @shortened
    def evaluate(
        self,
        *tensors: torch.Tensor,
        backend: str | None = None,
        split: Any = None,
        progress: Callable[[Any], None] | None = None,
        cancel: threading.Event | None = None,
        recompute: Any = None,
        nodes: Sequence[Node] | None = None,
        summaries: bool | None = None,
        timings: bool | None = None,
        verify: bool = False,
    ) -> Report:
        """Run all pending ops, or those that ``tensors`` or ``nodes`` need.

        Args:
            nodes: of this graph; they run, with what they need, and nothing else.
            summaries: note of every result its least, largest and mean value, how much of it is NaN or
                infinite, and a small histogram, in ``node.summaries``; ``report.first_nan`` and
                ``report.first_inf`` are then known.  Results stay the same; it takes about as long as
                reading every result twice, and up to 16 MiB beside the run's memory.  Default: off, or as
                the widget's button "Values" says.
            timings: note each op's seconds; on a GPU by CUDA events.  Default: on a CPU only.
            split: run in that many pieces of the batch, with ``"auto"`` in the fewest that fit; default: as
                the block was given.  One that was interrupted goes on in the pieces that it was begun in.
            backend: as of :func:`lazy`; default: the block's.  ``"ipyparallel"``, ``"ray"`` or a registered
                cluster runs the pieces on its workers; ``"auto"``, also where no split was given, is then at
                least one each.
            recompute: stay below that many bytes (or a size as ``"2 GiB"``) by dropping activations and
                computing them again, with ``"auto"`` below what the device has free; default: as the block.
            progress: called after each op with a :class:`lazyviz.execute.progress.Progress`.
            cancel: set it to stop between two ops, or while a backend compiles.
            verify: compare what a compiled backend's new segments compute with the recorded ops' results on
                copies of their inputs; where they differ by more than rounding these stand, and
                ``report.fallbacks`` says so.

        Raises:
            ValueError: an unknown backend, a split where no batch was named or with another backend, nodes
                of another graph.
            lazyviz.SplitError: the batch cannot be cut; the message names the nodes.  Nothing has run.
            lazyviz.RecomputeError: the budget cannot be met; the message says what can.  Nothing has run.
            lazyviz.Interrupted: cancelled; evaluating again goes on from there.
            lazyviz.NoWorkersError: a cluster has no workers, or none are left; the same holds.
            Exception: what a kernel raised, with the line that recorded it.
        """
        name = backend or self.backend
        find_backend(name)
        split, recompute = levers(self, split, recompute, name)
        if split not in ("off", 1) and name != "eager" and not is_cluster(find_backend(name)):
            raise ValueError(f"a split batch runs with the backend 'eager', not {name!r}")
        if tape.graph is not None and tape.owner != threading.get_ident():
            raise RuntimeError("a cell is recording on another thread; evaluate once it has ended")
        with tape.lock:
            targets = evaluation.needed(tensors)
            if nodes is not None:
                targets += self.own(nodes)
            elif not tensors:
                targets = self._unfinished()
            everything = not tensors and targets == list(tape.pending)  # which needs nothing else
            return evaluation.run(
                targets if everything and nodes is None else closure(targets),
                evaluation.called("evaluate()"),
                backend=name,
                progress=progress,
                cancel=cancel,
                graph=self,
                split=split,
                recompute=recompute,
                summaries=summaries,
                timings=timings,
                verify=verify,
            )


# --- the public functions -------------------------------------------------------------


@contextmanager
def lazy(
    device: Any = None,
    batch: Any = None,
    split: Any = "off",
    backend: str = "eager",
    allow_sync: bool = True,
    *,
    assume: Mapping[int, Any] | None = None,
    held_bytes_limit: int = HELD_BYTES_LIMIT,
    code: str = "",
    names: Mapping[str, Any] | None = None,
    whole: Sequence[str] = (),
    independent_rng: bool = False,
    recompute: Any = "off",
) -> Iterator[LazyGraph]:
    """Record the PyTorch ops of a block instead of running them.

    Args:
        batch: the tensors whose dim 0 has the samples, ``{tensor: dim}``, or names (``"x,y:1"``): those that
            have them when the block first uses them.
        split: evaluate in that many pieces of the batch (also at sync points, which then run all that is
            pending); ``"auto"``: in the fewest that fit the device's free memory.
        whole: operators (ATen's names, as ``"cumsum"``) that may run on the whole batch, put together between
            two passes over the pieces, where they would forbid a split.
        independent_rng: operators that draw random numbers inside a fused kernel may draw for each piece;
            the split run's numbers are then not those of the whole.
        backend: what evaluates by default: ``"eager"``, ``"inductor"``, ``"xla"``, ``"cudagraphs"``,
            ``"ipyparallel"``, ``"ray"``, one that is registered or that an installed package offers.
        recompute: evaluate with a peak below that many bytes (or a size as ``"2 GiB"``), activations being
            dropped and computed again for it (also at sync points, which then run all that is pending);
            ``"auto"``: below what the device has free.
        device: plan for this device by default (a device, a profile or its name).  In a process without
            CUDA, ``torch.cuda`` answers for a card inside the block, which can then only be planned.
        assume: what a read at each of these lines returns that an absent device would have to compute.
        allow_sync: False makes a sync point inside the block an error that names its line.
        held_bytes_limit: evaluate once pending ops keep more than this many bytes of
            outside tensors alive that the block itself has dropped.
        names: the variables by which pictures and plans call tensors; default: the caller's.

    Raises:
        ValueError: an option this version does not support, an unknown device or backend.
        RuntimeError: another thread is recording, or an outer block is for another absent card.
    """
    cluster = is_cluster(find_backend(backend))
    split = "off" if split is None else split
    check_split(split)
    named = None if batch is None else NamedBatch(batch, _lookup(names, sys._getframe(2)))
    if named is not None and names is None:
        variables, bound = _lookup(names, sys._getframe(2))(), bound_names(sys._getframe(2).f_code)
        if reason := unknown_names(named.names, variables, bound):
            raise ValueError(f"batch: {reason}")
    if named is None and split not in ("off", 1):
        raise ValueError("a split needs to know the batch: name its tensors (--batch, batch=)")
    if named is None and cluster:
        raise ValueError(f"{backend!r} runs pieces of the batch: name its tensors (--batch, batch=)")
    if cluster and split == "off":
        split = "auto"  # pieces are what it is for
    if split not in ("off", 1) and backend != "eager" and not cluster:
        raise ValueError(f"a split batch runs with the backend 'eager', not {backend!r}")
    recompute = recompute_option(recompute)
    check_combination(recompute, split, backend)
    device, card = absence.resolved(device)
    if tape.graph is not None and tape.owner != threading.get_ident():
        raise RuntimeError("another thread is recording; one lazy block at a time")
    tape.lock.wait()  # a run on another thread ends first
    outer = (tape.graph, tape.owner, tape.allow_sync, tape.held_bytes_limit, tape.batch)
    graph = LazyGraph(
        Graph(), device=device, backend=backend, code=code, batch=named, split=split, recompute=recompute
    )
    if named is not None:
        named.begin(tape, graph.ir)
    graph.ir.whole, graph.ir.independent_rng = tuple(whole), independent_rng
    evaluation.graphs[id(graph.ir)] = graph
    evaluation.latest = weakref.ref(graph)
    graph.ir.place, graph.ir.is_cell = tape.scopes.sources.find(sys._getframe(2))[0], bool(code)
    tape.watch(graph.ir)
    if outer[0] is None:
        if Lost.something and tape.pending:
            tape.forget_lost()
        if tape.overdue:
            evaluation.catch_up()
        release_held()
        evaluation.watch.begin_recording()
        tape.scopes.sources.block = sys._getframe(2).f_code
    if outer[0] is not None:
        outer[0].nested.append((len(outer[0].nodes), graph.ir))
        graph.ir.outermost = outer[0].outermost
    TrackedStorage.recording = graph.ir
    tape.graph, tape.owner = graph.ir, threading.get_ident()
    tape.allow_sync, tape.held_bytes_limit = allow_sync, held_bytes_limit
    tape.batch = named.dim if named is not None else None
    start = time.perf_counter()
    try:
        with (
            absence.recording_for(tape, card, graph.ir, assume, device),
            Patient() if outer[0] is None else absence.NOTHING,
        ):
            yield graph
    except BaseException as error:
        shorten_block(error)
        raise
    finally:
        name_tensors(
            tape, names if names is not None else variables_of(sys._getframe(1)), copied=names is None
        )
        if named is not None:
            named.resolve(tape, graph.ir)
        tape.graph, tape.owner, tape.allow_sync, tape.held_bytes_limit, tape.batch = outer
        TrackedStorage.recording = outer[0]
        if outer[0] is None:
            tape.scopes.hand_over(graph.ir)
        own = graph._unfinished()
        if own != list(tape.pending) and (earlier := len(closure(own)) - len(own)):
            # The plan is of this cell's ops alone: say what else its evaluation will run.
            graph.title += f", after {earlier:,} pending ops of earlier cells"
        if own:
            # A sync point inside, after which nothing was pending, took it out.
            evaluation.graphs[id(graph.ir)] = graph
        else:
            evaluation.graphs.pop(id(graph.ir), None)
        evaluation.metrics.add("record", time.perf_counter() - start)
        evaluation.metrics.count("graphs")
        evaluation.metrics.count("ops recorded", len(graph.ir))
        tape.settle()
        if tape.graph is None:
            tape.scopes.sources.block = None
            evaluation.watch.end_recording()


def _lookup(names: Mapping[str, Any] | None, frame: FrameType) -> Callable[[], Mapping[str, Any]]:
    """The variables as they are whenever asked: ``names``, or those of the block's own frame."""
    return (lambda: names) if names is not None else (lambda: {**frame.f_globals, **frame.f_locals})


def lazy_function(function: Callable[..., Any]) -> Callable[..., tuple[Any, LazyGraph]]:
    """``lazy_function(f)(*args)`` calls ``f`` in a lazy block: ``(result, graph)``."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> tuple[Any, LazyGraph]:
        with lazy() as graph:
            result = function(*args, **kwargs)
        return result, graph

    return wrapper


@shortened
def evaluate(*tensors: torch.Tensor) -> Report:
    """Run what ``tensors`` need, in whatever graphs; without arguments, everything pending.

    What was recorded for a card that is not on this machine stays pending then.  An op that fails stops
    what needs it; its error is raised once all else has run.  It stays pending and is tried again, but an
    error that is known already is only named in ``report.left``.

    Raises:
        lazyviz.AbsentDeviceError: one of ``tensors`` needs such a card.
        Exception: what a kernel raised, with the line that recorded it.
        RuntimeError: a compiled segment that failed has left memory half written; the rest has run.
    """
    with tape.lock:
        if not tensors:
            tape.forget_unreachable(tape.reachable())
        cause = evaluation.called("lazyviz.evaluate()")
        if tensors:
            return evaluation.run(closure(evaluation.needed(tensors)), cause)
        report = run_all(cause)
        if (error := half_done.left(tape.pending)) is not None:
            raise RuntimeError(error)
        return report


@shortened
def sync() -> Report:
    """Run every pending graph, as far as this machine can."""
    return evaluate()


def is_lazy(tensor: Any) -> bool:
    """Whether ``tensor`` is a tensor whose value is still pending."""
    return isinstance(tensor, torch.Tensor) and is_pending(tensor)


def to_lazy(tensor: torch.Tensor) -> torch.Tensor:
    """A lazy view of ``tensor``: inside a lazy block ops on either are recorded anyway."""
    if is_lazy(tensor):
        return tensor
    if tape.graph is not None:
        return torch.ops.aten.alias.default(tensor)
    with lazy():
        return torch.ops.aten.alias.default(tensor)


@shortened
def to_eager(tensor: torch.Tensor) -> torch.Tensor:
    """Evaluate what ``tensor`` needs and return it, now an ordinary tensor."""
    if needed := evaluation.needed([tensor]):
        with tape.lock:
            evaluation.run(closure(needed), "lazyviz.to_eager()")
    return tensor


@contextmanager
def forbid_sync() -> Iterator[None]:
    """Make every sync point in the block a :class:`SyncError` that names its cause."""
    token = evaluation.forbidden.set(True)
    try:
        yield
    finally:
        evaluation.forbidden.reset(token)


def cell_boundary() -> None:
    """Between two cells: forget what nobody can see; leave PyTorch as it was if nothing is pending."""
    tape.forget_unreachable(tape.reachable())
    evaluation.watch.leave()


def unload() -> None:
    """Leave PyTorch as it was before lazyviz was imported, if nothing is pending."""
    cell_boundary()
    evaluation.watch.unload()


def reset() -> None:
    """Forget everything pending, unevaluated; tensors that were pending stay without a value.

    What was moved to a planned card that is not on this machine is what it was before, on the CPU.
    """
    give_back(tape)
    tape.forget_all()
    evaluation.graphs.clear()
    evaluation.watch.leave()
