"""The composition root: the public ``LazyGraph`` and the functions over every pending graph.

Only this package and ``notebook`` see all stages.  Graphs get their plan, picture and run here;
:mod:`lazyviz.session.connect` gives recording what a sync point needs.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..execute.microbatch.run import SplitRun
from ..execute.progress import Progress
from ..execute.replay import node_passes
from ..execute.report import Report as Report
from ..graph.ir import Graph, Node, SyncPoint
from ..plan.devices.devices import DeviceLike
from ..plan.devices.devices import devices as devices
from ..process.tracebacks import shortened
from ..process.transaction import Transaction, complete
from ..record import partial_writes
from ..record.dependencies import closure
from ..record.fake_cuda.host_values import give_back
from ..record.graph_release import Owned
from ..record.lazy_tensor import is_pending
from ..record.pending_ops import HELD_BYTES_LIMIT, RunLock
from ..record.recorder import tape
from ..record.storage import Lost, TrackedNode
from . import evaluation
from .block import LazyBlock, Options, close_all
from .diagnostics import metrics as metrics
from .diagnostics import why as why
from .display import Shown
from .evaluate_all import run_all
from .named_batch import BatchLike, NamedBatch
from .recompute_options import Recompute, levers
from .recompute_options import RecomputeError as RecomputeError
from .run_options import Choices
from .split_options import SplitError as SplitError

if TYPE_CHECKING:
    from ..plan.plan import Plan


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
        self._report: Report | tuple[Any, ...] | None = None
        self.error: BaseException | None = None
        self._waits = 0  # the node that was found not to have run
        self._owned = Owned(graph)  # the last: attributes go in this order

    @property
    def report(self) -> Report | None:
        """What the last run of nodes of this graph did."""
        if isinstance(self._report, tuple):
            self._report = Report.of_read(*self._report)
        return self._report

    @report.setter
    def report(self, report: Report) -> None:
        self._report = report

    def note_read(self, *report: Any) -> None:
        """The last run is told by :meth:`.Report.of_read`, when somebody asks for it."""
        self._report = report

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_ending() or "ir" not in vars(self):
            return  # modules have lost their names by then, or making it was interrupted
        self.ir.lost = True
        if Lost.look is not None and tape.pending and node_passes.unfinished(self.nodes):
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
        """Whether some op has not run."""
        nodes = self.nodes
        if self._waits < len(nodes) and nodes[self._waits].state != "done":
            return True  # still the one that was found before
        waiting = node_passes.unfinished(nodes)
        self._waits = waiting[0].index if waiting else len(nodes)
        return bool(waiting)

    @property
    def sync_points(self) -> Sequence[SyncPoint]:
        return self.ir.sync_points

    @property
    def state(self) -> str:
        """``pending``, ``running``, ``done``, ``failed`` or ``interrupted``."""
        if self.run_state is not None:
            return self.run_state
        return "pending" if self.has_pending else "done"

    # --- planning -----------------------------------------------------------------

    def plan(
        self,
        device: DeviceLike | None = None,
        batch_size: int | None = None,
        split: int | str | None = None,
        backend: str | None = None,
        *,
        recompute: int | str | None = None,
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
        from ..plan.planner import make_plan

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

    def unfinished(self) -> list[TrackedNode]:
        """Its nodes that have not run, in program order."""
        pending = list(tape.pending)
        if pending == self.ir.nodes:  # as is usual, and sooner seen than what each of them is
            return pending
        return node_passes.unfinished(self.nodes)

    @shortened
    def evaluate(
        self,
        *tensors: torch.Tensor,
        backend: str | None = None,
        split: int | str | None = None,
        progress: Callable[[Progress], None] | None = None,
        cancel: threading.Event | None = None,
        recompute: int | str | None = None,
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
            progress: called after each op with a :class:`lazyviz.execute.progress.Progress`; what it raises
                stops the run there, and evaluating again goes on.
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
        split, recompute = levers(self, split, recompute, name)
        if tape.graph is not None and tape.owner != threading.get_ident():
            raise RuntimeError("a cell is recording on another thread; evaluate once it has ended")
        with tape.lock:
            targets = evaluation.needed(tensors)
            if nodes is not None:
                targets += self.own(nodes)
            elif not tensors:
                targets = self.unfinished()
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


def lazy(
    device: DeviceLike | None = None,
    batch: BatchLike | None = None,
    split: int | str | None = "off",
    backend: str = "eager",
    allow_sync: bool = True,
    *,
    assume: Mapping[int, Any] | None = None,
    held_bytes_limit: int = HELD_BYTES_LIMIT,
    code: str = "",
    names: Mapping[str, Any] | None = None,
    whole: Sequence[str] = (),
    independent_rng: bool = False,
    recompute: int | str | None = "off",
    mesh: Sequence[int] | int | None = None,
    rank: int = 0,
) -> LazyBlock[LazyGraph]:
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
        mesh: of a program that runs on several devices, the number of ranks in each dimension: ``(8,)``,
            ``(2, 4)``.  Inside the block ``torch.distributed`` is initialized as one of them, which can then
            only be planned: the others are not there.
        rank: which of them it is.
        assume: what a read at each of these lines returns that an absent device would have to compute; an
            iterator gives one value a read.
        allow_sync: False makes a sync point inside the block an error that names its line.
        held_bytes_limit: evaluate once pending ops keep more than this many bytes of
            outside tensors alive that the block itself has dropped.
        names: the variables by which pictures and plans call tensors; default: the caller's.

    Raises:
        ValueError: an option this version does not support, an unknown device or backend.
        RuntimeError: another thread or task is recording, or an outer block is for another absent card or
            rank; ``torch.distributed`` is initialized as another rank; or the block has been entered before.
    """
    return LazyBlock(
        LazyGraph,
        Options(
            device=device,
            batch=batch,
            split=split,
            backend=backend,
            allow_sync=allow_sync,
            assume=assume,
            mesh=mesh,
            rank=rank,
            held_bytes_limit=held_bytes_limit,
            code=code,
            names=names,
            whole=whole,
            independent_rng=independent_rng,
            recompute=recompute,
        ),
    )


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
            if tape.pending:
                tape.refuse_nested()
            tape.forget_unreachable(tape.reachable())
        cause = evaluation.called("lazyviz.evaluate()")
        if tensors:
            return evaluation.run(closure(evaluation.needed(tensors)), cause)
        report = run_all(cause)
        if (error := partial_writes.left(list(tape.pending))) is not None:
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


class forbid_sync(Transaction):
    """Make every sync point in the block a :class:`SyncError` that names its cause."""

    def _recreate_cm(self) -> forbid_sync:
        return forbid_sync()

    def begin(self) -> None:
        before = evaluation.forbidden.get()
        self.undo_by(lambda: evaluation.forbidden.set(before))
        evaluation.forbidden.set(True)


def cell_boundary() -> None:
    """Between two cells: forget what nobody can see; leave PyTorch as it was if nothing is pending."""
    tape.refuse_nested()
    tape.forget_unreachable(tape.reachable())
    evaluation.watch.leave()


def unload() -> None:
    """Leave PyTorch as it was before lazyviz was imported, if nothing is pending."""
    cell_boundary()
    evaluation.watch.unload()


def reset() -> None:
    """Forget everything pending, unevaluated, and leave PyTorch as it was, whatever state it is in.

    Tensors that were pending stay without a value.  What was moved to a planned card that is not on this
    machine is what it was before, on the CPU.  Blocks that are open are so no longer.
    """
    if evaluation.is_running_here():
        tape.refuse_nested()
    complete(_reset)


def _reset() -> None:
    close_all()
    if tape.lock.is_lost or (tape.lock.is_mine and not evaluation.is_running_here()):
        tape.lock, tape.running = RunLock(), 0
    evaluation.end_abandoned()
    evaluation.watch.reset()
    give_back(tape)
    tape.forget_all()
    evaluation.graphs.clear()
    evaluation.watch.restore()
